"""A DistributedDataParallel with the hook is saved whole, copied and averaged, as with a hook of torch."""

import copy

import pytest
import torch
from runs import HOOK, Run, alike, net, plain_sgd, train

from sparsecoll.torch import HookState, comm_hook
from sparsecoll.torch.compressors import TopK

pytestmark = [pytest.mark.mpi, pytest.mark.mpich, pytest.mark.usefixtures("process_group")]
TOPK = TopK(0.1, algo="allgather")


def saved(model, path):
    torch.save(model, path)
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("way", ["save", "deepcopy", "average"])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_the_model_is_copied_and_the_training_goes_on(comm, way, options, tmp_path):
    run = train(Run(HOOK, comm, net, plain_sgd, TOPK, **options), range(3))
    whole = train(Run(HOOK, comm, net, plain_sgd, TOPK, **options), range(3))
    if way == "average":
        average = torch.optim.swa_utils.AveragedModel(run.model)
        average.update_parameters(run.model)
        model = average.module
    else:
        model = copy.deepcopy(run.model) if way == "deepcopy" else saved(run.model, tmp_path / "model.pt")
    assert all(map(torch.equal, model.parameters(), run.model.parameters()))
    train(run, range(3, 6))
    assert alike(comm, run.values()) and all(
        map(torch.equal, run.module.parameters(), train(whole, range(3, 6)).module.parameters())
    )

    ((_, old),) = model._comm_hooks  # DDP's copy of the hook and its state
    assert isinstance(old, HookState) and old.state_dict()["tensors"]["residual"]
    if options:  # of a copy of a static graph, torch 2.13 itself reduces nothing in the first step
        return
    model.register_comm_hook(old, comm_hook)
    with pytest.raises(RuntimeError, match="A copied or loaded HookState has no communicator: make a new one"):
        model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    comm.Barrier()


def test_a_copied_model_trains_on_with_the_residuals_of_the_copied_state(comm):
    run = train(Run(HOOK, comm, net, plain_sgd, TOPK, find_unused_parameters=True), range(3))
    model = copy.deepcopy(run.model)
    ((_, old),) = model._comm_hooks
    new = HookState(comm, TOPK, model)
    new.load_state_dict(old.state_dict())
    model.register_comm_hook(new, comm_hook)
    again = Run(HOOK, comm, net, plain_sgd, TOPK)
    again.model, again.module, again.state = model, model.module.net, new
    again.inner = again.optimizer = plain_sgd(again.module.parameters())
    for one in (again, run):
        train(one, range(3, 6))
    assert all(map(torch.equal, again.module.parameters(), run.module.parameters()))
