"""Device arrays over MPI: direct where MPI takes device pointers, else through pinned memory.

A pretended GPU whose memory is the host's (fake_cupy.py) has no device pointers, so there the way leads through pinned
memory. With SPARSECOLL_PRETEND_DRIVER, or on a GPU, a CUDA-aware MPI gets device pointers.
"""

import os

import numpy as np
import pytest
from cases import case, same_bits
from test_gpu_vectors import lift, lowered  # noqa: F401 - a fixture

import sparsecoll
from sparsecoll import ALGORITHMS, Auto, Hierarchical, Network, simulate
from sparsecoll.transport import as_transport

pytestmark = pytest.mark.mpi
TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ


@pytest.fixture
def world():
    """All ranks of the mpirun, or of the torchrun, whose sockets get no device pointers."""
    if TORCHRUN:
        from torchrun import world

        return world()
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(params=["whole", "pieces"])
def pieces(request, cp, monkeypatch):
    from sparsecoll.transport import staging

    if request.param == "pieces":
        monkeypatch.setattr(staging.Staging, "chunk", 64)


def made(name):
    return {"auto": lambda: Auto(network=Network()), "hierarchical": lambda: Hierarchical(inner="allgather")}.get(
        name, ALGORITHMS[name]
    )()


@pytest.mark.parametrize("name", ["random", "empty_ranks"])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_bits_and_bytes_are_those_of_the_simulator(world, lift, algo, name):  # noqa: F811
    P = world.size
    inputs = [case(name, rank, P) for rank in range(P)]

    def program(comm, x):
        sparsecoll.allreduce(comm, x, made(algo))  # what ranks find out about each other once
        before = sparsecoll.traffic(comm).copy()
        reduction = sparsecoll.allreduce(comm, x, made(algo), return_reduction=True)
        return reduction, sparsecoll.traffic(comm).since(before).total

    mine, counted = program(world, lift(inputs[world.rank]))
    inside = P if algo == "hierarchical" else 1
    theirs, expected = simulate(P, lambda c: program(c, inputs[c.rank]), ranks_per_node=inside).results[world.rank]
    assert same_bits(lowered(mine.value), theirs.value)
    assert same_bits(lowered(mine.contributed), theirs.contributed)
    assert (counted.bytes_sent, counted.bytes_received) == (expected.bytes_sent, expected.bytes_received)


@pytest.mark.parametrize("algo", ["oktopk", "dense", "gtopk", "sparcml"])
def test_messages_in_pieces(world, lift, pieces, algo):  # noqa: F811
    inputs = [case("one_region", rank, world.size) for rank in range(world.size)]
    mine = sparsecoll.allreduce(world, lift(inputs[world.rank]), algo)
    theirs = simulate(world.size, lambda c: sparsecoll.allreduce(c, inputs[c.rank], algo)).results[world.rank]
    assert same_bits(lowered(mine), theirs)


def test_long_messages_into_place(world, cp, pieces):
    """Dense values arrive in the memory of the result, piece by piece."""
    rng = np.random.default_rng(world.rank)
    x = rng.integers(-9, 9, 5003).astype(np.float32)
    mine = sparsecoll.allreduce(world, cp.asarray(x), "dense")
    theirs = sparsecoll.allreduce(world, x, "dense")
    assert same_bits(lowered(mine), theirs)


def test_training_step_with_error_feedback_and_reused_thresholds(world, cp):
    from sparsecoll import OkTopk, Residual

    rng = np.random.default_rng(world.rank)
    host, device = Residual(20_000), Residual(20_000, like=cp.empty(1, np.float32))
    algorithms = OkTopk(tau=2), OkTopk(tau=2)
    for _ in range(5):
        gradient = rng.standard_normal(20_000).astype(np.float32)
        results = []
        for residual, algo, own in ((host, algorithms[0], gradient), (device, algorithms[1], cp.asarray(gradient))):
            acc = residual.compensate(own)
            reduction = sparsecoll.allreduce(world, acc, algo, density=0.01, return_reduction=True)
            residual.update(reduction.contributed)
            results.append(reduction.value)
        assert results[1].nnz and abs(results[1].nnz - results[0].nnz) <= results[0].nnz
        everywhere = world.allgather((results[1].indices.get().tobytes(), results[1].values.get().tobytes()))
        assert len(set(everywhere)) == 1


def test_a_failure_on_one_rank_leaves_the_channels_empty(world, lift, pieces):  # noqa: F811
    if world.size == 1:
        pytest.skip("one rank has no peer")
    x = lift(case("random", world.rank, world.size))
    wrong = x.with_values(x.values * np.float32(np.nan)) if world.rank == 1 else x
    for _ in range(2):
        with pytest.raises(ValueError, match="NaN"):
            sparsecoll.allreduce(world, wrong, "allgather")
        y = lowered(sparsecoll.allreduce(world, x, "allgather"))
        parts = [case("random", rank, world.size).to_dense() for rank in range(world.size)]
        np.testing.assert_array_equal(y.to_dense(), np.sum(parts, axis=0))


@pytest.mark.skipif(TORCHRUN, reason="about MPI")
def test_which_way_messages_go_is_said_and_can_be_set(world, monkeypatch):
    from sparsecoll.transport.mpi import takes_device_pointers

    monkeypatch.setenv("SPARSECOLL_GPU_DIRECT", "1")
    assert takes_device_pointers(world)
    monkeypatch.setenv("SPARSECOLL_GPU_DIRECT", "0")
    assert not takes_device_pointers(world)
    monkeypatch.setenv("SPARSECOLL_GPU_DIRECT", "yes")
    with pytest.raises(ValueError, match="SPARSECOLL_GPU_DIRECT: expected 0 or 1, got 'yes'"):
        takes_device_pointers(world)
    monkeypatch.delenv("SPARSECOLL_GPU_DIRECT")
    assert as_transport(world).gpu_direct == takes_device_pointers(world)
