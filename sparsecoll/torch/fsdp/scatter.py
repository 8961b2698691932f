"""Compressors whose mean is scattered: every rank gets its own region of it. Dense sums and top-k can be scattered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from sparsecoll import algorithms
from sparsecoll.algorithms import Algorithm, Reduction
from sparsecoll.collectives.options import NOTHING, CallOptions
from sparsecoll.collectives.reduce_scatter import reduce_scatter_vectors
from sparsecoll.select import Vector
from sparsecoll.torch.compressors import FP16, Compressor, NoCompression, TopK
from sparsecoll.torch.tensors.device import device_of
from sparsecoll.transport import Transport
from sparsecoll.vector import DenseVector, SparseVector


class Scattered(Compressor):
    """What the classes below have in common: the sum of messages is scattered, `allreduce_mean` writes one region."""

    def reduce(
        self,
        transport: Transport,
        message: Vector,
        algorithm: Any = None,
        alike: Mapping[str, Any] = NOTHING,
        **options: Any,
    ) -> Reduction:
        """Reduce-scatter what was selected."""
        if isinstance(message, SparseVector):
            self.check_finite(message)
        options.pop("k", None)
        return reduce_scatter_vectors(
            transport, message, CallOptions(timeout=self.timeout, nonfinite="pass", **options), alike
        )


@dataclass
class ScatteredSum(Scattered, NoCompression):
    """The dense mean. Volume: n(P-1)/P words."""


@dataclass
class ScatteredFP16(Scattered, FP16):
    """The dense mean, with values of 16 bits on the wire. Volume: n(P-1)/2P words."""


@dataclass
class ScatteredTopK(Scattered, TopK):
    """The exact sum of the top k of all ranks, in the region of each.

    Every entry goes straight to the rank that owns its region. Volume: 2k(P-1)/P words if entries are spread evenly.
    """


SCATTERED: dict[type, type[Scattered]] = {NoCompression: ScatteredSum, FP16: ScatteredFP16, TopK: ScatteredTopK}
EXACT = (algorithms.Auto, algorithms.Allgather)  # the exact sum of what the ranks selected, and nothing more


def scattered(compressor: Compressor) -> Compressor:
    """Return the compressor that scatters its mean.

    Raises:
        ValueError: The method has no such form.
    """
    kind = SCATTERED.get(type(compressor))
    if kind is None:
        raise ValueError(
            f"compressor: expected 'topk', 'fp16' or 'none' without replicas, got {compressor.name!r}: the other"
            " methods have no reduce-scatter"
        )
    if isinstance(compressor, TopK):
        _check_topk(compressor)
    return kind(**{f.name: getattr(compressor, f.name) for f in fields(compressor) if f.init})


def _check_topk(topk: TopK) -> None:
    algorithm: Algorithm = algorithms.resolve(topk.algo)
    if not isinstance(algorithm, EXACT):
        raise ValueError(f"algo: expected 'auto' without replicas, where sums are scattered, got {algorithm.name!r}")
    if isinstance(topk.density, Mapping):
        raise ValueError("density: expected a number or a Schedule without replicas, got one for each layer")


def reduce_scatter_tensors(
    transport: Transport, values: torch.Tensor, out: torch.Tensor, factor: float, timeout: float | None
) -> None:
    """Write this rank's region of factor * the mean of all ranks' values to `out`; sums are float32. Collective."""
    half = values.dtype == torch.bfloat16  # which NumPy lacks
    device = device_of(values)
    vector = DenseVector(device.array(values.float() if half else values))
    options = CallOptions(timeout=timeout, nonfinite="pass", value_dtype="bfloat16" if half else None)
    reduction = transport.in_order(lambda: reduce_scatter_vectors(transport, vector, options))
    assert isinstance(reduction.value, DenseVector)
    total = device.tensor(reduction.value.values)
    out.copy_(total if factor == transport.size else total / (transport.size / factor))
