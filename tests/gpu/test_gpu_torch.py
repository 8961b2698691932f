"""The torch adapter on a device: on CUDA where there is a GPU; else CPU tensors whose memory it sees as a device's."""

import contextlib

import numpy as np
import pytest
import torch

from sparsecoll import simulate
from sparsecoll.torch import COMPRESSORS, DistributedOptimizer, SparseSGD
from sparsecoll.torch.compressors import TopKCompressor, oktopk
from sparsecoll.torch.tensors import layout as devices

OPTIONS = {"covap": {"interval": 2}, "dragonn": {"selective": False, "density": 0.1}}


def pretended(pretend):
    """A device of which all work must be launched inside of `stream_context`."""

    class Pretended(devices.CpuDevice):
        inside = 0

        def array(self, tensor):
            return pretend.borrowed(tensor.detach().numpy())

        def empty(self, size, dtype):
            return self.zeros(size, dtype)

        def tensor(self, array):
            assert isinstance(array, pretend.ndarray), "a host array where a device array was expected"
            return torch.from_numpy(array._host)

        @contextlib.contextmanager
        def stream_context(self, event=None):
            assert event in (None, "event")
            self.inside += 1
            yield

        def record_event(self):
            return "event"

    return Pretended()


@pytest.fixture
def place(cp, monkeypatch):
    """Where models go: "cuda", or the CPU that is taken for a device."""
    if not hasattr(cp, "pretend"):
        if not torch.cuda.is_available():
            pytest.skip("CuPy sees a GPU, torch does not")
        return "cuda"
    monkeypatch.setattr(devices, "CPU", pretended(cp.pretend))
    return "cpu"


def train(comm, where, make, steps=4):
    """Parameters after some steps, and the losses."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3)).to(where)
    optimizer = make(comm, model)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(steps):
        x, y = torch.randn(16, 20, generator=generator), torch.randint(0, 3, (16,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x.to(where)), y.to(where)).backward()
        optimizer.step()
    state = optimizer.state_dict()
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.close()
    return [p.detach().cpu().numpy().copy() for p in model.parameters()], state


def wrapped(name):
    def make(comm, model):
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        compressor = COMPRESSORS[name](**OPTIONS.get(name, {}))
        return DistributedOptimizer(inner, model.named_parameters(), comm, compressor, bucket_bytes=3000, dense_below=0)

    return make


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor(place, name, monkeypatch):
    used = devices.CPU
    mine = simulate(2, lambda comm: train(comm, place, wrapped(name))).results
    if place == "cpu":
        assert used.inside
        monkeypatch.setattr(devices, "CPU", devices.CpuDevice())
    theirs = simulate(2, lambda comm: train(comm, "cpu", wrapped(name))).results
    for a, b, other in zip(mine[0][0], theirs[0][0], mine[1][0], strict=True):
        assert name == "free" or a.tobytes() == other.tobytes()
        # gradients differ in their last bits, and a value between two levels goes to the other one
        np.testing.assert_allclose(a, b, rtol=0, atol=0 if place == "cpu" else 1e-3 if name == "qsgd" else 1e-4)


@pytest.mark.parametrize("algo", ["oktopk", "dense", "allgather"])
def test_sparse_sgd(place, algo, monkeypatch):
    def make(comm, model):
        return SparseSGD(model.parameters(), 0.1, 0.9, weight_decay=1e-3, comm=comm, algo=algo, density=0.1)

    mine = simulate(2, lambda comm: train(comm, place, make)).results
    if place == "cpu":
        monkeypatch.setattr(devices, "CPU", devices.CpuDevice())
    theirs = simulate(2, lambda comm: train(comm, "cpu", make)).results
    for a, b, other in zip(mine[0][0], theirs[0][0], mine[1][0], strict=True):
        assert a.tobytes() == other.tobytes()
        np.testing.assert_allclose(a, b, rtol=0, atol=0 if place == "cpu" else 1e-4)


def test_options_of_top_k_and_its_state(place):
    """Momentum, clipping; and what was saved goes on with the same bits."""

    def make(comm, model):
        inner = torch.optim.SGD(model.parameters(), 0.1)
        compressor = TopKCompressor(0.2, "allgather", momentum=0.9, clip=1.0)
        return DistributedOptimizer(inner, model.named_parameters(), comm, compressor, dense_below=0)

    def program(comm):
        parameters, state = train(comm, place, make)
        residuals = state["sparsecoll"]["tensors"]["residual"]
        assert all(torch.isfinite(t).all() for t in residuals.values())
        assert any(t.abs().sum() > 0 for t in residuals.values())
        return parameters

    a, b = simulate(2, program).results
    assert all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def test_back_propagation_stays_in_the_thread_of_a_virtual_rank():
    """Autograd has one thread per GPU, in which the hooks of the first virtual rank would wait for ever."""

    def program(comm):
        wrapped("topk")(comm, torch.nn.Linear(3, 2))
        return torch._C._is_multithreading_enabled()

    assert simulate(2, program).results == [False, False]
    assert torch._C._is_multithreading_enabled()


def test_a_tensor_that_is_nowhere_near(place):
    with pytest.raises(TypeError, match="expected tensors with values, got one on meta"):
        SparseSGD([torch.nn.Parameter(torch.empty(3, device="meta"))], 0.1)


@pytest.mark.mpi
def test_overlap_over_mpi(place):
    """Buckets go to the progress thread while gradients still come."""
    from mpi4py import MPI

    def make(comm, model):
        inner = torch.optim.SGD(model.parameters(), 0.1)
        return DistributedOptimizer(
            inner, model.named_parameters(), comm, oktopk(0.1), bucket_bytes=2000, dense_below=0, verify=1
        )

    parameters, _ = train(MPI.COMM_WORLD, place, make, steps=6)
    everywhere = MPI.COMM_WORLD.allgather([p.tobytes() for p in parameters])
    assert all(other == everywhere[0] for other in everywhere)


@pytest.mark.mpi
def test_background_calls_use_the_callers_stream(cp):
    from mpi4py import MPI

    from sparsecoll.transport import as_transport
    from sparsecoll.transport.progress import in_background

    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        future = in_background(as_transport(MPI.COMM_WORLD), lambda: cp.cuda.get_current_stream().ptr)
    assert future.result() == stream.ptr
