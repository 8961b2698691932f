"""Local selection: which entries of a vector a rank sends.

`topk` and `threshold` are plain functions; a Selector is an object that may keep state between calls. With
`Residual.take`, each of them runs in the pass that adds the gradient to the residual. To add a selector, write a file
with a Selector and a line in SELECTORS.
"""

from __future__ import annotations

from sparsecoll.select.base import Selector as Selector, Vector as Vector, checked as checked
from sparsecoll.select.dgc import SampledThreshold as SampledThreshold
from sparsecoll.select.gaussian import GaussianK as GaussianK
from sparsecoll.select.randomk import RandomK as RandomK
from sparsecoll.select.reuse import ThresholdReuse as ThresholdReuse
from sparsecoll.select.stats import MagnitudeStats as MagnitudeStats
from sparsecoll.select.topk import TopK as TopK, threshold as threshold, topk as topk

SELECTORS: dict[str, type[Selector]] = {
    "topk": TopK,
    "reuse": ThresholdReuse,
    "dgc": SampledThreshold,
    "gaussian": GaussianK,
    "randomk": RandomK,
}
