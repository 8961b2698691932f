"""States of an ElasticGroup's workers, loaded, missed, or of other frozen parameters: all end with the same values."""

import copy
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from nets import bits, close, net, parameters  # noqa: E402
from test_elastic_group import Constant, made, together, train  # noqa: E402

from sparsecoll import CommunicationError  # noqa: E402
from sparsecoll.torch import ElasticGroup, LocalOptimizer  # noqa: E402
from sparsecoll.torch.reduction.rounds import Missed, number_of  # noqa: E402


class Layers(torch.nn.Module):
    """Two parameters, of which the second may be frozen."""

    def __init__(self, trained):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(8)) for _ in "ab")
        self.b.requires_grad_(trained)

    def step(self, optimizer, rate):
        for p in self.parameters():
            p.grad = torch.full_like(p, rate) if p.requires_grad else None
        optimizer.step()
        return [float(p.detach()[0]) for p in self.parameters()]


@pytest.mark.parametrize("trained", [(False, False), (False, True)])
def test_layers_that_are_frozen_on_some_workers_or_until_later(trained):
    store, models = dist.HashStore(), [Layers(own) for own in trained]

    def work(rank):
        model, rate = models[rank], rank + 1.0
        group = ElasticGroup(store, workers=2, name=f"worker {rank}")
        optimizer = LocalOptimizer(torch.optim.SGD(model.parameters(), 1.0), model, group, every=1)
        before = model.step(optimizer, rate)
        model.b.requires_grad_(True)
        return before, model.step(optimizer, rate)

    moved = -2.0 / 2 if trained[1] else 0.0
    assert together(lambda: work(0), lambda: work(1)) == [([-1.5, moved], [-3.0, moved - 1.5])] * 2


def test_frozen_parameters_that_a_worker_changes_itself_stay_its_own():
    store, models = dist.HashStore(), [Layers(False) for _ in range(2)]

    def work(rank):
        model = models[rank]
        group = ElasticGroup(store, workers=2, name=f"worker {rank}")
        optimizer = LocalOptimizer(torch.optim.SGD(model.parameters(), 1.0), model, group, every=1)
        for _ in range(3):
            with torch.no_grad():
                model.b.add_(rank + 1.0)
            values = model.step(optimizer, 1.0)
        return values

    assert together(lambda: work(0), lambda: work(1)) == [[-3.0, 3.0], [-3.0, 6.0]]


def test_buffers_stay_each_workers_own():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(12, 3), torch.nn.BatchNorm1d(3)).double()
    store, models = dist.HashStore(), [layers, copy.deepcopy(layers)]

    def work(rank):
        optimizer = made(store, models[rank], f"worker {rank}", workers=2, every=2)
        train(rank, optimizer, models[rank], 8)
        return bits(models[rank]), models[rank][1].running_mean.tolist()

    (one, mean), (other, another) = together(lambda: work(0), lambda: work(1))
    assert one == other and mean != another
    with pytest.raises(ValueError, match="Embedding '0': expected max_norm=None"):
        made(store, torch.nn.Sequential(torch.nn.Embedding(9, 3, max_norm=1.0)), "worker 2")


@pytest.mark.parametrize("first", ["model", "wrapper"])
def test_a_worker_that_returns_with_its_own_state_begins_where_the_others_are(first):
    store, model = dist.HashStore(), net()
    other, kept = net(), made(store, model, "kept")
    leaves = made(store, other, "leaves")
    together(lambda: train(0, kept, model, 4), lambda: train(1, leaves, other, 4))
    saved = copy.deepcopy((other.state_dict(), leaves.state_dict()))
    leaves.close()
    train(0, kept, model, 8, 4)
    again = net()
    if first == "model":
        again.load_state_dict(saved[0])
    returned = made(store, again, "returned")
    if first == "wrapper":
        again.load_state_dict(saved[0])
    returned.load_state_dict(saved[1])
    assert bits(again) == bits(model)
    together(lambda: train(0, kept, model, 4, 12), lambda: train(1, returned, again, 4, 12))
    assert bits(again) == bits(model)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_worker_returns_with_a_state_that_was_saved_between_two_means(rounds):
    store, model, other, again = dist.HashStore(), net(), net(), net()
    kept, leaves = made(store, model, "kept"), made(store, other, "leaves")
    together(lambda: train(0, kept, model, 4), lambda: train(1, leaves, other, 5))
    saved = copy.deepcopy((other.state_dict(), leaves.state_dict()))
    leaves.close()
    train(0, kept, model, 4 * rounds, 4)
    again.load_state_dict(saved[0])
    returned = made(store, again, "returned")
    returned.load_state_dict(saved[1])
    before = bits(model)
    together(kept.synchronize, returned.synchronize)
    assert bits(again) == bits(model) != before


@pytest.mark.parametrize("first", ["model", "wrapper"])
@pytest.mark.parametrize("steps", [8, 9])
def test_a_job_that_is_restarted_goes_on_as_if_it_had_not_stopped(first, steps):
    whole, models = dist.HashStore(), [net() for _ in range(2)]
    optimizers = [made(whole, model, f"worker {rank}", workers=2) for rank, model in enumerate(models)]
    together(*(lambda r=r: train(r, optimizers[r], models[r], steps) for r in range(2)))
    pairs = zip(models, optimizers, strict=True)
    states = [copy.deepcopy((model.state_dict(), own.state_dict())) for model, own in pairs]
    together(*(lambda r=r: train(r, optimizers[r], models[r], 7, steps) for r in range(2)))
    new, again = dist.HashStore(), [net() for _ in range(2)]

    def work(rank):
        if first == "model":
            again[rank].load_state_dict(states[rank][0])
        optimizer = made(new, again[rank], f"new {rank}", workers=2)
        if first == "wrapper":
            again[rank].load_state_dict(states[rank][0])
        optimizer.load_state_dict(states[rank][1])
        train(rank, optimizer, again[rank], 7, steps)

    together(lambda: work(0), lambda: work(1))
    for model, uninterrupted in zip(again, models, strict=True):
        close(parameters(model), parameters(uninterrupted), atol=1e-6)  # sums have the order in which workers came


def test_values_loaded_before_the_first_round_are_those_of_all_and_later_ones_are_refused():
    store = dist.HashStore()
    a, b = Constant(store, 1.0, "a", 60), Constant(store, 1.0, "b", 60)
    for one in (a, b):
        one.group.workers = 2
        with torch.no_grad():
            one.p.fill_(100.0)
    assert together(a.steps, b.steps) == [98.0] * 2
    c = Constant(store, 1.0, "c", 60)
    with torch.no_grad():
        b.p.fill_(7.0)
    with pytest.raises(CommunicationError, match="model before the optimizer, and both before the first"):
        b.steps(1)
    b.optimizer.discard()
    assert together(a.steps, b.steps, c.steps) == [96.0] * 3


def test_changes_count_once_if_the_messages_are_gone_when_a_worker_goes_on():
    store = dist.HashStore()
    a, b = Constant(store, 1.0, "a", 60), Constant(store, 4.0, "b", 60)
    read = a.group.read

    def missed(number):
        a.group.read = read
        while b.group.number == 0:
            time.sleep(0.01)
        b.group._write("state/1/b", b.optimizer._engine._saved())
        b.group._store.set("state", "1/b")
        raise Missed("the messages of this round are gone")

    a.group.read = missed
    assert together(a.steps, b.steps) == [-5.0] * 2
    assert together(a.steps, b.steps) == [-10.0] * 2


def test_a_worker_may_return_under_its_name_and_two_may_not_have_the_same():
    store = dist.HashStore()
    a = Constant(store, 1.0, "a", 60)
    assert a.steps(4) == -4.0
    again = Constant(store, 1.0, "a", 60)
    assert again.group.number == 2 and again.steps() == -6.0
    with pytest.raises(CommunicationError, match="a name of its own for each worker, got 'a'"):
        a.steps(4)


@pytest.mark.parametrize("adam", [False, True])
def test_a_round_is_taken_with_the_rates_of_the_worker_that_closed_it(adam):
    store = dist.HashStore()
    p = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]

    def work(rank):
        group = ElasticGroup(store, workers=2, name=f"worker {rank}")
        outer = torch.optim.AdamW([p[rank]], 1.0) if adam else torch.optim.SGD([p[rank]], 1.0, momentum=0.5)
        optimizer = LocalOptimizer(torch.optim.SGD([p[rank]], 1.0), [("p", p[rank])], group, every=1, outer=outer)
        for number in range(4):
            outer.param_groups[0]["lr"] = np.float64(1.0 / (1 + number + rank))
            if adam:
                outer.param_groups[0]["betas"] = (0.5 + 0.1 * rank + 0.05 * number, np.float32(0.5))
            p[rank].grad = torch.ones(4)
            optimizer.step()
        return outer.param_groups[0]["lr"], float(p[rank].detach()[0])

    (first, own), (second, other) = together(lambda: work(0), lambda: work(1))
    assert own == other and (first, second) == (1 / 4, 1 / 5)


def test_options_of_another_worker_are_those_of_its_round_alone():
    store = dist.HashStore()
    p = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]

    def work(rank):
        group, own = ElasticGroup(store, workers=2, name=f"worker {rank}"), (0.5 + 0.1 * rank, 0.5)
        outer = torch.optim.AdamW([p[rank]])
        optimizer = LocalOptimizer(torch.optim.SGD([p[rank]], 1.0), [("p", p[rank])], group, every=1, outer=outer)
        outer.param_groups[0].update(lr=0.1 + rank, betas=own)
        for _ in range(3):
            p[rank].grad = torch.ones(4)
            optimizer.step()
        assert (outer.param_groups[0]["lr"], outer.param_groups[0]["betas"]) == (0.1 + rank, own)

    together(lambda: work(0), lambda: work(1))
    assert p[0].equal(p[1])


def test_a_store_that_is_gone_is_named():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    a = Constant(client, 1.0, "a", 60)
    del store
    with pytest.raises(CommunicationError, match="store of the ElasticGroup"):
        a.steps(4)


def test_a_state_that_is_written_late_replaces_no_newer_one():
    """A worker is stopped while it writes a state, and another one goes on for ten rounds."""
    store, models, others = dist.HashStore(), [net() for _ in range(3)], []
    first = made(store, models[0], "first", deadline=0.2, every=1)
    write = first._engine._group._write

    def stopped(key, data):
        write(key, data)
        if key.startswith("state/") and not others:
            others.append(made(store, models[1], "other", deadline=0.2, every=1))
            with torch.enable_grad():
                train(1, others[0], models[1], 10)

    first._engine._group._write = stopped
    while not others:
        train(0, first, models[0], 1)
    number = others[0]._engine._group.number
    assert number - 3 <= number_of(store.get("state").decode()) <= number
    train(0, first, models[0], 1)
    joined = made(store, models[2], "joined", deadline=0.2, every=1)
    assert joined._engine._group.number >= number


def test_workers_join_after_one_has_died_while_it_published_the_first_state():
    store, models = dist.HashStore(), [net() for _ in range(2)]
    first = made(store, models[0], "first", deadline=0.2, every=1)
    store.delete_key("kept")  # which is written after the state
    while store.get("state") == b"0/first":
        train(0, first, models[0], 1)
    joined = made(store, models[1], "joined", deadline=0.2, every=1)
    assert joined._engine._group.number == first._engine._group.number


def test_a_loaded_state_is_that_of_all_if_the_worker_that_would_write_it_has_died():
    model, saved = net(), dist.HashStore()
    optimizer = made(saved, model, "before", every=1)
    train(0, optimizer, model, 5)
    state, before = copy.deepcopy((model.state_dict(), optimizer.state_dict())), bits(model)
    store, model = dist.HashStore(), net(seed=1)
    optimizer = made(store, model, "after", deadline=0.2, every=1)
    store.set("0/lock", "one that has died")
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    assert optimizer._engine._group.number == 5 and bits(model) == before


def test_a_group_is_of_one_optimizer_at_a_time():
    group, models = ElasticGroup(dist.HashStore(), name="worker"), [net(), net(seed=1)]
    inner = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    optimizer, before = LocalOptimizer(inner[0], models[0], group), bits(models[1])
    with pytest.raises(ValueError, match="expected an ElasticGroup for each optimizer"):
        LocalOptimizer(inner[1], models[1], group)
    assert bits(models[1]) == before
    optimizer.close()
    LocalOptimizer(torch.optim.SGD(models[1].parameters(), 0.1), models[1], group)
    assert bits(models[1]) == bits(models[0])


def test_a_state_is_of_no_device(monkeypatch):
    """The first worker has a GPU that the second one lacks."""
    store, models = dist.HashStore(), [net(), net(seed=1)]
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda _: "cuda:1")
        made(store, models[0], "first")
    made(store, models[1], "second")
    assert bits(models[1]) == bits(models[0])


def test_a_round_that_is_interrupted_begins_anew(monkeypatch):
    """Its message counted, and that of the next attempt beside it."""
    store = dist.HashStore()

    def worker(name):
        p = torch.nn.Parameter(torch.zeros(3))
        group = ElasticGroup(store, workers=2, name=name)
        return p, LocalOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], group, every=1), group

    def step(p, optimizer):
        p.grad = torch.ones(3)
        optimizer.step()

    def stop(_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    (p, first, group), (q, second, _) = worker("a"), worker("b")
    monkeypatch.setattr(time, "sleep", stop)
    with pytest.raises(KeyboardInterrupt):
        step(p, first)
    together(lambda: step(p, first), lambda: step(q, second))
    assert sorted(group.contributors) == ["a", "b"]
    assert p.tolist() == q.tolist() == [-1.5] * 3  # the mean of two steps and one


def streaming(store, name, deadline=60.0):
    model = Layers(True)
    group = ElasticGroup(store, workers=1, name=name, deadline=deadline)
    inner, parts = torch.optim.SGD(model.parameters(), 1.0), [[model.a], [model.b]]
    options = {"every": 4, "fragments": parts, "delay": 3, "alpha": 0.5}
    return model, LocalOptimizer(inner, model, group, **options), group


def test_with_means_under_way_states_are_published_and_rounds_are_deleted():
    store = dist.HashStore()
    model, optimizer, _ = streaming(store, "a")
    sizes = []
    for step in range(120):
        model.step(optimizer, 1.0)
        if step % 40 == 39:
            sizes.append(store.num_keys())
    assert number_of(store.get("state").decode()) > 40
    assert sizes[2] - sizes[0] <= 2.5 * 40  # two small keys a round stay, the messages do not


def test_with_means_under_way_a_worker_that_was_late_contributes_again():
    store = dist.HashStore()
    (one, first, group), (two, second, _) = streaming(store, "a", 0.5), streaming(store, "b", 0.5)

    def steps(model, optimizer, count):
        for _ in range(count):
            model.step(optimizer, 1.0)
            time.sleep(0.02)

    together(lambda: steps(one, first, 12), lambda: steps(two, second, 12))
    steps(one, first, 24)  # the other one is away for several rounds
    seen = []
    first.register_step_post_hook(lambda *_: seen.append(len(group.contributors)))
    together(lambda: steps(one, first, 80), lambda: steps(two, second, 80))
    assert 2 in seen[-40:]


def test_the_order_of_a_loaded_state_is_not_that_of_messages():
    store = dist.HashStore()

    class Three(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Parameter(torch.zeros(4)) for _ in "abc")

    def made_by(model, group=None, **options):
        return LocalOptimizer(torch.optim.SGD(model.parameters(), 1.0), model, group, every=1, **options)

    def step(model, optimizer):
        for value, p in enumerate(model.parameters(), 1):
            p.grad = torch.full_like(p, value) if p.requires_grad else None
        optimizer.step()
        return [float(p.detach()[0]) for p in model.parameters()]

    old = Three()
    old.c.requires_grad_(False)
    alone = made_by(old)
    step(old, alone)
    models, groups = [Three(), Three()], [ElasticGroup(store, workers=2, name=name) for name in "xy"]
    models[0].load_state_dict(old.state_dict())
    first = made_by(models[0], groups[0])
    first.load_state_dict(alone.state_dict())
    second = made_by(models[1], groups[1])
    ends = together(lambda: step(models[0], first), lambda: step(models[1], second))
    assert ends == [[-2.0, -4.0, -3.0]] * 2
