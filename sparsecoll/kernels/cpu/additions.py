"""Dense vectors that are added to dense vectors, in one pass over memory."""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels import reference
from sparsecoll.kernels.cpu.lanes import jit
from sparsecoll.kernels.keys import Array, Pass
from sparsecoll.kernels.memory import readonly

ADDED = tuple(map(np.dtype, ("float32", "float64", "int32", "int64")))  # dtypes that these kernels take


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


def form(values: Array, work: Pass) -> None:
    start, momentum, add, _ = work
    if values.dtype not in ADDED or (add is not None and add[0].dtype not in ADDED):
        reference.form(values, work)
        return
    start = values if start is None else start
    if momentum is not None and momentum.nesterov:
        reference.form(values, work._replace(add=None))
        start = values
    elif momentum is not None:
        velocity, factor, new_velocity, _ = momentum
        _accumulate_into(readonly(start), readonly(velocity), values.dtype.type(factor), new_velocity)
        start = new_velocity
    if add is None:
        if start is not values:
            values[:] = start
    elif start is values:
        _accumulate(values, readonly(add[0]), values.dtype.type(add[1]))
    else:
        _accumulate_into(readonly(start), readonly(add[0]), values.dtype.type(add[1]), values)
