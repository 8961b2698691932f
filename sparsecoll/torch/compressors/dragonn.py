"""DRAGONN (Wang, Xu, Wu, Shrivastava, Ng, ICML 2022): hashed slots where they pay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsecoll import select
from sparsecoll.algorithms import Algorithm, Reduction
from sparsecoll.formats import Format, Slots
from sparsecoll.kernels.memory import beside
from sparsecoll.select import Selector, Vector
from sparsecoll.select.randomk import mix
from sparsecoll.torch.compressors.base import DENSE, Shared, measured, write_mean
from sparsecoll.torch.compressors.topk import TopK
from sparsecoll.torch.device import Array
from sparsecoll.torch.layout import Layout
from sparsecoll.transport import Transport
from sparsecoll.transport.collectives import allgather
from sparsecoll.tune import tuning_of
from sparsecoll.vector import DenseVector


@dataclass
class DRAGONN(TopK):
    """About k entries above a threshold, written to k slots by a hash of their index; allgather; sparse decoding.

    Entries that lose their slot wait in the residual. Efficiency-aware tensor selection (equation (1)): a bucket of d
    values is compressed only if T_comp(d) < T_full(d) - T_spr(d), with the compression time measured on its own data
    type and length when it is bound, and alpha and beta of the communicator measured too:

        T_full(d) = 2(P-1)(alpha + beta d A / P),  T_spr(d) = (P-1)(alpha + beta gamma d A)

    where A is bytes a value and gamma the share that travels (an index and a value for each of k slots).

    Volume: 2k(P-1) words where compressed, else 2n(P-1)/P.

    Args:
        selector: how the threshold, which the paper takes as given, is found.
        selective: False compresses all buckets.
        seed: of the hashes; the same on all ranks.
    """

    name = "dragonn"

    algo: str | Algorithm = "allgather"
    selector: Selector | None = field(default_factory=select.SampledThreshold)
    selective: bool = True
    seed: int = 0

    def bind(self, layout: Layout, transport: Transport, shared: Shared, timeout: float | None = None) -> None:
        super().bind(layout, transport, shared, timeout)
        self.compressed = layout.length > 0 and (not self.selective or self._pays(transport, layout))
        self._slots = Slots(1, 0)

    def _pays(self, transport: Transport, layout: Layout) -> bool:
        """Equation (1), the same answer on every rank."""
        tuning, P = tuning_of(transport), transport.size
        d, k = self.layout.length, self._densities.k(self.layout.length, 1 << 60)
        gradient = beside(layout.zeros(), np.random.default_rng(0).standard_normal(d).astype(self.layout.dtype))
        vector, selector, form = DenseVector(gradient), select.SampledThreshold(), Slots(k, 0)
        chosen = form.arriving(selector.select(vector, k))
        message = form.encode(chosen)

        def compress() -> None:
            form.encode(form.arriving(selector.select(vector, k)))
            for _ in range(P):
                form.decode(message, d)

        cost = float(allgather(transport, np.array([measured(transport, compress, self.layout.device)])).max())
        full = 2 * (P - 1) * (tuning.alpha + tuning.beta * gradient.nbytes / P)
        return bool(cost < full - (P - 1) * (tuning.alpha + tuning.beta * message.size))

    def compress(self, acc: Vector) -> Vector:
        if not self.compressed:
            return acc
        chosen = super().compress(acc)
        self._slots = Slots(max(self._k, 1), mix(self.seed, self.shared.step))
        return chosen

    def communicate(self, transport: Transport, message: Vector) -> Reduction:
        if not self.compressed:
            return self._reduce(transport, message, DENSE)
        return super().communicate(transport, message)

    def _format(self) -> str | Format:
        return self._slots

    def update(self, out: Array, message: Any, reduced: Reduction) -> None:
        if self.compressed:
            super().update(out, message, reduced)
        else:
            write_mean(out, reduced.value, self.size)
            self.acc.values.fill(0)

    def extra_state(self) -> dict[str, Any]:
        return super().extra_state() | {"compressed": self.compressed}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self.compressed = state["compressed"]
