"""Dense sums by MPI's own allreduce: the same bits on all ranks, with the same failures as any other call."""

import time

import numpy as np
import pytest
from cases import same_bits

import sparsecoll
from sparsecoll import CommunicationError, Dense, SparseVector
from sparsecoll.transport import as_transport

pytestmark = pytest.mark.mpi

LENGTH = 100_000


@pytest.fixture
def own(comm, mpi):
    """A communicator that a test may break."""
    duplicate = comm.Dup()
    yield duplicate
    duplicate.Free()


def entries(comm, n, dtype):
    """A different number of entries on each rank, -0.0 and explicit zeros among them; sums are exact."""
    rng = np.random.default_rng([n, comm.rank])
    k = rng.integers(0, n // 3 + 2)
    values = rng.integers(-2, 3, k).astype(dtype)
    if dtype in ("float32", "float64"):
        values[::2][values[::2] == 0] = -0.0
    return SparseVector(np.sort(rng.choice(n, k, replace=False)), values, n)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64", "int32", "bool"])
def test_equals_the_librarys_own_sum(comm, mpi, dtype):
    for n in (1, 7, 5000):
        x = entries(comm, n, dtype)
        for op in ("sum", "max") if dtype != "complex64" else ("sum",):
            native = sparsecoll.allreduce(comm, x, Dense(native=True), op=op, return_reduction=op == "sum")
            y = native.value if op == "sum" else native
            assert same_bits(y, sparsecoll.allreduce(comm, x, "dense", op=op))
            if op == "sum":
                assert ("allreduce" in native.traffic.phases) == (comm.size > 1 and dtype in ("float32", "float64"))


def test_bytes_are_counted_by_the_formula_and_random_sums_have_the_same_bits(own):
    x = np.random.default_rng(own.rank).standard_normal(LENGTH).astype(np.float32)
    y = sparsecoll.allreduce(own, x, Dense(native=True), return_reduction=True)
    counted = sparsecoll.traffic(own).phases.get("allreduce")
    assert own.size == 1 or counted.bytes_received == 2 * x.nbytes * (own.size - 1) // own.size
    assert len(set(own.allgather(y.value.values.tobytes()))) == 1
    np.testing.assert_allclose(y.value.to_dense(), sum(own.allgather(x)), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(y.contributed.to_dense(), x)


def test_a_rank_that_fails_takes_the_others_out_of_the_sum(own, monkeypatch):
    x, transport = np.ones(LENGTH, np.float32), as_transport(own)

    def fail(*_):
        raise ValueError("bad luck")

    for _ in range(2):
        assert sparsecoll.allreduce(own, x, Dense(native=True)).values[0] == own.size
        if own.size > 1:
            with monkeypatch.context() as patch:
                if own.rank == own.size - 1:
                    patch.setattr(transport.native_sum, "_sum", fail)
                with pytest.raises(ValueError, match=f"rank {own.size - 1}: bad luck"):
                    sparsecoll.allreduce(own, x, Dense(native=True))
    assert sparsecoll.allreduce(own, x, Dense(native=True)).values[0] == own.size


def test_sums_of_different_calls_are_never_mixed(own):
    if own.size == 1:
        pytest.skip("needs another rank")
    x = np.ones(LENGTH, np.float32)
    for n in (LENGTH, LENGTH // 2):
        sparsecoll.allreduce(own, x[:n], Dense(native=True))  # the ranks have agreed on both
    with pytest.raises(CommunicationError, match="length: expected the same value on all ranks"):
        sparsecoll.allreduce(own, x[: LENGTH // (1 + (own.rank > 0))], Dense(native=True))


def test_nan_and_sums_that_differ_are_left_to_the_librarys_own(own, monkeypatch):
    x = SparseVector([1], np.array([np.nan], np.float32), 9)
    y = sparsecoll.allreduce(own, x, Dense(native=True), nonfinite="pass", return_reduction=True)
    assert np.isnan(y.value.values[0]) and "allreduce" not in y.traffic.phases
    monkeypatch.setattr(as_transport(own).native_sum, "_is_same", lambda *_: False)
    y = sparsecoll.allreduce(own, np.ones(9, np.float32), Dense(native=True), return_reduction=True)
    assert y.value.values[0] == own.size and (y.traffic.phases["split"].messages_sent if own.size > 1 else True)


def test_a_rank_that_fails_in_the_next_call_does_not_take_the_others_out_of_this_one(own, monkeypatch):
    """The last rank is still in MPI_Iallreduce when the report of the next call comes."""

    class Late:
        def __init__(self, request):
            self.request, self.end = request, time.monotonic() + 0.5

        def Test(self):
            return time.monotonic() > self.end and self.request.Test()

    x, native_sum = np.ones(LENGTH, np.float32), type(as_transport(own).native_sum)
    wait = native_sum._wait
    for _ in range(2):
        sparsecoll.allreduce(own, x, Dense(native=True))
    if own.rank == own.size - 1:
        monkeypatch.setattr(native_sum, "_wait", lambda self, request: wait(self, Late(request)))
    y = sparsecoll.allreduce(own, x, Dense(native=True))
    monkeypatch.undo()
    assert y.values[0] == own.size
    with pytest.raises(ValueError, match="rank 0: x: expected finite values"):
        sparsecoll.allreduce(own, x * np.nan if own.rank == 0 else x, Dense(native=True))
    assert sparsecoll.allreduce(own, x, Dense(native=True)).values[0] == own.size
