"""Dense arrays in the calls that only move data: the result is an equal array, of the same dtype, shape and library."""

import numpy as np
import pytest

import sparsecoll
from sparsecoll import DenseVector, RowSparse, SparseVector, simulate
from sparsecoll.vector import VALUE_DTYPES

RANKS = [1, 2, 3, 5]


def bcast(comm, x):
    return [sparsecoll.bcast(comm, x if comm.rank == comm.size - 1 else None, comm.size - 1)]


def alltoallv(comm, x):
    return list(sparsecoll.alltoallv(comm, dict.fromkeys(range(0, comm.size, 2), x)).values())


CALLS = {
    "bcast": bcast,
    "allgather": lambda comm, x: sparsecoll.allgather(comm, x),
    "iallgather": lambda comm, x: sparsecoll.iallgather(comm, x).wait(),
    "gather": lambda comm, x: sparsecoll.gather(comm, x, comm.size - 1) or [],
    "scatter": lambda comm, x: [sparsecoll.scatter(comm, [x] * comm.size)],
    "alltoall": lambda comm, x: sparsecoll.alltoall(comm, [x] * comm.size),
    "alltoallv": alltoallv,
}
BASE = np.arange(-30.0, 30.0).reshape(3, 4, 5)  # with zeros, which are sent like other values
ARRAYS = {
    "vector": BASE.reshape(-1),
    "shape": BASE,
    "0-d": np.array(3.5),
    "one value": BASE[:1, :1, :1],
    "empty": BASE[:0],
    "empty row": np.zeros((4, 0, 2), np.int16),
    "Fortran": np.asfortranarray(BASE),
    "strided": BASE[::2, ::-1, 1::3],
    "transposed": BASE.T,
    "repeated": np.broadcast_to(np.float32(7), (3, 4)),
    "big-endian": BASE.astype(">f4"),
    "read-only": np.frombuffer(b"abcdefgh", np.int16),
    "zeros": np.zeros(1000),
    "special": np.array([np.nan, -0.0, np.inf, 5e-324]),
    "large": np.arange(1 << 17, dtype=np.int64),
    **{name: (BASE % 3).astype(name) for name in VALUE_DTYPES[:-1]},
}


def assert_same(found, x):
    assert type(found) is np.ndarray and found.dtype == x.dtype.newbyteorder("=") and found.shape == x.shape
    assert found.tobytes() == x.astype(found.dtype).tobytes()
    found[...] = 0  # it is the caller's own


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("call", CALLS)
def test_the_result_is_an_equal_array(call, P):
    def program(comm):
        for x in ARRAYS.values():
            before = x.copy()
            for y in CALLS[call](comm, x):
                assert_same(y, before)
            assert x.tobytes() == before.tobytes()

    simulate(P, program)


@pytest.mark.parametrize("call", CALLS)
def test_tensors_and_dense_vectors(call):
    torch = pytest.importorskip("torch")
    tensors = [torch.arange(12.0).reshape(3, 4).T, torch.tensor(2.5), torch.zeros(0, 3), torch.ones(2).requires_grad_()]
    tensors += [torch.arange(6).to(dtype) for dtype in (torch.bfloat16, torch.bool, torch.complex128, torch.uint8)]

    def program(comm):
        for x in tensors:
            for y in CALLS[call](comm, x):
                assert y.dtype == x.dtype and y.shape == x.shape and torch.equal(y, x) and not y.requires_grad
        for y in CALLS[call](comm, DenseVector(np.arange(4))):
            assert type(y) is DenseVector and y.values.tolist() == [0, 1, 2, 3]

    simulate(3, program)


def test_ragged_arrays_to_unknown_partners():
    def program(comm):
        x = {to: np.full((comm.rank, to), comm.rank) for to in range(comm.rank, comm.size)}
        return sparsecoll.alltoallv(comm, x | {0: SparseVector([1], np.ones(1), 3)})

    for rank, found in enumerate(simulate(5, program).results):
        assert list(found) == (list(range(5)) if rank == 0 else list(range(rank + 1)))
        for source, y in found.items():
            if rank == 0:
                assert isinstance(y, SparseVector)
            else:
                assert np.array_equal(y, np.full((source, rank), source))


def test_a_block_takes_its_bytes_and_little_more():
    def program(comm):
        sparsecoll.bcast(comm, np.zeros(4), 0)
        before = sparsecoll.traffic(comm).copy()
        sparsecoll.bcast(comm, np.arange(10_000, dtype=np.float64), 0)
        return sparsecoll.traffic(comm).since(before).total.bytes_received

    assert 80_000 < simulate(2, program).results[1] < 80_400


def test_values_are_rounded_only_if_that_is_asked_for():
    x = np.array([1.0, 1 / 3, 1e5])

    def program(comm):
        y = sparsecoll.bcast(comm, x, value_dtype="float16")
        (z,) = sparsecoll.allgather(comm, x, value_dtype="float16")[:1]
        return y, z, sparsecoll.gather(comm, x, value_dtype="float32")

    for y, z, gathered in simulate(2, program).results:
        assert y.dtype == z.dtype == np.float64 and y.tolist() == z.tolist() == [1.0, float(np.float16(1 / 3)), 65504.0]
        assert gathered is None or np.array_equal(gathered, [x.astype(np.float32)] * 2)


def test_gather_takes_rows():
    def program(comm):
        return sparsecoll.gather(comm, RowSparse([comm.rank], np.ones((1, 2)), 4), 1)

    assert simulate(3, program).results[1] == [RowSparse([rank], np.ones((1, 2)), 4) for rank in range(3)]


WRONG = {
    "object": (lambda comm: bcast(comm, np.array([None, 1])), "values: expected dtype bool"),
    "text": (lambda comm: sparsecoll.alltoall(comm, [np.array(["a"])] * 3), r"x\[0\]|values: expected dtype"),
    "date": (lambda comm: bcast(comm, np.zeros(2, "M8[s]")), r"use x.view\(np.int64\)"),
    "record": (lambda comm: bcast(comm, np.zeros(2, "i4,f4")), "values: expected dtype bool"),
    "long double": (lambda comm: bcast(comm, np.zeros(2, np.longdouble)), r"use x.astype\(np.float64\)"),
    "mask": (lambda comm: bcast(comm, np.ma.zeros(2)), "without a mask"),
    "list": (lambda comm: bcast(comm, [1.0, 2.0]), r"use np.asarray\(x\) of a dense one"),
    "format": (
        lambda comm: sparsecoll.bcast(comm, np.zeros(2), format="coo"),
        "expected 'auto' for rows and dense arrays",
    ),
    "one array": (lambda comm: sparsecoll.scatter(comm, np.zeros(9)), r"a list such as np.array_split\(x, P\)"),
    "shape": (lambda comm: sparsecoll.allgather(comm, np.zeros((2, 3 + comm.rank))), "shape: expected the same value"),
    "empty": (lambda comm: sparsecoll.allgather(comm, np.zeros(comm.rank)), "shape: expected the same value"),
    "dtype": (
        lambda comm: sparsecoll.gather(comm, np.zeros(2, f"i{1 << comm.rank}")),
        "dtype: expected the same value",
    ),
    "kind": (
        lambda comm: sparsecoll.allgather(comm, np.zeros(2) if comm.rank else SparseVector([0], np.ones(1), 2)),
        "x: expected the same value on all ranks, got 'a vector' on rank 0, 'an array' on ranks 1, 2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_sent_is_refused_on_all_ranks(name):
    if name == "long double" and np.dtype(np.longdouble) == np.float64:
        pytest.skip("long double is double here")
    program, text = WRONG[name]

    def refused(comm):
        with pytest.raises((TypeError, ValueError, sparsecoll.CommunicationError), match=text) as caught:
            program(comm)
        return str(caught.value), sparsecoll.bcast(comm, np.ones(2)).tolist()

    results = simulate(3, refused).results
    assert results == [results[0]] * 3 and results[0][1] == [1.0, 1.0]


def test_a_tall_matrix_of_columns_takes_memory_by_its_entries():
    sparse = pytest.importorskip("scipy.sparse")
    at = np.array([7, 2**40 - 1, 0]), np.array([0, 0, 2])
    x = sparse.coo_array((np.array([1.0, 2.0, 4.0]), at), shape=(2**40, 3)).tocsc()
    y = sparsecoll.allreduce(None, x)
    assert y.format == "csc" and y.has_canonical_format and y.shape == x.shape
    assert [y[7, 0], y[2**40 - 1, 0], y[0, 2]] == [1, 2, 4] and y.nnz == 3


class Exporting:
    """An array of a library that has no shape."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("name", CALLS)
def test_arrays_without_a_shape_move(name):
    def program(comm):
        total = sparsecoll.allreduce(comm, Exporting(BASE), sparsecoll.LowBit())
        return CALLS[name](comm, Exporting(BASE)), total

    for moved, total in simulate(3, program).results:
        assert total.shape == BASE.shape
        for own in moved:
            np.testing.assert_array_equal(own, BASE)
