"""Compressors. To add one: a file with a Compressor dataclass (or a preset of TopKCompressor), a line here, and a test.

The contract tests (same bits on all ranks, gradient mass conserved where promised, resume bit for bit) run over all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from sparsecoll.algorithms import Algorithm
from sparsecoll.errors import check_choice
from sparsecoll.torch.compressors.acpsgd import ACPSGD as ACPSGD
from sparsecoll.torch.compressors.arrays import ArrayCompressor as ArrayCompressor
from sparsecoll.torch.compressors.base import (
    Compressor as Compressor,
    ErrorFeedback as ErrorFeedback,
    StepContext as StepContext,
)
from sparsecoll.torch.compressors.chunked import ChunkedTopK as ChunkedTopK
from sparsecoll.torch.compressors.covap import COVAP as COVAP
from sparsecoll.torch.compressors.dragonn import DRAGONN as DRAGONN
from sparsecoll.torch.compressors.fp16 import FP16 as FP16
from sparsecoll.torch.compressors.none import NoCommunication as NoCommunication, NoCompression as NoCompression
from sparsecoll.torch.compressors.powersgd import PowerSGD as PowerSGD
from sparsecoll.torch.compressors.presets import (
    densestream as densestream,
    dgc as dgc,
    gaussiank as gaussiank,
    nesterovtopk as nesterovtopk,
    oktopk as oktopk,
    sgdtopk as sgdtopk,
)
from sparsecoll.torch.compressors.qsgd import QSGD as QSGD, efsignsgd as efsignsgd
from sparsecoll.torch.compressors.randomk import RandomKCompressor as RandomKCompressor
from sparsecoll.torch.compressors.topk import TopKCompressor as TopKCompressor

COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    "none": NoCompression,
    "free": NoCommunication,
    "fp16": FP16,
    "topk": TopKCompressor,
    "sgdtopk": sgdtopk,
    "nesterovtopk": nesterovtopk,
    "oktopk": oktopk,
    "densestream": densestream,
    "dgc": dgc,
    "gaussiank": gaussiank,
    "randomk": RandomKCompressor,
    "dragonn": DRAGONN,
    "chunktopk": ChunkedTopK,
    "efsignsgd": efsignsgd,
    "qsgd": QSGD,
    "powersgd": PowerSGD,
    "acpsgd": ACPSGD,
    "covap": COVAP,
}


def as_compressor(compressor: str | Compressor | Algorithm) -> Compressor:
    """Return the compressor that a user's `compressor=` stands for.

    Args:
        compressor: name in `COMPRESSORS`, for that compressor with default options; a Compressor, which is copied; or
            an Algorithm, for `TopKCompressor(algo=compressor)`.

    Raises:
        ValueError: No compressor has the name.
        TypeError: `compressor` is none of these.
    """
    if isinstance(compressor, Algorithm):
        return TopKCompressor(algo=copy.deepcopy(compressor))
    if isinstance(compressor, Compressor):
        return copy.deepcopy(compressor)
    if not isinstance(compressor, str):
        raise TypeError(
            "compressor: expected a name, a Compressor object or a sparsecoll.Algorithm object,"
            f" got {f'the class {compressor.__name__}' if isinstance(compressor, type) else type(compressor).__name__}"
        )
    check_choice("compressor", compressor, COMPRESSORS)
    return COMPRESSORS[compressor]()
