"""The largest of each chunk, on a GPU, or on the host as if it were one: the bits are those of the reference."""

import numpy as np
import pytest
from gpu_cases import all_same, same, values
from hypothesis import HealthCheck, given, settings, strategies as st

from sparsecoll.kernels import reference
from sparsecoll.kernels.keys import Chunks, Pass


def cut(length, chunk, k, shared):
    edges = np.append(np.arange(0, length, chunk), length).astype(np.int64)
    blocks = np.append(np.arange(0, edges.size - 1, shared), edges.size - 1)
    return Chunks(edges, blocks, np.maximum(1, k * np.diff(edges) // chunk))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.sampled_from([0, 1, 300, 2049]),
    chunk=st.sampled_from([64, 500]),
    k=st.sampled_from([1, 16, 64]),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_chunks_equal_the_reference(cp, gpu, dtype, length, chunk, k, seed):
    chunks = cut(length, chunk, k, 3)
    source, addend = (values(np.dtype(dtype), length, seed + d, special=d == 0) for d in (0, 1))
    for x, work in ((source, (None, None)), (np.zeros_like(source), (source, (addend, 0.95))), (addend, (None, None))):
        theirs, mine = x.copy(), cp.asarray(x)
        with np.errstate(all="ignore"):
            wrong, *taken = reference.chunk_topk(theirs, Pass(work[0], add=work[1]), chunks)
        on = [None if work[0] is None else cp.asarray(work[0]), work[1] and (cp.asarray(work[1][0]), work[1][1])]
        found, *own = gpu.chunk_topk(mine, Pass(on[0], add=on[1]), chunks)
        assert found == wrong
        if wrong >= 0:
            continue
        same(mine, theirs)
        all_same(own, taken)
        for add in (False, True):
            starts = chunks.edges[chunks.blocks[:-1]]
            reference.chunk_sum([taken, taken], starts, 3, theirs, add)
            gpu.chunk_sum([own, own], starts, 3, mine, add)
            same(mine, theirs)
