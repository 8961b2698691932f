"""What a worker of an ElasticGroup contributes to a round, exactly once, whatever happens between rounds."""

import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from test_elastic_group import together  # noqa: E402
from test_elastic_states import Layers  # noqa: E402

from sparsecoll.torch import ElasticGroup, LocalOptimizer  # noqa: E402


def worker(store, name, workers=2, **options):
    p = torch.nn.Parameter(torch.zeros(3))
    group = ElasticGroup(store, workers=workers, name=name, deadline=60.0)
    return p, LocalOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], group, every=1, dense_below=0, **options), group


def step(p, optimizer):
    p.grad = torch.ones_like(p)
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


def test_what_an_outer_optimizer_counts_in_its_groups_stays():
    store = dist.HashStore()

    def work(rank):
        p = torch.nn.Parameter(torch.zeros(3))
        outer = Counting([p], 1.0)
        outer.param_groups[0]["k"] = 0
        group = ElasticGroup(store, workers=2, name=f"worker {rank}")
        optimizer = LocalOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], group, every=1, outer=outer)
        for _ in range(3):
            step(p, optimizer)
        return outer.param_groups[0]["k"]

    assert together(lambda: work(0), lambda: work(1)) == [3, 3]


def test_fp16_is_refused():
    """It divides gradients by a number of ranks that a round only finds out."""
    with pytest.raises(ValueError, match="compressor: expected 'none' or 'chunktopk' with an ElasticGroup, got 'fp16'"):
        worker(dist.HashStore(), "a", compressor="fp16")
