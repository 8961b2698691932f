"""examples/elastic.py under torchrun, as users start it."""

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
