"""Messages in chunks, and ranks without room for a message, over MPI."""

import numpy as np
import pytest

import sparsecoll
from sparsecoll import CommunicationError
from sparsecoll.transport import as_transport

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 128, 129, 192])
@pytest.mark.parametrize("room", [None, 64, 127, 128, 192])
def test_messages_of_whole_chunks_arrive_in_the_memory_given(comm, size, room):
    transport = as_transport(comm)
    before, transport.chunk = transport.chunk, 64
    try:
        into = None if room is None else np.zeros(room, np.uint8)
        message = np.arange(size, dtype=np.uint8) + transport.rank
        transport.isend((transport.rank + 1) % transport.size, message)
        source = (transport.rank - 1) % transport.size
        received = transport.recv(source, into)
        transport.waitall()
        assert received.tolist() == (np.arange(size, dtype=np.uint8) + source).tolist()
        assert (received is into) == (size == room) or size < 64
    finally:
        transport.chunk = before


def test_a_dense_sum_whose_parts_are_whole_chunks(comm):
    """A part of such a message was left out of the sum."""
    transport = as_transport(comm)
    before, transport.chunk = transport.chunk, 1 << 16
    try:
        x = np.arange(1, (comm.size << 16) + 1, dtype=np.float32)
        for _ in range(2):
            y = sparsecoll.allreduce(comm, x, "dense", timeout=60)
            assert (y.values == comm.size * x).all()
    finally:
        transport.chunk = before


@pytest.mark.parametrize("chunk", [None, 100_000])
def test_a_rank_without_room_for_a_message_says_so_on_all_ranks_and_goes_on(comm, chunk, monkeypatch):
    """The message waits in MPI until it is discarded, which takes no room."""
    if comm.size == 1:
        pytest.skip("one rank receives nothing")
    home = "sparsecoll.transport.tcp.connection" if hasattr(as_transport(comm), "_connections") else None
    home = home or "sparsecoll.transport.mpi.messages"
    room = [1 << 40]

    def empty(size, dtype, *like):
        if size > room[0]:
            raise MemoryError(f"no room for {size} bytes")
        return np.empty(size, dtype)

    monkeypatch.setattr(f"{home}.empty", empty)
    comm, x, made = comm.Dup() if hasattr(comm, "Dup") else comm, np.ones(300_000), []
    transport = as_transport(comm)
    transport.chunk = chunk or transport.chunk
    for turn in range(6):
        room[0] = 90_000 if comm.rank == 1 and turn in (1, 2, 4) else 1 << 40
        try:
            made.append(sparsecoll.allreduce(comm, x, "sparcml", k=x.size, timeout=60).nnz)
        except CommunicationError as error:
            made.append(str(error))
    texts = [made.pop(turn) for turn in (4, 2, 1)]
    assert all(text.startswith("rank 1 failed: MemoryError: no room for ") for text in texts)
    assert made == [300_000] * 3 and not transport._sends


def test_what_is_sent_beside_the_arguments_is_sent_when_a_call_returns(comm):
    """Sums of a few keys returned without waiting for it, and no later call waited either."""
    transport, x = as_transport(comm), sparsecoll.SparseVector([comm.rank], np.ones(1), comm.size)
    rows = sparsecoll.RowSparse([comm.rank], np.ones((1, 2)), comm.size)
    calls = {
        "allreduce": lambda: sparsecoll.allreduce(comm, {f"key {comm.rank}": 1}),
        "reduce": lambda: sparsecoll.reduce(comm, {comm.rank: 1}),
        "gather": lambda: sparsecoll.gather(comm, rows),
        "scatter": lambda: sparsecoll.scatter(comm, x if comm.rank == 0 else None),
        "allreduce_init": lambda: sparsecoll.allreduce_init(comm, x),
        "bcast": lambda: sparsecoll.bcast(comm, {comm.rank: 1}),
        "alltoallv": lambda: sparsecoll.alltoallv(comm, {0: x}),
    }
    for name, call in calls.items():
        for _ in range(3):
            call()
            assert not transport._sends, name
