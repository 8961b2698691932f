"""The scripts of docs/loops.md, and the DDP hook of docs/torch.md, on the ranks of an mpirun or a torchrun."""

import logging
import re
import runpy
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.mpi
PAGE = Path(__file__).parent.parent.parent / "docs" / "loops.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)


@pytest.mark.parametrize("block", [block for block in BLOCKS if "model = " in block])
def test_ranks_train_one_model_on_samples_of_their_own(block, process_group, caplog, capsys):
    comm, threads = process_group, torch.get_num_threads()
    names = {"__name__": "block"}
    with caplog.at_level(logging.WARNING, "sparsecoll"):
        exec(compile(block, "block", "exec"), names)
    torch.set_num_threads(threads)
    bits = torch.cat([p.detach().view(-1) for p in names["model"].parameters()]).numpy().tobytes()
    assert comm.allgather(bits) == [bits] * comm.size
    assert "the same sums" not in caplog.text  # that is the warning
    if "folder" in names:
        assert len(list(names["folder"][0].glob("optimizer-*.pt"))) == comm.size
        assert ("right" in capsys.readouterr().out) == (comm.rank == 0)
    names["optimizer"].close()


def test_a_checkpoint_of_the_example_is_loaded(process_group, tmp_path):
    names = runpy.run_path(str(PAGE.parent.parent / "examples" / "elastic.py"))
    folder, states = process_group.bcast(tmp_path), []
    for _ in range(2):
        import sparsecoll.torch

        model = torch.nn.Linear(20, 3)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = sparsecoll.torch.DistributedOptimizer(inner, model.named_parameters())
        assert names["load"](folder, model, optimizer) == len(states)
        model(torch.randn(4, 20)).sum().backward()
        optimizer.step()
        names["save"](folder, len(states) + 1, model, optimizer)
        states.append(optimizer.state_dict()["sparsecoll"]["step"])
        optimizer.close()
        process_group.Barrier()
    assert states == [1, 2]


def test_hook_of_the_page_on_training_averages_gradients(process_group):
    (block,) = re.findall(r"^```python\n([^`]*comm_hook[^`]*)^```", (PAGE.parent / "torch.md").read_text(), re.S | re.M)
    comm, names = process_group, {"__name__": "block"}
    exec(compile(block, "block", "exec"), names)
    model = names["parallel"](torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + comm.rank + step)).pow(2).sum().backward()
        optimizer.step()
    bits = torch.cat([p.detach().view(-1) for p in model.parameters()]).numpy().tobytes()
    assert comm.allgather(bits) == [bits] * comm.size
