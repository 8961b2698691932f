"""What a worker of an ElasticGroup contributes to a round, exactly once, whatever happens between rounds."""

import copy
import time
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from test_elastic_group import together  # noqa: E402
from test_elastic_states import Layers  # noqa: E402

from sparsecoll import simulate  # noqa: E402
from sparsecoll.errors import NonFiniteError  # noqa: E402
from sparsecoll.torch import ElasticGroup, LocalOptimizer  # noqa: E402


def worker(store, name, workers=2, every=1, **options):
    p = torch.nn.Parameter(torch.zeros(3))
    group = ElasticGroup(store, workers=workers, name=name, deadline=60.0)
    return p, LocalOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], group, every=every, dense_below=0, **options), group


def step(p, optimizer, *gradients):
    for gradient in gradients or (1.0,):
        p.grad = torch.full_like(p, gradient)
        optimizer.step()


def test_workers_are_waited_for_again_after_join():
    """An epoch's loop is often in `with optimizer.join()`."""
    store = dist.HashStore()

    def work(rank):
        p, optimizer, group = worker(store, f"worker {rank}")
        seen = []
        for epoch in range(2):
            with optimizer.join():
                while len(seen) < 12 * (epoch + 1) or (epoch and 2 not in seen[12:] and len(seen) < 2000):
                    time.sleep(0.02 * (1 + rank))
                    step(p, optimizer)
                    seen.append(len(group.contributors))
        return seen

    assert all(seen[:12] == [2] * 12 and 2 in seen[12:] for seen in together(lambda: work(0), lambda: work(1)))


@pytest.mark.parametrize("takes_a_mean", [True, False])
def test_a_round_that_is_interrupted_while_its_messages_are_read_counts_once(monkeypatch, takes_a_mean):
    """The next step is not a part of it."""
    store = dist.HashStore()
    (p, first, group), (q, second, _) = worker(store, "a"), worker(store, "b")
    read = group._read

    def stop(key):
        if key.partition("/")[2].startswith("message"):
            monkeypatch.undo()
            raise KeyboardInterrupt
        return read(key)

    monkeypatch.setattr(group, "_read", stop)

    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            step(p, first)

    together(interrupted, lambda: step(q, second))
    if takes_a_mean:
        first.synchronize()
        assert p.tolist() == q.tolist() == [-1.0] * 3 and sorted(group.contributors) == ["a", "b"]
    together(lambda: step(p, first), lambda: step(q, second))
    assert p.tolist() == q.tolist() == [-2.0] * 3


@pytest.mark.parametrize("with_state", [True, False])
def test_frozen_parameters_that_were_loaded_before_the_first_round_are_those_of_all(with_state):
    store, model = dist.HashStore(), Layers(False)

    def made(model, name):
        return LocalOptimizer(torch.optim.SGD(model.parameters(), 1.0), model, ElasticGroup(store, name=name), every=1)

    optimizer = made(model, "a")
    saved = optimizer.state_dict()
    model.load_state_dict({"a": torch.zeros(8), "b": torch.full((8,), 5.0)})
    if with_state:
        optimizer.load_state_dict(saved)
    else:
        model.load_state_dict({"a": torch.ones(8), "b": torch.full((8,), 5.0)})
        model.step(optimizer, 1.0)
    new = Layers(False)
    made(new, "b")
    assert new.b.tolist() == [5.0] * 8


class Counting(torch.optim.SGD):
    """Counts its steps in its group, as schedule-free optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["k"] += 1


@pytest.mark.parametrize("elastic", [False, True])
def test_an_outer_optimizer_steps_once_for_a_mean_and_keeps_what_it_counts(elastic):
    store = dist.HashStore()

    def work(rank):
        p, large = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2000))  # which have two buckets
        outer = Counting([p, large], 1.0)
        outer.param_groups[0]["k"] = 0
        group = ElasticGroup(store, workers=2, name=f"worker {rank}") if elastic else rank
        named = {"p": p, "large": large}.items()
        optimizer = LocalOptimizer(torch.optim.SGD([p, large], 1.0), named, group, every=1, outer=outer)
        for _ in range(3):
            step(p, optimizer)
        return outer.param_groups[0]["k"]

    done = together(lambda: work(0), lambda: work(1)) if elastic else simulate(2, work).results
    assert done == [3, 3]


def test_fp16_is_refused():
    """It divides gradients by a number of ranks that a round only finds out."""
    with pytest.raises(ValueError, match="compressor: expected 'none' or 'chunktopk' with an ElasticGroup, got 'fp16'"):
        worker(dist.HashStore(), "a", compressor="fp16")


def test_frozen_parameters_of_all_files_are_loaded_when_a_job_restarts():
    def made(model, store, name):
        return LocalOptimizer(torch.optim.SGD(model.parameters(), 1.0), model, ElasticGroup(store, name=name), every=1)

    saved, store = made(Layers(False), dist.HashStore(), "before").state_dict(), dist.HashStore()
    models = [Layers(False) for _ in range(3)]
    for model, optimizer in [(model, made(model, store, f"{i}")) for i, model in enumerate(models)]:
        model.load_state_dict({"a": torch.zeros(8), "b": torch.full((8,), 5.0)})
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert [model.b.tolist() for model in models] == [[5.0] * 8] * 3


def test_frozen_parameters_that_a_worker_has_changed_are_its_own_when_it_returns():
    store, models = dist.HashStore(), [Layers(True), Layers(False), Layers(False)]

    def made(model, name):
        group = ElasticGroup(store, name=name, deadline=0.5)
        return LocalOptimizer(torch.optim.SGD(model.parameters(), 1.0), model, group, every=1)

    first, second = made(models[0], "a"), made(models[1], "b")
    with torch.no_grad():
        models[1].b.add_(3.0)  # which the first worker trains
    together(lambda: models[0].step(first, 1.0), lambda: models[1].step(second, 1.0))
    kept, state = copy.deepcopy(models[1].state_dict()), second.state_dict()
    second.close()
    models[0].step(first, 1.0)
    returned = made(models[2], "b")
    models[2].load_state_dict(kept)
    returned.load_state_dict(state)
    assert kept["b"].tolist() == [2.5] * 8 and models[2].b.tolist() == [1.5] * 8


def test_parameters_that_all_workers_have_frozen_do_not_move():
    """Neither by an outer momentum nor by an outer weight decay."""
    model = Layers(True)
    outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, weight_decay=0.1)
    group = ElasticGroup(dist.HashStore())
    optimizer = LocalOptimizer(torch.optim.SGD(model.parameters(), 1.0), model, group, every=1, outer=outer)
    for _ in range(3):
        model.step(optimizer, 1.0)
    model.b.requires_grad_(False)
    before = model.step(optimizer, 1.0)[1]
    assert [model.step(optimizer, 1.0)[1] for _ in range(3)] == [before] * 3


@pytest.mark.parametrize("joining", [1, 2])
def test_workers_that_join_and_are_always_the_first_get_anothers_inner_state(joining):
    store = dist.HashStore()

    def made(name):
        p = torch.nn.Parameter(torch.zeros(3))
        group = ElasticGroup(store, name=name, deadline=60)
        inner = torch.optim.AdamW([p], 0.1)
        return p, inner, LocalOptimizer(inner, [("p", p)], group, every=1)

    p, _, old = made("old")
    for _ in range(5):
        step(p, old)
    new = [made(f"new {i}") for i in range(joining)]  # who send before the old one, unless the machine is slow
    for _ in range(5):
        together(lambda: (time.sleep(0.2), step(p, old)), *(partial(step, q, own) for q, _, own in new))
    assert all(inner.state[q]["step"] > 6 for q, inner, _ in new)


def test_a_group_is_of_one_optimizer_after_join_too():
    p, optimizer, group = worker(dist.HashStore(), "a", workers=1)
    with optimizer.join():
        step(p, optimizer)
    with pytest.raises(ValueError, match="expected an ElasticGroup for each optimizer"):
        LocalOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], group, every=1, dense_below=0)


@pytest.mark.parametrize("compressor", ["none", "chunktopk"])
def test_a_nan_raises_on_its_worker_alone(compressor):
    store = dist.HashStore()
    (p, first, group), (q, second, _) = (worker(store, name, compressor=compressor) for name in "ab")
    together(lambda: step(p, first), lambda: step(q, second))

    def fails_once():
        p.grad = torch.full_like(p, float("nan"))
        with pytest.raises(NonFiniteError, match="change of parameter 'p': expected finite values"):
            first.step()
        first.discard()
        step(p, first)

    together(fails_once, lambda: step(q, second))
    assert p.tolist() == q.tolist() == [-2.0] * 3 and sorted(group.contributors) == ["a", "b"]


def test_a_change_that_overflows_raises_on_its_worker_alone():
    """Before its message is in a round, which no worker could take."""
    store = dist.HashStore()
    (p, first, group), (q, second, _) = worker(store, "a", every=2), worker(store, "b", every=2)
    together(lambda: step(p, first, 1.5e38, 0.0), lambda: step(q, second, 1.5e38, 0.0))

    def fails_once():
        with pytest.raises(NonFiniteError, match="change of parameters: expected a finite one, got an overflow"):
            step(p, first, -2e38, -2e38)
        first.discard()
        step(p, first, -1.5e38, 0.0)

    together(fails_once, lambda: step(q, second, -1.5e38, 0.0))
    assert p.tolist() == q.tolist() == [0.0] * 3 and sorted(group.contributors) == ["a", "b"]


def test_weights_may_be_large():
    store = dist.HashStore()
    (p, first, _), (q, second, _) = worker(store, "a", weight=lambda: 1e300), worker(store, "b", weight=lambda: 1e308)
    together(lambda: step(p, first, 1e34), lambda: step(q, second, 1.0))
    torch.testing.assert_close(p, torch.full_like(p, -1.0 - 1e26))
    assert p.tolist() == q.tolist()


def test_a_slow_worker_replaces_no_newer_state():
    groups = [ElasticGroup(dist.PrefixStore("x", store), name=name) for store in [dist.HashStore()] for name in "ab"]
    groups[0].enter("{}")
    groups[0].publish(0, lambda: b"0", 0)
    groups[1].enter("{}")
    for group, number in zip(reversed(groups), (2, 1), strict=True):
        group._waits[-1], group.contributors = 1 << 30, [group.name]
        group.publish(number, str(number).encode, 0)
    assert bytes(groups[0].newest()) == b"2" and groups[0].number == 2


def test_states_hold_no_number_of_numpy():
    """Such as a schedule's, which torch.load refuses."""
    store = dist.HashStore()
    p, first, group = worker(store, "a", workers=1)
    first._engine._outer.groups[0]["lr"] = np.float64(0.5)
    group._waits[-1] = 1 << 30
    step(p, first)
    assert p.tolist() == [-0.5] * 3 and group.newest() and worker(store, "b")[0].tolist() == p.tolist()


def test_frozen_integers_are_left_alone():
    p, base = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(3, dtype=torch.int8), False)
    inner, group = torch.optim.SGD([p, base], 1.0), ElasticGroup(dist.HashStore())
    optimizer = LocalOptimizer(inner, [("p", p), ("base", base)], group, every=1, dense_below=0)
    step(p, optimizer)
    assert p.tolist() == [-1.0] * 3 and base.tolist() == [1] * 3


def test_a_fragment_may_have_no_parameters():
    """As the activations among the layers of a Sequential."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    group, before = ElasticGroup(dist.HashStore()), [p.detach().clone() for p in model.parameters()]
    optimizer = LocalOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, group, every=3, fragments=[*model])
    for _ in range(6):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert group.number == 6
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
