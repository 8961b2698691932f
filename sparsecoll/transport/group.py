"""Some ranks of a transport as a transport of their own: no new communicator, the same channels and counters."""

from __future__ import annotations

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.transport.base import PendingReceive, Transport


class GroupTransport(Transport):
    """Ranks `members` of `parent`, renumbered 0, 1, ...; this rank must be among them.

    Sends and receives go over the parent's channels, with its stamps, and are counted there, in its current phase.
    """

    def __init__(self, parent: Transport, members: list[int]) -> None:
        super().__init__(members.index(parent.rank), len(members))
        self.parent = parent
        self.members = members
        self.traffic, self.timeout, self.virtual = parent.traffic, parent.timeout, parent.virtual
        self.format, self.value_dtype, self.one_node = parent.format, parent.value_dtype, parent.one_node

    def now(self) -> float:
        return self.parent.now()

    def _send(self, destination: int, buffer: Buffer) -> None:
        self.parent._send(self.members[destination], buffer)

    def _receive(self, source: int, into: Buffer | None) -> PendingReceive:
        return self.parent._receive(self.members[source], into)

    def exchange(self, report: Buffer) -> list[Buffer | None]:
        raise CommunicationError(
            f"report: expected the whole communicator, got {self.size} of {self.parent.size} ranks"
        )

    def flush(self) -> None:
        self.parent.flush()

    def progress(self) -> None:
        self.parent.progress()

    def node(self) -> int:
        return self.parent.node()
