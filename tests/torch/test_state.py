"""Saved state: one format for all ways in, and files of another kind."""

import copy
import gc
import io
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nets import P, batch, bits, loss_of, net, parameters, sparse, train, wrapped  # noqa: E402

import sparsecoll.torch  # noqa: E402
from sparsecoll import simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer, SparseSGD, load, redistribute, save  # noqa: E402
from sparsecoll.torch.compressors import ACPSGD, COVAP, Compressor, PowerSGD, RandomKCompressor, TopKCompressor, oktopk  # noqa: E402


@pytest.mark.parametrize("make", [sparse, wrapped])
def test_a_run_goes_on_bit_for_bit(make):
    """With the thresholds and boundaries of the algorithm, which the next step would not find alike."""

    def program(comm):
        whole, half, again = net(), net(), net()
        train(comm, whole, make(comm, whole), range(8))
        optimizer = make(comm, half)
        train(comm, half, optimizer, range(5))
        state = optimizer.state_dict()
        again.load_state_dict(half.state_dict())
        optimizer = make(comm, again)
        optimizer.load_state_dict(state)
        train(comm, again, optimizer, range(5, 8))
        return bits(again) == bits(whole)

    assert all(simulate(3, program).results)


def scaled(comm, model, optimizer, scaler, steps, overflows=()):
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, batch(comm.rank, step)) * (float("inf") if step in overflows else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


RUNS = [(make, change) for make in (sparse, wrapped) for change in ("same", "grows", "shrinks")]
RUNS += [(partial(wrapped, algo="allgather"), "shrinks"), (partial(wrapped, algo="cltk"), "grows")]


@pytest.mark.parametrize(("make", "change"), RUNS)
def test_a_run_with_a_grad_scaler_goes_on_bit_for_bit(make, change):
    """The residual is saved unscaled. What an overflow, a failed reduction, has made invalid is not saved."""

    def program(comm):
        def made():
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4 if change == "grows" else 100)
            model = net()
            return model, make(comm, model, grad_scaler=scaler), scaler

        overflows = [3] if change == "shrinks" else []
        model, optimizer, scaler = made()
        scaled(comm, model, optimizer, scaler, range(4), overflows)
        states = model.state_dict(), optimizer.state_dict(), scaler.state_dict()
        again = made()
        for one, state in zip(again, copy.deepcopy(states), strict=True):
            one.load_state_dict(state)
        for loop in ((model, optimizer, scaler), again):
            scaled(comm, *loop, range(4, 7))
        return scaler.get_scale(), bits(model) == bits(again[0])

    assert simulate(2, program).results == [({"same": 2.0**10, "grows": 2.0**11, "shrinks": 2.0**9}[change], True)] * 2


def test_a_run_goes_on_with_another_scaler_or_none():
    """Residuals have no scale."""

    def program(comm):
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = wrapped(comm, model, "allgather")
        train(comm, model, optimizer, range(3))
        again = net()
        again.load_state_dict(model.state_dict())
        other = wrapped(comm, again, "allgather", grad_scaler=scaler)
        other.load_state_dict(optimizer.state_dict())
        scaled(comm, again, other, scaler, range(3, 6))
        train(comm, model, optimizer, range(3, 6))
        return bits(model) == bits(again)

    assert all(simulate(2, program).results)


def test_what_waits_is_sent_by_parameters_that_are_small_after_loading():
    def program(comm):
        model, state = net(), None
        start, given = parameters(model), [torch.zeros_like(p) for p in model.parameters()]
        for step, dense_below in enumerate([0, 10_000]):
            inner = torch.optim.SGD(model.parameters(), 1.0)
            optimizer = DistributedOptimizer(inner, model, comm, oktopk(0.05), dense_below=dense_below)
            if state is not None:
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            own = net()
            own.load_state_dict(model.state_dict())
            for one in (own, model):
                loss_of(one, batch(comm.rank, step)).backward()
            for total, p in zip(given, own.parameters(), strict=True):
                total += p.grad
            optimizer.step()
            state = optimizer.state_dict()
            assert any(t.any() for t in state["sparsecoll"]["tensors"]["residual"].values()) == (step == 0)
        return [a - p for a, p in zip(start, parameters(model), strict=True)], given

    results = simulate(P, program).results
    for moved, *given in zip(results[0][0], *(given for _, given in results), strict=True):
        torch.testing.assert_close(P * moved, sum(given))


@pytest.mark.parametrize(
    "given", ["auto", "oktopk", RandomKCompressor(0.1), COVAP(interval=2)], ids=lambda c: getattr(c, "name", c)
)
@pytest.mark.parametrize("change", [(0, 10_000), (10_000, 0), (0, 10_000, 0)], ids=str)
def test_parameters_are_compressed_or_not_by_another_limit_after_loading(given, change):
    """A bucket of the same parameters has then a compressor of another kind, or a sum that sends what waits."""

    def program(comm):
        model, state = net(dtype=torch.float32), None
        for dense_below in change:
            inner = torch.optim.SGD(model.parameters(), 0.1)
            compressor = given if isinstance(given, Compressor) else TopKCompressor(0.05, given)
            optimizer = DistributedOptimizer(inner, model, comm, compressor, bucket_bytes=None, dense_below=dense_below)
            if state is not None:
                optimizer.load_state_dict(state)
            train(comm, model, optimizer, range(3), torch.float32)
            state = optimizer.state_dict()
            optimizer.close()
        return bits(model)

    results = simulate(2, program).results
    assert results[0] == results[1]


def test_a_run_goes_on_whose_first_step_was_skipped_before_it_was_saved():
    """Ranks had gradients of different parameters."""

    def program(comm):
        def made():
            params = {name: torch.nn.Parameter(torch.zeros(40)) for name in "abc"}
            inner = torch.optim.SGD(params.values(), 1.0)
            return params, DistributedOptimizer(inner, params.items(), comm, "topk", dense_below=0, overlap=False)

        def step(params, optimizer, names):
            for i, name in enumerate(names):
                params[name].backward(torch.linspace(1, 2, 40) * (comm.rank + i + 1))
            optimizer.step()

        params, optimizer = made()
        own = "cab"[comm.rank :]
        sum(params[name].sum() for name in own).backward()
        optimizer.zero_grad()
        state = copy.deepcopy(optimizer.state_dict())
        again, other = made()
        other.load_state_dict(state)
        for loop in ((params, optimizer), (again, other)):
            for names in ("abc", "bca"):
                step(*loop, names)
        assert any(p.any() for p in params.values())
        return all(params[name].equal(again[name]) for name in params)

    assert all(simulate(3, program).results)


@pytest.mark.parametrize("make", [sparse, wrapped])
def test_all_ways_in_save_the_same_keys(make):
    def program(comm):
        model = net()
        optimizer = make(comm, model)
        train(comm, model, optimizer, range(2))
        return optimizer.state_dict()["sparsecoll"]

    (state,) = simulate(1, program).results
    keys = {"rank", "size", "compressor", "replicated", "step", "order", "rows", "dense", "tensors", "buckets"}
    keys |= {"filled"}  # whether there are residuals
    assert keys <= set(state) <= keys | {"params", "rated", "scale"}
    assert all(isinstance(names, list) and isinstance(text, str) for names, text in state["buckets"])


def test_a_state_that_lacks_a_residual_on_one_rank_is_refused_on_all():
    def program(comm):
        model = net()
        optimizer = wrapped(comm, model)
        train(comm, model, optimizer, range(2))
        state = optimizer.state_dict()
        if comm.rank == 1:
            state["sparsecoll"]["tensors"]["residual"].popitem()
        with pytest.raises(sparsecoll.CommunicationError, match="tensors: expected the same value on all ranks"):
            optimizer.load_state_dict(state)

    simulate(3, program)


@pytest.mark.parametrize("make", [sparse, wrapped])
def test_a_state_that_is_damaged_on_one_rank_is_loaded_on_none(make):
    def program(comm, damage, text):
        model = net()
        optimizer = make(comm, model)
        train(comm, model, optimizer, range(2))
        before = copy.deepcopy(optimizer.state_dict())
        state = copy.deepcopy(before)
        if comm.rank == 1:
            damage(state["sparsecoll"])
        with pytest.raises((ValueError, sparsecoll.CommunicationError), match=text):
            optimizer.load_state_dict(state)
        assert str(optimizer.state_dict()["sparsecoll"]["tensors"]) == str(before["sparsecoll"]["tensors"])

    without = "rank 1: state_dict: expected one of sparsecoll.torch, got one without 'order'"
    simulate(3, partial(program, damage=lambda own: own.pop("order"), text=without))
    simulate(3, partial(program, damage=lambda own: own["buckets"][0].pop(), text="rank 1: not enough values"))


@pytest.mark.parametrize("method", [PowerSGD, ACPSGD])
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 40)])  # 40: no matrix is small enough
def test_factors_of_another_rank_are_refused(method, before, after):
    def program(comm):
        def made(rank):
            model = net()
            inner = torch.optim.SGD(model.parameters(), 0.1)
            return model, DistributedOptimizer(inner, model, comm, method(rank), dense_below=0)

        model, optimizer = made(before)
        train(comm, model, optimizer, range(2))
        state = copy.deepcopy(optimizer.state_dict())
        model, optimizer = made(after)
        with pytest.raises(ValueError, match=r"state_dict: p of '\d\.weight': expected shape \(\d+, \d+\), got") as got:
            optimizer.load_state_dict(state)
        assert f", {before}) of {method.name}(rank={before}" in str(got.value)
        assert f"this is {method.name}(rank={after}" in str(got.value)
        for kind in ("p", "q"):  # the cure
            del state["sparsecoll"]["tensors"][kind]
        optimizer.load_state_dict(state)
        train(comm, model, optimizer, range(2, 4))
        return bits(model)

    results = simulate(2, program).results
    assert results[0] == results[1]


def test_redistribute_refuses_a_rank_that_there_is_not():
    with pytest.raises(ValueError, match="rank: expected 0 to 2, got 7"):
        redistribute([{"rank": 0, "size": 1}], 7, 3)


def test_redistribute_refuses_states_of_different_parameters():
    def program(comm):
        return SparseSGD(net().parameters(), comm=comm).state_dict()

    states = simulate(2, program).results
    states[1]["sparsecoll"]["tensors"]["residual"] = {"a": torch.zeros(1)}
    with pytest.raises(
        ValueError, match="states: expected residual of 'a' of all ranks, got that of one of ranks 0 and 1"
    ):
        redistribute(states, 0, 3)
    with pytest.raises(ValueError, match=r"expected one of sparsecoll\.torch, got one without 'buckets'"):
        redistribute([net().state_dict()], 0, 3)


@pytest.mark.parametrize("make", [sparse, wrapped])
def test_files_hold_no_number_of_numpy(make, tmp_path):
    """Such as a schedule's, which torch.load refuses."""

    def program(comm):
        model = net()
        optimizer = make(comm, model)
        optimizer.param_groups[0]["lr"] = np.float64(0.05)
        train(comm, model, optimizer, range(2))
        path = tmp_path / f"{comm.rank}.pt"
        save(optimizer.state_dict(), path)
        assert isinstance(optimizer.param_groups[0]["lr"], np.float64)
        optimizer.load_state_dict(load(path))
        return optimizer.param_groups[0]["lr"]

    assert simulate(2, program).results == [0.05, 0.05]


def test_states_with_other_keys_are_saved():
    """As those of optimizers that have another one inside."""

    class Nested(torch.optim.SGD):
        def state_dict(self):
            return {"base": super().state_dict()}

        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict["base"])

    def program(comm):
        model = net()
        optimizer = DistributedOptimizer(Nested(model.parameters(), 0.1), model, comm, "topk")
        train(comm, model, optimizer, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        train(comm, model, optimizer, range(2, 3))
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1


def test_parameters_of_a_local_optimizer_are_not_compared_after_a_load():
    """They differ between two means, and their states have each rank's own."""

    def program(comm):
        model = net()
        rest = LocalOptimizer(torch.optim.SGD(model[:4].parameters(), 0.1), model, comm, every=4)
        last = DistributedOptimizer(torch.optim.SGD(model[4].parameters(), 0.1), model, comm, "topk")

        def step(number):
            loss_of(model, batch(comm.rank, number)).backward()
            for optimizer in (rest, last):
                optimizer.step()
                optimizer.zero_grad()

        for number in range(6):
            step(number)
        saved = copy.deepcopy([model.state_dict(), rest.state_dict(), last.state_dict()])
        for owner, state in zip((model, rest, last), saved, strict=True):
            owner.load_state_dict(state)
        for number in range(6, 8):
            step(number)
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1


@pytest.mark.parametrize("make", [sparse, wrapped])
def test_a_file_of_another_kind_is_refused(make):
    def program(comm):
        model = net()
        optimizer = make(comm, model)
        with pytest.raises(ValueError, match="expected that of an optimizer, got one without 'param_groups'"):
            optimizer.load_state_dict(model.state_dict())
        with pytest.raises(ValueError, match=r"got (one without 'buckets'|another optimizer's)"):
            optimizer.load_state_dict({**optimizer.state_dict(), "sparsecoll": {"rank": 0}})

    simulate(2, program)


WHOLE = io.BytesIO()
torch.save({"weight": torch.ones(1000)}, WHOLE)
FILES = {"garbage": b"].".ljust(50), "empty": b"", "truncated": WHOLE.getvalue()[:2000], "text": b"lr: 0.1\n"}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_a_file_that_torch_cannot_load_is_named(tmp_path, content):
    path = tmp_path / "rank0.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rank0\.pt: expected a file of tensors that torch\.save wrote"):
        sparsecoll.torch.load(path)
    with pytest.raises(ValueError, match=r"rank0\.pt: expected a file of tensors"):
        torch.save(net(), path)  # code, too
        sparsecoll.torch.load(path)
    with pytest.raises(OSError, match=str(tmp_path)):
        sparsecoll.torch.load(tmp_path)


def test_an_optimizer_that_is_gone_on_some_ranks_changes_no_comparison():
    def program(comm):
        model = net()
        rest = LocalOptimizer(torch.optim.SGD(model[:4].parameters(), 0.1), model, comm, every=2)
        last = DistributedOptimizer(torch.optim.SGD(model[4].parameters(), 0.1), model, comm, "topk", verify=1)
        kept.append(rest) if comm.rank == 0 else rest.close()
        del rest
        gc.collect()
        train(comm, model, last, range(3))

    kept = []
    simulate(3, program)
