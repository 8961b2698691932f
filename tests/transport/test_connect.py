"""Ranks that have a store of torch.distributed in common, and no registered process group."""

import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

dist = pytest.importorskip("torch.distributed")

import sparsecoll  # noqa: E402
from sparsecoll import CommunicationError, SparseVector, simulate  # noqa: E402

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import sys
import numpy as np, torch, torch.distributed as dist
import sparsecoll, sparsecoll.torch

kind, place, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if kind == "FileStore":
    store = dist.FileStore(place, size)
else:
    store = dist.TCPStore("127.0.0.1", int(place), size, is_master=rank == 0, wait_for_workers=False)
comm = sparsecoll.connect(dist.PrefixStore("first", store), rank, size)
again = sparsecoll.connect(dist.PrefixStore("second", store), rank, size, timeout=60)
assert (comm.rank, comm.size, dist.is_initialized()) == (rank, size, False)
for which in (comm, again):
    x = sparsecoll.SparseVector([rank, 9], np.array([1.0, 2.0]), 10)
    assert sparsecoll.allreduce(which, x).to_dense().tolist() == [1.0] * size + [0.0] * (9 - size) + [2.0 * size]
assert sparsecoll.iallreduce(again, x, "allgather").wait().nnz == size + 1
assert sparsecoll.traffic(comm).total.bytes_sent > 0 or size == 1
model = torch.nn.Linear(4, 4)
optimizer = sparsecoll.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm)
model(torch.full((2, 4), float(rank))).sum().backward()
optimizer.step()
print(sum(p.sum().item() for p in model.parameters()).hex())
optimizer.close()
sparsecoll.allgather(comm, x)  # nobody needs the store any more
comm.close()
try:
    sparsecoll.allreduce(comm, x)
except sparsecoll.CommunicationError as error:
    assert "out of use since it was closed" in str(error), error
assert sparsecoll.allreduce(again, x, "dense").nnz == size + 1
again.close()
"""


@pytest.mark.parametrize(("kind", "P"), [("FileStore", 3), ("TCPStore", 2)])
def test_processes_with_a_store(kind, P, tmp_path):
    place = str(tmp_path / "store")
    if kind == "TCPStore":
        import socket

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = str(free.getsockname()[1])
    command = [sys.executable, "-c", PROGRAM, kind, place]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([*command, str(rank), str(P)], cwd=ROOT, text=True, stdout=pipe, stderr=pipe)
        for rank in range(P)
    ]
    printed = [(*process.communicate(timeout=200), process.returncode) for process in processes]
    assert [status for _, _, status in printed] == [0] * P, printed
    assert len({out for out, _, _ in printed}) == 1


def outcomes(arguments, **options):
    """What `connect` returns or raises for each of (rank, size), in threads with a store in common."""
    store = dist.HashStore()

    def one(given):
        try:
            return sparsecoll.connect(store, *given, **options)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(one, arguments))


def test_the_same_bits_as_the_simulator():
    def program(comm):
        x = np.random.default_rng(comm.rank).standard_normal(5000).astype(np.float32)
        return sparsecoll.allreduce(comm, x, "oktopk", k=100).values.tobytes()

    comms = outcomes([(rank, 3) for rank in range(3)])
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(program, comms)) == simulate(3, program).results
    for comm in comms:
        comm.close()


@pytest.mark.parametrize(
    ("arguments", "kind", "expected"),
    [
        ([(0, 2), (2, 2)], ValueError, "rank: expected 0 to 1, got 2"),
        ([(0, 2), (-1, 2)], ValueError, "rank: expected 0 to 1, got -1"),
        ([(0, 2), (True, 2)], TypeError, "rank: expected an integer, got True"),
        ([(0, 2), (1.0, 2)], TypeError, "rank: expected an integer, got 1.0"),
        ([(0, 2), (1, 0)], ValueError, "size: expected at least 1, got 0"),
        ([(0, 2), (1, "2")], TypeError, "size: expected an integer, got '2'"),
        ([(0, 2), (1, 3)], ValueError, r"size: expected the same on all ranks, got [23] on rank [01] and [23] on"),
        ([(0, 3), (1, 2), (2, 3)], ValueError, r"size: expected the same on all ranks, got [23]"),
        ([(0, 2), (0, 2)], ValueError, "rank: expected one process of each rank and a store for each call, got anoth"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all(arguments, kind, expected):
    began = time.monotonic()
    raised = outcomes(arguments)
    assert all(isinstance(error, (kind, CommunicationError)) for error in raised), raised
    assert any(isinstance(error, kind) for error in raised)
    for error in raised:
        with pytest.raises(type(error), match=expected):
            raise error
    assert time.monotonic() - began < 15


def test_a_store_that_has_been_used_is_refused():
    store = dist.HashStore()
    sparsecoll.connect(store, 0, 1).close()
    with pytest.raises(ValueError, match=r"a store for each call.*torch.distributed.PrefixStore"):
        sparsecoll.connect(store, 0, 1)
    sparsecoll.connect(dist.PrefixStore("another", store), 0, 1).close()


def test_wrong_stores_and_timeouts_are_refused_and_a_missing_rank_is_waited_for():
    with pytest.raises(TypeError, match=r"store: expected a store of torch.distributed, such as TCPStore, got dict"):
        sparsecoll.connect({}, 0, 1)
    for timeout, kind in ((0, ValueError), (float("nan"), ValueError), ("1", TypeError)):
        first, second = outcomes([(0, 2), (1, 2)], timeout=timeout)
        assert [type(first), type(second)] == [kind, kind] and "timeout: expected seconds above 0" in str(first)
    (raised,) = outcomes([(0, 2)], timeout=0.3)
    assert isinstance(raised, CommunicationError) and "no answer within the timeout" in str(raised)


def test_groups_that_are_not_registered_are_refused_with_the_cure():
    x = SparseVector([0], np.ones(1), 4)
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    for comm, kind in ((backend, TypeError), (group, ValueError)):
        with pytest.raises(kind, match=r"sparsecoll.connect\(store, rank, size\)"):
            sparsecoll.allreduce(comm, x)


def test_sockets_are_closed_with_the_communicator():
    before = threading.active_count()
    for _ in range(3):
        comms = outcomes([(rank, 2) for rank in range(2)])
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda comm: sparsecoll.iallreduce(comm, np.ones(9), k=9).wait(), comms))
        for comm in comms:
            comm.close()
    assert threading.active_count() <= before


def test_ranks_and_sizes_may_be_numpys():
    comms = outcomes([(np.int64(rank), np.int32(2)) for rank in range(2)])
    assert [type(comm.rank) for comm in comms] == [int, int], comms
    for comm in comms:
        comm.close()


class Ending:
    """A store of one rank, which ends when the first rank has returned, with the process that has it."""

    def __init__(self, store, over):
        self.store, self.over = store, over

    def __getattr__(self, name):
        if self.over:
            raise dist.DistNetworkError("the store has ended")
        time.sleep(random.random() * 0.003)
        return getattr(self.store, name)


def test_the_store_may_end_with_the_rank_that_returns_first():
    for _ in range(10):
        store, over = dist.HashStore(), []

        def one(rank, store=store, over=over):
            comm = sparsecoll.connect(Ending(store, over), rank, 3, timeout=60)
            over.append(rank)
            return comm

        with ThreadPoolExecutor(3) as pool:
            for comm in pool.map(one, range(3)):
                comm.close()
