"""Top-k methods, ours and published ones, as presets: functions that return a `TopKCompressor` with other defaults."""

from __future__ import annotations

from typing import Any

from sparsecoll import algorithms, select
from sparsecoll.torch.compressors.schedule import Density, WarmUp
from sparsecoll.torch.compressors.topk import TopKCompressor


def sgdtopk(density: Density | None = None, **options: Any) -> TopKCompressor:
    """Top k for torch.optim.SGD with the learning rate and the momentum of dense training (docs/convergence.md).

    Each rank's top k with values of 4 bits, an allgather, and Nesterov momentum with correction and factor masking
    (Deep Gradient Compression, sections 3.1 to 3.3) in place of SGD's momentum; the default of SparseSGD and, with
    torch.optim.SGD, of DistributedOptimizer. See `sparsecoll.torch.SparseSGD` for the momentum. In loops that do not
    know the optimizer (DDP's hook, FSDP) use `nesterovtopk`.

    Volume: about 1.5k(P-1) bytes at a density of 1 %, which grows with P: for many ranks use `oktopk`.

    Args:
        density: k as a fraction of a bucket, as in `TopKCompressor` (default: None, for `WarmUp(0.01)`).
        **options: further options of `TopKCompressor`.

    Returns:
        TopKCompressor with `algo="allgather"`, `format="packed_codes"` and `momentum=None`.
    """
    defaults = {"algo": "allgather", "format": "packed_codes", "momentum": None}
    made = _named("sgdtopk", WarmUp(0.01) if density is None else density, defaults, options)
    made.dense_below = 0
    return made


def nesterovtopk(density: Density = 0.01, **options: Any) -> TopKCompressor:
    """The setting of TopKCompressor that stayed within 0.2 points of dense training with SGD (docs/convergence.md).

    Each rank's top k with values of 4 bits, an allgather, and a Nesterov momentum of 0.7 with momentum correction and
    factor masking (Deep Gradient Compression, sections 3.1 to 3.3). In place of SGD with momentum 0.9, use it with
    `torch.optim.SGD` without momentum at three times the learning rate, and with `density=WarmUp(0.01, steps)`, where
    `steps` is 2 % of all steps. The delay in the residual acts like momentum, so that 0.7 is enough.

    Volume: about 1.5k(P-1) bytes at a density of 1 %, which grows with P: for many ranks use `oktopk`.

    Args:
        density: k as a fraction of a bucket, as in `TopKCompressor` (default: 0.01).
        **options: further options of `TopKCompressor`.

    Returns:
        TopKCompressor with `algo="allgather"`, `format="packed_codes"`, `momentum=0.7` and `nesterov=True`.
    """
    defaults = {"algo": "allgather", "format": "packed_codes", "momentum": 0.7, "nesterov": True}
    return _named("nesterovtopk", density, defaults, options)


def oktopk(density: Density = 0.01, **options: Any) -> TopKCompressor:
    """Ok-Topk (Li and Hoefler, PPoPP 2022): the top k of the sum of the top k of all ranks.

    Volume: 2k(P-1)/P to 6k(P-1)/P words.

    Args:
        density: k as a fraction of a bucket, as in `TopKCompressor` (default: 0.01).
        **options: further options of `TopKCompressor`; `algo=sparsecoll.OkTopk(...)` sets those of the allreduce.

    Returns:
        TopKCompressor with `algo="oktopk"`.
    """
    return _named("oktopk", density, {"algo": "oktopk"}, options)


def densestream(density: Density = 0.01, **options: Any) -> TopKCompressor:
    """DenseStream (Algorithm 2 of the paper: TopkDSA with DenseStream blocks): the exact sum of the top k of all ranks.

    Inside blocks, true values are sent instead of zeros, in the same number of bytes (`fill`, end of section IV.B), but
    not with a selector. `format="auto"` sends fewer bytes. Volume: equation (6) of the paper.

    Args:
        density: as in `TopKCompressor`.
        **options: of `TopKCompressor`.

    Returns:
        TopKCompressor with `algo=sparsecoll.DenseStream(fill=True)` and `format="densestream"`.
    """
    return _named("densestream", density, {"algo": algorithms.DenseStream(fill=True), "format": "densestream"}, options)


def dgc(density: Density = 0.01, **options: Any) -> TopKCompressor:
    """Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018).

    Top-k by a sampled threshold, with momentum correction, factor masking, local clipping and warm-up:

    1. Clip each parameter's gradient to a norm of `clip` / sqrt(P) (section 3.2).
    2. u = momentum * u + gradient; v = v + u (momentum correction, Algorithm 4).
    3. Send about the k largest entries of v; set v and u to zero there (momentum factor masking, section 3.3).

    The momentum is part of the compressor: use an optimizer without one. To follow the paper where the defaults do not,
    use `clip_by="bucket"` with `bucket_bytes=None` and `dense_below=0` (clip by the norm of the whole gradient),
    `nesterov=True` (Nesterov momentum), and `density=WarmUp(0.001, steps)` (warm up to the density of 0.001, section
    3.4). The sample is a strided one, not a random one.

    Args:
        density: as in `TopKCompressor`.
        **options: of `TopKCompressor`; an `algo` that takes no selector, or "dense", needs `selector=None`.

    Returns:
        TopKCompressor with `algo="allgather"`, `selector=select.SampledThreshold()` and `momentum=0.9`.
    """
    defaults = {"algo": "allgather", "selector": select.SampledThreshold(), "momentum": 0.9}
    return _named("dgc", density, defaults, options)


def gaussiank(density: Density = 0.01, **options: Any) -> TopKCompressor:
    """Gaussian-k (Shi, Chu, Cheung, See, "Understanding Top-k Sparsification in Distributed Deep Learning", 2019).

    Selects about k entries above a threshold computed from mean and deviation; their number differs between ranks.

    Args:
        density: as in `TopKCompressor`.
        **options: of `TopKCompressor`.

    Returns:
        TopKCompressor with `algo="allgather"` and `selector=select.GaussianK()`.
    """
    return _named("gaussiank", density, {"algo": "allgather", "selector": select.GaussianK()}, options)


def _named(name: str, density: Density, defaults: dict[str, Any], options: dict[str, Any]) -> TopKCompressor:
    made = TopKCompressor(density, **{**defaults, **options})
    made.name = name  # type: ignore[misc]
    return made
