"""Ranks that have a store of torch.distributed in common, but no process group that torch.distributed knows."""

from __future__ import annotations

from typing import Any

from sparsecoll.transport import usable
from sparsecoll.transport.process_groups import StoreMeeting
from sparsecoll.transport.tcp import TcpTransport, connect as connect_ranks

PREFIX = "sparsecoll"


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
    return transport


def _check(store: Any, rank: int, size: int, timeout: float | None) -> None:
    for name, number in (("rank", rank), ("size", size)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name}: expected an integer, got {number!r}")
    if size < 1:
        raise ValueError(f"size: expected at least 1, got {size}")
    if not 0 <= rank < size:
        raise ValueError(f"rank: expected 0 to {size - 1}, got {rank}")
    if not usable(timeout):
        kind = ValueError if isinstance(timeout, (int, float)) else TypeError
        raise kind(f"timeout: expected seconds above 0, or None to wait for ever, got {timeout!r}")
    first, other = store.compare_set(f"{PREFIX}/size", "", f"{size} on rank {rank}").decode().split(" ", 1)
    if int(first) != size:
        raise ValueError(f"size: expected the same on all ranks, got {first} {other} and {size} on rank {rank}")
    if store.add(f"{PREFIX}/came/{rank}", 1) > 1:
        raise ValueError(
            f"rank: expected one process of each rank and a store for each call, got another call of rank {rank}:"
            " torch.distributed.PrefixStore(name, store) makes a store of another"
        )
