"""Jobs that torchrun restarts: examples/elastic.py, as users start it, and the backend."""

import re
from pathlib import Path

import launching
import pytest
from launching import run

pytest.importorskip("torch")
ROOT = Path(__file__).parent.parent
WORKER = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import torch.utils.data
import elastic

class Sampler(torch.utils.data.DistributedSampler):
    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        self.epochs = getattr(self, "epochs", 0) + 1

    def __iter__(self):
        for number, index in enumerate(super().__iter__()):
            if self.num_replicas == 3 and self.rank == 2 and self.epochs == 2 and number == 200:
                os.kill(os.getpid(), signal.SIGKILL)
            yield index

elastic.DistributedSampler = Sampler
elastic.main()
"""


def torchrun(folder, size, *arguments):
    """What a job prints, and its exit status."""
    command = launching.torchrun(size, "--monitor-interval", 0.1)
    done = run(*command, *arguments, cwd=folder, variables={"PYTHONPATH": str(ROOT)})
    return done.stdout, done.stderr, done.returncode


def test_training_goes_on_after_the_loss_of_a_worker_and_with_other_ranks(tmp_path):
    """Each of two lives of three ranks ends in its second epoch; then two ranks go on."""
    (tmp_path / "worker.py").write_text(WORKER)
    printed, errors, status = torchrun(tmp_path, 3, "--max-restarts", 1, "worker.py", "--epochs", 4)
    assert status != 0, printed + errors[:3000]
    more, errors, status = torchrun(tmp_path, 2, "worker.py", "--epochs", 4)
    assert status == 0, errors
    epochs = re.findall(r"epoch (\d): ([\d.]+) % right on (\d) ranks", printed + more)
    assert [(int(epoch), int(ranks)) for epoch, _, ranks in epochs] == [(1, 3), (2, 3), (3, 2), (4, 2)]
    assert all(float(right) > 90 for epoch, right, _ in epochs[2:])


RESTARTED = f"""
import os, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
import torch
import torch.distributed as dist
import sparsecoll

first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
rank, there = int(os.environ["RANK"]), Path("there")
if first and rank == 1:  # ends before it meets rank 0, which has left its entry
    while not there.exists():
        time.sleep(0.01)
    sys.exit(1)
if first:
    threading.Timer(1, there.touch).start()
elif rank == 0:
    time.sleep(1)
dist.init_process_group("sparsecoll")
x = torch.sparse_coo_tensor([[rank]], torch.ones(1), (3,))
dist.all_reduce(x)
os.write(1, f"sum {{x.to_dense().tolist()}}\\n".encode())  # in one piece
dist.destroy_process_group()
"""


def test_the_backend_meets_its_ranks_after_a_restart(tmp_path):
    """The store, which torchrun keeps, has the entry of a process that has ended."""
    (tmp_path / "worker.py").write_text(RESTARTED)
    printed, errors, status = torchrun(tmp_path, 2, "--max-restarts", 1, "worker.py")
    assert status == 0 and printed.count("sum [1.0, 1.0, 0.0]") == 2, printed + errors
