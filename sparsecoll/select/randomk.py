"""Random-k: the same random coordinates on every rank, so that indices need not be sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsecoll.errors import check_integer
from sparsecoll.select.base import Selector, Vector, check_order
from sparsecoll.vector import SparseVector

_MASK = 2**64 - 1


def mix(seed: int, step: int) -> int:
    """Hash a seed and a step to 64 bits (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators")."""
    z = (int(seed) * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@dataclass
class RandomK(Selector):
    """Select k random coordinates, uniformly and without repetition; the same on every rank with the same seed.

    All values at these coordinates are kept, also zeros, so that the vectors of all ranks have the same indices. Sum
    their values with algo="dense", and no index is sent. The choice depends on the seed and the number of the call
    only; NumPy's generators are not used.

    Args:
        seed: must be the same on all ranks (default: 0).

    Raises:
        TypeError: `seed` is not an integer.
    """

    name = "randomk"

    seed: int = 0
    _calls: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_integer("seed", self.seed)

    def select(self, x: Vector, k: int) -> SparseVector:
        k, key = check_integer("k", k, 0), mix(self.seed, self._calls)
        self._calls += 1
        return check_order(x.random_entries(k, key))
