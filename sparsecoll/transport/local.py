"""LocalTransport: a communicator of one rank."""

from __future__ import annotations

from typing import Any

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.transport.base import Transport


class LocalTransport(Transport):
    """A communicator of one rank, for programs run without MPI."""

    threads = True

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _isend(self, destination: int, buffer: Buffer, tag: int) -> None:
        raise CommunicationError("send: a communicator of one rank has no other rank")

    def _irecv(self, source: int, into: Buffer | None) -> Any:
        raise CommunicationError("receive: a communicator of one rank has no other rank")

    def waitall(self) -> None:
        pass
