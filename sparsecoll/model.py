"""The alpha-beta network and each algorithm's closed-form volume, citing paper and equation.

Volumes are words (4 bytes) received by a rank, own part excluded, for COO with float32 values and 32-bit indices.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """A message of m bytes costs alpha + beta * m seconds; a rank sends and receives one message at a time.

    Args:
        alpha: seconds per message.
        beta: seconds per byte (8e-9 for 1 Gb/s).
    """

    alpha: float = 50e-6
    beta: float = 8e-9

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.beta < 0:
            raise ValueError(f"Network: expected alpha >= 0 and beta >= 0, got {self.alpha} and {self.beta}")


def dense_words(n: int, P: int) -> float:
    """2n(P-1)/P: reduce-scatter and allgather (Ok-Topk, Table 1, Dense)."""
    return 2 * n * (P - 1) / P


def allgather_words(k: int, P: int) -> float:
    """2k(P-1): every rank receives every other rank's k entries (Ok-Topk, Table 1, TopkA)."""
    return 2 * k * (P - 1)


def oktopk_words(k: int, P: int) -> tuple[float, float]:
    """(lower, upper) = (2k(P-1)/P, 6k(P-1)/P) (Ok-Topk, Theorem 3.1 and equation (3))."""
    return 2 * k * (P - 1) / P, 6 * k * (P - 1) / P
