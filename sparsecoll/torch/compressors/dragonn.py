"""DRAGONN (Wang, Xu, Wu, Shrivastava, Ng, ICML 2022): hashed slots where they pay off."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsecoll import formats, select
from sparsecoll.algorithms import Algorithm, Reduction
from sparsecoll.formats import Format, Slots
from sparsecoll.kernels.memory import asarray_like
from sparsecoll.select import Selector, Vector
from sparsecoll.select.randomk import mix
from sparsecoll.torch.compressors.base import DENSE, StepContext, measured, write_mean
from sparsecoll.torch.compressors.topk import TopK
from sparsecoll.torch.tensors.layout import Array, Layout
from sparsecoll.transport import Transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.collectives import allgather
from sparsecoll.transport.network import Network
from sparsecoll.vector import DenseVector, SparseVector


@dataclass
class DRAGONN(TopK):
    """Writes about k entries above a threshold to k slots by a hash of their index, and gathers the slots.

    1. Select entries and write them to slots (Algorithm 1). Entries that lose their slot stay in the residual.
    2. Allgather the slots of all ranks (Bruck).
    3. Sparse decoding (Algorithm 2, section 4.3): all messages are added to one dense gradient, slot by slot, in rank
       order, without sorting and without intermediate vectors.

    Efficiency-aware tensor selection (equation (1)): a bucket of d values is compressed only if
    T_comp(d) < T_full(d) - T_spr(d). The seconds to compress and to decode a message of its dtype and length are
    measured when the bucket is created; alpha and beta are those of `network`. If the density of late steps is known
    (see `Schedule.settles_at`), it decides for all steps; otherwise each step's own k decides:

        T_full(d) = 2(P-1)(alpha + beta d A / P),  T_spr(d) = (P-1)(alpha + beta gamma d A)

    where A is the bytes of a value and gamma the fraction that is sent (an index and a value for each of k slots).

    The paper's error feedback is momentum correction: use `momentum=0.9` and an optimizer without momentum.

    Volume: 2k(P-1) words if compressed, otherwise 2n(P-1)/P.

    Args:
        density: as in `TopK`.
        selector: the selector that finds the threshold, which the paper assumes to be given (default:
            SampledThreshold()).
        value_dtype: as in `TopK`.
        momentum: as in `TopK`.
        nesterov: as in `TopK`.
        follow_lr: as in `TopK`.
        clip: as in `TopK`.
        clip_by: as in `TopK`.
        row_density: as in `TopK`.
        selective: whether only buckets for which it pays off are compressed (default: True), or all.
        seed: seed of the hash functions (default: 0).
        network: alpha and beta of equation (1); None, the default, for those that `sparsecoll.Auto` assumes.

    Raises:
        ValueError: An option of `TopK` is out of range.
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
        self.compressed = False
        self._most = layout.length or -1
        if self.selective and layout.length:
            self._most = self._pays_up_to(transport, layout)

    def _pays_up_to(self, transport: Transport, layout: Layout) -> int:
        """Return for how many entries at most equation (1) holds, -1 for none; the same on every rank.

        The number of entries of late steps, where it is known, decides for all steps. Otherwise each step has its own
        answer, by a line through the seconds of few entries and of many.
        """
        with CollectiveCall(transport, "compressor", self.timeout) as call:
            call.signature |= {"compressor": self.describe()}
            call.agree()
        network, P, n = self.network or transport.network, transport.size, layout.length
        full = 2 * (P - 1) * (network.alpha + network.beta * n * layout.dtype.itemsize / P)
        if self._densities.settles:
            return n if self._seconds(transport, layout, max(sum(self._entries(settled=True)), 1)) < full else -1
        few, many = 1, max(2, n // 10)
        low, high = (self._seconds(transport, layout, k) for k in (few, many))
        if low >= full:
            return -1
        slope = max(high - low, 0.0) / (many - few)
        return n if low + slope * n < full else int(few + (full - low) / slope)

    def _seconds(self, transport: Transport, layout: Layout, k: int) -> float:
        """Return T_comp + T_spr for k entries of a bucket, the same on every rank; collective."""
        network, P = self.network or transport.network, transport.size
        gradient = asarray_like(
            np.random.default_rng(0).standard_normal(layout.length).astype(layout.dtype), layout.zeros()
        )
        vector, out, selector = DenseVector(gradient), DenseVector(layout.zeros()), select.SampledThreshold()
        form = Slots(k)
        message = form.encode(form.roundtrip(selector.select(vector, k)))
        encode = measured(transport, lambda: form.encode(form.roundtrip(selector.select(vector, k))), layout.device)
        decode = measured(transport, lambda: formats.add_into(out, [message]), layout.device)
        cost = float(allgather(transport, np.array([encode + P * decode])).max())
        return cost + (P - 1) * (network.alpha + network.beta * message.size)

    def _selected(self, acc: Vector) -> Vector:
        self.compressed = self._k <= self._most
        if not self.compressed:
            return self._whole()
        chosen = super()._selected(acc)
        assert isinstance(chosen, SparseVector)
        self.check_finite(chosen)
        self._slots = Slots(max(self._k, 1), mix(self.seed, self.context.step))
        return self._slots.roundtrip(chosen, self.value_dtype)

    def communicate(self, transport: Transport, message: Vector) -> Any:
        if not self.compressed:
            return self.reduce(transport, message, DENSE, self.compared)
        assert isinstance(message, SparseVector)
        return self.gather(transport, self._slots.encode(message, self.value_dtype), self.compared)

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

    def extra_state(self) -> dict[str, Any]:
        return super().extra_state() | {"compressed": self._most}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self._most = state["compressed"]
