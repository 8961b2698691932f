"""The k largest entries of all ranks together, found by counting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sparsecoll.algorithms.primitives.quantiles import EDGES_PER_RANK, MOST_EDGES, quantiles
from sparsecoll.kernels.keys import key_of
from sparsecoll.select import ThresholdReuse
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.base import Transport
from sparsecoll.vector import SparseVector

SPREAD = 1.3  # a threshold is first sought between that of the last call, divided and multiplied by this


def global_topk(
    transport: Transport,
    entries: SparseVector,
    k: int,
    total: int,
    largest: int,
    order: Sequence[int],
    reuse: ThresholdReuse,
    exact: bool = True,
) -> tuple[SparseVector, list[int]]:
    """Return this rank's entries among the k largest of all ranks, and how many each rank has.

    Ties at the threshold go to lower indices. No entries travel; see `quantiles` for the volume. If the number need not
    be exact, the search ends as soon as a threshold gives k to within half of the tolerance, often after one round.

    Args:
        entries: this rank's entries, in an index region that no other rank has; without NaN.
        k: number of entries, below `total`.
        total: number of entries of all ranks.
        largest: largest magnitude key of all ranks.
        order: the ranks, in the order of their regions.
        reuse: holds the threshold of the last call, and gets the new one.
        exact: whether exactly k entries are wanted (default: True).
    """
    slack = -1 if exact else int(min(k * min(reuse.tolerance, 1.0) / 2, total))
    near_last = _edges_around(entries, reuse.value, largest, transport.size)
    [(key, below)] = quantiles(
        transport, np.sort(entries.magnitude_keys()), [total - k], largest + 1, total, slack, near_last
    )
    above, equal, near = allgather(transport, np.array(entries.count_around_key(key, ThresholdReuse.PROBE))).T
    ordered = np.array(order)
    before = np.cumsum(equal[ordered]) - equal[ordered]  # ties of the regions before, which come first
    quotas = np.zeros_like(equal)
    wanted = k if exact or abs(total - below - k) > slack else total - below
    quotas[ordered] = np.clip(wanted - int(above.sum()) - before, 0, equal[ordered])
    reuse.found(entries.magnitude_of(key), int((above + equal).sum()), int(near.sum()), exact)
    return entries.topk_by_key(key, int(quotas[transport.rank])), (above + quotas).tolist()


def _edges_around(entries: SparseVector, value: float | None, largest: int, size: int) -> NDArray[np.uint64] | None:
    """Return edges around the key of a magnitude, up to `largest`, evenly spaced; None without a magnitude."""
    if not value:
        return None
    low, high = (min(max(key_of(value * factor, entries.dtype), 1), largest) for factor in (1 / SPREAD, SPREAD))
    count = min(EDGES_PER_RANK * size, MOST_EDGES)
    return np.array(sorted({low + (high - low) * i // count for i in range(count)}), np.uint64)
