"""The seconds that `auto` predicts from the costs of a communicator."""

from dataclasses import replace

import numpy as np
import pytest

from sparsecoll import Tuning
from sparsecoll.algorithms.auto import costmodel
from sparsecoll.algorithms.primitives import estimates


def test_reach_inverts_fill_in():
    for n, k, P in ((10**6, 1000, 8), (10**6, 200_000, 4), (5000, 100, 64)):
        for support_size in (k, 2 * k, n):
            total = estimates.fill_in(support_size, k, P)
            assert costmodel.effective_length(n, k, P, round(total)) == pytest.approx(support_size, rel=0.1)


def test_mpis_own_allreduce_is_predicted_from_measured_sizes_and_where_it_can_be_used(tmp_path):
    tuning = Tuning(call=0, native=[(1e3, 1e-5), (1e5, 1e-4)])
    for size, seconds in ((10, 1e-5), (1e3, 1e-5), (1e4, 1e-4 / 10**0.5), (1e5, 1e-4), (2e5, 2e-4), (1e6, np.inf)):
        assert tuning.native_seconds(size) == pytest.approx(seconds)
    assert Tuning().native_seconds(1) == np.inf
    tuning.save(tmp_path / "tuning.json")
    assert Tuning.load(tmp_path / "tuning.json") == tuning
    shape = costmodel.Shape(50_000, 40_000, 4, 4, 50_000)
    assert "native" not in costmodel.seconds(shape, tuning)
    assert costmodel.seconds(replace(shape, native=True), tuning)["native"] < costmodel.seconds(shape, tuning)["dense"]


def test_predictions_are_corrected_by_whole_calls(tmp_path):
    """Times measured over predicted at a call's length, log-linear between two, as at the ends beyond them."""
    tuning = Tuning(calls={"dense": [(1e-3, 2e-3), (1e-1, 8e-1)]})
    for seconds, factor in ((1e-3, 2), (1e-2, 4), (1e-1, 8), (1e-6, 2), (10.0, 8)):
        assert tuning.corrected("dense", seconds) == pytest.approx(factor * seconds)
        assert tuning.corrected("allgather", seconds) == seconds
    tuning.save(tmp_path / "tuning.json")
    assert Tuning.load(tmp_path / "tuning.json") == tuning


def test_ranks_that_share_a_core_compute_longer_and_overlap_less():
    """Costs are those of all ranks at once, which a kernel shorter than a time slice does not show."""
    link = Tuning(alpha=1e-4, beta=3e-9, call=1e-5, merge=5e-9, code=5e-9)
    shared = replace(link, call=2e-5, merge=1e-8, code=1e-8, sharing=2.0, copy=3e-9)
    long = costmodel.Shape(10**7, 10**6, 4, 4, 10**7)
    alone, together = costmodel.seconds(long, link), costmodel.seconds(long, shared)
    assert together["allgather"] > 1.5 * alone["allgather"]  # its messages and its work no longer overlap
    assert together["dynamic"] < 1.5 * alone["dynamic"]
    assert alone["allgather"] < alone["dynamic"] and together["dynamic"] < together["allgather"]


def test_work_overlaps_with_what_the_processor_does_not_copy_itself():
    """Each rank has work of its own for as long as a slow link takes, however many ranks share its core."""
    long = costmodel.Shape(10**7, 10**6, 4, 4, 10**7)
    busy = Tuning(alpha=1e-4, beta=8e-9, call=2e-5, merge=1e-8, code=1e-8, sharing=2.0)
    costs = (replace(busy, copy=share * busy.beta) for share in (0, 0.3, 1))
    none, some, every = (costmodel.seconds(long, t)["allgather"] for t in costs)
    link = busy.beta * 3 * long.message(busy, long.k).bytes
    assert none == pytest.approx(link, rel=0.1) and some == pytest.approx(none)
    assert every > 1.4 * link


def test_what_does_not_fit_a_cache_takes_longer():
    memory = Tuning(alpha=0, beta=1e-10, call=0, merge=5.5e-9, code=4e-9)

    def per_entry(k):
        return costmodel.seconds(costmodel.Shape(100 * k, k, 2, 4, 100 * k, one_node=True), memory)["allgather"] / k

    assert per_entry(10**4) == pytest.approx(per_entry(10**3), rel=0.01)
    assert per_entry(10**6) > 1.1 * per_entry(10**4)
    sums = [costmodel.Shape(10**9, 1, 2, 4, 10**9).merging(memory, 2**e) / 2**e for e in (12, 17, 20, 23, 26)]
    assert sums == pytest.approx([sums[0], sums[0], 1.15 * sums[0], 1.3 * sums[0], 1.3 * sums[0]])
    long, longer = (costmodel.seconds(costmodel.Shape(n, 1, 2, 4, n), memory)["dense"] / n for n in (1 << 18, 1 << 24))
    assert longer > 1.5 * long
