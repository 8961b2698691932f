"""Distributed quantiles equal those of the gathered multiset, for any spread of the items and with ties."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import sparsecoll
from sparsecoll import OkTopk, simulate
from sparsecoll.algorithms.primitives.quantiles import quantiles


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32), st.sampled_from([2, 50, 10**6, 2**62, 2**64]), st.data())
def test_items_of_given_ranks_are_those_of_the_sorted_union(P, seed, stop, data):
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(P):
        largest = rng.choice([rng.integers(0, stop - 1, dtype=np.uint64, endpoint=True), np.uint64(stop - 1)])
        items = rng.integers(0, largest, rng.integers(0, 60), dtype=np.uint64, endpoint=True)
        items[: rng.integers(0, 9)] = largest
        parts.append(np.sort(items))
    union = np.sort(np.concatenate(parts))
    if not union.size:
        return
    ranks = sorted(data.draw(st.lists(st.integers(0, union.size - 1), min_size=1, max_size=5)))
    first = np.unique(rng.integers(0, stop - 1, 5, dtype=np.uint64, endpoint=True))  # the answer may be elsewhere
    first = first if seed % 2 else None

    def program(comm):
        return quantiles(comm.transport, parts[comm.rank], ranks, stop, union.size, first_edges=first)

    for found in simulate(P, program).results:
        for rank, (edge, below) in zip(ranks, found, strict=True):
            assert edge == union[rank]
            assert below == np.searchsorted(union, union[rank])


@pytest.mark.parametrize("tolerance", [0, 5, 40])
def test_tolerance_bounds_the_count_where_items_are_distinct(tolerance):
    P, stop = 4, 10**6
    parts = [np.arange(r, 4000, P).astype(np.uint32) ** 2 // 16 + r * 7 for r in range(P)]
    parts = [np.unique(p).astype(np.uint32) for p in parts]
    union = np.sort(np.concatenate(parts))
    ranks = [union.size * j // 7 for j in range(1, 7)]
    found = simulate(P, lambda c: quantiles(c.transport, parts[c.rank], ranks, stop, union.size, tolerance)).results
    repeats = np.unique(union, return_counts=True)[1].max()
    for rank, (edge, below) in zip(ranks, found[0], strict=True):
        assert below == np.searchsorted(union, edge)
        assert abs(below - rank) <= max(tolerance, repeats)
    assert all(f == found[0] for f in found)


def test_a_large_tolerance_of_oktopk_leaves_entries():
    """Thresholds of the sum are found with half of k to spare at most."""

    def program(comm):
        algorithm, x = OkTopk(tolerance=2.0), np.random.default_rng(comm.rank).standard_normal(2000)
        return [sparsecoll.allreduce(comm, scale * x, algorithm, k=300).nnz for scale in (1, 1, 1, 10, 10, 10, 0.1)]

    assert min(simulate(4, program).results[0]) > 0
