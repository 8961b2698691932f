"""Ok-Topk (Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022).

The result is Topk(sum over ranks of Topk(x)): the inner Topk by `select`, the outer one by `__call__`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from sparsecoll.algorithms.base import Algorithm, Loss, Reduction, digest
from sparsecoll.algorithms.primitives import partition, pipeline
from sparsecoll.algorithms.primitives.balance import balanced
from sparsecoll.algorithms.primitives.global_topk import global_topk
from sparsecoll.errors import NonFiniteError, check_choice, check_flag, check_integer, check_number
from sparsecoll.select import ThresholdReuse, Vector
from sparsecoll.transport.all_ranks import allgather, sums_and_maxima
from sparsecoll.transport.channel import Channel, VectorRequest
from sparsecoll.vector import SparseVector, accumulator_dtype

MAX_K_RATIO = 2.0  # thresholds and boundaries are reused if k changes by at most this factor
MAX_LOAD_RATIO = 1.5  # load of a region, divided by the mean, above which the next call repartitions


@dataclass(kw_only=True)
class OkTopk(Algorithm):
    """Top k of the sum of the ranks' top k: Algorithm 1 of the paper, for any P.

    1. Find the local threshold exactly every tau' calls, and reuse it in between (lines 2-4; `select`).
    2. Every tau calls, divide the index space into P regions with equal numbers of entries (lines 5-7).
    3. Split and reduce: the owner of each region receives and sums it (line 8; destinations rotated, in buckets).
    4. Find the global threshold exactly every tau' calls, and reuse it in between (lines 9-12).
    5. Balance the selected entries if the largest part is above `balance_factor` times the mean, then allgatherv
       (line 13).
    6. contributed = the own entries whose index is in the result (line 14).

    Approximate: entries outside every rank's local top k are not considered (they belong to the residual). Each region
    is summed in the cyclic rank order owner, owner - 1, owner - 2, ...

    Volume: at most 6k(P-1)/P words of COO (equation (3)) + O(P), usually 4k(P-1)/P. This includes thresholds and
    boundaries, which are found by counting (`quantiles`), never by gathering. With a reused threshold k stands for the
    number selected, which `tolerance` bounds; a call whose entries have moved away from the reused boundaries may
    exceed the bound, and the next one repartitions. If k changes by less than a factor of 2, as the largest nnz does
    from call to call, thresholds are adjusted to select about k entries, and boundaries stay. Messages: P - 1, up to
    P - 1 more with balancing, and O(log P) for the gather and for each round of counting. Memory: the entries.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: as in `sparsecoll.Algorithm`.
        tau: number of calls from one repartition to the next (default: 64).
        tau_prime: number of calls from one exact threshold to the next (default: 32).
        bucket: number of messages in one stage of split and reduce (default: 8); sums overlap with the messages of the
            following stages. Between nodes, messages of 512 KiB and more are sent in chunks, one or more stages each.
        balance_factor: ratio of the largest to the mean part above which the result is balanced before the allgatherv
            (default: 4).
        repartition: how the regions are found. "histogram" (the default) uses quantiles of the entries of all ranks
            together, which balances any distribution, and gives each rank the region of which it has the most entries.
            "average", as published, averages the quantiles of each rank, which requires similar supports. "even" makes
            regions of equal width.
        exact: always select exactly k entries, locally and globally (default: False).
        tolerance: relative deviation of the number selected by a reused threshold from k, above which the call finds
            another one: the local one exactly, the global one to within half of this (default: 0.1).

    Raises:
        ValueError: An option is out of range; or, on every rank, a sum is NaN, which has no order.
    """

    name = "oktopk"
    semantics = "top_k_of_sum"

    tau: int = 64
    tau_prime: int = 32
    bucket: int = 8
    balance_factor: float = 4.0
    repartition: str = "histogram"
    exact: bool = False
    tolerance: float = 0.1

    _calls: int = field(default=0, init=False, repr=False)
    _key: list[int] = field(default_factory=lambda: [-1, -1], init=False, repr=False)  # length and k of the last call
    _boundaries: list[int] = field(default_factory=list, init=False, repr=False)
    _owners: list[int] = field(default_factory=list, init=False, repr=False)  # rank of each region
    _overloaded: bool = field(default=False, init=False, repr=False)  # repartition at the next call
    _local: ThresholdReuse = field(default_factory=ThresholdReuse, init=False, repr=False)
    _global: ThresholdReuse = field(default_factory=ThresholdReuse, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tau", "tau_prime", "bucket"):
            check_integer(name, getattr(self, name), 1)
        check_flag("exact", self.exact)
        check_choice("repartition", self.repartition, partition.METHODS)
        check_number("balance_factor", self.balance_factor, "[1, inf]")
        check_number("tolerance", self.tolerance, "[0, inf]")
        for reuse in (self._local, self._global):
            reuse.period, reuse.tolerance = self.tau_prime, self.tolerance

    def select(self, x: Vector, k: int, ranks: int = 1) -> SparseVector:
        """Select Topk(x): about k entries by the reused threshold (see `tolerance`), exactly k every tau' calls."""
        if self.selector is not None:
            return super().select(x, k)
        self._adapt_state_to(x.length, k)
        return self._local.select(x, k, self.exact)

    def _adapt_state_to(self, length: int, k: int) -> None:
        """Adjust the thresholds to k, or discard the state if the length or k differs too much from the last call's."""
        before, self._key = self._key, [length, k]
        if self._key == before:
            return
        if length == before[0] and before[1] <= MAX_K_RATIO * k and 0 < k <= MAX_K_RATIO * before[1]:
            for reuse in (self._local, self._global):
                reuse.aim(k / before[1])
            return
        self._calls, self._boundaries, self._owners, self._overloaded = 0, [], [], False
        for reuse in (self._local, self._global):
            reuse.reset()

    def replicated_state(self) -> tuple[int, int]:
        own = [*self._boundaries, *self._owners, self._overloaded, self._global.age]
        return self._calls, digest(own) if self._calls else 0

    def __call__(self, channel: Channel, x: SparseVector, k: int) -> Reduction:
        self._adapt_state_to(x.length, k)
        if len(self._owners) != channel.size or self._calls % self.tau == 0 or self._overloaded:
            with channel.phase("repartition"):
                edges = partition.boundaries(channel.transport, x, self.repartition)
                asked = self.repartition == "histogram" and channel.size > 1
                owners = partition.owners(channel.transport, x, edges) if asked else list(range(channel.size))
                self._boundaries, self._owners, self._overloaded = edges, owners, False
        with channel.phase("split"):
            reduced, load = self._split_and_reduce(channel, x, k)
        with channel.phase("threshold"):
            chosen, largest, sizes = self._select_global(channel, reduced, load, k)
        with channel.phase("gather"):
            final = channel.round(chosen.astype(x.dtype))
            value = self._balance_and_allgatherv(channel, final.drop_zeros(), largest, sizes).astype(x.dtype)
        self._calls += 1

        def contributed() -> Vector:
            loss = Loss(channel, chosen.rounding_error(final))  # it stays with the owner of the region
            loss.restrict_to(value)
            return loss.subtract_from(x.intersect(value))

        return Reduction(value, contributed)

    # 3. split and reduce

    def _split_and_reduce(self, channel: Channel, x: SparseVector, k: int) -> tuple[SparseVector, int]:
        """Return the sum of the own region in the accumulator dtype, and the number of entries added. Equation (1).

        Entries are added as soon as there are at least as many as the sum has, so that with many ranks the sum is not
        read and written again for every bucket.
        """
        rank, size = channel.rank, channel.size
        chunks = pipeline.chunks(k * (x.dtype.itemsize + 1) / size, channel.transport.one_node)  # of each region
        evenly = [a + (b - a) * chunk // chunks for a, b in pairwise(self._boundaries) for chunk in range(chunks)]
        parts = x.split([*evenly, self._boundaries[-1]])
        region_of = {owner: region for region, owner in enumerate(self._owners)}
        steps = range(1, size)
        buckets = [steps[i : i + self.bucket] for i in range(0, len(steps), self.bucket)]
        order = [(chunk, bucket) for chunk in range(chunks) for bucket in buckets]
        first = region_of[rank] * chunks
        reduced = [SparseVector.merge([part], accumulator_dtype(x.dtype)) for part in parts[first : first + chunks]]
        load = sum(part.nnz for part in reduced)
        waiting: list[list[SparseVector]] = [[] for _ in reduced]

        def stages() -> Iterator[list[VectorRequest]]:
            for chunk, bucket in order:
                for step in bucket:
                    to = (rank + step) % size
                    channel.isend(to, parts[region_of[to] * chunks + chunk])
                yield [channel.irecv((rank - step) % size) for step in bucket]

        for (chunk, bucket), arrived in zip(order, pipeline.run(channel.transport, stages()), strict=True):
            load += sum(part.nnz for part in arrived)
            waiting[chunk] += arrived
            if bucket is buckets[-1] or sum(part.nnz for part in waiting[chunk]) >= reduced[chunk].nnz:
                reduced[chunk] = SparseVector.merge([reduced[chunk], *waiting[chunk]], reduced[chunk].dtype)
                waiting[chunk].clear()
        return SparseVector.concatenate(reduced), load

    # 4. global threshold

    def _select_global(
        self, channel: Channel, reduced: SparseVector, load: int, k: int
    ) -> tuple[SparseVector, int, list[int] | None]:
        """Return this rank's part of the global top k, the size of the largest part and, if unbalanced, of each."""
        reuse = self._global
        exact = self.exact or reuse.due
        estimate = reduced if exact else reduced.threshold(reuse.value or 0.0, reduced.nnz)
        largest_key = reduced.key_range()[1]
        row = [reduced.nnz, estimate.nnz, int(largest_key >= reduced.nan_key()), largest_key, load]
        sums, most, rows = sums_and_maxima(channel.transport, row)
        if most[2]:  # the error names the ranks in whose regions there is one
            flags = allgather(channel.transport, np.array([row[2]]))[:, 0]
            raise NonFiniteError(
                f"x: expected sums that can be ordered by magnitude, got NaN in the regions of ranks"
                f" {np.flatnonzero(flags).tolist()} (inf - inf, or NaN in an input)"
            )
        self._overloaded = most[4] * channel.size > MAX_LOAD_RATIO * (sums[4] + channel.size**2)
        accepted = not exact and reuse.accepts(sums[1], k)
        if sums[0] > k and not accepted:
            chosen, sizes = global_topk(channel.transport, reduced, k, sums[0], most[3], self._owners, reuse, exact)
            return chosen, max(sizes), sizes if self._unbalanced(sum(sizes), max(sizes)) else None
        if sums[0] > k:
            reuse.selected(sums[1], k)
        chosen, column = (estimate, 1) if sums[0] > k else (reduced, 0)
        if not self._unbalanced(sums[column], most[column]):
            return chosen, most[column], None
        held = allgather(channel.transport, np.array([chosen.nnz]))[:, 0] if rows is None else rows[:, column]
        return chosen, most[column], [int(size) for size in held]

    def _unbalanced(self, total: int, largest: int) -> bool:
        """Return whether entries move to other ranks before the result is gathered."""
        return largest * len(self._owners) > self.balance_factor * total

    # 5. balance and allgatherv

    def _balance_and_allgatherv(
        self, channel: Channel, mine: SparseVector, largest: int, sizes: list[int] | None
    ) -> SparseVector:
        """Return the entries of all ranks in index order. Equation (2)."""
        order = self._owners
        if sizes is not None:
            mine = balanced(channel, mine, [sizes[owner] for owner in order], order)
            largest = -(-sum(sizes) // len(sizes))
        chunks = pipeline.chunks(largest * (mine.dtype.itemsize + 1), channel.transport.one_node)
        if chunks > 1 and channel.size > 1:
            parts = (mine.slice_entries(mine.nnz * j // chunks, mine.nnz * (j + 1) // chunks) for j in range(chunks))
            rows = list(pipeline.allgather(channel, parts))
        else:
            rows = [channel.allgather(mine)]
        return SparseVector.concatenate([row[owner] for owner in order for row in rows])
