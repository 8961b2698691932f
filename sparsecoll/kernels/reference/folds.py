"""Folds: values of the same coordinate combined by an operation other than the sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsecoll.kernels.keys import Array

__all__ = ["fold_into", "merge_fold"]

FOLDS = ("min", "max", "prod", "and", "or", "xor", "differ", "last")


def fold_into(dense: Array, other: Array, fold: str) -> None:
    """dense = dense combined with other, item by item, in place. Both have the same dtype.

    Args:
        fold: "min" or "max", in which -0 is below +0; "prod"; "and", "or" or "xor" of the bits of integers; "differ", 1
            where exactly one of two values is not zero; "last", the value of `other`. A NaN that "min", "max" or "prod"
            of floats gives is np.nan.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        dense[:] = _combined(dense, other, fold)


def _combined(a: Array, b: Array, fold: str) -> Array:
    if fold == "differ":
        return (a != 0) != (b != 0)  # type: ignore[no-any-return]
    if fold == "last":
        return b
    if fold in ("min", "max"):
        zeros = np.signbit(b if fold == "min" else a) & (a == b) if a.dtype.kind == "f" else False
        combined: Array = np.where(((b < a) if fold == "min" else (b > a)) | zeros, b, a)
        if a.dtype.kind == "f":
            combined[np.isnan(a)] = np.nan
    elif fold == "prod" and a.dtype.kind == "c":  # each product and sum is rounded
        combined = np.empty_like(a)
        combined.real = a.real * b.real - a.imag * b.imag
        combined.imag = a.real * b.imag + a.imag * b.real
    else:
        combined = {"prod": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[fold](a, b)
    if a.dtype.kind == "f":
        combined[np.isnan(combined) | np.isnan(b)] = np.nan
    return combined


def merge_fold(parts: Sequence[tuple[Array, Array]], fold: str, zeros: bool) -> tuple[Array, Array]:
    """Sparse vectors given as (ascending unique indices, values of one dtype), combined in the order of `parts`.

    Returns (indices, values): those of an index that one part alone has are its own.

    Args:
        fold: as in `fold_into`.
        zeros: whether a value is also combined with zero, at last, if some part does not have the index.
    """
    indices, given = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    order = np.argsort(indices, kind="stable")
    indices = indices[order]
    starts = np.flatnonzero(np.diff(indices, prepend=~indices[:1]))
    counts, values = np.diff(starts, append=order.size), given[order[starts]]

    def combine(at: Array, others: Array) -> None:
        own = values[at]
        fold_into(own, others, fold)
        values[at] = own

    for number in range(1, len(parts)):
        at = np.flatnonzero(counts > number)
        combine(at, given[order[starts[at] + number]])
    if zeros:
        lacking = np.flatnonzero(counts < len(parts))
        combine(lacking, np.zeros_like(values[lacking]))
    return indices[starts], values
