"""Inputs that every algorithm must get right, those of the contract and others; `oracles.py` has what comes out."""

from __future__ import annotations

import numpy as np

from sparsecoll.testing.cases import DISTRIBUTIONS, RANKS, K, N, case, same_bits

__all__ = ["DISTRIBUTIONS", "RANKS", "SUPPORTS", "K", "N", "case", "same_bits", "support"]


def support(name: str, rank: int, P: int, k: int, rng: np.random.Generator, n: int) -> np.ndarray:
    """Positions of k entries of one rank, for measurements of volume."""
    if name == "random":
        return np.sort(rng.choice(n, k, replace=False))
    if name == "same":
        return np.sort(np.random.default_rng(5).choice(n, k, replace=False))
    if name == "disjoint":
        return rank * (n // P) + np.sort(rng.choice(n // P, min(k, n // P), replace=False))
    if name == "crossed":
        return support("disjoint", P - 1 - rank, P, k, rng, n)
    if name == "one_region":
        return n - 2 * k + np.sort(rng.choice(2 * k, k, replace=False))
    if name == "skewed":
        return np.unique((n * rng.random(2 * k) ** 4).astype(np.int64))[:k]
    if name == "one_rank":
        return support("random", rank, P, k if rank == 0 else 0, rng, n)
    assert name == "nnz_below_P"
    return support("random", rank, P, min(k, 2), rng, n)


SUPPORTS = ["random", "same", "disjoint", "crossed", "one_region", "skewed", "one_rank", "nnz_below_P"]
