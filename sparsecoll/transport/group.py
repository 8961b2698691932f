"""GroupTransport: some ranks of a transport as a transport of their own, with the same messages and counters."""

from __future__ import annotations

from typing import Any

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.telemetry.traffic import Counts
from sparsecoll.transport.base import Transport


def _of_parent(name: str) -> Any:
    """Return a property that is that of the parent."""
    return property(lambda own: getattr(own.parent, name), lambda own, value: setattr(own.parent, name, value))


class GroupTransport(Transport):
    """The ranks `members` of `parent`, renumbered 0, 1, ...; this rank must be one of them.

    Messages have the parent's tags and are counted in its traffic. Errors are exchanged by the parent.
    """

    one_node, room, network = _of_parent("one_node"), _of_parent("room"), _of_parent("network")
    now, waitall, progress, node = (_of_parent(name) for name in ("now", "waitall", "progress", "node"))
    _check = _of_parent("_check")

    def __init__(self, parent: Transport, members: list[int]) -> None:
        super().__init__(members.index(parent.rank), len(members))
        self.parent, self.members = parent, members
        self.virtual, self.traffic = parent.virtual, parent.traffic

    def _counters(self) -> tuple[Counts, ...]:
        """Messages outside of a phase of the group count in the parent's."""
        return super()._counters() if self._phase or self._setting_up else self.parent._counters()

    def _isend(self, destination: int, buffer: Buffer, tag: int) -> None:
        self.parent._isend(self.members[destination], buffer, self.parent.tag)

    def _irecv(self, source: int, into: Buffer | None) -> Any:
        return self.parent._irecv(self.members[source], into)

    def exchange_errors(self, report: Buffer, error: Exception | None = None) -> list[Buffer | None]:
        raise CommunicationError(
            f"report: expected the whole communicator, got {self.size} of {self.parent.size} ranks"
        )
