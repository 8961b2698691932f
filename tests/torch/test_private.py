"""What the adapter uses of torch's private interfaces is as it expects: a test for each function of `private.py`."""

import inspect
import math
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: E402
from torch.distributed.fsdp._flat_param import FlatParameter  # noqa: E402

from sparsecoll.torch.tensors import private  # noqa: E402

SPARSE = torch.sparse_coo_tensor([[2, 0, 2]], [[1.0], [2.0], [3.0]], (4, 1), check_invariants=False)


class Table(torch.nn.Module):
    """A module with a buffer, which has a module without any."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.inner = torch.nn.Linear(2, 2)


def test_every_function_has_a_test():
    functions = {
        name for name, f in inspect.getmembers(private, inspect.isfunction) if f.__module__ == private.__name__
    }
    assert {f"test_{name}" for name in functions} <= globals().keys() and functions


def test_version():
    t = torch.zeros(3)
    before = private.version(t)
    t.add_(1)
    assert private.version(t) == before + 1
    t.detach().add_(1)
    assert private.version(t) == before + 2
    t.data.add_(1)
    assert private.version(t) == before + 2
    with torch.inference_mode():
        assert private.version(torch.zeros(3)) == 0


def test_values_of():
    dense = torch.ones(3)
    assert private.values_of(dense) is dense
    values = private.values_of(SPARSE)
    assert not SPARSE.is_coalesced() and values.tolist() == [[1.0], [2.0], [3.0]]
    new = torch.sparse_coo_tensor([[0, 1]], torch.zeros(2), (2,), is_coalesced=True, check_invariants=False)
    private.values_of(new).fill_(5.0)  # not a copy
    assert new.to_dense().tolist() == [5.0, 5.0]


def test_indices_of():
    assert private.indices_of(SPARSE).tolist() == [[2, 0, 2]]


def test_base_of():
    x = torch.sparse_coo_tensor([[1]], torch.tensor([1 + 2j]), (5,), check_invariants=False)
    assert private.base_of(torch.view_as_real(x)) is x and private.base_of(x) is None


def test_is_flat():
    assert private.is_flat(FlatParameter(torch.zeros(3))) and not private.is_flat(torch.nn.Parameter(torch.zeros(3)))


def test_has_buffers():
    module = Table()
    assert private.has_buffers(module) and not private.has_buffers(module.inner)


def test_hooks_after():
    p = torch.nn.Parameter(torch.zeros(3))
    assert private.hooks_after(p) == []
    first, second = (p.register_post_accumulate_grad_hook(lambda p: None) for _ in range(2))
    assert private.hooks_after(p) == [first.id, second.id]
    first.remove()
    assert private.hooks_after(p) == [second.id]


def test_backward_number():
    p, seen = torch.nn.Parameter(torch.zeros(3)), []
    p.register_hook(lambda g: seen.append(private.backward_number()))
    for _ in range(2):
        (p * p).sum().backward()
    assert private.backward_number() == -1 and len(set(seen)) == 2 and min(seen) >= 0


def test_backward_node():
    p, seen = torch.nn.Parameter(torch.zeros(3)), []
    p.register_hook(lambda g: (seen.append(private.backward_node()), private.queue_callback(end))[:0] or None)

    def end():
        seen.append(private.backward_node())

    (p * p).sum().backward()
    assert private.backward_node() is None and seen[0] is not None and seen[1] is None


def test_queue_callback():
    p, seen = torch.nn.Parameter(torch.zeros(3)), []

    def hook(p):
        for name in ("first", "second"):
            private.queue_callback(lambda name=name: seen.append((name, p.grad.tolist())))

    p.register_post_accumulate_grad_hook(hook)
    p.sum().backward()
    assert seen == [("first", [1.0] * 3), ("second", [1.0] * 3)]


def test_at_end_of_backward():
    """Once, also where back-propagation runs within back-propagation, when all gradients are complete."""
    p, seen = torch.nn.Parameter(torch.ones(3)), []

    class Owner:
        pass

    owner = Owner()

    def end():
        seen.append(p.grad.tolist())

    p.register_post_accumulate_grad_hook(lambda _: private.at_end_of_backward(owner, end))
    x = torch.utils.checkpoint.checkpoint(lambda t: t * p, torch.ones(3, requires_grad=True), use_reentrant=True)
    (x * p).sum().backward()
    assert seen == [[2.0] * 3]
    p.sum().backward()
    assert seen == [[2.0] * 3, [3.0] * 3]


def test_inside_ddp(tmp_path):
    seen, model = [], torch.nn.Linear(2, 1)
    model.register_forward_pre_hook(lambda *_: seen.append(private.inside_ddp()))
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.nn.parallel.DistributedDataParallel(model)(torch.zeros(1, 2))
    finally:
        torch.distributed.destroy_process_group()
    model(torch.zeros(1, 2))
    assert seen == [True, False] and not private.inside_ddp()


def test_profiled():
    assert not private.profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private.profiled()


@pytest.mark.parametrize("moment", ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"])
def test_state_dict_hooks(moment):
    optimizer = torch.optim.SGD([torch.zeros(2)], 0.1)

    def hook(*_):
        return None

    getattr(optimizer, f"register_{moment}_hook")(hook)
    assert list(private.state_dict_hooks(optimizer, moment)) == [hook]


def test_is_trial_step():
    model, seen = torch.nn.Linear(2, 1), []

    class Adam(torch.optim.Adam):
        def step(self, closure=None):
            seen.append(private.is_trial_step(self))
            return super().step(closure)

    optimizer = Adam(model.parameters())
    get_optimizer_state_dict(model, optimizer)
    optimizer.step()
    assert seen == [True, False]


def test_is_stepping():
    seen = []

    def closure():
        seen.append((private.is_stepping(optimizer), private.is_stepping(other)))
        raise ValueError

    parameters = [torch.nn.Parameter(torch.ones(1))]
    optimizer, other = torch.optim.SGD(parameters, 0.1), torch.optim.SGD(parameters, 0.1)
    with pytest.raises(ValueError):
        optimizer.step(closure)
    assert seen == [(True, False)] and not private.is_stepping(optimizer)


def test_untraced():
    def function(x):
        return x + (1 if torch.compiler.is_compiling() else 2)

    compiled = torch.compile(private.untraced(function), backend="eager")
    assert compiled(torch.ones(1)).item() == 3 and private.untraced(function)(torch.ones(1)).item() == 3


def test_first_post_hook():
    optimizer, called = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), []
    optimizer.register_step_post_hook(lambda *_: called.append("own"))
    handle = private.first_post_hook(optimizer, lambda *_: called.append("first"))
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert called == ["first", "own", "own"]


def test_is_called_by_scaler():
    class Asking(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self):
            called.append(private.is_called_by_scaler(self))

    called, scaler = [], torch.amp.GradScaler("cpu")
    optimizer = Asking([torch.nn.Parameter(torch.ones(1))], 0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)
    optimizer.step()
    assert called == [True, False]


def test_skipped():
    for scale, expected in ((1.0, [False]), (math.inf, [True])):
        scaler, seen = torch.amp.GradScaler("cpu"), []
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1, fused=True)
        optimizer.register_step_post_hook(lambda one, *_, seen=seen: seen.append(private.skipped(one)))
        scaler.scale(optimizer.param_groups[0]["params"][0] * scale).backward()
        scaler.step(optimizer)
        assert seen == expected


def test_calling_scaler():
    (scaler, optimizer), called = scaled(1.0), []
    optimizer.register_step_post_hook(lambda *_: called.append(private.calling_scaler()))
    scaler.step(optimizer)
    optimizer.step()
    assert called == [scaler, None]


def test_scaler_state():
    scaler, optimizer = scaled(float("inf"))
    assert private.scaler_state(scaler, id(optimizer)) == {}
    scaler.unscale_(optimizer)
    state = private.scaler_state(scaler, id(optimizer))
    assert state["stage"] is torch.amp.grad_scaler.OptState.UNSCALED
    assert [float(mark) for mark in state["found_inf_per_device"].values()] == [1.0]


def test_check_overflow():
    scaler, optimizer = scaled(1.0)
    scaler.unscale_(optimizer)
    (group,) = optimizer.param_groups
    group["params"][0].grad.fill_(float("nan"))
    private.check_overflow(scaler, optimizer)
    marks = private.scaler_state(scaler, id(optimizer))["found_inf_per_device"]
    assert [float(mark) for mark in marks.values()] == [1.0]


def test_scale_device():
    assert private.scale_device(scaled(1.0)[0]) == torch.device("cpu")


def scaled(factor):
    """A scaler and an optimizer with scaled gradients of one parameter."""
    p = torch.nn.Parameter(torch.zeros(3))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.SGD([p], 0.1)
    scaler.scale((factor * p).sum()).backward()
    return scaler, optimizer


def backends_of_one_rank(folder):
    store = dist.FileStore(str(folder / "store"), 1)
    return store, private.inner_backends(store, 0, 1, timedelta(seconds=60))


def test_inner_backends(tmp_path):
    backends = backends_of_one_rank(tmp_path)[1]
    assert [*backends] == ["cpu", "cuda"]
    x = torch.ones(3)
    backends["cpu"].allreduce([x], dist.AllreduceOptions()).wait()
    assert x.tolist() == [1, 1, 1]


def test_seconds_of(tmp_path):
    gloo = backends_of_one_rank(tmp_path)[1]["cpu"]
    gloo._set_default_timeout(timedelta(seconds=7))
    assert private.seconds_of(gloo) == 7.0


def test_serve_by(tmp_path):
    store, backends = backends_of_one_rank(tmp_path)
    group, x = dist.ProcessGroup(store, 0, 1), torch.ones(3)
    private.serve_by(group, backends)
    group.allreduce([x]).wait()
    group.barrier().wait()
    assert x.tolist() == [1, 1, 1] and "cpu" in map(str, group._device_types)


def test_serve_monitored_barrier(monkeypatch):
    calls = []

    class Group:
        def monitored_barrier(self, *arguments):
            calls.append(arguments)

    for module in (dist, dist.distributed_c10d):
        monkeypatch.setattr(module, "monitored_barrier", dist.monitored_barrier)
    private.serve_monitored_barrier(Group)
    dist.monitored_barrier(Group(), wait_all_ranks=True)
    assert calls == [(None, True)]
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.monitored_barrier()
