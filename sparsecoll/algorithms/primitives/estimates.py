"""Expected numbers of messages and entries, by which algorithms are chosen."""

from __future__ import annotations

import math

OVERHEAD = 5e-6  # seconds of a further message in flight at the same time; the magnitude matters, digits do not


def fill_in(n: int, k: float, ranks: float) -> float:
    """Return the expected nnz of the sum of `ranks` uniform, independent supports: n(1 - (1 - k/n)^ranks)."""
    return n * -math.expm1(ranks * math.log1p(-min(k / n, 1 - 1e-12))) if n else 0.0


def rounds(P: int) -> int:
    """Return ceil(log2 P)."""
    return (P - 1).bit_length()
