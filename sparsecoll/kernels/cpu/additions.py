"""Dense vectors that are added to dense vectors, in one pass over memory."""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels import reference
from sparsecoll.kernels.cpu.lanes import jit
from sparsecoll.kernels.keys import Addend, Array
from sparsecoll.kernels.memory import readonly

ADDED = tuple(map(np.dtype, ("float32", "float64", "int32", "int64")))  # dtypes that these kernels take
PART = 1 << 11  # items that stay in the cache between two loops over them


@jit
def add_range(values, addend, scale, start, stop):  # type: ignore[no-untyped-def]
    target, source = values[start:stop], addend[start:stop]  # slices: plain loops over them are vectorised
    for i in range(target.size):
        target[i] += scale * values.dtype.type(source[i])


@jit
def sum_range(values, addend, scale, out, start, stop):  # type: ignore[no-untyped-def]
    target, first, second = out[start:stop], values[start:stop], addend[start:stop]
    for i in range(target.size):
        target[i] = first[i] + scale * out.dtype.type(second[i])


@jit
def _accumulate(values, addend, scale):  # type: ignore[no-untyped-def]
    add_range(values, addend, scale, 0, values.size)


@jit
def _accumulate_into(values, addend, scale, out):  # type: ignore[no-untyped-def]
    sum_range(values, addend, scale, out, 0, out.size)


@jit
def velocity_range(velocity, gradient, factor, new_velocity, start, stop):  # type: ignore[no-untyped-def]
    target, first, second = new_velocity[start:stop], velocity[start:stop], gradient[start:stop]
    for i in range(target.size):
        target[i] = factor * (first[i] + second[i])


@jit
def _nesterov(velocity, factor, new_velocity, values):  # type: ignore[no-untyped-def]
    for start in range(0, values.size, PART):
        stop = min(start + PART, values.size)
        velocity_range(velocity, values, factor, new_velocity, start, stop)
        add_range(values, new_velocity, values.dtype.type(1), start, stop)


@jit
def _nesterov_into(velocity, gradient, factor, new_velocity, out):  # type: ignore[no-untyped-def]
    for start in range(0, out.size, PART):
        stop = min(start + PART, out.size)
        velocity_range(velocity, gradient, factor, new_velocity, start, stop)
        sum_range(gradient, new_velocity, out.dtype.type(1), out, start, stop)


def accumulate(values: Array, add: Addend, out: Array | None = None) -> None:
    addend, scale = add
    if values.dtype not in ADDED or addend.dtype not in ADDED:
        reference.accumulate(values, add, out)
    elif out is not None:
        _accumulate_into(readonly(values), readonly(addend), values.dtype.type(scale), out)
    else:
        _accumulate(values, addend, values.dtype.type(scale))


def nesterov(velocity: Array, gradient: Array, factor: float, new_velocity: Array, out: Array) -> None:
    typed = out.dtype.type(factor)
    if out.dtype not in ADDED:
        reference.nesterov(velocity, gradient, factor, new_velocity, out)
    elif out is gradient:
        _nesterov(readonly(velocity), typed, new_velocity, out)
    else:
        _nesterov_into(readonly(velocity), readonly(gradient), typed, new_velocity, out)
