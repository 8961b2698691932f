"""Top-k over any algorithm of the registry, with error feedback."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from sparsecoll import select
from sparsecoll.algorithms import Algorithm, Reduction, resolve
from sparsecoll.formats import Format
from sparsecoll.select import Selector, Vector
from sparsecoll.torch.compressors.base import Array, Feedback, Shared, write_mean
from sparsecoll.torch.layout import Layout
from sparsecoll.torch.schedule import Densities, Density
from sparsecoll.transport import Transport
from sparsecoll.vector import DenseVector, SparseVector


@dataclass
class TopK(Feedback):
    """Each rank sends about the k largest entries of residual + gradient (Stich, Cordonnier, Jaggi, NeurIPS 2018).

    1. acc = residual + gradient, and k of its entries are selected, in one pass over memory.
    2. They are summed by a sparse allreduce.
    3. residual = acc - what of it entered the sum.

    Volume: the algorithm's (see docs/algorithms.md).

    Args:
        density: k as a share of a bucket: a number, a Schedule, or a mapping from patterns of parameter names to
            either; with a mapping every layer selects its own entries.
        algo: a name of `sparsecoll.ALGORITHMS`, or an Algorithm object; each bucket gets a copy.
        selector: how entries are selected; None: the algorithm's own way (exactly, if it has none).
        format, value_dtype: as in `sparsecoll.allreduce`.
    """

    name = "topk"

    density: Density = 0.01
    algo: str | Algorithm = "auto"
    selector: Selector | None = None
    format: str | Format = "auto"
    value_dtype: str | None = None

    def __post_init__(self) -> None:
        Densities.of(self.density)
        resolve(self.algo)

    def bind(self, layout: Layout, transport: Transport, shared: Shared, timeout: float | None = None) -> None:
        super().bind(layout, transport, shared, timeout)
        self._densities = Densities.of(self.density)
        self._algorithm = copy.deepcopy(resolve(self.algo))
        if self.selector is not None:
            self._algorithm.selector = copy.deepcopy(self.selector)
        if self._densities.by_layer:
            self._selectors = [copy.deepcopy(self.selector or select.TopK()) for _ in layout.names]

    def compress(self, acc: Vector) -> Vector:
        if self._algorithm.takes_dense:
            return acc
        if self._densities.by_layer:
            return self._layer_by_layer(acc)
        self._k = self._densities.k(self.layout.length, self.shared.step)
        return self._algorithm.select(acc, self._k, self.size)

    def _layer_by_layer(self, acc: Vector) -> SparseVector:
        """Each layer's own largest entries."""
        assert isinstance(acc, DenseVector)
        values, edges, parts = acc.values, self.layout.offsets, []
        self._k = 0
        layers = zip(self.layout.names, self._selectors, edges[:-1], edges[1:], strict=True)
        for name, selector, a, b in layers:
            k = self._densities.k(b - a, self.shared.step, name)
            self._k += k
            parts.append(selector.select(DenseVector(values[a:b]), k).shifted(a, self.layout.length))
        return SparseVector.concatenate(parts)

    def communicate(self, transport: Transport, message: Vector | Exception) -> Reduction:
        options: dict[str, Any] = (
            {} if self._algorithm.takes_dense or isinstance(message, Exception) else {"k": self._k}
        )
        return self._reduce(
            transport, message, self._algorithm, format=self._format(), value_dtype=self.value_dtype, **options
        )

    def _format(self) -> str | Format:
        return self.format

    def update(self, gradient: Array, message: Any, reduced: Reduction) -> None:
        self.residual.update(reduced.contributed)
        write_mean(gradient, reduced.value, self.size)

    def extra_state(self) -> dict[str, Any]:
        layers = [selector.state_dict() for selector in self._selectors] if self._densities.by_layer else []
        return {"algorithm": self._algorithm.state_dict(), "layers": layers}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self._algorithm.load_state_dict(state["algorithm"])
        if self._densities.by_layer:
            for selector, saved in zip(self._selectors, state["layers"], strict=True):
                selector.load_state_dict(saved)
