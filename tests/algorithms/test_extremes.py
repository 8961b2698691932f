"""The largest and the smallest values of every dtype, in every algorithm and selector."""

import numpy as np
import pytest
from cases import same_bits

import sparsecoll
from sparsecoll import ALGORITHMS, SparseVector, select, simulate
from sparsecoll.algorithms import as_algorithm
from sparsecoll.kernels import reference
from sparsecoll.vector import VALUE_DTYPES

P = 4
SELECTORS = ("TopK", "ThresholdReuse", "SampledThreshold", "GaussianK")


@pytest.fixture(params=VALUE_DTYPES)
def values(request):
    """Each extreme value several times, in random order."""
    finfo = pytest.importorskip("ml_dtypes").finfo if request.param == "bfloat16" else np.finfo
    dtype = np.dtype(request.param)
    if dtype.kind in "bui":
        info = np.iinfo(np.int8 if dtype.kind == "b" else dtype)
        drawn = [info.max, info.max - 1, info.max // 2 + 1, 1, 2]
        drawn += [info.min, info.min + 1, -1] if dtype.kind == "i" else []
    else:
        info = finfo(dtype)
        drawn = [info.max, info.min, 1, -1, info.tiny, info.smallest_subnormal, -info.smallest_subnormal]
        drawn += [complex(0, x) for x in drawn] if dtype.kind == "c" else []
    return np.random.default_rng(0).permutation(np.repeat(np.array(drawn, dtype), 4))


def largest(x, k):
    """The k largest entries, by the specification."""
    return SparseVector(*reference.topk(x.values, k, indices=x.indices), x.length)


@pytest.mark.parametrize("algo", [*ALGORITHMS, "hierarchical with oktopk"])
def test_every_algorithm_delivers_extreme_values_as_they_are(algo, values):
    """No index is on two ranks: an entry arrives as it is, or not at all."""
    total = SparseVector(np.arange(values.size) * 3, values, 3 * values.size)
    inputs = [total.take(np.arange(rank, total.nnz, P)) for rank in range(P)]
    for k in (None, 5, total.nnz):

        def program(comm, k=k):
            kind = as_algorithm(algo) if algo in ALGORITHMS else sparsecoll.Hierarchical(inner="oktopk")
            return [sparsecoll.allreduce(comm, inputs[comm.rank], kind, k=k) for _ in range(2)], kind.semantics

        results = simulate(P, program, ranks_per_node=2).results
        for (first, second), semantics in results:
            for y in (first, second):
                assert same_bits(y, total.take(np.searchsorted(total.indices, y.indices)))
                assert same_bits(y, results[0][0][y is second])
            entered = [x if k is None else largest(x, k) for x in inputs]
            entered = total.take(np.sort(np.concatenate([x.indices // 3 for x in entered])).astype(np.int64))
            if semantics == "exact_sum":
                assert same_bits(first, entered)
            if semantics == "top_k_of_sum":
                assert same_bits(first, largest(entered, k or inputs[0].nnz))


@pytest.mark.parametrize("selector", SELECTORS)
def test_every_selector_selects_among_extreme_values(selector, values):
    x = SparseVector(np.arange(values.size), values, values.size)
    for given in (x, values):
        own = getattr(select, selector)()
        for k in (1, 5, values.size // 2, values.size):
            chosen = own.select(sparsecoll.as_vector(given), k)
            assert same_bits(chosen, x.take(chosen.indices))
            if selector == "TopK":
                assert same_bits(chosen, largest(x, k))
