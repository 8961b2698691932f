"""Local selection: which entries of a vector a rank sends.

`topk` and `threshold` are plain functions; a Selector is an object that may keep state between calls. With
`Residual.take`, each of them runs in the pass that adds the gradient to the residual. To add a selector, write a file
with a Selector and a line in SELECTORS.
"""

from __future__ import annotations

from sparsecoll.select.base import Selector, Vector, checked
from sparsecoll.select.dgc import SampledThreshold
from sparsecoll.select.gaussian import GaussianK
from sparsecoll.select.hashed import Hashed
from sparsecoll.select.mstopk import MSTopK
from sparsecoll.select.randomk import RandomK
from sparsecoll.select.reuse import ThresholdReuse
from sparsecoll.select.stats import MagnitudeStats
from sparsecoll.select.topk import TopK, threshold, topk

SELECTORS: dict[str, type[Selector]] = {
    "topk": TopK,
    "reuse": ThresholdReuse,
    "dgc": SampledThreshold,
    "mstopk": MSTopK,
    "gaussian": GaussianK,
    "randomk": RandomK,
    "hashed": Hashed,
}

__all__ = [
    "SELECTORS",
    "GaussianK",
    "Hashed",
    "MSTopK",
    "MagnitudeStats",
    "RandomK",
    "SampledThreshold",
    "Selector",
    "ThresholdReuse",
    "TopK",
    "Vector",
    "checked",
    "threshold",
    "topk",
]
