"""Inputs that every algorithm must get right, those of the contract and others; `oracles.py` has what comes out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from sparsecoll.testing.cases import DISTRIBUTIONS, RANKS, K, N, case, same_bits

__all__ = ["DISTRIBUTIONS", "RANKS", "SUPPORTS", "K", "N", "case", "pairwise", "same_bits", "support"]


def pairwise(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases in which any two values of different parameters meet: far fewer than all combinations."""
    values, chance, cases = list(map(list, parameters)), random.Random(0), []
    numbers = [(i, a) for i, own in enumerate(values) for a in range(len(own))]
    missing = [pair for pair in itertools.combinations(numbers, 2) if pair[0][0] != pair[1][0]]
    while missing:
        drawn = [[chance.randrange(len(own)) for own in values] for _ in range(20)]
        for new in drawn:
            for i, a in missing[0]:
                new[i] = a
        best = max(drawn, key=lambda new: sum(new[i] == a and new[j] == b for (i, a), (j, b) in missing))
        missing = [((i, a), (j, b)) for (i, a), (j, b) in missing if best[i] != a or best[j] != b]
        cases.append(best)
    return [tuple(own[a] for own, a in zip(values, best, strict=True)) for best in sorted(cases)]


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
