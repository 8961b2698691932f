"""Inputs that every algorithm must get right, those of the contract and others; `oracles.py` has what comes out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from sparsecoll.testing.cases import DISTRIBUTIONS, RANKS, K, N, case, same_bits

__all__ = ["DISTRIBUTIONS", "DTYPES", "RANKS", "SUPPORTS", "K", "N", "case", "pairwise", "same_bits", "support"]

DTYPES = ["float16", "float32", "float64", "int32", "int64"]


def pairwise(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases in which any two values of different parameters meet: far fewer than all combinations."""
    values, chance, cases = list(map(list, parameters)), random.Random(1), []
    every = [[(i, a) for a in range(len(own))] for i, own in enumerate(values)]
    missing = {pair for axes in itertools.combinations(every, 2) for pair in itertools.product(*axes)}
    while missing:
        one = dict(chance.choice(sorted(missing)))
        for i in set(range(len(values))) - one.keys():
            gains = [sum((min(own, pair), max(own, pair)) in missing for pair in one.items()) for own in every[i]]
            one[i] = chance.choice([a for a, gain in enumerate(gains) if gain == max(gains)])
        missing -= set(itertools.combinations(sorted(one.items()), 2))
        cases.append([one[i] for i in range(len(values))])
    return [tuple(own[a] for own, a in zip(values, one, strict=True)) for one in sorted(cases)]


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
