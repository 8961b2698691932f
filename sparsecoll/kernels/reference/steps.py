"""Steps of an optimizer by a sparse gradient."""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels.keys import Array, SgdRule

__all__ = ["sgd_step"]


def sgd_step(params: Array, velocity: Array | None, indices: Array, values: Array, offset: int, rule: SgdRule) -> None:
    """A step of SGD by a gradient g = share * values + decay * params, in place. All arrays are of one dtype of floats.

    velocity = momentum * velocity + damp * g, and params -= lr * velocity; with Nesterov momentum params -= lr * (g +
    momentum * velocity). Each product is rounded before it is added, in the order given here.

    Args:
        velocity: of the length of `params`; None if there is no momentum: params -= lr * g.
        indices: ascending and unique; values[i] belongs to params[indices[i] - offset].
        offset: at most the first index.
    """
    lr, share, decay, momentum, damp, nesterov = rule
    at = (indices - indices.dtype.type(offset)).astype(np.int64)
    kind = params.dtype.type
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if velocity is not None:
            velocity *= kind(momentum)
            velocity[at] += kind(damp * share) * values
            if decay:
                velocity += kind(damp * decay) * params
        if velocity is None or nesterov:
            if decay:
                params *= kind(1 - lr * decay)
            params[at] -= kind(lr * share) * values
        if velocity is not None:
            params -= kind(lr * momentum if nesterov else lr) * velocity
