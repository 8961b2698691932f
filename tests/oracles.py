"""What each algorithm must give, on dense arrays; one that is approximate in its own way has an entry in EXPECTED."""

from __future__ import annotations

import numpy as np

from sparsecoll import ALGORITHMS, SparseVector
from sparsecoll.testing.algorithms import oracle_top, top_k_of_sum


def exact_sum(inputs: list[SparseVector], k: int) -> np.ndarray:
    return np.sum([x.to_dense() for x in inputs], axis=0, dtype=inputs[0].dtype)


def add_top(a: np.ndarray, b: np.ndarray, k: int) -> np.ndarray:
    return oracle_top((a.astype(np.float64) + b).astype(a.dtype), k)


def gtopk(inputs: list[SparseVector], k: int) -> np.ndarray:
    """A binomial tree that truncates each partial sum."""
    held, distance = [oracle_top(x.to_dense(), k) for x in inputs], 1
    while distance < len(inputs):
        for rank in range(0, len(inputs) - distance, 2 * distance):
            held[rank] = add_top(held[rank], held[rank + distance], k)
        distance *= 2
    return held[0]


def spardl(inputs: list[SparseVector], k: int) -> np.ndarray:
    """Blocks, each truncated after every step of the reduce-scatter."""
    P, n = len(inputs), inputs[0].length
    edges = [n * j // P for j in range(P + 1)]
    share = [k * (j + 1) // P - k * j // P for j in range(P)]
    vectors = [x.to_dense() for x in inputs]
    held = [[oracle_top(x[edges[j] : edges[j + 1]], share[j]) for j in range(P)] for x in vectors]
    for distance in [2**t for t in reversed(range((P - 1).bit_length()))]:
        before = [list(blocks) for blocks in held]
        for rank in range(P):
            for offset in range(distance, min(2 * distance, P)):
                to, block = (rank + distance) % P, (rank + offset) % P
                held[to][block] = add_top(before[to][block], before[rank][block], share[block])
    return np.concatenate([held[j][j] for j in range(P)])


def cltk(inputs: list[SparseVector], k: int) -> np.ndarray:
    """The sum at the top k of rank 0, which leads in the first call."""
    return np.where(oracle_top(inputs[0].to_dense(), k) != 0, exact_sum(inputs, k), 0).astype(inputs[0].dtype)


EXPECTED = {"gtopk": gtopk, "cltk": cltk, "spardl": spardl}
BY_SEMANTICS = {"exact_sum": exact_sum, "top_k_of_sum": top_k_of_sum}


def oracle(inputs: list[SparseVector], algo: str, k: int) -> np.ndarray:
    """The expected dense result of one allreduce by the algorithm of that name."""
    return (EXPECTED.get(algo) or BY_SEMANTICS[ALGORITHMS[algo]().semantics])(inputs, k)
