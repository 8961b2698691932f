"""Steps of an optimizer by a sparse gradient, in one pass over memory."""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels import threads
from sparsecoll.kernels.cpu.lanes import jit, prefetch
from sparsecoll.kernels.cpu.sums import end
from sparsecoll.kernels.keys import Array, SgdRule
from sparsecoll.kernels.memory import readonly

PART = 1 << 11  # parameters that stay in the cache between two loops over them
STRIP = 1 << 7  # of them for which the next part's memory is prefetched at a time: adding entries loads none of it
CACHE_LINE = 64  # bytes


@jit
def _prefetch(array, start, stop):  # type: ignore[no-untyped-def]
    """Have the processor load the items from `start` to `stop`, which may be beyond the end."""
    for place in range(start, stop, CACHE_LINE // array.itemsize):
        prefetch(array, place)


@jit
def _add_entries(target, base, indices, values, first, last, factor):  # type: ignore[no-untyped-def]
    for i in range(first, last):
        target[np.uint64(indices[i]) - base] += factor * values[i]


@jit
def _step(  # type: ignore[no-untyped-def]
    params, velocity, indices, values, offset, start, stop, momentum, damped, damped_decay, kept, share, rate
):
    """Update the parameters from `start` to `stop`; factors that are None are of terms that the step does not have."""
    first = end(indices, 0, np.uint64(start) + offset)
    for begin in range(start, stop, PART):
        until = min(begin + PART, stop)
        p, base, last = params[begin:until], np.uint64(begin) + offset, first
        while last < indices.size and np.uint64(indices[last]) < np.uint64(until) + offset:
            last += 1
        if velocity is not None:
            v = velocity[begin:until]
            for begun in range(0, v.size, STRIP):
                _prefetch(velocity, until + begun, until + begun + STRIP)
                strip = v[begun : begun + STRIP]
                for i in range(strip.size):
                    strip[i] *= momentum
            _add_entries(v, base, indices, values, first, last, damped)
            if damped_decay is not None:
                for i in range(v.size):
                    v[i] += damped_decay * p[i]
        if kept is not None:
            for i in range(p.size):
                p[i] *= kept
        if share is not None:
            _add_entries(p, base, indices, values, first, last, share)
        if velocity is not None:
            for begun in range(0, p.size, STRIP):
                _prefetch(params, until + begun, until + begun + STRIP)
                strip, moved = p[begun : begun + STRIP], v[begun : begun + STRIP]
                for i in range(strip.size):
                    strip[i] -= rate * moved[i]
        first = last


def sgd_step(params: Array, velocity: Array | None, indices: Array, values: Array, offset: int, rule: SgdRule) -> None:
    lr, share, decay, momentum, damp, nesterov = rule
    now = velocity is None or nesterov  # whether the gradient itself is added to the parameters
    kept, added = 1 - lr * decay if decay and now else None, -(lr * share) if now else None
    factors = momentum, damp * share, damp * decay if decay else None, kept, added, lr * momentum if nesterov else lr
    typed = [None if factor is None else params.dtype.type(factor) for factor in factors]
    given = params, velocity, readonly(indices), readonly(values), np.uint64(offset)
    threads.run(lambda start, stop: _step(*given, start, stop, *typed), threads.ranges(params.size, PART))
