"""Inputs of several ranks, and what the checks share.

Values are small multiples of 1/8, so sums are exact in any order and results can be compared bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from inspect import signature
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
    """Return what a class that is no dataclass itself annotates."""
    hints = vars(base).get("__annotations__", {}) if "__dataclass_fields__" not in vars(base) else {}
    return [name for name, hint in hints.items() if "ClassVar" not in str(hint)]


def same_bits(a: SparseVector, b: SparseVector) -> bool:
    """Return whether two vectors are the same to the last bit."""
    return (
        a.length == b.length
        and a.dtype == b.dtype
        and a.indices.tobytes() == b.indices.tobytes()
        and a.values.tobytes() == b.values.tobytes()
    )


def _values(rng: np.random.Generator, size: int, dtype: np.dtype[Any]) -> Any:
    return (rng.integers(1, 257, size) * rng.choice([-1, 1], size) / 8).astype(dtype)


def _vector(indices: Any, values: Any) -> SparseVector:
    return SparseVector(np.sort(np.asarray(indices, np.int64)), values, N)


def _random(rank: int, P: int, rng: Any, dtype: Any) -> SparseVector:
    return _vector(rng.choice(N, K, replace=False), _values(rng, K, dtype))


def _same_support(rank: int, P: int, rng: Any, dtype: Any) -> SparseVector:
    return _vector(np.random.default_rng(7).choice(N, K, replace=False), _values(rng, K, dtype))


def _disjoint(rank: int, P: int, rng: Any, dtype: Any) -> SparseVector:
    width = N // P
    size = min(K, width)
    return _vector(rank * width + rng.choice(width, size, replace=False), _values(rng, size, dtype))


def _crossed(rank: int, P: int, rng: Any, dtype: Any) -> SparseVector:
    """Disjoint, and everything lies where an even split puts the other end."""
    return _disjoint(P - 1 - rank, P, rng, dtype)


def _one_region(rank: int, P: int, rng: Any, dtype: Any) -> SparseVector:
    return _vector(N - 100 + rng.choice(100, K, replace=False), _values(rng, K, dtype))


def _empty_ranks(rank: int, P: int, rng: Any, dtype: Any) -> SparseVector:
    return SparseVector.empty(N, dtype) if rank % 2 == 0 else _random(rank, P, rng, dtype)


def _one_rank_has_all(rank: int, P: int, rng: Any, dtype: Any) -> SparseVector:
    return _random(rank, P, rng, dtype) if rank == P - 1 else SparseVector.empty(N, dtype)


def _all_empty(rank: int, P: int, rng: Any, dtype: Any) -> SparseVector:
    return SparseVector.empty(N, dtype)


def _ties(rank: int, P: int, rng: Any, dtype: Any) -> SparseVector:
    return _vector(rng.choice(N, K, replace=False), np.ones(K, dtype))


def _nnz_below_P(rank: int, P: int, rng: Any, dtype: Any) -> SparseVector:
    return _vector(rng.choice(N, 2, replace=False), _values(rng, 2, dtype))


def _cancelling(rank: int, P: int, rng: Any, dtype: Any) -> SparseVector:
    """Neighbours cancel each other to zero."""
    indices = np.random.default_rng(3 + rank // 2).choice(N, K, replace=False)
    values = _values(np.random.default_rng(rank // 2), K, dtype)
    return _vector(indices, values if rank % 2 else -values)


_MADE = (
    *(_random, _same_support, _disjoint, _crossed, _one_region, _empty_ranks, _one_rank_has_all, _all_empty, _ties),
    *(_nnz_below_P, _cancelling),
)
DISTRIBUTIONS: dict[str, Callable[..., SparseVector]] = {made.__name__[1:]: made for made in _MADE}


def case(name: str, rank: int, P: int, dtype: Any = "float32") -> SparseVector:
    """Return the input of one rank, of the distribution of that name."""
    return DISTRIBUTIONS[name](rank, P, np.random.default_rng([rank, 11]), np.dtype(dtype))
