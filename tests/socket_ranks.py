"""Ranks as threads of one process that are connected by sockets, for what the simulator does not model: timeouts."""

import threading
from concurrent.futures import ThreadPoolExecutor

from sparsecoll.transport.tcp import connect


class Meeting:
    """Ranks of one process meet in a dict."""

    def __init__(self, entries, rank, size):
        self._entries, self.rank, self.size = entries, rank, size

    def put(self, entry):
        self._entries[self.rank] = entry

    def entries(self):
        return [self._entries[rank] for rank in range(self.size)] if self.known() == self.size else None

    def absent(self):
        return [rank for rank in range(self.size) if rank not in self._entries]

    def known(self):
        return self.size - len(self.absent())

    def clear(self):
        del self._entries[self.rank]

    def fail(self, why):
        self._entries["failed"] = why

    def failed(self):
        return self._entries.get("failed", "")


def run(size, program, timeout=None):
    """The results of `program(transport)` on every rank; or the exception, which does not end the others."""
    entries = {}

    def one(rank):
        try:
            transport = connect(Meeting(entries, rank, size), timeout)
            try:
                return program(transport)
            finally:
                transport.close("the test is over")
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def together(size):
    """Let ranks wait for each other outside of the transport."""
    return threading.Barrier(size, timeout=60).wait
