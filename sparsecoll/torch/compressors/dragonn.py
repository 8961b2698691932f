"""DRAGONN (Wang, Xu, Wu, Shrivastava, Ng, ICML 2022): hashed slots where they pay off."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sparsecoll import formats, select
from sparsecoll.algorithms import Algorithm, Reduction
from sparsecoll.algorithms.auto.costmodel import CALL, UNION, VALUE
from sparsecoll.formats import Format, SlotsFormat
from sparsecoll.select import Selector, Vector
from sparsecoll.select.randomk import mix
from sparsecoll.torch.compressors.base import DENSE, StepContext, write_mean
from sparsecoll.torch.compressors.schedule import ENTRIES, as_schedule
from sparsecoll.torch.compressors.topk import TopKCompressor
from sparsecoll.torch.tensors.layout import Array, Layout, residual_dtype
from sparsecoll.transport import Transport
from sparsecoll.transport.network import Network
from sparsecoll.vector import DenseVector, SparseVector

INDEX_BYTES = 4  # of a slot


@dataclass
class DRAGONN(TopKCompressor):
    """Writes about k entries above a threshold to k slots by a hash of their index, and gathers the slots.

    1. Select entries and write them to slots (Algorithm 1). Entries that lose their slot stay in the residual.
    2. Allgather the slots of all ranks (Bruck).
    3. Sparse decoding (Algorithm 2, section 4.3): all messages are added to one dense gradient, slot by slot, in rank
       order, without sorting and without intermediate vectors.

    Efficiency-aware tensor selection (equation (1)): a parameter of d values is compressed only if
    T_comp(d) < T_full(d) - T_spr(d) at the density of late steps; the others are sent whole, in buckets of their own.
    In a step, a bucket of d values is compressed only if the same holds for it, with the number of entries of that
    step. DDP's hook and FSDP, which get buckets from torch, decide by bucket alone:

        T_full(d) = 2(P-1)(alpha + beta d A / P),  T_spr(d) = (P-1)(alpha + beta gamma d A)

    where A is the bytes of a value and gamma the fraction that is sent (an index and a value for each of k slots).
    alpha and beta are those of `network`, and T_comp is computed from the seconds that `sparsecoll.Auto` assumes for
    messages, entries and values: nothing is measured, so that runs have the same bits.

    The paper's error feedback is momentum correction: use `momentum=0.9` and an optimizer without momentum.

    Volume: 2k(P-1) words if compressed, otherwise 2n(P-1)/P.

    Args:
        density: as in `TopKCompressor`.
        selector: the selector that finds the threshold, which the paper assumes to be given (default:
            SampledThreshold()).
        value_dtype: as in `TopKCompressor`.
        momentum: as in `TopKCompressor`.
        nesterov: as in `TopKCompressor`.
        clip: as in `TopKCompressor`.
        clip_by: as in `TopKCompressor`.
        row_density: as in `TopKCompressor`.
        selective: whether only parameters and buckets for which it pays off are compressed (default: True), or all.
        seed: seed of the hash functions (default: 0).
        network: alpha and beta of equation (1); None, the default, for those that `sparsecoll.Auto` assumes.

    Raises:
        ValueError: An option of `TopKCompressor` is out of range.
    """

    name = "dragonn"

    algo: str | Algorithm = field(default="allgather", init=False)
    format: str | Format = field(default="auto", init=False)
    selector: Selector | None = field(default_factory=select.SampledThreshold)
    selective: bool = True
    seed: int = 0
    network: Network | None = None

    def bind(self, layout: Layout, transport: Transport, context: StepContext, timeout: float | None = None) -> None:
        super().bind(layout, transport, context, timeout)
        self._network, self.compressed = self.network or transport.network, False

    def _pays(self, n: int, k: int, itemsize: int, P: int, network: Network) -> bool:
        """Whether equation (1) holds for k of n values; the same on every rank."""
        full = 2 * (P - 1) * (network.alpha + network.beta * n * itemsize / P)
        sparse = (P - 1) * (network.alpha + network.beta * k * (INDEX_BYTES + itemsize))
        return VALUE * n + (1 + P) * (CALL + UNION * k) < full - sparse

    def sends_whole(self, parameter: torch.Tensor, transport: Transport) -> bool:
        n, itemsize = parameter.numel(), residual_dtype(parameter.dtype).itemsize
        end, network = as_schedule(self.density).settles_at(), self.network or transport.network
        pays = not self.selective or end is None or self._pays(n, round(end * n), itemsize, transport.size, network)
        return not pays

    def _selected(self, acc: Vector) -> Vector:
        n, itemsize = self.layout.length, self.layout.dtype.itemsize
        self.compressed = n > 0 and (not self.selective or self._pays(n, self._k, itemsize, self.size, self._network))
        if not self.compressed:
            return self._whole()
        chosen = super()._selected(acc)
        assert isinstance(chosen, SparseVector)
        self.check_finite(chosen)
        self._slots = SlotsFormat(max(self._k, 1), mix(self.seed, self.context.step))
        return self._slots.roundtrip(chosen, self.value_dtype)

    def communicate(self, transport: Transport, message: Vector) -> Any:
        compared = {ENTRIES: self._k}
        if not self.compressed:
            return self.reduce(transport, message, DENSE, compared)
        assert isinstance(message, SparseVector)
        return self.gather(transport, self._slots.encode(message, self.value_dtype), compared)

    def update(self, out: Array, message: Vector, reduced: Any) -> None:
        if not self.compressed:
            assert isinstance(reduced, Reduction)
            write_mean(out, reduced.value, self.size)
            self.acc.values.fill(0)
            return
        self.contributed(message)
        self._mask(message, message)
        out.fill(0)
        formats.add_into(DenseVector(out), reduced)
        np.divide(out, self.size, out=out)
