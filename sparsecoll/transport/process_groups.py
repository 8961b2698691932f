"""Process groups, device meshes and stores of torch.distributed as communicators: ranks connected by TCP sockets.

torch is imported by the user; a process that has not imported torch.distributed has no process group.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import weakref
from functools import partial
from typing import Any

from sparsecoll.errors import CommunicationError, check_integer
from sparsecoll.transport.all_ranks import barrier
from sparsecoll.transport.base import Transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.tcp import TcpTransport, connect as connect_ranks
from sparsecoll.transport.waiting import Abandoned, check_timeout

PREFIX = "sparsecoll"
_transports: weakref.WeakKeyDictionary[Any, Transport | Abandoned] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


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
    with _lock:
        if (transport := _transports.get(group)) is None:
            _transports[group] = Abandoned("two threads made calls at the same time")  # for another thread
    if transport is None:
        try:
            transport = connect_group(group, group.group_name, timeout)
        except CommunicationError as error:
            transport = _transports[group] = Abandoned(str(error))
        except BaseException as error:
            _transports[group] = Abandoned(f"its first call failed on rank {group.rank()}: {error!r}")
            raise
    if isinstance(transport, Abandoned):
        raise transport.error()
    return transport


def connect_group(group: Any, name: str, timeout: float | None = None) -> Transport:
    """Connect a process group's ranks, also if torch.distributed does not know it yet; collective.

    Args:
        group: the process group.
        name: of the group, which no other group in its store has.
        timeout: see `group_transport`.

    Raises:
        CommunicationError: The ranks could not be connected.
    """
    transport = connect_ranks(_meeting_of(group, name), timeout)
    _close_with(group, transport)
    _transports[group] = transport
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
    close = partial(transport.close, "its process group was destroyed")
    if transport.worker is None:
        close()
    else:
        transport.worker.submit(close)


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
        raise ValueError("comm: this process is not in the process group")
    if hasattr(comm, "ndim"):
        if comm.ndim != 1:
            raise ValueError(
                f"comm: expected a DeviceMesh of one dimension, such as mesh['dp'], got {comm.ndim} dimensions"
            )
        if comm.get_coordinate() is None:
            raise ValueError("comm: this process is not in the DeviceMesh")
        comm = comm.get_group()
    try:
        dist.get_rank(comm)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            "comm: expected a process group, got one that was destroyed, or that neither init_process_group nor"
            " new_group has made: in its place pass sparsecoll.connect(store, rank, size)"
        ) from error
    return comm


def _meeting_of(group: Any, name: str) -> StoreMeeting:
    """Return the meeting of a group's ranks: in the store by which they found each other.

    No collective of the group is used: one that some rank never joins would wait when the process ends.
    """
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if hasattr(group, "get_group_store"):
        store = group.get_group_store()
    else:  # before PyTorch had the method
        store = _distributed().distributed_c10d._get_process_group_store(group)
    return StoreMeeting(store, group.rank(), group.size(), f"sparsecoll/{name}", True, start)


class StoreMeeting:
    """Where ranks leave messages for each other before they are connected: keys of a store of torch.distributed.

    Args:
        store: the store.
        rank: of this process.
        size: number of ranks.
        prefix: of all keys.
        counted: whether there may be several meetings in this place, one after the other (default: False). The store
            counts the meetings of each rank, whatever process it was. A rank that finds others in the next meeting
            joins them: as long as a rank waits for entries, no rank has left its meeting but by a failure.
        start: of the job, whose failures count (default: "").
    """

    def __init__(self, store: Any, rank: int, size: int, prefix: str, counted: bool = False, start: str = "") -> None:
        self._store, self.rank, self.size = store, int(rank), int(size)  # of NumPy's, proofs would differ
        self._prefix, self._counted, self._entry, self._seen = prefix, counted, "", ""
        self._number, self._failed = self._next_meeting() if counted else 0, f"failed/{start}"

    def _next_meeting(self) -> int:
        return int(self._store.add(f"{self._prefix}/meetings/{self.rank}", 1))

    def _key(self, name: object, later: int = 0) -> str:
        return f"{self._prefix}/{self._number + later}/{name}"

    def put(self, entry: str) -> None:
        """Leave this rank's entry."""
        while self._is_over():
            self._number = self._next_meeting()
        self._entry = entry
        for key in (self._key(self.rank), self._key("begun")):
            self._store.set(key, entry)

    def _is_over(self) -> bool:
        return self._counted and bool(self._store.check([self._key("begun", later=1)]))

    def entries(self) -> list[str] | None:
        """Return all ranks' entries; None if some are not there yet, or not known to be those of living processes.

        They are when each rank has told that it has seen the same ones.
        """
        if self._is_over():
            self._store.delete_key(self._key(f"{self.rank}/{self._seen}"))
            self._seen = ""
            self.put(self._entry)
        keys = [self._key(rank) for rank in range(self.size)]
        if not self._store.check(keys):
            return None
        entries = [self._store.get(key).decode() for key in keys]
        seen = hashlib.blake2b("\n".join(entries).encode(), digest_size=8).hexdigest()
        if self._seen != seen:
            self._store.set(self._key(f"{self.rank}/{seen}"), "")
            self._seen = seen
        return entries if self._store.check([self._key(f"{rank}/{seen}") for rank in range(self.size)]) else None

    def absent(self) -> list[int]:
        """Return the ranks that have left no entry or, once all have, have not told that they have seen all."""
        told = f"/{self._seen}" if self._seen else ""
        return [rank for rank in range(self.size) if not self._store.check([self._key(f"{rank}{told}")])]

    def clear(self) -> None:
        """Remove this rank's entry, which all ranks have read: a job that is restarted may meet at the same place."""
        for key in (self._key(self.rank), self._key(f"{self.rank}/{self._seen}")):
            self._store.delete_key(key)

    def fail(self, why: str) -> None:
        """Tell all ranks that this one cannot be connected."""
        self._store.set(self._key(self._failed), why)

    def failed(self) -> str:
        """Return the reason that a rank has given by `fail`; "" if none has."""
        key = self._key(self._failed)
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""


def connect(
    store: Any, rank: int, size: int, *, timeout: float | None = None, secret: str | bytes | None = None
) -> TcpTransport:
    """Connect processes that share a store of torch.distributed, by sockets; collective.

    For ranks without `torch.distributed.init_process_group` or with groups that it does not know, such as
    ProcessGroupGloo objects. Process groups, meshes and MPI's communicators are passed to the calls as they are.

    Args:
        store: TCPStore, FileStore or another store of torch.distributed, for this call alone: where there are several
            calls, `torch.distributed.PrefixStore(name, store)` with a name for each of them.
        rank: of this process, from 0 to size - 1.
        size: number of processes, the same on all of them.
        timeout: seconds to wait for the others; None, the default, for no limit.
        secret: at least 16 bytes that only the ranks know, the same on all of them; None, the default, for the value of
            the environment variable SPARSECOLL_SECRET, if there is one. It is never sent: each rank proves to each
            other one that it knows it.

    Returns:
        Communicator, which every call of the library takes as `comm`; its attributes `rank` and `size` are as given,
        and `close()` closes the sockets, after the nonblocking calls that are under way.

    Raises:
        TypeError, ValueError: An argument is wrong, or a process of this rank has used the store already.
        CommunicationError: That is so on another rank, the secret is too short, or some rank did not come, cannot be
            reached or has another secret.

    See Also:
        sparsecoll.torch.init_process_group: for the processes of torchrun and of mpirun.
    """
    if not all(hasattr(store, name) for name in ("add", "check", "compare_set", "delete_key", "get", "set")):
        raise TypeError(f"store: expected a store of torch.distributed, such as TCPStore, got {type(store).__name__}")
    try:
        _check(store, rank, size, timeout)
        if not isinstance(secret, (str, bytes, type(None))):
            raise TypeError(f"secret: expected str or bytes, got {type(secret).__name__}")
    except (TypeError, ValueError) as error:
        StoreMeeting(store, 0, 0, PREFIX).fail(f"rank {rank}: {error}")  # the others wait for this rank
        raise
    transport = connect_ranks(StoreMeeting(store, rank, size, PREFIX), timeout, secret)
    transport.cure = "connect the ranks again, by another store"
    with CollectiveCall(transport, "connect", timeout), transport.set_up():
        barrier(transport)  # the store may end with the rank that returns first
    return transport


def _check(store: Any, rank: int, size: int, timeout: float | None) -> None:
    check_integer("size", size, 1)
    check_integer("rank", rank, 0, size - 1)
    check_timeout(timeout)
    first, other = store.compare_set(f"{PREFIX}/size", "", f"{size} on rank {rank}").decode().split(" ", 1)
    if int(first) != size:
        raise ValueError(f"size: expected the same on all ranks, got {first} {other} and {size} on rank {rank}")
    if store.add(f"{PREFIX}/meetings/{rank}", 1) > 1:
        raise ValueError(
            f"rank: expected one process of each rank and a store for each call, got another call of rank {rank}:"
            " torch.distributed.PrefixStore(name, store) makes a store of another"
        )
