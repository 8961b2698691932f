"""Inputs of several ranks, and what the checks share.

Values are small multiples of 1/8, so sums are exact in any order and results can be compared bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from inspect import get_annotations, signature
from typing import Any

import numpy as np

from sparsecoll.vector import SparseVector

RANKS = [1, 2, 3, 5, 8]
N, K = 2003, 60


@contextlib.contextmanager
def case_of(text: str) -> Iterator[None]:
    """Context manager: an error of the enclosed code names the case."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{text}: {type(error).__name__}: {error}") from error


def expect(condition: Any, text: str) -> None:
    """Raise AssertionError with the text unless the condition holds."""
    if not condition:
        raise AssertionError(text)


def check_class(argument: str, part: Any) -> None:
    """Raise TypeError unless a class has a name, and its options are the fields of a dataclass, which ranks compare."""
    kind = type(part)
    if not isinstance(getattr(part, "name", None), str):
        raise TypeError(f"{argument}: expected a class with a string `name`, got {kind.__name__}: add name = '...'")
    options = [f.name for f in fields(kind) if f.init]
    own = [name for base in kind.__mro__ for name in _own_options(base)]
    if sorted(signature(kind).parameters) != sorted(options) or not set(own) <= {f.name for f in fields(kind)}:
        raise TypeError(
            f"{argument}: expected a dataclass, whose options are its fields, got {kind.__name__} with {options}:"
            " add @dataclass, make its options annotated fields, and write no __init__"
        )


def _own_options(base: type) -> list[str]:
    """Return the options that a class annotates without being a dataclass itself."""
    hints = get_annotations(base) if "__dataclass_fields__" not in vars(base) else {}
    return [name for name, hint in hints.items() if "ClassVar" not in str(hint)]


def same_bits(a: SparseVector, b: SparseVector) -> bool:
    """Return whether two vectors are the same to the last bit."""
    mine, theirs = ((x.length, x.dtype, x.indices.tobytes(), x.values.tobytes()) for x in (a, b))
    return mine == theirs


def _random(rank: int, P: int, rng: np.random.Generator) -> Any:
    return rng.choice(N, K, replace=False)


def _disjoint(rank: int, P: int, rng: np.random.Generator) -> Any:
    return rank * (N // P) + rng.choice(N // P, min(K, N // P), replace=False)


DISTRIBUTIONS: dict[str, Callable[[int, int, np.random.Generator], Any]] = {  # indices of one of P ranks
    "random": _random,
    "same_support": lambda rank, P, rng: _random(0, P, np.random.default_rng(7)),
    "disjoint": _disjoint,
    "crossed": lambda rank, P, rng: _disjoint(P - 1 - rank, P, rng),  # all where an even split puts the other end
    "one_region": lambda rank, P, rng: N - 100 + rng.choice(100, K, replace=False),
    "empty_ranks": lambda rank, P, rng: _random(rank, P, rng) if rank % 2 else [],
    "one_rank_has_all": lambda rank, P, rng: _random(rank, P, rng) if rank == P - 1 else [],
    "all_empty": lambda rank, P, rng: [],
    "ties": _random,
    "nnz_below_P": lambda rank, P, rng: rng.choice(N, 2, replace=False),
    "cancelling": lambda rank, P, rng: _random(0, P, np.random.default_rng(3 + rank // 2)),  # to zero, in pairs
}


def case(name: str, rank: int, P: int, dtype: Any = "float32") -> SparseVector:
    """Return the input of one rank, of the distribution of that name."""
    rng = np.random.default_rng([rank, 11])
    indices = np.sort(np.asarray(DISTRIBUTIONS[name](rank, P, rng), np.int64))
    drawn = np.random.default_rng(rank // 2) if name == "cancelling" else rng
    values = drawn.integers(1, 257, indices.size) * drawn.choice([-1, 1], indices.size) / 8
    if name == "ties":
        values = np.ones(indices.size)
    elif name == "cancelling" and rank % 2 == 0:
        values = -values
    return SparseVector(indices, values.astype(dtype), N)
