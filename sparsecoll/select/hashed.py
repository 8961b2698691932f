"""Selection by hashing (Wang, Xu, Wu, Shrivastava, Ng, "DRAGONN", ICML 2022, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsecoll.formats import SlotsFormat
from sparsecoll.select.base import Selector, Vector
from sparsecoll.select.dgc import SampledThreshold
from sparsecoll.select.randomk import mix
from sparsecoll.vector import SparseVector


@dataclass
class Hashed(Selector):
    """Select the entries above a threshold that get a slot by hashing; the others stay in the residual.

    1. `threshold` chooses about k entries (the paper assumes that a threshold is given).
    2. Each is written to one of m slots by a hash of its index; later entries overwrite earlier ones.
    3. The entries that are left in the slots are selected. Every call uses another hash function, so that every entry
       is selected eventually.

    Args:
        m: number of slots; None, the default, for k.
        seed: seed of the hash functions (default: 0).
        threshold: the selector of step 1 (default: SampledThreshold()).
    """

    name = "hashed"

    m: int | None = None
    seed: int = 0
    threshold: Selector = field(default_factory=SampledThreshold)
    _calls: int = field(default=0, init=False, repr=False)

    def select(self, x: Vector, k: int) -> SparseVector:
        chosen = self.threshold.select(x, k)
        form = SlotsFormat(self.m or max(k, 1), mix(self.seed, self._calls))
        self._calls += 1
        return form.roundtrip(chosen)
