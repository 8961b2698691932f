"""Selection by hashing (Wang, Xu, Wu, Shrivastava, Ng, "DRAGONN", ICML 2022, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparsecoll.formats import Slots
from sparsecoll.select.base import Selector, Vector
from sparsecoll.select.dgc import SampledThreshold
from sparsecoll.select.randomk import mix
from sparsecoll.vector import SparseVector


@dataclass
class Hashed(Selector):
    """Entries above a threshold that find a slot of their own: the others wait in the residual.

    1. `threshold` chooses about k entries (the paper takes a threshold as given; by default DGC's sampled one).
    2. Each is written to one of m slots by a hash of its index; later entries overwrite earlier ones.
    3. What the slots hold then is selected. Every call hashes anew, so that no entry is starved.

    Args:
        m: slots; None: k.
        seed: of the hash functions.
    """

    name = "hashed"

    m: int | None = None
    seed: int = 0
    threshold: Selector = field(default_factory=SampledThreshold)
    _calls: int = field(default=0, init=False, repr=False)

    def select(self, x: Vector, k: int) -> SparseVector:
        chosen = self.threshold.select(x, k)
        form = Slots(self.m or max(k, 1), mix(self.seed, self._calls))
        self._calls += 1
        return form.arriving(chosen)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls, "threshold": self.threshold.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._calls = state["calls"]
        self.threshold.load_state_dict(state["threshold"])
