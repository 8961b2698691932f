"""LocalOptimizer with fragments, delays, weights and other outer optimizers, beside the formulas of the papers."""

import contextlib
import copy
import math
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from nets import batch, bits, close, loss_of, net, parameters  # noqa: E402

from sparsecoll import simulate  # noqa: E402
from sparsecoll.errors import CommunicationError, NonFiniteError  # noqa: E402
from sparsecoll.torch import DiLoCo, LocalOptimizer  # noqa: E402
from sparsecoll.torch.compressors import QSGD, ChunkedTopK, TopKCompressor  # noqa: E402
from sparsecoll.torch.optimizers.diloco import PRESETS  # noqa: E402

CHUNKED = ChunkedTopK(4, 16, algo="allgather")
NAMES = [name for name, _ in net().named_parameters()]


def grads_of(model, rank, step):
    model.zero_grad()
    loss_of(model, batch(rank, step)).backward()


def by_formulas(P, steps, every, fragments, delay, alpha, weights=None):
    """All ranks' parameters after `steps` steps and a last mean of all, as in Streaming DiLoCo, in one process."""
    models = [net() for _ in range(P)]
    inner = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    shared = net()
    outer = torch.optim.SGD(shared.parameters(), 0.7, 0.9, nesterov=True)
    sizes, fragment_of = [0] * fragments, {}
    for name, p in sorted(shared.named_parameters(), key=lambda pair: -pair[1].nbytes):
        fragment_of[name] = sizes.index(min(sizes))
        sizes[fragment_of[name]] += p.nbytes
    starts = [every * f // fragments for f in range(1, fragments + 1)]
    under_way = []

    def begin(names, due):
        changes = {}
        for name in names:
            common = shared.get_parameter(name).detach()
            w = [1.0] * P if weights is None else weights
            parts = [w[r] * (common - models[r].get_parameter(name).detach()) for r in range(P)]
            changes[name] = sum(parts) / sum(w)
        under_way.append((due, changes))

    @torch.no_grad()
    def take(alpha):
        _, changes = under_way.pop(0)
        outer.zero_grad()
        for name, change in changes.items():
            shared.get_parameter(name).grad = change.clone()
        outer.step()
        for model in models:
            for name in changes:
                model.get_parameter(name).lerp_(shared.get_parameter(name), 1 - alpha)

    for t in range(1, steps + 1):
        for rank, model in enumerate(models):
            grads_of(model, rank, t)
            inner[rank].step()
        while under_way and under_way[0][0] <= t:
            take(alpha)
        for f in range(fragments):
            if t >= starts[f] and (t - starts[f]) % every == 0:
                begin([n for n in NAMES if fragment_of[n] == f], t + delay)
                if not delay:
                    take(0.0)
    while under_way:
        take(alpha)
    begin(NAMES, 0)
    take(0.0)
    return parameters(shared)


def train(comm, optimizer, model, steps, start=0):
    for t in range(start + 1, start + steps + 1):
        grads_of(model, comm.rank, t)
        optimizer.step()


@pytest.mark.parametrize(
    ("every", "fragments", "delay", "alpha"),
    [(4, 1, 0, 0.0), (6, 3, 0, 0.0), (5, 2, 0, 0.0), (4, 1, 2, 0.0), (6, 3, 2, 0.5), (6, 2, 5, 0.25), (4, 4, 3, 0.5)],
)
@pytest.mark.parametrize("P", [1, 3])
def test_parameters_move_as_by_the_formulas(P, every, fragments, delay, alpha):
    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        options = {"outer_lr": 0.7, "outer_momentum": 0.9, "dense_below": 0}
        optimizer = LocalOptimizer(
            inner, model, comm, every=every, fragments=fragments, delay=delay, alpha=alpha, **options
        )
        train(comm, optimizer, model, 23)
        optimizer.synchronize()
        return parameters(model), bits(model)

    results = simulate(P, program).results
    assert len({own for _, own in results}) == 1
    close(results[0][0], by_formulas(P, 23, every, fragments, delay, alpha), atol=1e-6)


def test_means_are_weighted():
    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        options = {"outer_lr": 0.7, "outer_momentum": 0.9, "weight": lambda: [2.0, 0.0, 5.0][comm.rank]}
        optimizer = LocalOptimizer(inner, model, comm, every=4, **options)
        train(comm, optimizer, model, 9)
        optimizer.synchronize()
        return parameters(model)

    close(simulate(3, program).results[1], by_formulas(3, 9, 4, 1, 0, 0.0, [2.0, 0.0, 5.0]), atol=1e-6)


STREAM = {"every": 6, "fragments": 3, "delay": 3, "alpha": 0.5, "outer_lr": 0.7, "outer_momentum": 0.9}


def made(comm, model, seed=None, **options):
    inner = torch.optim.SGD(model.parameters(), 0.1)
    return LocalOptimizer(inner, model, comm, **{**STREAM, "dense_below": 0, "timeout": 30.0, **options})


def test_outer_optimizers_of_fragments_have_their_own_rates():
    """Several, one with a schedule, move as one with groups. Those that lack a parameter are refused."""

    def program(comm, several):
        model = net()
        layers = [part for part in model.children() if [*part.parameters()]]
        outer = [torch.optim.SGD(part.parameters(), 0.5, 0.9, nesterov=True) for part in layers]
        schedules = [torch.optim.lr_scheduler.StepLR(own, 1, 0.5) for own in outer[1:] if several]
        if several:
            optimizer = made(comm, model, fragments=layers, delay=0, alpha=0.0, **NO_SGD, outer=outer)
        else:
            one = torch.optim.SGD([*map(dict, groups(layers))], 0.5, 0.9, nesterov=True)
            optimizer = made(comm, model, fragments=layers, delay=0, alpha=0.0, **NO_SGD, outer=one)
        for step in range(0, 12, 6):
            train(comm, optimizer, model, 6, step)
            for own in schedules:
                own.step()
            if not several:
                for group in one.param_groups[1:]:
                    group["lr"] *= 0.5
        optimizer.synchronize()
        if several:
            with pytest.raises(ValueError, match="every parameter of the wrapped optimizer once, got 0 times"):
                made(comm, model, **NO_SGD, outer=[torch.optim.SGD(part.parameters(), 0.5) for part in layers[:-1]])
        return parameters(model)

    def groups(layers):
        return [{"params": part.parameters()} for part in layers]

    one, several = (simulate(2, partial(program, several=several)).results[0] for several in (False, True))
    close(one, several)


NO_SGD = {"outer_lr": 1.0, "outer_momentum": 0.0}


@pytest.mark.parametrize("P", [1, 2, 3, 5, 8, 9])
def test_buckets_under_way_together_have_the_bits_of_one_bucket(P):
    """No bucket divides a chunk. Beside another optimizer, whose means a progress thread forms."""

    def program(comm, bucket_bytes, plain=True):
        other = net()
        streaming = made(comm, other)
        train(comm, streaming, other, 7)
        model = net()
        outer = {} if plain else {"outer": torch.optim.SGD(model.parameters(), 0.7), "outer_lr": 1.0}
        options = {"fragments": 1, "delay": 0, "alpha": 0.0, "outer_momentum": 0.0, **outer}
        optimizer = made(comm, model, compressor=CHUNKED, bucket_bytes=bucket_bytes, **options)
        train(comm, optimizer, model, 13)
        optimizer.synchronize()
        return bits(model), parameters(model)

    one, several, dense = (
        simulate(P, partial(program, **options)).results
        for options in ({"bucket_bytes": 1 << 30}, {"bucket_bytes": 1}, {"bucket_bytes": 1, "plain": False})
    )
    assert len({own for own, _ in [*one, *several]}) == len({own for own, _ in dense}) == 1
    close(one[0][1], dense[0][1], atol=1e-6)


@pytest.mark.parametrize("compressor", ["none", TopKCompressor(0.1, "allgather"), QSGD(4, feedback=True), CHUNKED])
def test_a_rank_that_has_nan_while_means_are_under_way(compressor):
    """All raise in the same step; after discard() all go on with the same bits."""

    def program(comm):
        model = net()
        optimizer = made(comm, model, compressor=compressor)
        train(comm, optimizer, model, 15)
        if comm.rank == 1:
            with torch.no_grad():
                next(iter(model.parameters())).fill_(math.nan)
        raised = []
        for t in range(16, 31):
            try:
                train(comm, optimizer, model, 1, t)
            except NonFiniteError as error:
                raised.append((t, str(error)))
                break
        optimizer.discard()
        train(comm, optimizer, model, 9, 30)
        optimizer.synchronize()
        return raised, bits(model)

    results = simulate(3, program).results
    assert len({own for _, own in results}) == 1
    assert len({raised[0][0] for raised, _ in results}) == 1
    assert all("discard()" in raised[0][1] for raised, _ in results)


@pytest.mark.parametrize("steps", [7, 9, 12])
def test_a_run_that_was_saved_while_means_are_under_way_resumes_with_the_same_bits_on_all_ranks(steps):
    def program(comm):
        model = net()
        optimizer = made(comm, model, compressor=QSGD(4, feedback=True))
        train(comm, optimizer, model, steps)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        again = net()
        resumed = made(comm, again, compressor=QSGD(4, feedback=True))
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        assert bits(again) == bits(model)
        train(comm, resumed, again, 10, steps)
        resumed.synchronize()
        return bits(again)

    assert len(set(simulate(3, program).results)) == 1


@pytest.mark.parametrize("join", [True, False])
def test_ranks_with_different_numbers_of_steps_end_with_the_same_bits_while_means_are_under_way(join):
    def program(comm):
        model = net()
        optimizer = made(comm, model)
        for steps in ([5, 31, 20, 0], [8, 7, 8, 9]):
            with optimizer.join() if join else contextlib.nullcontext():
                train(comm, optimizer, model, steps[comm.rank])
            if not join:
                optimizer.synchronize()
        return bits(model)

    assert len(set(simulate(4, program).results)) == 1


def test_an_exception_while_several_means_are_under_way_is_one_on_all_ranks():
    def program(comm, step):
        model = net()
        optimizer = made(comm, model, every=8, fragments=4, delay=5)
        train(comm, optimizer, model, step - 1)

        def fail(*_):
            raise KeyError("of this rank")

        if comm.rank == 1:
            optimizer.optimizer.step = fail
        with pytest.raises((KeyError, CommunicationError), match="of this rank"):
            train(comm, optimizer, model, 20, step - 1)
        if comm.rank == 1:
            del optimizer.optimizer.step
        optimizer.discard()
        train(comm, optimizer, model, 20)
        optimizer.synchronize()
        return bits(model)

    for step in (18, 20, 22):
        assert len(set(simulate(3, partial(program, step=step)).results)) == 1


def test_ranks_whose_outer_rates_differ_when_they_meet_are_refused():
    """A schedule of one rank went on while another waited for it."""

    def program(comm):
        model = net()
        outer = torch.optim.SGD(model.parameters(), 0.7)
        optimizer = made(comm, model, every=2, fragments=1, delay=0, alpha=0.0, outer=outer, **NO_SGD)
        train(comm, optimizer, model, 1)
        outer.param_groups[0]["lr"] = 0.7 if comm.rank else 0.6
        with pytest.raises(CommunicationError, match=r"outer\[0\]"):
            optimizer.synchronize()
        outer.param_groups[0]["lr"] = 0.7
        optimizer.synchronize()
        return bits(model)

    assert len(set(simulate(3, program).results)) == 1


def test_wrong_paces_are_refused_on_all_ranks():
    def program(comm):
        model = net()
        parts = [*model.children()]
        for options, message in [
            ({"fragments": 7}, "fragments: expected 1 to every=6"),
            ({"delay": 6}, "delay: expected fewer steps than every=6, got 6"),
            ({"alpha": 1.0}, r"alpha: expected in \[0, 1\)"),
            ({"delay": 0}, "0 without a delay, got 0.5"),
            ({"weight": 2.0}, "weight: expected a function"),
            ({"fragments": [model, parts[0]]}, "fragments: expected every parameter in one"),
            ({"outer": torch.optim.SGD(model.parameters(), 1.0)}, "outer_lr, outer_momentum: expected none"),
        ]:
            wrong = options if comm.rank == 1 else {}
            with pytest.raises((ValueError, TypeError), match=message):
                made(comm, model, **wrong)
        with pytest.raises(CommunicationError, match="delay"):
            made(comm, model, delay=2 + comm.rank)
        optimizer = made(comm, model, weight=lambda: -1.0 + 2 * comm.rank)
        with pytest.raises(ValueError, match=r"weight: expected in \[0, inf\), got -1"):
            train(comm, optimizer, model, 12)

    simulate(2, program)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_several_inner_optimizers_step_together_and_resume():
    def program(comm):
        model = net()
        matrices, others = ([p for p in model.parameters() if (p.ndim == 2) is kind] for kind in (True, False))

        def inner():
            return [torch.optim.Muon(matrices, 0.02), torch.optim.AdamW(others, 0.01)]

        made_of = inner()
        schedule = torch.optim.lr_scheduler.StepLR(made_of[0], 1, 0.5)
        optimizer = LocalOptimizer(made_of, model, comm, every=3, dense_below=0)
        with pytest.raises(ValueError, match="every parameter in one of the optimizers"):
            LocalOptimizer([*inner(), torch.optim.SGD(matrices, 0.1)], model, comm)
        with pytest.raises(RuntimeError, match=r"call LocalOptimizer\.step"):
            made_of[1].step()
        train(comm, optimizer, model, 4)
        schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(comm, optimizer, model, 5, 4)
        expected = bits(model)
        model.load_state_dict(saved[0])
        resumed = LocalOptimizer(inner(), model, comm, every=3, dense_below=0)
        model.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(comm, resumed, model, 5, 4)
        assert bits(model) == expected
        for own in (resumed, made_of[0]):
            with pytest.raises(RuntimeError, match="expected one inner optimizer, got several"):
                own.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        optimizer.close()
        made_of[0].add_param_group({"params": [torch.nn.Parameter(torch.zeros(3, 3))]})
        return expected

    assert len(set(simulate(2, program).results)) == 1


def test_presets_are_those_of_the_table():
    made = {name: of() for name, of in PRESETS.items()}
    assert [own["every"] for own in made.values()] == [30, 100, 30, 30] and made["diloco"]["compressor"] == "none"
    assert [made["streaming"][key] for key in ("fragments", "delay", "alpha")] == [4, 5, 0.5]
    assert [(made[n]["compressor"].bits, made[n]["compressor"].feedback) for n in ("streaming", "muloco")] == [
        (4, True),
        (2, True),
    ]
    chunked = made["sparseloco"]["compressor"]
    assert (chunked.k, chunked.chunk, chunked.decay) == (64, 4096, 0.95)


@pytest.mark.parametrize("preset", ["diloco", "streaming", "sparseloco", "muloco"])
def test_presets_of_diloco_have_the_papers_values_and_resume(preset):
    def program(comm):
        model = net()

        def wrapped():
            return DiLoCo(torch.optim.SGD(model.parameters(), 0.1), model, comm, preset=preset, dense_below=0, every=6)

        optimizer = wrapped()
        assert repr(optimizer).startswith("DiLoCo(")
        outer = optimizer._engine._outer.optimizers[0].param_groups[0]
        assert (outer["lr"], outer["momentum"]) == VALUES[preset] and outer["nesterov"] == (outer["momentum"] > 0)
        train(comm, optimizer, model, 13)
        optimizer.synchronize()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(comm, optimizer, model, 12, 13)
        optimizer.synchronize()
        expected = bits(model)
        model.load_state_dict(saved[0])
        resumed = wrapped()
        resumed.load_state_dict(saved[1])
        train(comm, resumed, model, 12, 13)
        resumed.synchronize()
        assert bits(model) == expected
        with pytest.raises(ValueError, match="preset"):
            DiLoCo(torch.optim.SGD(model.parameters(), 0.1), model, comm, preset="dense")
        return expected

    assert len(set(simulate(3, program).results)) == 1


VALUES = {"diloco": (0.7, 0.9), "streaming": (0.4, 0.9), "sparseloco": (0.4, 0.0), "muloco": (0.7, 0.5)}
