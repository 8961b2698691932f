"""Vectors, formats, residuals and every algorithm on device arrays: the bits and the bytes are those of the host."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest
from cases import case, same_bits
from test_gpu_kernels import same

import sparsecoll
from sparsecoll import ALGORITHMS, DenseVector, Residual, SparseVector, formats, simulate
from sparsecoll.formats import FORMATS
from sparsecoll.kernels.memory import bind_current_stream
from sparsecoll.select import SELECTORS

NAMES = ["random", "empty_ranks", "one_region", "ties"]
LOSSLESS = [name for name, form in FORMATS.items() if not form.lossy]


@pytest.fixture
def lift(cp):
    """Host vectors and arrays to the device."""

    def lifted(x):
        if isinstance(x, SparseVector):
            return SparseVector(cp.asarray(x.indices), cp.asarray(x.values), x.length)
        return DenseVector(cp.asarray(x.values)) if isinstance(x, DenseVector) else cp.asarray(x)

    return lifted


def lowered(x):
    assert x.on_gpu
    if isinstance(x, DenseVector):
        return DenseVector(x.values.get())
    return SparseVector.from_sorted_unchecked(x.indices.get(), x.values.get(), x.length)


def counted(comm):
    total = sparsecoll.traffic(comm).total
    return total.bytes_received, total.messages_received


def run(P, program, inputs):
    return simulate(P, lambda comm: program(comm, inputs)).results


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm(lift, algo, P, name):
    inputs = [case(name, rank, P) for rank in range(P)]
    device = [lift(x) for x in inputs]

    def program(comm, given):
        reduction = sparsecoll.allreduce(comm, given[comm.rank], algo, return_reduction=True)
        return reduction, *counted(comm)

    for mine, theirs in zip(run(P, program, device), run(P, program, inputs), strict=True):
        assert same_bits(lowered(mine[0].value), theirs[0].value)
        assert same_bits(lowered(mine[0].contributed), theirs[0].contributed)
        assert mine[1] == theirs[1]
        if algo not in ("auto", "allgather"):  # which send host memory with the arguments that the ranks compare
            assert mine[2] == theirs[2]


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "int64"])
@pytest.mark.parametrize("algo", ["oktopk", "densestream", "dense", "gtopk"])
def test_sums_of_every_dtype_on_the_gpu_have_the_bits_of_the_host(lift, algo, dtype):
    inputs = [case("random", rank, 3, dtype) for rank in range(3)]
    device = [lift(x) for x in inputs]
    mine = simulate(3, lambda comm: sparsecoll.allreduce(comm, device[comm.rank], algo)).results
    theirs = simulate(3, lambda comm: sparsecoll.allreduce(comm, inputs[comm.rank], algo)).results
    assert all(same_bits(lowered(a), b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("value_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("algo", ["oktopk", "allgather", "dense"])
def test_narrow_values_on_the_wire(lift, algo, value_dtype):
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(3000).astype(np.float32) for _ in range(3)]
    device = [lift(g) for g in gradients]

    def program(comm, given):
        return sparsecoll.allreduce(
            comm, given[comm.rank], algo, density=0.1, value_dtype=value_dtype, return_reduction=True
        )

    for mine, theirs in zip(run(3, program, device), run(3, program, gradients), strict=True):
        assert same_bits(lowered(mine.value), theirs.value)
        assert same_bits(lowered(mine.contributed), theirs.contributed)


@pytest.mark.parametrize("value_dtype", [None, "float16"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_format(cp, lift, form, value_dtype):
    for name, length in (("random", 2003), ("one_region", 2003), ("all_empty", 2003), ("random", 2**33)):
        x = case(name, 1, 4)
        x = SparseVector(x.indices, x.values, length)
        message = formats.encode(x, form, value_dtype)
        mine = formats.encode(lift(x), form, value_dtype)
        same(mine, message)
        assert same_bits(lowered(formats.decode(mine, length)), formats.decode(message, length))
        dense, on = DenseVector(np.ones(2003, np.float32)), DenseVector(cp.asarray(np.ones(2003, np.float32)))
        if length == 2003:
            formats.add_into(dense, [message, message])
            formats.add_into(on, [mine, mine])
            same(on.values, dense.values)
        if mine.size > 20:
            with pytest.raises(sparsecoll.CommunicationError):
                formats.decode(mine[:-3], length)


@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_with_error_feedback(cp, lift, name):
    rng = np.random.default_rng(4)
    mine, theirs = SELECTORS[name](), SELECTORS[name]()
    host, device = Residual(20_000), Residual(20_000, like=cp.empty(1, np.float32))
    for _ in range(4):
        gradient = rng.standard_normal(20_000).astype(np.float32) ** 3
        a, b = device.take(cp.asarray(gradient), mine, 300, 0.5), host.take(gradient, theirs, 300, 0.5)
        if name in ("topk", "reuse", "randomk"):  # the others sample, and a bound of a sample may be any
            assert same_bits(lowered(a), b)
            same(device.array, host.array)
        total = device.array.copy()
        total[a.indices] += a.values
        assert abs(float(total.sum()) - float(host.array.sum() + b.values.sum())) < 1


def test_vectors_say_where_they_are(cp):
    i, v = np.array([1, 5], np.uint32), np.array([2.0, -3.0], np.float32)
    x = SparseVector(cp.asarray(i), cp.asarray(v), 8)
    assert x.on_gpu and x.indices.dtype == np.uint32
    assert x.to_dense().get().tolist() == [0, 2, 0, 0, 0, -3, 0, 0]
    with pytest.raises(TypeError, match="both on the GPU or neither, got arrays of NumPy and CuPy"):
        SparseVector(i, cp.asarray(v), 8)
    with pytest.raises(ValueError, match="unsorted"):
        SparseVector(cp.asarray(i[::-1].copy()), cp.asarray(v), 8)
    with pytest.raises(TypeError):
        np.asarray(x.values)


def test_ranks_must_agree_on_where_vectors_are(cp, lift):
    inputs = [case("random", rank, 3) for rank in range(3)]
    mixed = [inputs[0], lift(inputs[1]), inputs[2]]

    def program(comm):
        with pytest.raises(sparsecoll.CommunicationError, match="memory"):
            sparsecoll.allreduce(comm, mixed[comm.rank], "oktopk")

    simulate(3, program)


@pytest.mark.parametrize("algo", ["oktopk", "allgather", "densestream", "gtopk"])
def test_the_host_reads_sizes_alone(cp, algo):
    """What the host waits for in a step with error feedback does not grow with the vector."""
    if not hasattr(cp, "pretend"):
        pytest.skip("only a pretence counts")
    largest = []
    for n in (20_000, 80_000):
        residuals = [Residual(n, like=cp.empty(1, np.float32)) for _ in range(2)]
        gradients = [cp.asarray(np.random.default_rng(rank).standard_normal(n).astype(np.float32)) for rank in range(2)]

        def program(comm, gradients=gradients, residuals=residuals):
            acc = residuals[comm.rank].compensate(gradients[comm.rank])
            reduction = sparsecoll.allreduce(comm, acc, algo, density=0.01, format="coo", return_reduction=True)
            residuals[comm.rank].update(reduction.contributed)

        cp.pretend.reads.clear()
        cp.pretend.counts.clear()
        simulate(2, program)
        largest.append(max(cp.pretend.reads))
        assert not cp.pretend.counts.get("synchronize")
    assert largest[0] == largest[1] <= 256


def test_without_cupy_the_error_says_so():
    code = "import sys; sys.modules['cupy'] = None; from sparsecoll.kernels.memory import from_dlpack; from_dlpack(1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "on the GPU needs CuPy (pip install cupy-cuda13x)" in done.stderr


@pytest.mark.parametrize("op", ["sum", "min", "max", "replace"])
def test_pairs_with_repeated_indices(cp, op):
    indices, values = np.array([4, 1, 4, 0, 1]), np.array([2.0, 3.0, 5.0, -1.0, -7.0], np.float32)
    expected = SparseVector.from_pairs(indices, values, 6, op)
    x = SparseVector.from_pairs(cp.asarray(indices), cp.asarray(values), 6, op)
    assert same_bits(lowered(x), expected)


def test_calls_in_other_threads_need_no_gpu(cp, monkeypatch):
    """CuPy can be imported without a driver."""

    class NoDevice(RuntimeError):
        pass

    def device():
        raise NoDevice("cudaErrorNoDevice")

    monkeypatch.setattr(cp.cuda, "Device", device)
    monkeypatch.setattr(cp.cuda.runtime, "CUDARuntimeError", NoDevice, raising=False)
    assert bind_current_stream(lambda: "done")() == "done"


def test_calls_in_other_threads_use_the_current_stream_of_torch(monkeypatch):
    torch = pytest.importorskip("torch")
    current = []

    @contextlib.contextmanager
    def stream(chosen):
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    call = bind_current_stream(lambda: list(current))
    assert call() == ["the caller's"] and not current
