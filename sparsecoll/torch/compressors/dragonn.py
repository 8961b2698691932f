"""DRAGONN (Wang, Xu, Wu, Shrivastava, Ng, ICML 2022): hashed slots where they pay off."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsecoll import formats, select
from sparsecoll.algorithms import Algorithm, Allgather, Reduction, resolve
from sparsecoll.algorithms.auto.tune import tuning_of
from sparsecoll.formats import Slots
from sparsecoll.kernels.memory import asarray_like
from sparsecoll.select import Selector, Vector
from sparsecoll.select.randomk import mix
from sparsecoll.torch.compressors.base import DENSE, StepContext, measured, write_mean
from sparsecoll.torch.compressors.topk import TopK
from sparsecoll.torch.device import Array
from sparsecoll.torch.layout import Layout
from sparsecoll.transport import Transport
from sparsecoll.transport.collectives import allgather
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
    measured when the bucket is created, as are alpha and beta of the communicator:

        T_full(d) = 2(P-1)(alpha + beta d A / P),  T_spr(d) = (P-1)(alpha + beta gamma d A)

    where A is the bytes of a value and gamma the fraction that is sent (an index and a value for each of k slots).

    The paper's error feedback is momentum correction: use `momentum=0.9` and an optimizer without momentum.

    Volume: 2k(P-1) words if compressed, otherwise 2n(P-1)/P.

    Args:
        density: as in `TopK`.
        algo: "allgather" (the default) or an Allgather, since slots can be gathered but not summed.
        selector: the selector that finds the threshold, which the paper assumes to be given (default:
            SampledThreshold()).
        format: not used, since messages are slots.
        value_dtype: as in `TopK`.
        momentum: as in `TopK`.
        nesterov: as in `TopK`.
        follow_lr: as in `TopK`.
        clip: as in `TopK`.
        clip_by: as in `TopK`.
        row_density: as in `TopK`.
        selective: whether only buckets for which it pays off are compressed (default: True), or all.
        seed: seed of the hash functions (default: 0).

    Raises:
        ValueError: `algo` is not an allgather, or an option of `TopK` is out of range.
    """

    name = "dragonn"

    algo: str | Algorithm = "allgather"
    selector: Selector | None = field(default_factory=select.SampledThreshold)
    selective: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(resolve(self.algo), Allgather):
            raise ValueError(f"algo: expected 'allgather', since slots cannot be summed, got {self.algo!r}")

    def bind(self, layout: Layout, transport: Transport, context: StepContext, timeout: float | None = None) -> None:
        super().bind(layout, transport, context, timeout)
        self.compressed = layout.length > 0 and (not self.selective or self._pays(transport, layout))

    def _pays(self, transport: Transport, layout: Layout) -> bool:
        """Evaluate equation (1); the same result on every rank."""
        tuning, P = tuning_of(transport), transport.size
        gradient = asarray_like(
            np.random.default_rng(0).standard_normal(layout.length).astype(layout.dtype), layout.zeros()
        )
        vector, out, selector = DenseVector(gradient), DenseVector(layout.zeros()), select.SampledThreshold()
        k = self._entries(layout)
        form = Slots(k)
        message = form.encode(form.roundtrip(selector.select(vector, k)))
        encode = measured(transport, lambda: form.encode(form.roundtrip(selector.select(vector, k))), layout.device)
        decode = measured(transport, lambda: formats.add_into(out, [message]), layout.device)
        cost = float(allgather(transport, np.array([encode + P * decode])).max())
        full = 2 * (P - 1) * (tuning.alpha + tuning.beta * gradient.nbytes / P)
        return bool(cost < full - (P - 1) * (tuning.alpha + tuning.beta * message.size))

    def _entries(self, layout: Layout) -> int:
        """Return k of late steps, or of this one where that is not known."""
        step, edges = self.context.step, layout.offsets
        if not self._densities.by_layer:
            return self._densities.k(layout.length, step, settled=True)
        parts = zip(layout.names, edges[:-1], edges[1:], strict=True)
        return max(sum(self._densities.k(b - a, step, name, True) for name, a, b in parts), 1)

    def compress(self, acc: Vector) -> Vector:
        if not self.compressed:
            return self._whole()
        chosen = super().compress(acc)
        assert isinstance(chosen, SparseVector)
        self.check_finite(chosen)
        self._slots = Slots(max(self._k, 1), mix(self.seed, self.context.step))
        return self._slots.roundtrip(chosen, self.value_dtype)

    def communicate(self, transport: Transport, message: Vector) -> Any:
        if not self.compressed:
            return self._reduce(transport, message, DENSE)
        assert isinstance(message, SparseVector)
        return self._gather(transport, self._slots.encode(message, self.value_dtype), self.compared)

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
        return super().extra_state() | {"compressed": self.compressed}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self.compressed = state["compressed"]
