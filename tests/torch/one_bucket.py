"""Reductions of one bucket by a compressor, without an optimizer."""

import numpy as np

from sparsecoll import simulate
from sparsecoll.torch.compressors import StepContext, as_compressor
from sparsecoll.torch.tensors.layout import Layout

OPTIONS = {"bucket_bytes": 6000, "dense_below": 10}  # three or more buckets, vectors among what is compressed


def step(own, transport, gradient):
    """The mean of a step that is taken."""
    out = np.empty_like(gradient) if own.keeps_gradient else gradient
    own.allreduce_mean(transport, gradient, out)
    own.versions.accept()
    own.versions.commit()
    return out


def one(compressor, gradients, steps=1, shapes=None, **world):
    """Means of `steps` reductions of one bucket, on as many ranks as there are gradients, and the bound compressors."""
    shapes = shapes or (gradients[0].shape,)

    def program(comm):
        own = as_compressor(compressor)
        names = tuple(f"p{i}" for i in range(len(shapes)))
        flat = gradients[comm.rank].reshape(-1)
        own.bind(
            Layout(0, (flat.size,), names, shapes, flat.dtype),
            comm.transport,
            StepContext(momenta=lambda some: [0.9] * len(some)),
        )
        results = []
        for _ in range(steps):
            results.append(step(own, comm.transport, flat.copy()))
            own.context.step += 1
        return results, own

    return simulate(len(gradients), program, **world).results


def normal(P, *shape, dtype=np.float32):
    return [np.random.default_rng(rank).standard_normal(shape).astype(dtype) for rank in range(P)]
