"""Schedules of a user's own: which steps they are asked for, how ranks compare them, and where they are taken."""

import json
import logging
from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nets import bits, net, parameters, train  # noqa: E402
from one_bucket import (  # noqa: E402
    normal,
    one,
    step as one_step,
)

from sparsecoll import CommunicationError, Network, simulate  # noqa: E402
from sparsecoll.torch import Constant, DistributedOptimizer, Schedule, SparseSGD, WarmUp  # noqa: E402
from sparsecoll.torch.compressors import DRAGONN, RandomKCompressor, StepContext, TopKCompressor  # noqa: E402
from sparsecoll.torch.tensors.layout import Layout  # noqa: E402


class Table(Schedule):
    """Knows the steps of the run only."""

    def __init__(self, *densities):
        self.densities = densities

    def at(self, step):
        return self.densities[step]


class Plain(Schedule):
    def at(self, step):
        return 0.25 if step < 2 else 0.05


class Settled(Table):
    def __init__(self, end, *densities):
        super().__init__(*densities)
        self.end = end

    def settles_at(self):
        return self.end


@dataclass
class ByFunction(Schedule):
    function: object

    def at(self, step):
        return self.function(step)


@pytest.mark.parametrize("compressor", [TopKCompressor, RandomKCompressor, DRAGONN])
def test_a_schedule_is_asked_for_steps_that_are_taken_only(compressor):
    results, own = one(compressor(Table(0.2, 0.1, 0.05)), normal(2, 400), steps=3)[0]
    if isinstance(own, TopKCompressor) and not isinstance(own, DRAGONN):
        assert np.count_nonzero(results[2]) <= 2 * 20 < np.count_nonzero(results[0])


@pytest.mark.parametrize(
    ("schedule", "warnings"),
    [
        (Table(0.5, 0.5), 1),
        (Settled(0.5, 0.01, 0.01), 0),
        (Settled(0.01, 0.5, 0.5), 1),
    ],
    ids=str,
)
def test_a_density_whose_end_is_not_known_counts_as_low(caplog, schedule, warnings):
    model = net()
    with caplog.at_level(logging.WARNING, "sparsecoll"):
        DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, None, TopKCompressor(schedule)).close()
    assert caplog.text.count("AdamW divides by its own size") == warnings


def test_dragonn_chooses_in_every_step():
    """A density that begins high; nothing is lost where the choice changes, and a later run chooses alike."""
    table, gradients = Table(1.0, 0.9, 0.01, 1e-4, 1.0, 0.001), normal(3, 100_000)
    layout = Layout(0, (100_000,), ("p",), ((100_000,),), np.dtype(np.float32))

    def program(comm):
        own, later, total, choices = DRAGONN(table), DRAGONN(table), np.zeros(100_000), []
        own.bind(layout, comm.transport, StepContext())
        later.bind(layout, comm.transport, StepContext(step=5))
        for _ in range(6):
            total += 3 * one_step(own, comm.transport, gradients[comm.rank].copy()).astype(np.float64)
            choices.append(own.compressed)
            own.context.step += 1
        later.load_extra_state(json.loads(json.dumps(own.extra_state())))
        one_step(later, comm.transport, gradients[comm.rank].copy())
        return choices, later.compressed, total, own.residual.astype(np.float64)

    results = simulate(3, program, network=Network(1e-3, 1e-5)).results
    for choices, later, total, _ in results:
        assert choices == [False, False, True, True, False, True] and later
        np.testing.assert_allclose(total + sum(r for *_, r in results), 6 * sum(gradients), atol=1e-3)


def test_where_schedules_settle():
    assert Constant(0.2).settles_at() == 0.2 and Plain().settles_at() is None
    assert WarmUp(0.001, 8).settles_at() == WarmUp(0.001, 8).at(1000)
    with pytest.raises(ValueError, match=r"density: expected in \(0, 1\], got 2"):
        TopKCompressor(Settled(2, 0.1))


def test_schedules_are_compared_by_their_attributes():
    def program(comm):
        for schedule in (Plain(), Table(0.5, 0.1), ByFunction(lambda step: 0.5)):
            model = net(dtype=torch.float32)
            compressor = TopKCompressor(schedule)
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm, compressor)
            train(comm, model, optimizer, range(2), torch.float32)
            optimizer.close()
        with pytest.raises(CommunicationError, match=r"compressor.density: .*Table\(densities=\(0.5, 0.2\)\)"):
            given = TopKCompressor(Table(0.5, 0.1 + 0.1 * comm.rank))
            DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm, given)

    simulate(2, program)
    assert repr(Plain()) == "Plain()"


def test_sparse_sgd_takes_a_schedule():
    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, comm=comm, density=Table(0.5, 0.01, 0.2), algo="allgather")
        counts, before = [], parameters(model)
        for step in range(3):
            train(comm, model, optimizer, [step])
            after = parameters(model)
            counts.append(sum(int((a != b).sum()) for a, b in zip(after, before, strict=True)))
            before = after
        return counts, bits(model)

    results = simulate(2, program).results
    total = sum(p.numel() for p in net().parameters())
    for (first, second, third), model in results:
        assert first > 0.45 * total and 0 < second <= 0.02 * total + 2 < third <= 0.4 * total + 2
        assert model == results[0][1]


class Faulty(Schedule):
    """Whose third step is wrong."""

    def __init__(self, wrong):
        self._wrong = wrong

    def __repr__(self):
        return "Faulty()"

    def at(self, step):
        return self._wrong if step == 2 else np.float32(0.1)


WAYS = {  # what takes a schedule, and what errors call it
    "topk": (TopKCompressor, "entries by density"),
    "randomk": (RandomKCompressor, "entries by density"),
    "dragonn": (lambda density: DRAGONN(density, selective=False), "entries by density"),
    "rows": (lambda density: TopKCompressor(0.1, row_density=density), "rows by row_density"),
    "SparseSGD": (None, "entries by density"),
}


def steps_of(comm, name, schedule):
    """Take two steps and try a third one; return what that raises."""
    make, _ = WAYS[name]
    torch.manual_seed(0)
    model = torch.nn.Embedding(50, 4, sparse=True) if name == "rows" else net(dtype=torch.float32)
    if make is None:
        optimizer = SparseSGD(model.parameters(), 0.1, comm=comm, density=schedule)
    else:
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model, comm, make(schedule), dense_below=0)
    rows, inputs, error = torch.arange(30), torch.linspace(0, 1, 24).view(2, 12), None
    for step in range(3):
        optimizer.zero_grad()
        try:
            x = rows + comm.rank if name == "rows" else inputs * (step + comm.rank)
            model(x).square().sum().backward()
            optimizer.step()
        except Exception as raised:
            assert error is None and step == 2
            error = raised
    return error


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(
    ("wrong", "kind"), [(1.5, ValueError), (0, ValueError), (float("nan"), ValueError), (None, TypeError)]
)
def test_what_a_schedule_returns_is_checked_on_all_ranks(name, wrong, kind):
    argument = WAYS[name][1].split()[-1]
    number = "a number " if kind is TypeError else ""
    text = f"rank 1: {argument}: expected {number}in (0, 1], got {wrong} from at(2) of Faulty(): return the share"
    for error in simulate(2, lambda comm: steps_of(comm, name, Faulty(wrong if comm.rank else 0.1))).results:
        assert type(error) is kind and text in str(error)


@pytest.mark.parametrize("name", WAYS)
def test_a_density_that_differs_between_ranks_is_refused_by_name(name):
    text = f"{WAYS[name][1]}, which may depend on the step alone: expected the same value on all ranks, got "
    errors = simulate(3, lambda comm: steps_of(comm, name, Faulty(0.5 if comm.rank == 1 else 0.1))).results
    assert len({str(error) for error in errors}) == 1
    assert type(errors[0]) is CommunicationError and str(errors[0]).startswith(text)
    assert "on ranks 0, 2" in str(errors[0])
    assert simulate(2, lambda comm: steps_of(comm, name, Faulty(0.5))).results == [None, None]


@pytest.mark.parametrize(
    "make", [TopKCompressor, RandomKCompressor, lambda density: SparseSGD(net().parameters(), density=density)]
)
def test_a_mapping_is_refused_with_the_cure(make):
    text = r"density: expected a number or a Schedule, got the mapping {'\*': 0.1}: layers .* an optimizer of their own"
    with pytest.raises(TypeError, match=text):
        make({"*": 0.1})
