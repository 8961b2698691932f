"""Compressors. To add one: a file with a Compressor dataclass (or a preset of TopK), a line in COMPRESSORS, a test.

The contract tests (same bits on all ranks, gradient mass conserved where that is promised, resume bit for bit) run over
the registry.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from sparsecoll.algorithms import Algorithm
from sparsecoll.errors import check_choice
from sparsecoll.torch.compressors.acpsgd import ACPSGD
from sparsecoll.torch.compressors.arrays import ArrayCompressor
from sparsecoll.torch.compressors.base import Compressor, ErrorFeedback, StepContext
from sparsecoll.torch.compressors.covap import COVAP
from sparsecoll.torch.compressors.dragonn import DRAGONN
from sparsecoll.torch.compressors.efsignsgd import EFSignSGD
from sparsecoll.torch.compressors.fp16 import FP16
from sparsecoll.torch.compressors.none import NoCommunication, NoCompression
from sparsecoll.torch.compressors.powersgd import PowerSGD
from sparsecoll.torch.compressors.presets import DGC, DenseStream, GaussianK, MSTopK, NesterovTopK, OkTopk
from sparsecoll.torch.compressors.qsgd import QSGD
from sparsecoll.torch.compressors.randomk import RandomK
from sparsecoll.torch.compressors.topk import TopK

COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    "none": NoCompression,
    "free": NoCommunication,
    "fp16": FP16,
    "topk": TopK,
    "nesterovtopk": NesterovTopK,
    "oktopk": OkTopk,
    "densestream": DenseStream,
    "dgc": DGC,
    "gaussiank": GaussianK,
    "mstopk": MSTopK,
    "randomk": RandomK,
    "dragonn": DRAGONN,
    "efsignsgd": EFSignSGD,
    "qsgd": QSGD,
    "powersgd": PowerSGD,
    "acpsgd": ACPSGD,
    "covap": COVAP,
}

__all__ = [
    "ACPSGD",
    "COMPRESSORS",
    "COVAP",
    "DGC",
    "DRAGONN",
    "FP16",
    "QSGD",
    "ArrayCompressor",
    "Compressor",
    "DenseStream",
    "EFSignSGD",
    "ErrorFeedback",
    "GaussianK",
    "MSTopK",
    "NesterovTopK",
    "NoCommunication",
    "NoCompression",
    "OkTopk",
    "PowerSGD",
    "RandomK",
    "StepContext",
    "TopK",
    "resolve",
]


def resolve(compressor: str | Compressor | Algorithm) -> Compressor:
    """Return the compressor that a user's `compressor=` stands for.

    Args:
        compressor: name in `COMPRESSORS`, for that compressor with default options; a Compressor, which is copied; or
            an Algorithm, for `TopK(algo=compressor)`.

    Raises:
        ValueError: No compressor has the name.
        TypeError: `compressor` is none of these.
    """
    if isinstance(compressor, Algorithm):
        return TopK(algo=copy.deepcopy(compressor))
    if isinstance(compressor, Compressor):
        return copy.deepcopy(compressor)
    if not isinstance(compressor, str):
        raise TypeError(
            "compressor: expected a name, a Compressor object or a sparsecoll.Algorithm object,"
            f" got {f'the class {compressor.__name__}' if isinstance(compressor, type) else type(compressor).__name__}"
        )
    check_choice("compressor", compressor, COMPRESSORS)
    return COMPRESSORS[compressor]()
