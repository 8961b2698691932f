"""LocalOptimizer's means: what they send and hold in memory, and failures at any line."""

import contextlib
import copy
import gc
import logging
import os
import tracemalloc
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from lines import Injected, Lines, spread  # noqa: E402
from nets import batch, bits, loss_of, net, parameters, train  # noqa: E402

from sparsecoll import CommunicationError, simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer  # noqa: E402
from sparsecoll.torch.compressors import ACPSGD, COVAP, TopKCompressor  # noqa: E402
from sparsecoll.torch.reduction import means, window  # noqa: E402

SPARSE = TopKCompressor(0.1, "allgather")
TRIED = None if os.environ.get("SPARSECOLL_FUZZ") else 25  # lines at which an exception is injected


def local(comm, model, make=torch.optim.AdamW, **options):
    options = {"every": 4, "compressor": SPARSE, "dense_below": 0, "bucket_bytes": 6000, **options}
    return LocalOptimizer(make(model.parameters(), 0.01), model, comm, **options)


def test_buffers_are_sent_only_when_they_have_changed():
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = torch.nn.Linear(12, 3), torch.nn.BatchNorm1d(3)
            self.register_buffer("mask", torch.ones(1000, 1000))

        def forward(self, x):
            return self.norm(self.inner(x)) * self.mask[0, 0]

    def program(comm):
        model = Masked()
        optimizer = local(comm, model)
        sent = optimizer.traffic.total.bytes_sent
        train(comm, model, optimizer, range(8), torch.float32)
        means = optimizer.traffic.total.bytes_sent - sent
        with torch.no_grad():
            model.mask[0, 0] = comm.rank
        optimizer.synchronize()
        optimizer.synchronize()
        train(comm, model, optimizer, [8], torch.float32)
        optimizer.synchronize()
        return means, float(model.mask[0, 0]), model.norm.running_mean.tolist()

    (sent, *same), (_, *other) = simulate(2, program).results
    assert sent < 10_000 and same == other and same[0] == 0


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"alpha": 0.5}])
@pytest.mark.parametrize("steps", range(12, 16))
def test_buffers_are_the_same_after_means_that_were_under_way(options, steps):
    def program(comm):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(12, 3), torch.nn.BatchNorm1d(3))
        optimizer = local(comm, model, delay=3, **options)
        train(comm, model, optimizer, range(steps), torch.float32)
        optimizer.synchronize()
        first = model[1].running_mean.tolist()
        model(torch.full((2, 12), float(comm.rank)))  # nothing moves since
        optimizer.synchronize()
        return first, model[1].running_mean.tolist()

    one, other = simulate(2, program).results
    assert one == other


def storage_bytes():
    """Bytes of the memory that tensors hold which Python knows and has made since gc.freeze()."""
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]  # not torch.compile's
    storages = [t.untyped_storage() for t in tensors if t.layout == torch.strided and not t.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_memory_is_that_of_the_shared_parameters_the_residual_and_the_momentum(momentum):
    """During a mean, its fragment comes on top. tracemalloc counts NumPy's memory, also at its peak; torch's is read
    before and after every outer step."""
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128, bias=False) for _ in range(20)])
    size = sum(p.nbytes for p in model.parameters())

    def program(comm):
        def step():
            optimizer.zero_grad()
            model(torch.ones(1, 128)).square().mean().backward()
            optimizer.step()

        optimizer = local(comm, model, torch.optim.SGD, every=20, outer_momentum=momentum, fragments=20)
        for _ in range(40):
            step()
        optimizer.zero_grad()
        gc.collect()
        between = storage_bytes() + tracemalloc.get_traced_memory()[0]
        (outer,) = optimizer._engine._outer.optimizers
        outer.register_step_pre_hook(lambda *_: seen.append(storage_bytes()))
        outer.register_step_post_hook(lambda *_: seen.append(storage_bytes()))
        tracemalloc.reset_peak()
        for _ in range(20):
            step()
        peak = max(seen) + tracemalloc.get_traced_memory()[1] - size  # without gradients
        return between / size, peak / size

    seen = []
    simulate(1, program)  # compiles kernels
    seen.clear()
    gc.collect()
    gc.freeze()
    tracemalloc.start()
    try:
        ((between, peak),) = simulate(1, program).results
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    copies = 2 + (momentum > 0)
    assert copies - 0.1 < between < copies + 0.2 and peak < copies + 0.5, (between, peak)


@pytest.mark.slow
def test_an_exception_at_any_line_is_raised_on_all_ranks():
    """On a rank that has finished the mean already, in its next call; discard() then gives all the same bits again."""

    def program(comm, target):
        model = net()
        optimizer, lines = (
            local(comm, model),
            Lines(lambda code: code.co_filename in (means.__file__, window.__file__), target),
        )
        train(comm, model, optimizer, range(3))
        loss_of(model, batch(comm.rank, 9)).backward()
        with lines if comm.rank == 1 else contextlib.nullcontext():
            if target is None:
                optimizer.step()
                return list(lines.seen)
            with pytest.raises((Injected, CommunicationError), match="here"):
                optimizer.step()
                optimizer.synchronize()
        optimizer.discard()
        train(comm, model, optimizer, range(10, 14))
        return bits(model)

    lines = simulate(2, partial(program, target=None)).results[1]
    assert len(lines) > 50
    for target in spread(lines, TRIED):
        assert len(set(simulate(2, partial(program, target=target)).results)) == 1, target


@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_in_inference_mode(optimizer_of):
    def program(comm, mode):
        model = net()
        optimizer = local(comm, model, optimizer_of, outer_momentum=0.9)
        for step in range(9):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            with mode():
                optimizer.step()
        optimizer.synchronize()
        with mode():
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.discard()
        return bits(model)

    modes = torch.no_grad, torch.inference_mode
    plain, other = (simulate(2, lambda comm, mode=mode: program(comm, mode)).results for mode in modes)
    assert plain == other and len(set(plain)) == 1


def test_hooks_on_the_state_are_called():
    """As frameworks that load rank 0's state on all ranks need them."""

    def program(comm):
        model = net()
        optimizer = local(comm, model)
        train(comm, model, optimizer, range(6))
        saved[comm.rank] = optimizer.state_dict()
        optimizer.synchronize()
        optimizer.register_load_state_dict_pre_hook(lambda _, state: saved[comm.rank])
        optimizer.load_state_dict(saved[0])
        return optimizer.state_dict()["sparsecoll"]["rank"]

    saved = {}
    assert simulate(2, program).results == [0, 1]


def test_an_attribute_that_is_missing_is_not_looked_for_in_the_wrapped_optimizer():
    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        inner.train, inner.seconds = (lambda: "train"), None  # the second one is DistributedOptimizer's
        optimizer = LocalOptimizer(inner, model.named_parameters(), comm)
        with pytest.raises(AttributeError, match="'LocalOptimizer' object has no attribute 'seconds'"):
            _ = optimizer.seconds
        return optimizer.train()

    assert simulate(1, program).results == ["train"]


def test_momentum_in_compressor_and_outer_step_is_told_by_its_name(caplog):
    def program(comm):
        model = net()
        local(comm, model, compressor="nesterovtopk", outer_momentum=0.9)

    with caplog.at_level(logging.WARNING):
        simulate(2, program)
    (record,) = [r for r in caplog.records if "momentum" in r.msg]
    assert (
        "LocalOptimizer one of 0.9" in record.getMessage()
        and "Use outer_momentum=0 in LocalOptimizer" in record.getMessage()
    )


@pytest.mark.parametrize("error", [False, True])
def test_no_sync_ends_where_it_began(error):
    def program(comm):
        model = net(seed=comm.rank)
        optimizer = local(comm, model, every=1)
        with pytest.raises(KeyError) if error else optimizer.no_sync(), optimizer.no_sync():
            train(comm, model, optimizer, range(3))
            assert len({*comm_bits(model)}) == 2
            if error:
                raise KeyError
        train(comm, model, optimizer, [3])
        return bits(model)

    seen = {}

    def comm_bits(model):
        seen[id(model)] = bits(model)
        return seen.values() if len(seen) == 2 else [0, 1]

    assert len(set(simulate(2, program).results)) == 1


@pytest.mark.parametrize("wrapper", [DistributedOptimizer, LocalOptimizer])
def test_a_comparison_after_a_failure_leaves_out_buffers_of_forward_passes(wrapper):
    """Those differ between ranks until the reduction ends."""

    def program(comm):
        model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)).double()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = wrapper(inner, model, comm, **({"every": 2} if wrapper is LocalOptimizer else {}))
        train(comm, model, optimizer, range(2))
        if wrapper is LocalOptimizer:
            optimizer.load_state_dict(optimizer.state_dict())
        elif comm.rank == 1:

            def fail(*_):
                handle.remove()
                raise OSError("after the step")

            handle = inner.register_step_post_hook(fail)
            with pytest.raises(OSError, match="after the step"):
                train(comm, model, optimizer, [2])
            optimizer._engine.after_step()  # which it is
        else:
            train(comm, model, optimizer, [2])
        train(comm, model, optimizer, range(3, 5))
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1


def in_two_fragments(comm, model, compressor):
    inner = torch.optim.SGD(model.parameters(), 0.1)
    options = {"every": 2, "fragments": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "dense_below": 0, "bucket_bytes": 1}
    return LocalOptimizer(inner, model, comm, compressor, **options)


def test_covap_sends_every_bucket_of_every_fragment():
    """It takes turns by the number of the mean, as fragments do."""

    def program(comm):
        model = net()
        start = [p.detach().clone() for p in model.parameters()]
        optimizer = in_two_fragments(comm, model, COVAP(2))
        train(comm, model, optimizer, range(12))
        optimizer.discard()  # what was not averaged
        return [torch.equal(own, first) for own, first in zip(parameters(model), start, strict=True)]

    assert not any(simulate(2, program).results[0])


def test_acpsgd_forms_both_factors_of_every_fragment():
    def program(comm):
        model, seen = net(), []
        optimizer = in_two_fragments(comm, model, ACPSGD(1))
        for start in (0, 8):
            train(comm, model, optimizer, range(start, start + 8))
            seen.append(optimizer.state_dict()["sparsecoll"]["tensors"])
        return [{name: bool((seen[0][kind][name] == t).all()) for name, t in seen[1][kind].items()} for kind in "pq"]

    same = simulate(2, program).results[0]
    assert len(same[0]) > 1 and not any(value for part in same for value in part.values())


def test_residuals_of_a_wrapped_distributed_optimizer_are_saved():
    """Gradients are averaged within a node of two ranks, and changes between the nodes."""

    def made(comm, model):
        node, across = comm.Split(comm.rank // 2), comm.Split(comm.rank % 2)
        inner = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, node, SPARSE, dense_below=0)
        return LocalOptimizer(inner, model, across, every=2, compressor=SPARSE, dense_below=0)

    def program(comm):
        model = net()
        optimizer = made(comm, model)
        train(comm, model, optimizer, range(4))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(comm, model, optimizer, range(4, 8))
        again = net(seed=3)
        resumed = made(comm, again)
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(comm, again, resumed, range(4, 8))
        return bits(model), bits(again)

    assert all(own == resumed for own, resumed in simulate(4, program).results)


def test_a_device_that_one_rank_lacks_is_refused_on_all():
    def program(comm):
        with pytest.raises(CommunicationError, match=r"rank 1 failed: RuntimeError: .*nowhere"):
            local(comm, net(), backup_device="nowhere" if comm.rank == 1 else None)

    simulate(2, program)


def test_states_of_inner_optimizers_are_those_of_all_until_they_are_released():
    def program(comm):
        model = net()
        inner = [torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in (model[:3], model[3:])]
        optimizer = LocalOptimizer(inner, model, comm, every=2)
        train(comm, model, optimizer, range(2))
        for call in (inner[0].state_dict, partial(inner[1].load_state_dict, inner[1].__dict__)):
            with pytest.raises(RuntimeError, match="_dict: expected one inner optimizer, got several: use that of"):
                call()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.close()
        assert [len(own.state_dict()["state"]) for own in inner] == [4, 2]
        with pytest.raises(ValueError, match="every: expected"):
            LocalOptimizer(inner, model, comm, every=0)
        inner[0].load_state_dict(inner[0].state_dict())
        closed = LocalOptimizer([torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)], model, comm)
        closed.close()
        train(comm, model, closed, range(2))
        assert len(closed.state_dict()["state"]) == 6  # which have come since

    simulate(2, program)
