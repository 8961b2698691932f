"""LocalTransport: a communicator of one rank."""

from __future__ import annotations

import time
from typing import Any

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.transport.base import Transport


class LocalTransport(Transport):
    """A communicator of one rank, for programs run without MPI."""

    threads = True

    def __init__(self) -> None:
        super().__init__(0, 1)

    def located(self) -> list[list[int]]:
        return [[0]]

    def now(self) -> float:
        return time.perf_counter()

    def _isend(self, destination: int, buffer: Buffer) -> None:
        raise CommunicationError(f"send: rank {destination} does not exist on a communicator of one rank")

    def _irecv(self, source: int, into: Buffer | None) -> Any:
        raise CommunicationError(f"receive: rank {source} does not exist on a communicator of one rank")

    def exchange_errors(self, report: Buffer, error: Exception | None = None) -> list[Buffer | None]:
        return [None]

    def waitall(self) -> None:
        pass
