"""ElasticGroup: workers leave, die, return and join; none waits longer than the deadline, and no change is lost."""

import random
import threading
import time
from functools import partial

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from nets import batch, bits, close, loss_of, net, parameters  # noqa: E402

from sparsecoll import CommunicationError, simulate  # noqa: E402
from sparsecoll.torch import ElasticGroup, LocalOptimizer  # noqa: E402
from sparsecoll.torch.reduction import rounds  # noqa: E402

OPTIONS = {"every": 4, "outer_lr": 0.7, "outer_momentum": 0.9, "dense_below": 0}


def train(rank, optimizer, model, steps, start=0):
    for t in range(start + 1, start + steps + 1):
        optimizer.zero_grad()
        loss_of(model, batch(rank, t)).backward()
        optimizer.step()


def made(store, model, name, deadline=60.0, workers=1, **options):
    inner = torch.optim.SGD(model.parameters(), 0.1)
    group = ElasticGroup(store, deadline=deadline, workers=workers, name=name)
    return LocalOptimizer(inner, model, group, **{**OPTIONS, **options})


def together(*calls):
    """The results of functions that run as threads."""
    results = {}

    def run(i, call):
        try:
            results[i] = call()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i, call)) for i, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    failed = [error for error in results.values() if isinstance(error, Exception)]
    if failed:
        raise failed[0]
    return [results[i] for i in range(len(calls))]


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"fragments": 2, "delay": 1, "alpha": 0.5}])
def test_workers_that_stay_train_as_ranks_do(options):
    store = dist.HashStore()

    def work(rank, model):
        optimizer = made(store, model, f"worker {rank}", workers=3, **options)
        train(rank, optimizer, model, 9)
        optimizer.synchronize()
        return bits(model), parameters(model)

    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = LocalOptimizer(inner, model, comm, **OPTIONS, **options)
        train(comm.rank, optimizer, model, 9)
        engine = optimizer._engine
        with torch.no_grad():
            while engine._under_way:
                engine._take()
            for _ in range(options.get("fragments", 1)):
                engine._begin(engine._pace.fragment(engine._next), 0)
                engine._take()
        return parameters(model)

    models = [net() for _ in range(3)]
    results = together(*(lambda rank=rank: work(rank, models[rank]) for rank in range(3)))
    assert len({own for own, _ in results}) == 1
    close(results[0][1], simulate(3, program).results[0], atol=1e-6)


class Constant:
    """A worker whose steps all move its one parameter by -rate, so that a formula tells where it ends."""

    def __init__(self, store, rate, name, deadline, **options):
        self.p, self.rate = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64)), rate
        group = ElasticGroup(store, deadline=deadline, name=name)
        inner = torch.optim.SGD([self.p], 1.0)
        self.group, self.optimizer = group, LocalOptimizer(inner, [("p", self.p)], group, **{"every": 2, **options})

    def steps(self, count=2):
        for _ in range(count):
            self.p.grad = torch.full_like(self.p, self.rate)
            self.optimizer.step()
        return float(self.p.detach()[0])


def test_a_worker_that_is_late_keeps_its_changes_and_one_that_joins_gets_the_shared_parameters():
    store = dist.HashStore()
    a, b = Constant(store, 1.0, "a", 0.3), Constant(store, 4.0, "b", 60)
    assert a.steps() == -2.0 and a.group.contributors == ["a"]  # b has not come within the deadline
    a.group.deadline = 60.0
    assert b.steps() == -10.0 and b.group.contributors == ["a"]  # -2 of a, and its own -8, which wait
    c = Constant(store, 0.0, "c", 60)
    assert float(c.p.detach()[0]) == -2.0 and a.group.number == b.group.number == c.group.number == 1
    moved = together(a.steps, b.steps, c.steps)
    assert moved == [-2.0 - (2 + 16 + 0) / 3] * 3
    assert a.group.contributors == b.group.contributors and sorted(a.group.contributors) == ["a", "b", "c"]


def test_means_are_weighted_and_a_worker_that_was_away_begins_with_the_newest_state():
    store = dist.HashStore()
    a, b = Constant(store, 1.0, "a", 60, weight=lambda: 3.0), Constant(store, 5.0, "b", 60, weight=lambda: 1.0)
    assert together(a.steps, b.steps) == [-(3 * 2 + 10) / 4] * 2
    a.group.deadline = b.group.deadline = 0.2
    for _ in range(40):  # states are written, and messages removed
        alone = a.steps()
    with pytest.raises(Exception, match="removed"):
        b.group.read(1)
    b.p.grad = torch.full_like(b.p, 5.0)
    b.optimizer.step()
    start = time.monotonic()
    together(lambda: a.steps(), lambda: b.steps(1))
    assert time.monotonic() - start < 60
    b.optimizer.synchronize()
    assert float(b.p.detach()[0]) <= alone < -80


class Removing:
    """A store that removes a message as soon as a worker looks for it, and in which none may wait for a value."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        call = getattr(self.store, name)

        def seen(key, *given):
            keys = [key] if isinstance(key, str) else key
            assert name not in ("get", "wait") or self.store.check(keys), f"{name} would wait for {keys}"
            found = call(key, *given)
            if "0/message/0" in keys:
                self.store.delete_key("0/message/0.0")
                self.store.delete_key("0/message/0")
            return found

        return seen


@pytest.mark.parametrize("rounds", [1, 2])
def test_messages_that_are_removed_while_a_worker_reads_them_are_not_waited_for(rounds):
    """The worker takes the newest state and keeps its changes, be it one round behind or more."""
    store = dist.HashStore()
    a, b = Constant(store, 1.0, "a", 0.01), Constant(store, 5.0, "b", 60)
    a.steps(2 * (rounds - 1))
    a.group._waits[-1] = 1 << 30  # bytes, so that it writes a state
    a.steps()
    a.group.deadline, b.group._store, changes = 60.0, Removing(store), 10
    if rounds == 1:
        assert b.steps() == -2 - changes
        changes += 10

    def after_its_return():
        while not store.check([f"{rounds - 1}/name/1"]):
            time.sleep(0.001)
        return a.steps()

    assert together(after_its_return, b.steps) == [-2 * rounds - (2 + changes) / 2] * 2
    assert b.group.number == a.group.number == rounds + 1


def test_messages_and_states_are_longer_than_a_tcp_store_takes_at_once():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    p = torch.nn.Parameter(torch.zeros(2_200_000))
    LocalOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], ElasticGroup(store, name="a"), every=1)
    client, q = dist.TCPStore("127.0.0.1", store.port, is_master=False), torch.nn.Parameter(torch.ones(2_200_000))
    joined = LocalOptimizer(torch.optim.SGD([q], 1.0), [("p", q)], ElasticGroup(client), every=1)
    joined._engine._group.deadline = 0.01
    q.grad = torch.ones_like(q)
    joined.step()
    assert not (q + 1).any()


def test_a_worker_that_joins_after_some_rounds_has_the_bits_of_the_others():
    """Also where old + (new - old) is not new."""
    store, models = dist.HashStore(), [net() for _ in range(2)]
    first = made(store, models[0], "a", 0.2)
    train(0, first, models[0], 12)
    made(store, models[1], "b")
    assert bits(models[1]) == bits(models[0])


@pytest.mark.parametrize("made_by", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_a_worker_that_joins_has_the_state_of_anothers_inner_optimizer(made_by):
    store, (first, second) = dist.HashStore(), [made_by([torch.nn.Parameter(torch.zeros(5))], 0.1) for _ in range(2)]
    (p,), (q,) = (inner.param_groups[0]["params"] for inner in (first, second))

    def steps(optimizer, own, count):
        for t in range(count):
            own.grad = torch.full_like(own, t + 1.0)
            optimizer.step()

    a = LocalOptimizer(first, [("p", p)], ElasticGroup(store, deadline=0.1), every=1)
    steps(a, p, 3)
    b = LocalOptimizer(second, [("p", q)], ElasticGroup(store, deadline=0.1), every=1)
    steps(b, q, 1)  # asks
    steps(a, p, 2)  # late, then lends
    steps(b, q, 1)
    assert second.state[q].keys() == first.state[p].keys() != set()
    assert all(
        torch.equal(t, first.state[p][key]) and t is not first.state[p][key] for key, t in second.state[q].items()
    )


def test_other_options_and_unsuited_compressors_are_refused():
    store, model = dist.HashStore(), net()
    made(store, model, "a")
    with pytest.raises(ValueError, match=r"outer_lr: expected 0\.7, as the other workers have, got 0\.5"):
        made(store, net(), "b", outer_lr=0.5)
    with pytest.raises(
        ValueError, match="compressor: expected 'none' or 'chunktopk' with an ElasticGroup, got 'powersgd'"
    ):
        made(store, net(), "b", compressor="powersgd")
    with pytest.raises(ValueError, match=r"names in param_groups\[0\]: expected .*, as the other workers have, got"):
        made(store, torch.nn.Sequential(*net(), torch.nn.Linear(3, 3).double()), "b")
    with pytest.raises(TypeError, match=r"store: expected one of torch\.distributed"):
        ElasticGroup({})


def test_a_first_worker_that_dies_before_its_state_is_replaced(monkeypatch):
    store, publish, begun, here = dist.HashStore(), ElasticGroup.publish, threading.Event(), threading.Event()

    def dies(group, *given):
        raise Killed

    def waits(group, number, state, size):
        here.set()

        def late():
            begun.wait(60)
            return state()

        publish(group, number, late, size)

    monkeypatch.setattr(ElasticGroup, "publish", dies)
    with pytest.raises(Killed):
        made(store, net(), "a", deadline=0.5)
    monkeypatch.setattr(ElasticGroup, "publish", waits)  # the next one is too slow
    failed = []

    def begins_late():
        with pytest.raises(CommunicationError) as caught:
            made(store, net(), "b", deadline=0.5)
        failed.append(str(caught.value))

    slow = threading.Thread(target=begins_late)
    slow.start()
    assert here.wait(60)
    monkeypatch.setattr(ElasticGroup, "publish", publish)
    models = [net(), net()]
    optimizers = [made(store, model, name, deadline=0.5) for model, name in zip(models, "cd", strict=True)]
    begun.set()
    slow.join(60)
    assert "c has begun in place of b" in failed[0]
    together(*(lambda rank=rank: train(rank, optimizers[rank], models[rank], 4) for rank in range(2)))
    for optimizer in optimizers:
        optimizer._engine._group.deadline = 60
    together(*(lambda rank=rank: train(rank, optimizers[rank], models[rank], 4, 4) for rank in range(2)))
    assert bits(models[0]) == bits(models[1])


def test_a_first_state_may_take_longer_than_the_deadline(monkeypatch):
    store, began = dist.HashStore(), threading.Event()
    monkeypatch.setattr(rounds, "PIECE", 400)
    write = store.set

    def slowly(key, value):
        if key.startswith("state/0/a."):
            began.set()
            time.sleep(0.03)
        write(key, value)

    class Slow:
        def __getattr__(self, name):
            return slowly if name == "set" else getattr(store, name)

    models = [net(), net()]

    def second():
        assert began.wait(60)
        return made(store, models[1], "b", deadline=1.0)

    first, other = together(lambda: made(Slow(), models[0], "a", deadline=60), second)
    assert store.get("first") == b"a" and first is not other
    together(*(lambda r=r, o=o: train(r, o, models[r], 8) for r, o in enumerate((first, other))))


def test_a_state_with_residuals_of_small_parameters_is_taken():
    def loop(store, below, steps, state=None):
        model = net()
        optimizer = made(store, model, "a", compressor="chunktopk", dense_below=below)
        if state is not None:
            optimizer.load_state_dict(state)
        train(0, optimizer, model, steps)
        return optimizer.state_dict()

    saved = loop(dist.HashStore(), 0, 8)
    assert "residual" in loop(dist.HashStore(), 1024, 8, saved)["sparsecoll"]["tensors"]


class Killed(Exception):
    """A worker has died."""


@pytest.mark.parametrize("options", [{"compressor": "chunktopk"}, {"fragments": 2, "delay": 1, "alpha": 0.5}])
def test_200_rounds_with_20_kills_and_20_joins(options):
    """All that are left end with the same bits; no round takes longer than the deadline."""
    store, draw, deadline, slowest = dist.HashStore(), random.Random(3), 0.4, []
    kills = sorted(draw.sample(range(10, 180), 20))
    dead, lock = [], threading.Lock()

    def work(rank, model, first):
        optimizer = made(store, model, f"worker {rank}", deadline, workers=first, **options)
        exchange = optimizer._engine._group.exchange

        def timed(number, *given):
            with lock:
                dies = bool(kills) and number >= kills[0] and rank % 4 == len(kills) % 4
                if dies:
                    kills.pop(0)
            if dies and draw.random() < 0.5:
                raise Killed
            start = time.monotonic()
            if number >= 195 and not kills:
                optimizer._engine._group.deadline = 60  # who comes late in the last round keeps its changes
            found = exchange(number, *given)
            slowest.append(time.monotonic() - start)
            if dies:
                raise Killed
            return found

        optimizer._engine._group.exchange = timed
        step = 0
        while optimizer._engine._group.number < 200:
            step += 1
            try:
                train(rank, optimizer, model, 1, step)
            except Exception as error:
                assert "Killed" in repr(error), error
                with lock:
                    dead.append(rank)
                    return None
        optimizer.synchronize()
        return bits(model)

    # every worker that dies is followed by one that joins, with the number of the next free worker
    results = {}
    models = [net() for _ in range(24)]

    def chain(rank):
        following = rank
        while following < 24:
            results[following] = work(following, models[following], 4)
            if results[following] is not None:
                return
            following += 4

    together(*(lambda rank=rank: chain(rank) for rank in range(4)))
    left = [own for own in results.values() if own is not None]
    assert len(dead) >= 15 and len(left) >= 1 and len(set(left)) == 1
    assert max(slowest) < deadline + 30
