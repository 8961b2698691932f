"""The states of gradients between two steps."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sparsecoll  # noqa: E402
from sparsecoll import simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, HookState, comm_hook  # noqa: E402
from sparsecoll.torch.compressors import TopKCompressor  # noqa: E402
from sparsecoll.torch.reduction.steps import Gradients, State  # noqa: E402

OF_DISTRIBUTED_OPTIMIZER = """
    EMPTY LOCAL, LOCAL SENDING, LOCAL EMPTY, SENDING MEANS, SENDING LOCAL, SENDING STALE, SENDING DISCARDED,
    SENDING NAN, SENDING EMPTY, STALE LOCAL, STALE DISCARDED, STALE NAN, DISCARDED STALE, DISCARDED EMPTY, MEANS EMPTY,
    MEANS LOCAL, NAN EMPTY, NAN LOCAL"""


def test_another_transition_raises():
    gradients = Gradients()
    with pytest.raises(AssertionError, match="EMPTY to STEPPED"):
        gradients.to(State.STEPPED)


class Breaks(torch.autograd.Function):
    """Raises in back-propagation, gives NaN, or calls a function."""

    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.how == "raises":
            raise ValueError("in back-propagation")
        if callable(ctx.how):
            ctx.how()
        return gradient * (torch.nan if ctx.how == "nan" else 1.0), None


def loops(comm):
    """Loops that meet all states, of a model whose last layer has its gradients before `how` matters."""
    first, last = torch.nn.Linear(30, 40), torch.nn.Linear(40, 30)
    model = torch.nn.Sequential(first, last)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model, comm, "topk", bucket_bytes=4000)

    def backward(how="plain"):
        last(Breaks.apply(first(torch.full((3, 30), comm.rank + 1.0)), how)).square().mean().backward()

    def break_off():
        with pytest.raises(ValueError, match="in back-propagation"):
            backward("raises")

    def fail(call):
        with pytest.raises(sparsecoll.NonFiniteError):
            call()

    for _ in range(2):
        optimizer.zero_grad()
        backward()
        optimizer.step()
    backward()
    backward()  # adds to the means
    optimizer.step()
    optimizer.zero_grad()
    backward(lambda: last.weight.grad.mul_(2.0))  # which was sent
    optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync():
        backward()
    optimizer.zero_grad()  # local ones
    break_off()
    optimizer.zero_grad()  # after some were sent
    backward()
    optimizer.step()
    break_off()
    backward()  # again
    optimizer.step()
    optimizer._engine._early = True  # as before gradients have come more than once
    break_off()
    break_off()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer._engine._early = True
    backward()
    optimizer.zero_grad()
    break_off()
    backward("nan")
    fail(optimizer.step)
    optimizer._engine._early = True
    backward()
    optimizer.zero_grad()
    backward("nan")
    backward()  # adds to NaN
    fail(optimizer.step)
    optimizer.zero_grad()
    break_off()
    optimizer.load_state_dict({**optimizer.optimizer.state_dict()})  # drops what was sent
    backward()
    optimizer.step()
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


@pytest.mark.parametrize("P", [1, 3])
def test_loops_take_all_of_these_transitions_and_no_others(P, monkeypatch):
    seen, enter = set(), Gradients.to

    def to(self, state):
        if state is not self.state:
            seen.add(f"{self.state.name} {state.name}")
        enter(self, state)

    monkeypatch.setattr(Gradients, "to", to)
    results = simulate(P, loops).results
    assert all(np.array_equal(result, results[0]) for result in results)
    assert seen == {pair.strip() for pair in OF_DISTRIBUTED_OPTIMIZER.split(",")}


def test_a_step_that_raises_leaves_the_update_to_the_loop(tmp_path):
    def residual_after(fails):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
        state = HookState(torch.distributed.group.WORLD, TopKCompressor(0.1), model)
        model.register_comm_hook(state, comm_hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.randn(8, 64)).square().mean().backward()
        if fails:

            def out_of_memory(*_):
                raise MemoryError

            handle = optimizer.register_step_pre_hook(out_of_memory)
            with pytest.raises(MemoryError):
                optimizer.step()
            handle.remove()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()  # decides what becomes of the residual
        optimizer.step()
        (residual,) = state.state_dict()["tensors"]["residual"].values()
        return residual.clone()

    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert torch.equal(residual_after(True), residual_after(False))
    finally:
        torch.distributed.destroy_process_group()
