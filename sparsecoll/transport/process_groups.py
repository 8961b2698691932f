"""Process groups and device meshes of torch.distributed as communicators: their ranks, connected by TCP sockets.

torch is imported by the user; a process that has not imported torch.distributed has no process group.
"""

from __future__ import annotations

import os
import sys
import weakref
from functools import partial
from typing import Any

from sparsecoll.errors import CommunicationError
from sparsecoll.transport.base import Transport
from sparsecoll.transport.tcp import TcpTransport, connect as connect_ranks
from sparsecoll.transport.waiting import Abandoned

_transports: weakref.WeakKeyDictionary[Any, Transport | Abandoned] = weakref.WeakKeyDictionary()


def is_group(comm: Any) -> bool:
    """Return whether `comm` is a ProcessGroup or DeviceMesh, or what stands for a group in a process outside of it."""
    names = {base.__name__ for base in type(comm).__mro__ if base.__module__.startswith("torch.")}
    return bool(names & {"ProcessGroup", "DeviceMesh"}) or (_distributed() is not None and _is_non_member(comm))


def default_group() -> Any:
    """Return the default group of torch.distributed; None if it is not initialized."""
    dist = _distributed()
    return dist.group.WORLD if dist is not None and dist.is_initialized() else None


def group_transport(comm: Any, timeout: float | None = None) -> Transport:
    """Return the transport cached on a process group; the first call connects its ranks, which is collective.

    Args:
        comm: ProcessGroup, or DeviceMesh of one dimension.
        timeout: seconds to wait for the other ranks to make their first call; None, the default, for no limit.

    Raises:
        ValueError: This process is not in the group, the group was destroyed, or the mesh has several dimensions.
        CommunicationError: The ranks could not be connected, now or earlier.
    """
    group = _group_of(comm)
    transport = _transports.get(group)
    if transport is None:
        try:
            transport = connect_ranks(_meeting_of(group), timeout)
        except CommunicationError as error:
            transport = Abandoned(str(error))
        else:
            _close_with(group, transport)
        _transports[group] = transport
    if isinstance(transport, Abandoned):
        raise transport.error()
    return transport


def bind(transport: Transport) -> None:
    """Let the default group stand for a communicator of the same ranks."""
    _transports[default_group()] = transport


def _close_with(group: Any, transport: TcpTransport) -> None:
    """Close the transport when the group is gone, unless the process ends: then threads may be in calls."""
    weakref.finalize(group, _leave, transport).atexit = False


def _leave(transport: TcpTransport) -> None:
    """Close a transport, after its nonblocking calls.

    The garbage collector calls this, on any thread and within any function: also while a thread starts, which holds a
    lock of `threading` without which no thread can be joined. So nothing here may wait.
    """
    if transport.worker is None:
        _close(transport)
    else:
        transport.worker.submit(partial(_close, transport))


def _close(transport: TcpTransport) -> None:
    transport.close("its process group was destroyed")


def _distributed() -> Any:
    """Return torch.distributed, if this process has imported it and PyTorch was built with it."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() else None


def _is_non_member(comm: Any) -> bool:
    return type(comm) is int and comm == _distributed().GroupMember.NON_GROUP_MEMBER


def _group_of(comm: Any) -> Any:
    """Return the process group that `comm` is or has."""
    dist = _distributed()
    if _is_non_member(comm):
        raise ValueError("comm: expected a process group that this process is in, got one that it is not in")
    if hasattr(comm, "ndim"):
        if comm.ndim != 1:
            raise ValueError(
                f"comm: expected a DeviceMesh of one dimension, such as mesh['dp'], got {comm.ndim} dimensions"
            )
        if comm.get_coordinate() is None:
            raise ValueError("comm: expected a DeviceMesh that this process is in, got one that it is not in")
        comm = comm.get_group()
    try:
        dist.get_rank(comm)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            "comm: expected a process group, got one that was destroyed, or that neither init_process_group nor"
            " new_group has made: in its place pass sparsecoll.connect(store, rank, size)"
        ) from error
    return comm


def _meeting_of(group: Any) -> StoreMeeting:
    """Return the meeting of a group's ranks: in the store by which they found each other.

    No collective of the group is used: one that some rank never joins would wait when the process ends.
    """
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return StoreMeeting(_store_of(group), group.rank(), group.size(), f"sparsecoll/{group.group_name}", True, start)


class StoreMeeting:
    """Keys of a store of torch.distributed by which ranks meet, see `tcp.Meeting`.

    Args:
        store: the store.
        rank: of this process.
        size: number of ranks.
        prefix: of all keys.
        counted: whether there may be several meetings in this place, one after the other (default: False). The store
            counts for each rank how often it has come, whatever process it was. A rank that finds others in the next
            meeting joins them: as long as a rank waits for entries, nobody has left its meeting but by a failure.
        start: of the job, whose failures count (default: "").
    """

    def __init__(self, store: Any, rank: int, size: int, prefix: str, counted: bool = False, start: str = "") -> None:
        self._store, self.rank, self.size = store, rank, size
        self._prefix, self._counted, self._entry = prefix, counted, ""
        self._number, self._failed = self._come() if counted else 0, f"failed/{start}"

    def _come(self) -> int:
        return int(self._store.add(f"{self._prefix}/came/{self.rank}", 1))

    def _key(self, name: object, later: int = 0) -> str:
        return f"{self._prefix}/{self._number + later}/{name}"

    def put(self, entry: str) -> None:
        while self._is_over():
            self._number = self._come()
        self._entry = entry
        for key in (self._key(self.rank), self._key("begun")):
            self._store.set(key, entry)

    def _is_over(self) -> bool:
        return self._counted and bool(self._store.check([self._key("begun", later=1)]))

    def entries(self) -> list[str] | None:
        if self._is_over():
            self.clear()
            self.put(self._entry)
        keys = [self._key(rank) for rank in range(self.size)]
        return [self._store.get(key).decode() for key in keys] if self._store.check(keys) else None

    def clear(self) -> None:
        self._store.delete_key(self._key(self.rank))

    def fail(self, why: str) -> None:
        self._store.set(self._key(self._failed), why)

    def failed(self) -> str:
        key = self._key(self._failed)
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""


def _store_of(group: Any) -> Any:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return _distributed().distributed_c10d._get_process_group_store(group)  # before PyTorch had the method
