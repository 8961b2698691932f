"""Process groups and device meshes of torch.distributed as communicators: their ranks, connected by TCP sockets.

torch is imported by the user; a process that has not imported torch.distributed has no process group.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from sparsecoll.errors import CommunicationError
from sparsecoll.transport.base import Transport
from sparsecoll.transport.tcp import TcpTransport, connect as connect_ranks

_transports: weakref.WeakKeyDictionary[Any, Transport | _Abandoned] = weakref.WeakKeyDictionary()
_numbers: dict[str, int] = {}  # how many transports of a group of this name have been made
_left: SimpleQueue[TcpTransport | None] = SimpleQueue()  # of groups that are gone; None ends the closer
_closers: list[threading.Thread] = []  # the thread that closes those, once there is one


@dataclass
class _Abandoned:
    """Cached in place of a transport after the ranks could not be connected.

    Attributes:
        why: the error.
    """

    why: str


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
            transport = _Abandoned(str(error))
        else:
            _close_with(group, transport)
        _transports[group] = transport
    if isinstance(transport, _Abandoned):
        raise CommunicationError(
            f"communicator is out of use since {transport.why}; continue with a new one, once all ranks have made"
            " this call"
        )
    return transport


def bind(transport: Transport) -> None:
    """Let the default group stand for a communicator of the same ranks."""
    _transports[default_group()] = transport


def _close_with(group: Any, transport: TcpTransport) -> None:
    """Close the transport when the group is gone."""
    if not any(thread.is_alive() for thread in _closers):  # a forked process has none
        _closers[:] = [threading.Thread(target=_close_left, name="sparsecoll-closer", daemon=True)]
        _closers[0].start()
    weakref.finalize(group, _leave, transport)


def _leave(transport: TcpTransport) -> None:
    """Close a transport, or let the closer wait for its nonblocking calls.

    The garbage collector calls this, on any thread and within any function: also while a thread starts, which holds a
    lock of `threading` without which no thread can be joined. So nothing here may wait.
    """
    if transport.worker is None or not _closers:
        _close(transport)
    else:
        _left.put(transport)


def _close_left() -> None:
    while (transport := _left.get()) is not None:
        _close(transport)
        del transport


@atexit.register
def _end_closer() -> None:
    """Wait for the closer: a thread that still runs when the interpreter is finalized may abort the process.

    Nonblocking calls have been completed by now, so that later transports are closed at once, by `_leave` itself.
    """
    closers = [thread for thread in _closers if thread.is_alive()]
    _closers.clear()
    for thread in closers:
        _left.put(None)
        thread.join()


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
    name = str(group.group_name)
    number = _numbers[name] = _numbers.get(name, 0) + 1
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return StoreMeeting(_store_of(group), group.rank(), group.size(), f"sparsecoll/{name}/{number}", f"failed/{start}")


class StoreMeeting:
    """Keys of a store of torch.distributed by which ranks meet, see `tcp.Meeting`."""

    def __init__(self, store: Any, rank: int, size: int, prefix: str, failed: str = "failed") -> None:
        self._store, self.rank, self.size = store, rank, size
        self._keys = [f"{prefix}/{number}" for number in range(size)]
        self._failed = f"{prefix}/{failed}"

    def put(self, entry: str) -> None:
        self._store.set(self._keys[self.rank], entry)

    def entries(self) -> list[str] | None:
        return [self._store.get(key).decode() for key in self._keys] if self._store.check(self._keys) else None

    def clear(self) -> None:
        self._store.delete_key(self._keys[self.rank])

    def fail(self, why: str) -> None:
        self._store.set(self._failed, why)

    def failed(self) -> str:
        return str(self._store.get(self._failed).decode()) if self._store.check([self._failed]) else ""


def _store_of(group: Any) -> Any:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return _distributed().distributed_c10d._get_process_group_store(group)  # before PyTorch had the method
