"""The contract by property: any algorithm, format, dtype, P, n, distribution, k and op.

SPARSECOLL_FUZZ sets the number of cases (`make fuzz`: 20,000). What it finds becomes a test with a name below.
"""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import sparsecoll
from sparsecoll import ALGORITHMS, SparseVector, formats, simulate
from sparsecoll.algorithms import Auto, Hierarchical, as_algorithm
from sparsecoll.transport.network import Network

CASES = int(os.environ.get("SPARSECOLL_FUZZ", "200"))
FUZZ = settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
LOSSLESS = [name for name, form in formats.FORMATS.items() if not form.lossy]
SPANNING = ("dense", "bitmap")  # formats, and an algorithm, that take room for all coordinates
WIDE = 2**33 + 17
DISTRIBUTIONS = ("random", "same", "disjoint", "one region", "empty ranks", "one rank", "ties", "few", "cancelling")


def support(rng, name, rank, P, n, nnz):
    """Ascending coordinates of one rank."""
    low, high = 0, n
    if name == "one region":
        low = max(0, n - max(1, n // 50))
    elif name == "disjoint":
        low, high = n * rank // P, n * (rank + 1) // P
    elif (name == "empty ranks" and rank % 2 == 0) or (name == "one rank" and rank != P - 1):
        return np.empty(0, np.int64)
    elif name == "few":
        nnz = min(nnz, 2)
    if name in ("same", "cancelling"):
        rng = np.random.default_rng([nnz, rank // 2 if name == "cancelling" else 0])
    width = high - low
    if width > 10**6:
        return np.unique(low + rng.integers(0, width, nnz))
    return low + np.sort(rng.choice(width, min(nnz, width), replace=False)).astype(np.int64)


def vector(seed, name, rank, P, n, nnz, dtype):
    """One rank's input. Values are such that sums are exact in any order, in float16 too."""
    rng = np.random.default_rng([seed, rank])
    indices = support(rng, name, rank, P, n, nnz)
    if name == "ties":
        values = np.ones(indices.size)
    elif name == "cancelling":
        values = np.random.default_rng([seed, rank // 2]).integers(1, 60, indices.size) * (-1) ** rank
    else:
        values = rng.integers(1, 60, indices.size) * rng.choice([-1, 1], indices.size)
    return SparseVector(indices, values.astype(dtype), n)


@st.composite
def cases(draw):
    algo = draw(st.sampled_from(list(ALGORITHMS)))
    P = draw(st.integers(1, 17))
    n = draw(st.sampled_from([0, 1, 2, P - 1, P, P + 1, 63, 257, 2003, 20_001, WIDE]))
    format = draw(st.sampled_from(["auto", *LOSSLESS]))
    if n == WIDE and (algo == "dense" or format in SPANNING):
        algo, format = "allgather", "auto"
    nnz = draw(st.sampled_from([0, 1, P - 1, P, 40, 300]))
    return {
        "algo": algo,
        "P": P,
        "n": n,
        "nnz": min(nnz, n),
        "name": draw(st.sampled_from(DISTRIBUTIONS)),
        "dtype": draw(st.sampled_from(["float16", "float32", "float64", "int32", "int64"])),
        "format": format,
        "value_dtype": draw(st.sampled_from([None, None, None, "float16", "bfloat16"])),
        "k": draw(st.sampled_from([None, None, 0, 1, P, 17, 10**6])),
        "op": draw(st.sampled_from(["sum", "sum", "mean"])),
        "per_node": draw(st.sampled_from([1, 1, 2, 5])),
        "calls": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 2**20)),
    }


def make(algo):
    """An object, so that state is kept between the calls of a case."""
    if algo == "auto":
        return Auto(network=Network())
    return Hierarchical(inner="allgather") if algo == "hierarchical" else as_algorithm(algo)


def compact(vectors):
    """The union of all supports, and the vectors as arrays over it."""
    union = np.unique(np.concatenate([v.indices for v in vectors] + [np.empty(0, np.int64)]))
    dense = []
    for v in vectors:
        row = np.zeros(union.size, np.float64)
        row[np.searchsorted(union, v.indices)] = v.values
        dense.append(row)
    return union, np.array(dense).reshape(len(vectors), union.size)


def top(row, k):
    """All but the k largest magnitudes zero; ties by lower index."""
    order = np.lexsort((np.arange(row.size), -np.abs(row)))
    kept = np.zeros_like(row)
    kept[order[:k]] = row[order[:k]]
    return kept


def check(algo, P, n, nnz, name, dtype, format, value_dtype, k, op, per_node, calls, seed):
    inputs = [vector(seed, name, rank, P, n, nnz, dtype) for rank in range(P)]
    before = [(x.indices.tobytes(), x.values.tobytes()) for x in inputs]
    op = op if np.dtype(dtype).kind == "f" else "sum"
    if np.dtype(dtype).kind != "f" or (dtype == "float16" and value_dtype == "bfloat16"):
        value_dtype = None

    def program(comm):
        algorithm = make(algo)
        for _ in range(calls):
            reduction = sparsecoll.allreduce(
                comm,
                inputs[comm.rank],
                algorithm,
                k=k,
                format=format,
                value_dtype=value_dtype,
                op=op,
                return_reduction=True,
            )
        return reduction

    results = simulate(P, program, ranks_per_node=per_node).results
    assert before == [(x.indices.tobytes(), x.values.tobytes()) for x in inputs]
    values, contributed = [r.value for r in results], [r.contributed for r in results]
    for v in values:
        assert (v.indices.tobytes(), v.values.tobytes()) == (values[0].indices.tobytes(), values[0].values.tobytes())
        assert v.length == n and v.dtype == np.dtype(dtype)
        assert (np.diff(v.indices.astype(np.int64)) > 0).all() and (not v.nnz or int(v.indices[-1]) < n)
    _, rows = compact([*inputs, values[0], *contributed])
    scale = 1 / P if op == "mean" else 1.0
    given_, value, entered = rows[:P], rows[P], rows[P + 1 :].sum(axis=0) * scale
    tolerance = 2e-3 if dtype == "float16" or value_dtype else 1e-6
    assert np.allclose(entered, value, rtol=tolerance, atol=tolerance if op == "mean" or value_dtype else 0)
    if value_dtype is not None:
        return
    semantics = as_algorithm(algo).semantics
    used = max(x.nnz for x in inputs) if k is None else k
    exactly = [row if k is None else top(row, k) for row in given_]
    if algo == "dense" and k is None:
        used = n
    total = np.sum(exactly, axis=0)
    if semantics == "approximate_top_k":
        assert np.count_nonzero(value) <= used
        return
    expected = total if semantics == "exact_sum" or algo == "hierarchical" else top(total, used)
    if algo == "oktopk" and calls > 1:  # thresholds are reused: about k entries of about k entries
        held = value != 0
        assert held.sum() <= max(1.1 * used + 1, np.count_nonzero(expected))
        if k is None:  # nothing was left out by the ranks: what arrives are whole sums
            assert np.allclose(value[held], total[held] * scale, rtol=1e-3 if op == "mean" else 0, atol=0)
        return
    assert np.allclose(value, expected * scale, rtol=1e-3 if op == "mean" else 0, atol=0)


@FUZZ
@given(cases())
def test_the_contract_holds(case):
    check(**case)


CASE = {
    "algo": "allgather",
    "P": 3,
    "n": 257,
    "nnz": 40,
    "name": "random",
    "dtype": "float32",
    "format": "auto",
    "value_dtype": None,
    "k": None,
    "op": "sum",
    "per_node": 1,
    "calls": 1,
    "seed": 0,
}


FOUND = {
    "oktopk gave back float16 where values travelled as float16": {"algo": "oktopk", "P": 1, "value_dtype": "float16"},
    "sparcml's recursive doubling kept zeros on some ranks": {
        "algo": "sparcml",
        "n": 2,
        "nnz": 1,
        "name": "cancelling",
        "format": "dense",
    },
    "gtopk kept zeros on some ranks": {
        "algo": "gtopk",
        "P": 2,
        "n": 1,
        "nnz": 1,
        "name": "cancelling",
        "format": "dense",
    },
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name):
    check(**CASE | FOUND[name])


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_property_itself_can_fail(algo):
    """A sum that misses a rank is not taken for right."""
    check(**CASE | {"algo": algo})
    real = sparsecoll.SparseVector.merge

    def wrong(parts, *arguments):
        return real(list(parts)[: max(1, len(parts) - 1)], *arguments)

    if algo in ("dense", "auto", "cltk"):  # which add dense values
        return
    sparsecoll.SparseVector.merge = wrong
    try:
        with pytest.raises(AssertionError):
            check(**CASE | {"algo": algo})
    finally:
        sparsecoll.SparseVector.merge = real
