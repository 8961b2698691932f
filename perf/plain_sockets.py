"""The CPU time in which plain TCP sockets carry bytes between all ranks at once: a bound for what a transport takes."""

from __future__ import annotations

import selectors
import socket
import time
from typing import Any

from sparsecoll.transport.tcp.addresses import interface_address


class PlainSockets:
    """A connection between every two ranks; collective.

    Args:
        comm: communicator of MPI, through which the ranks learn their addresses.
        interface: name of the network interface; None if all ranks are on one machine.
    """

    def __init__(self, comm: Any, interface: str | None) -> None:
        self._comm = comm
        self._sockets: dict[int, socket.socket] = {}
        address = interface_address("--interface", interface) if interface else "127.0.0.1"
        with socket.create_server((address, 0), backlog=comm.size) as server:
            peers = comm.allgather(server.getsockname())
            for rank in range(comm.rank):
                self._sockets[rank] = socket.create_connection(peers[rank])
                self._sockets[rank].sendall(comm.rank.to_bytes(4, "little"))
            for _ in range(comm.rank + 1, comm.size):
                connection, _ = server.accept()
                self._sockets[int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")] = connection
            comm.Barrier()
        for connection in self._sockets.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)

    def exchange(self, size: int) -> None:
        """Send `size` bytes to every other rank and receive as many from each."""
        sent, arrived = dict.fromkeys(self._sockets, 0), dict.fromkeys(self._sockets, 0)
        out, into = memoryview(bytes(size)), {rank: memoryview(bytearray(size)) for rank in self._sockets}
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._sockets.items():
                selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, rank)
            while selector.get_map():
                for key, events in selector.select():
                    rank, connection = key.data, self._sockets[key.data]
                    if events & selectors.EVENT_WRITE:
                        sent[rank] += connection.send(out[sent[rank] :])
                    if events & selectors.EVENT_READ:
                        arrived[rank] += connection.recv_into(into[rank][arrived[rank] :])
                    read = selectors.EVENT_READ if arrived[rank] < size else 0
                    wanted = read | (selectors.EVENT_WRITE if sent[rank] < size else 0)
                    if not wanted:
                        selector.unregister(connection)
                    elif wanted != key.events:
                        selector.modify(connection, wanted, rank)

    def cpu_seconds_per_byte(self, size: int = 250_000, repeat: int = 40, warm: int = 5) -> float:
        """Return the CPU time of this rank, kernel and Python, for each byte that it receives and sends."""
        for _ in range(warm):
            self.exchange(size)
        self._comm.Barrier()
        start = time.thread_time()
        for _ in range(repeat):
            self.exchange(size)
        return (time.thread_time() - start) / (repeat * size * max(len(self._sockets), 1))
