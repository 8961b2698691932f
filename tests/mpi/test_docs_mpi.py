"""The scripts of docs/loops.md, and the DDP hook of docs/torch.md, on the ranks of an mpirun."""

import logging
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.mpi
PAGE = Path(__file__).parent.parent.parent / "docs" / "loops.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)


@pytest.mark.parametrize("block", BLOCKS)
def test_ranks_train_one_model_on_samples_of_their_own(block, caplog, capsys):
    threads = torch.get_num_threads()
    names = {"__name__": "block"}
    with caplog.at_level(logging.WARNING, "sparsecoll"):
        exec(compile(block, "block", "exec"), names)
    torch.set_num_threads(threads)
    comm = names["comm"]
    bits = torch.cat([p.detach().view(-1) for p in names["model"].parameters()]).numpy().tobytes()
    assert comm.allgather(bits) == [bits] * comm.size
    assert "same bits" not in caplog.text  # that is the warning
    if "folder" in names:
        assert len(list(names["folder"].glob("optimizer-*.pt"))) == comm.size
        assert ("right" in capsys.readouterr().out) == (comm.rank == 0)
    names["optimizer"].close()


def test_hook_of_the_page_on_training_averages_gradients():
    from mpi4py import MPI

    (block,) = re.findall(r"^```python\n([^`]*comm_hook[^`]*)^```", (PAGE.parent / "torch.md").read_text(), re.S | re.M)
    names = {"__name__": "block"}
    exec(compile(block, "block", "exec"), names)
    model = names["parallel"](torch.nn.Linear(4, 3), MPI.COMM_WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + MPI.COMM_WORLD.rank + step)).pow(2).sum().backward()
        optimizer.step()
    bits = torch.cat([p.detach().view(-1) for p in model.parameters()]).numpy().tobytes()
    assert MPI.COMM_WORLD.allgather(bits) == [bits] * MPI.COMM_WORLD.size
    torch.distributed.destroy_process_group()
