"""Compressors. Add one: a file with a Compressor dataclass, a line in COMPRESSORS, a test.

The contract tests (same bits on all ranks, mass conserved where it is promised, resume bit for bit) run over the
registry.
"""

from __future__ import annotations

import copy

from sparsecoll.torch.compressors.acpsgd import ACPSGD
from sparsecoll.torch.compressors.base import Compressor, Feedback, Shared
from sparsecoll.torch.compressors.covap import COVAP
from sparsecoll.torch.compressors.densestream import DenseStream
from sparsecoll.torch.compressors.dgc import DGC
from sparsecoll.torch.compressors.dragonn import DRAGONN
from sparsecoll.torch.compressors.efsignsgd import EFSignSGD
from sparsecoll.torch.compressors.fp16 import FP16
from sparsecoll.torch.compressors.gaussiank import GaussianK
from sparsecoll.torch.compressors.mstopk import MSTopK
from sparsecoll.torch.compressors.none import Free, NoCompression
from sparsecoll.torch.compressors.oktopk import OkTopk
from sparsecoll.torch.compressors.powersgd import PowerSGD
from sparsecoll.torch.compressors.qsgd import QSGD
from sparsecoll.torch.compressors.randomk import RandomK
from sparsecoll.torch.compressors.topk import TopK

COMPRESSORS: dict[str, type[Compressor]] = {
    "none": NoCompression,
    "free": Free,
    "fp16": FP16,
    "topk": TopK,
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
    "Compressor",
    "DenseStream",
    "EFSignSGD",
    "Feedback",
    "Free",
    "GaussianK",
    "MSTopK",
    "NoCompression",
    "OkTopk",
    "PowerSGD",
    "RandomK",
    "Shared",
    "TopK",
    "resolve",
]


def resolve(compressor: str | Compressor) -> Compressor:
    """A default compressor for a name; a copy of an object.

    Raises:
        ValueError: an unknown name.
        TypeError: neither a name nor a Compressor.
    """
    if isinstance(compressor, Compressor):
        return copy.deepcopy(compressor)
    if not isinstance(compressor, str):
        raise TypeError(f"compressor: expected a name or a Compressor object, got {type(compressor).__name__}")
    if compressor not in COMPRESSORS:
        raise ValueError(f"compressor: expected one of {', '.join(COMPRESSORS)}, got {compressor!r}")
    return COMPRESSORS[compressor]()
