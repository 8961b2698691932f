"""Operations other than the sum: every one on every type and algorithm that offers it, against NumPy."""

import itertools

import numpy as np
import pytest
from cases import same_bits
from contract import EXACT, expected_of, input_of, offered

import sparsecoll
from sparsecoll import ALGORITHMS, RowSparse, SparseVector, simulate
from sparsecoll.vector import VALUE_DTYPES
from sparsecoll.vector.operation import OPERATIONS

DTYPES = [name for name in VALUE_DTYPES if name != "bfloat16"]
OTHERS = [name for name in ALGORITHMS if name not in EXACT]
OBJECTS = [sparsecoll.SparCML(variant="recursive_double"), sparsecoll.SparCML(variant="dynamic")]
OBJECTS += [sparsecoll.DenseStream(repartition="even"), sparsecoll.Hierarchical(inner="dense")]
CALLS = [*EXACT, *OBJECTS, sparsecoll.reduce, sparsecoll.reduce_scatter]
CASES = [(*c, d) for c in itertools.product(OPERATIONS, ("ignore", "zero")) for d in DTYPES if offered(c[0], d)]


def called(comm, x, call, op, missing):
    if callable(call) and not isinstance(call, sparsecoll.Algorithm):
        return call(comm, x, op=op, missing=missing)
    return sparsecoll.allreduce(comm, x, call, op=op, missing=missing)


@pytest.mark.parametrize("P", range(1, 10))
def test_every_operation_on_every_type_and_algorithm(P):
    """Among the cases are all (operation, missing, type), each with two calls, and all (call, missing, P)."""
    every = [(case, CALLS[(n + shift) % len(CALLS)]) for n, case in enumerate(CASES) for shift in (0, 5)]
    chosen = every[P - 1 :: 9]
    for n, call in enumerate(CALLS):
        ops = ["prod", "min", "max", "bitwise_and", "logical_and", "replace"]
        chosen += [((ops[(n + P) % 6], missing, "int64"), call) for missing in ("ignore", "zero")]
        chosen += [(("min", "zero", "float64"), call)]
    inputs = {dtype: [input_of(rank, P, dtype) for rank in range(P)] for dtype in DTYPES}

    def program(comm):
        return [called(comm, inputs[dtype][comm.rank], call, op, missing) for (op, missing, dtype), call in chosen]

    results = simulate(P, program, ranks_per_node=2).results
    for (case, call), found in zip(chosen, zip(*results, strict=True), strict=True):
        op, missing, dtype = case
        union, values = expected_of(inputs[dtype], op, missing)
        if call is sparsecoll.reduce_scatter:
            found = [SparseVector.concatenate(found)]
        for y in found[:1] if call is sparsecoll.reduce else found:
            assert y.dtype == dtype and same_bits(y, found[0]), (case, call)
            np.testing.assert_array_equal(y.indices, union, str((case, call)))
            np.testing.assert_array_equal(y.values, values, str((case, call)))


def refused(op, dtype="float64", algo="auto", call=sparsecoll.allreduce, **options):
    """The error that all ranks raise, with the communicator usable afterwards."""
    x = SparseVector([1], np.ones(1, dtype), 9)

    def program(comm):
        arguments = {"algo": algo, **options} if call is sparsecoll.allreduce else options
        with pytest.raises((ValueError, TypeError)) as raised:
            call(comm, x, op=op, **arguments)
        assert sparsecoll.allreduce(comm, SparseVector([1], np.ones(1), 9)).values.tolist() == [3.0]
        return type(raised.value), str(raised.value)

    results = simulate(3, program).results
    assert len(set(results)) == 1
    return results[0][1]


@pytest.mark.parametrize("algo", OTHERS)
def test_algorithms_that_do_not_form_exact_sums_refuse(algo):
    assert "'max'" in refused("max", algo=algo) and algo in refused("max", algo=algo)


def test_what_makes_no_sense_is_refused_on_all_ranks():
    assert "only for bool and integers" in refused("bitwise_or")
    assert "no order" in refused("max", "complex64")
    assert "expected 'sum' for int32, got 'mean'" in refused("mean", "int32")
    assert "expected 'sum' for bool, got 'mean'" in refused("mean", "bool", call=sparsecoll.reduce)
    assert "op: expected one of sum, mean, min" in refused("median")
    assert "expected a name or an operation of mpi4py" in refused(np.maximum, call=sparsecoll.reduce_scatter)
    assert "'ignore' or 'zero'" in refused("max", missing=0)
    assert "return_reduction" in refused("max", return_reduction=True)
    assert "loses nothing" in refused("min", format="slots", algo="allgather")
    assert "'max'" in refused("max", algo=sparsecoll.Hierarchical(inner="oktopk"))
    assert "'max'" in refused("max", algo=sparsecoll.Auto(want="top_k_of_sum"))


def test_ranks_with_different_operations_raise():
    def program(comm):
        with pytest.raises(sparsecoll.CommunicationError, match="op: expected the same value on all ranks"):
            sparsecoll.allreduce(comm, SparseVector([1], np.ones(1), 9), op="max" if comm.rank else "min")

    simulate(2, program)


@pytest.mark.parametrize("op", ["logical_and", "logical_or", "logical_xor", "replace", "max", "mean"])
@pytest.mark.parametrize("missing", ["ignore", "zero"])
@pytest.mark.parametrize("call", [sparsecoll.allreduce, sparsecoll.reduce, sparsecoll.reduce_scatter])
def test_nan_is_refused_by_every_operation(call, op, missing):
    """Also by those whose result is finite: what is not NaN, or an entry of a later rank."""

    def program(comm):
        bad = np.array([1.0 if comm.rank else np.inf, 2.0])
        rows = [] if call is sparsecoll.reduce else [RowSparse([1], bad.reshape(1, 2), 9)]  # which it refuses
        for x in (SparseVector([0, 1], bad, 9), {0: bad[0]}, *rows):
            with pytest.raises(ValueError, match="expected finite values"):
                call(comm, x, op=op, missing=missing)

    simulate(2, program)


def test_nan_is_refused_or_passes_through_maxima():
    def program(comm):
        x = SparseVector([0, 1], np.array([np.nan if comm.rank else 1.0, 2.0]), 9)
        with pytest.raises(ValueError, match="finite"):
            sparsecoll.allreduce(comm, x, op="max")
        for algo in EXACT:
            largest = sparsecoll.allreduce(comm, x, algo, op="max", nonfinite="pass").values
            truth = sparsecoll.allreduce(comm, x, algo, op="logical_and", nonfinite="pass").values
            assert np.isnan(largest[0]) and largest[1] == 2 and truth.tolist() == [1, 1]

    simulate(3, program)


def test_dense_vectors_and_selected_entries():
    def program(comm):
        x = np.array([0.0, comm.rank, -comm.rank, 5])
        whole = [sparsecoll.allreduce(comm, x, "dense", op=op).to_dense().tolist() for op in ("min", "replace")]
        top = sparsecoll.allreduce(comm, x, k=1, op="max")
        return whole, top.indices.tolist(), sparsecoll.iallreduce(comm, x, k=4, op="max").wait().values.tolist()

    for whole, top, largest in simulate(3, program).results:
        assert whole == [[0, 0, -2, 5], [0, 2, -2, 5]] and top == [3] and largest == [2, -1, 5]


@pytest.mark.parametrize("op", ["min", "max", "prod", "logical_and", "replace"])
def test_zeros_are_entries_of_a_selection_too(op):
    """k of at least the number of entries selects all; a smaller one the nonzeros, then zeros of lowest index."""

    def program(comm):
        x = SparseVector([1, 3, 4], np.array([[6.0, 0, 0], [5.0, -5, 2]][comm.rank]), 8)
        keys = {"a": 6 - comm.rank, "b": [0, -5][comm.rank]}
        whole = sparsecoll.allreduce(comm, x, op=op)
        for algo, k in itertools.product(EXACT, (3, 9)):
            assert sparsecoll.allreduce(comm, x, algo, k=k, op=op) == whole
        assert sparsecoll.allreduce_init(comm, x, k=3, op=op)(x) == whole
        assert sparsecoll.reduce(comm, x, k=3, op=op) in (None, whole)
        assert sparsecoll.allreduce(comm, keys, k=2, op=op) == sparsecoll.allreduce(comm, keys, op=op)
        return sparsecoll.allreduce(comm, x, k=2, op=op).indices.tolist()

    assert simulate(2, program).results == 2 * [[1, 3]]


def test_operations_on_bfloat16_are_rounded_once():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

    def program(comm):
        x, found = SparseVector([1, 3 + comm.rank, 20], np.array([1.5, -2, comm.rank + 256], bfloat16), 40), []
        for algo, op in itertools.product(EXACT, ("sum", "max", "prod")):
            y = sparsecoll.allreduce(comm, x, algo, op=op)
            assert y.dtype == bfloat16
            found.append((op, y.values.astype(float).tolist()))
        sent = [sparsecoll.bcast(comm, x).dtype, *(part.dtype for part in sparsecoll.allgather(comm, x))]
        return found, sent, x.topk(1).indices.tolist()

    expected = {"sum": [4.5, -2, -2, -2, 768], "max": [1.5, -2, -2, -2, 258], "prod": [3.375, -2, -2, -2, 16908288]}
    for found, sent, top in simulate(3, program).results:
        assert all(values == expected[op] for op, values in found) and set(sent) == {np.dtype(bfloat16)} and top == [20]


def test_entries_are_selected_by_the_values_of_the_caller():
    """Not by what an operation makes of them: logical operations of 1 and 0, "replace" with zeros of all zeros."""

    def program(comm):
        dense = np.array([1, 0, 5, -7, 2, 0.5]) if comm.rank else np.array([9.0, 1, 0, 0, 3, 0])
        found = []
        for x in (dense, SparseVector.from_dense(dense)):
            for call in (sparsecoll.allreduce, sparsecoll.reduce):
                for op in ("logical_or", "replace"):
                    y = call(comm, x, k=2, op=op, missing="zero")
                    found.append(None if y is None else dict(zip(y.indices.tolist(), y.values.tolist(), strict=True)))
        return found

    expected = [{0: 1, 2: 1, 3: 1, 4: 1}, {0: 0, 2: 5, 3: -7, 4: 0}]
    assert simulate(2, program).results[0] == 4 * expected
