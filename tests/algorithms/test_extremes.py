"""The largest and the smallest values of every dtype, in every algorithm and selector."""

import copy

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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_keeps_what_rounding_takes_from_sums_of_halves(dtype, size, nodes):
    """Sums beyond the largest value, and of a large and a small one."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    kinds = [name for name in ALGORITHMS if name not in ("lowbit", "spardl")]
    objects = [sparsecoll.SparCML(variant=variant) for variant in ("recursive_double", "split_allgather", "dynamic")]
    objects += [sparsecoll.Hierarchical(inner=inner) for inner in ("allgather", "oktopk", "sparcml")]
    for algo in [*map(as_algorithm, kinds), *objects]:

        def program(comm, algo=algo):
            large = [40000.0, [2048.0, 1.0][comm.rank % 2], -40000.0 * (comm.rank == 1), 3.0 + comm.rank]
            x = SparseVector([0, 1, 5, 9], np.array(large).astype(dtype), 12)
            y = sparsecoll.allreduce(comm, x, copy.deepcopy(algo), k=4, return_reduction=True)
            return y.value.to_dense().astype(np.float64), y.contributed.to_dense().astype(np.float64)

        results = simulate(size, program, ranks_per_node=nodes).results
        entered = sum(contributed for _, contributed in results)
        for value, _ in results:
            np.testing.assert_array_equal(value, entered, err_msg=repr(algo))


@pytest.mark.parametrize("algo", [name for name in ALGORITHMS if name != "lowbit"])
def test_float16_in_bfloat16_stays_finite(algo):
    """bfloat16 has larger values, which float16 would read as infinity."""

    def program(comm):
        x = SparseVector([0, 1, 2], np.array([65504, -65408, 40000], np.float16), 4)
        y = sparsecoll.allreduce(comm, x, algo, k=3, value_dtype="bfloat16", return_reduction=True)
        return y.value, y.contributed

    results = simulate(3, program).results
    for value, contributed in results:
        assert np.isfinite(value.values).all() and np.isfinite(contributed.to_dense()).all()
        assert same_bits(value, results[0][0]) and value.values[2] > 0
