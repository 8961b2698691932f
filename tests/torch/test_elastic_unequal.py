"""Workers of an ElasticGroup with weights that change."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from nets import bits, net  # noqa: E402
from test_elastic_group import Constant, made, together, train  # noqa: E402

from sparsecoll.torch.compressors import ChunkedTopK  # noqa: E402


def test_residuals_are_in_units_of_parameters_and_a_weight_of_zero_counts_nothing():
    """Weights that are the same on all workers change nothing; what a worker without weight has sent stays its own."""

    def run(weighted):
        store, models, at = dist.HashStore(), [net(), net()], [240.0]
        options = {"workers": 2, "compressor": ChunkedTopK(2, 64)}
        options |= {"weight": lambda: at[0]} if weighted else {}
        own = [made(store, model, str(rank), **options) for rank, model in enumerate(models)]
        for part, at[0] in enumerate((240.0, 8.0, 0.5)):
            together(*(partial(train, rank, own[rank], models[rank], 4, 4 * part) for rank in range(2)))
        return [bits(model) for model in models]

    assert run(True) == run(False)
    store, weights = dist.HashStore(), [1.0, 0.0]
    chunked = {"compressor": ChunkedTopK(1, 5), "dense_below": 0}
    a, b = (Constant(store, i, "ab"[i], 60, weight=lambda i=i: weights[i], **chunked) for i in (0, 1))
    assert together(a.steps, b.steps) == [0.0, 0.0]
    assert not any(
        residual.any() for residual in b.optimizer.state_dict()["sparsecoll"]["tensors"]["residual"].values()
    )
    weights[:] = 0.0, 0.0
    assert together(a.steps, b.steps) == [0.0, 0.0]


def test_a_slow_worker_takes_fewer_steps():
    store = dist.HashStore()
    fast, slow = (Constant(store, 1.0, name, 60, every=every) for name, every in (("fast", 6), ("slow", 2)))
    assert together(partial(fast.steps, 12), partial(slow.steps, 4)) == [-8.0, -8.0]


def test_a_worker_that_is_always_late_is_told(caplog):
    """Once, and not while it is in some of the means."""
    store = dist.HashStore()
    fast, slow = Constant(store, 1.0, "fast", 0.05), Constant(store, 2.0, "slow", 0.05)
    fast.steps(2)
    for turn in range(8):
        fast.steps(2)
        slow.steps(2)
        assert ("late" in caplog.text) == (turn > 2)
    assert caplog.text.count("'slow' of an ElasticGroup has come too late to 3 rounds") == 1
    caplog.clear()
    for turn in range(6):
        together(*(partial(one.steps, 2) for one in (fast, slow)[: 1 + (turn % 2)]))
    assert not caplog.records
