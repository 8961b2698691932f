"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018)."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsecoll import select
from sparsecoll.algorithms import Algorithm
from sparsecoll.select import Selector
from sparsecoll.torch.compressors.topk import TopK


@dataclass
class DGC(TopK):
    """Top-k by a sampled threshold, with momentum correction, factor masking, local clipping and warm-up.

    1. Clip each parameter's gradient to a norm of `clip` / sqrt(P) (section 3.2).
    2. u = momentum * u + gradient; v = v + u (momentum correction, Algorithm 4).
    3. Send about the k largest entries of v; set v and u to zero there (momentum factor masking, section 3.3).

    The momentum is in here: use it with an optimizer without one. Where the paper does otherwise there is an option:
    `clip_by="bucket"` with `DistributedOptimizer(bucket_bytes=None)` clips by the norm of the whole gradient,
    `nesterov=True` corrects Nesterov momentum, `selector=select.SampledThreshold(random=True)` samples at random, and
    `density=WarmUp(0.001, steps)` warms up to the density of 0.001 (section 3.4).
    """

    name = "dgc"

    algo: str | Algorithm = "allgather"
    selector: Selector | None = field(default_factory=select.SampledThreshold)
    momentum: float = 0.9
