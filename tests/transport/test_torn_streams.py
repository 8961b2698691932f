"""Sockets whose messages arrive in parts, or damaged, and ranks without room for a message."""

import select
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from test_tcp import run, together

import sparsecoll
from sparsecoll import CommunicationError, SparseVector
from sparsecoll.transport.tags import FIRST_TAG
from sparsecoll.transport.tcp.connection import Connection, Disconnected


def test_a_rank_without_room_for_a_message_says_so_on_all_ranks_and_goes_on(monkeypatch):
    """The message is kept in the network until there is room, or discarded in pieces."""
    room = {}

    def empty(size, dtype):
        if size > room.get(threading.get_ident(), size):
            raise MemoryError(f"no room for {size} bytes")
        return np.empty(size, dtype)

    monkeypatch.setattr("sparsecoll.transport.tcp.connection.empty", empty)

    def program(comm):
        x, made = np.ones(1_000_000), []
        for turn in range(6):
            room[threading.get_ident()] = 100_000 if comm.rank == 1 and turn in (1, 2, 4) else 1 << 40
            try:
                made.append(sparsecoll.allreduce(comm, x, "sparcml", k=x.size, timeout=60).nnz)
            except CommunicationError as error:
                made.append(str(error))
        return made, len(comm._sends)

    for made, sends in run(3, program):
        texts = [made.pop(turn) for turn in (4, 2, 1)]
        assert all(text.startswith("rank 1 failed: MemoryError: no room for ") for text in texts)
        assert made == [1_000_000] * 3 and sends == 0


@pytest.mark.parametrize("noise", [bytes(100), b"HTTP/1.1 400 Bad Request"], ids=["zeros", "text"])
def test_bytes_that_are_no_message_are_refused(noise):
    wait = together(2)

    def program(transport):
        x, texts = SparseVector([transport.rank], np.ones(1), 9), []
        sparsecoll.allreduce(transport, x)
        wait()
        if transport.rank == 1:
            transport._outgoing[0].socket.sendall(noise)
        for _ in range(3):
            try:
                sparsecoll.allreduce(transport, x)
            except CommunicationError as error:
                texts.append(str(error))
        wait()
        return texts

    for texts in run(2, program):
        assert len(texts) >= 2 and texts[-1].startswith("communicator is out of use since rank 0 lost rank 1: ")
        assert all("it has sent bytes that are no message" in text for text in texts)


def test_a_message_that_is_sent_twice_or_not_at_all_is_refused():
    """A header is that of a message at its place in the stream only."""

    def program(transport):
        if transport.rank == 0:
            transport._outgoing[1]._sent += 1
            transport.isend(1, np.ones(3, np.uint8))
            return
        with pytest.raises(CommunicationError, match="bytes that are no message"):
            transport.recv(0)

    assert run(2, program) == [None, None]


@pytest.mark.parametrize("size", [2000, 1_000_000])
@pytest.mark.parametrize("last", [1, 1000])
def test_a_receiver_is_woken_by_the_last_bytes_the_next_message_and_the_end(size, last):
    server = socket.create_server(("127.0.0.1", 0))
    sender = Connection(socket.create_connection(server.getsockname()), 1, SimpleNamespace(chunk=1 << 30))
    receiver = Connection(server.accept()[0], 0, SimpleNamespace(chunk=1 << 30))
    sent = np.random.default_rng(0).integers(0, 256, size, np.uint8)

    def receives():
        while not receiver.poll(None, lambda tag, size: None):
            assert select.select([receiver.socket], [], [], 30)[0], "the receiver was not woken"
        return receiver.take().buffer

    for message in (sent, sent[:5]):  # the first one in two parts, of which the receiver takes the first at once
        sender.send(FIRST_TAG, size=message.size, pieces=[message[:-last] if message is sent else message], gpu=False)
        if message is sent:
            assert not receiver.poll(None, lambda tag, size: None)
            sender.outgoing.append(memoryview(message[-last:]))
            while sender.outgoing:
                sender.flush()
                receiver.poll(None, lambda tag, size: None)
        else:
            assert select.select([receiver.socket], [], [], 30)[0], "the receiver was not woken"
        assert receives().tolist() == message.tolist()
    sender.send(FIRST_TAG, size=size, pieces=[sent[:-last]], gpu=False)
    sender.socket.close()
    with pytest.raises(Disconnected, match="closed"):
        receives()
    receiver.socket.close()
    server.close()
