"""Layers that are replaced, over MPI with its progress thread; and under DistributedDataParallel."""

import copy
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from loops_of_backward import replace  # noqa: E402
from runs import HOOK, LOCAL, OVERLAP, SPARSE, TIMEOUT, Ledger, Run, alike, bits, net, plain_sgd, train  # noqa: E402

from sparsecoll.errors import CommunicationError  # noqa: E402
from sparsecoll.torch import HookState, comm_hook  # noqa: E402
from sparsecoll.torch.compressors import TopKCompressor  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("process_group")]
TOPK = TopKCompressor(0.1, algo="allgather")
new_head = partial(replace, index=4, make=lambda: torch.nn.Linear(32, 1).double())


def same_names(run):
    kept = run.optimizer.state_dict()["sparsecoll"]
    named = [name for name, p in run.module.named_parameters() if p.numel() >= 40 or run.way == SPARSE]
    return set(kept["tensors"]["residual"]) == set(named)


@pytest.mark.parametrize("way", [OVERLAP, LOCAL])
def test_no_gradient_is_lost_before_and_after_and_a_resumed_run_is_the_same(comm, way):
    run = Run(way, comm, net, plain_sgd, TOPK)
    for step in range(9):
        if step % 3 == 0:
            if step:
                new_head(run)
            ledger = Ledger(run)
        run.optimizer.zero_grad()
        ledger.zero()
        run.loss(step).backward()
        run.optimizer.step()
        ledger.settle()
    assert same_names(run) and alike(comm, run.values())
    model, state = copy.deepcopy((run.module.state_dict(), run.optimizer.state_dict()))
    again = Run(way, comm, net, plain_sgd, TOPK)
    new_head(again), new_head(again)  # as many groups
    again.module.load_state_dict(model)
    again.optimizer.load_state_dict(state)
    assert bits(train(again, range(9, 12)).values()) == bits(train(run, range(9, 12)).values())


@pytest.mark.parametrize("way", [OVERLAP, LOCAL, SPARSE])
def test_a_change_on_one_rank_raises_on_all_and_training_goes_on_when_all_have_made_it(comm, way):
    options = {"algo": "allgather", "density": 0.1} if way == SPARSE else {}
    run = train(Run(way, comm, net, plain_sgd, TOPK, **options), range(3))
    head = run.module[4]
    if comm.rank == run.last:
        for group in run.inner.param_groups:
            group["params"] = list(run.module[:4].parameters())
        run.module[4] = torch.nn.Linear(32, 1).double()
    with pytest.raises(CommunicationError, match="parameters removed") as raised:
        train(run, [3])
    assert len(set(comm.allgather(str(raised.value)))) == 1
    assert "(change the model and the optimizer on all ranks" in str(raised.value)
    run.optimizer.zero_grad()
    if comm.rank == run.last:
        run.module[4] = head
        for group in run.inner.param_groups:
            group["params"] = list(run.module.parameters())
    train(run, [4])
    new_head(run)
    train(run, range(5, 7))
    assert same_names(run) and alike(comm, run.values())


@pytest.mark.mpich
def test_a_hook_state_belongs_to_one_ddp_and_another_one_loads_its_state(comm):
    run = train(Run(HOOK, comm, net, plain_sgd, TOPK), range(3))
    new_head(run)
    old = run.state

    def wrap(state):
        run.model = torch.nn.parallel.DistributedDataParallel(run.model.module)
        run.state = HookState(comm, TOPK, run.model, timeout=TIMEOUT) if state is None else state
        run.model.register_comm_hook(run.state, comm_hook)

    wrap(old)
    with pytest.raises(ValueError, match="HookState of its own") as raised:
        train(run, [3])
    assert len(set(comm.allgather(str(raised.value)))) == 1
    run.optimizer.zero_grad()
    wrap(None)
    state = copy.deepcopy(old.state_dict())
    for kind in state["tensors"].values():
        kind.pop("net.4.weight"), kind.pop("net.4.bias")
    run.state.load_state_dict(state)
    kept = run.state.state_dict()["tensors"]["residual"]
    assert kept["net.2.weight"].any() and torch.equal(
        kept["net.2.weight"], state["tensors"]["residual"]["net.2.weight"]
    )
    assert alike(comm, train(run, range(4, 7)).values())
    assert set(run.state.state_dict()["tensors"]["residual"]) == {f"net.{n}" for n, _ in run.module.named_parameters()}
