"""MPI's own allreduce as a nonblocking one, so that waits have a timeout and end if another rank fails."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparsecoll.kernels.memory import empty
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.tags import CallMismatch

if TYPE_CHECKING:
    from sparsecoll.transport.mpi.transport import MpiTransport

MOST = 2**31 - 1  # items, so that counts fit an int on every MPI


class NativeSum:
    """Sums arrays over the ranks by MPI_Iallreduce on a communicator of its own.

    All ranks enter it only after each has had a message of this call from every other one, so that MPI never combines
    the arrays of different calls. A rank that waits looks for reports of errors in this call. A reduction that it
    leaves because of one is never finished, and neither is its communicator used again: the next sum duplicates another
    one.

    Args:
        transport: the ranks.
    """

    def __init__(self, transport: MpiTransport) -> None:
        self._transport = transport
        self._comm: Any = None
        self._kept: list[Any] = []  # which MPI may still use: requests, their arrays and their communicator
        self._same: dict[tuple[str, int], bool] = {}

    def reset(self) -> None:
        """Forget what all ranks have found out."""
        self._same.clear()

    def __call__(self, values: NDArray[Any], out: NDArray[Any]) -> bool:
        """See `Transport.allreduce`."""
        transport = self._transport
        if values.size > MOST:
            return False
        key = values.dtype.str, values.size.bit_length()
        if transport.met != transport.calls:
            with transport.phase("agree"):
                allgather(transport, np.zeros(1, np.uint8))
            transport.met = transport.calls
        if key not in self._same:
            with transport.set_up():
                self._same[key] = self._is_same(values.dtype, values.size)
        if self._same[key]:
            self._sum(values, out)
            self._count(values.nbytes)
        return self._same[key]

    def _count(self, size: int) -> None:
        """Count a sum of `size` bytes as what a reduce-scatter and an allgather send and receive."""
        ranks = self._transport.size
        moved, messages = 2 * size * (ranks - 1) // ranks, 2 * (ranks - 1).bit_length()
        for counts in self._transport._counters():
            counts.bytes_sent += moved
            counts.bytes_received += moved
            counts.messages_sent += messages
            counts.messages_received += messages

    def _is_same(self, dtype: np.dtype[Any], size: int) -> bool:
        """Return whether the sum of random values has the same bits on all ranks; collective."""
        transport, like = self._transport, np.empty(0, dtype)
        if allgather(transport, np.array([self._comm is None], np.uint8)).any():
            self._duplicate()
        values, out = empty(size, dtype, like), empty(size, dtype, like)
        values[:] = np.random.default_rng(transport.rank).standard_normal(size, np.float32)
        self._sum(values, out)
        checksums = allgather(transport, np.array([zlib.crc32(out.view(np.uint8))], np.uint32))
        return bool((checksums == checksums[0]).all())

    def _duplicate(self) -> None:
        transport = self._transport
        if self._comm is not None:
            self._kept.append(self._comm)
        self._comm, request = transport.comm.Idup()
        waiter = transport.watchdog(lambda: "waits for all ranks to duplicate the communicator")
        while not request.Test():
            waiter.pause(moving=True)

    def _sum(self, values: NDArray[Any], out: NDArray[Any]) -> None:
        transport = self._transport
        try:
            request = self._comm.Iallreduce(MPI.IN_PLACE if out is values else values, out)
            try:
                self._wait(request)
            except BaseException:
                self._kept.append((request, values, out, self._comm))
                self._comm = None
                raise
        except MPI.Exception as error:
            raise transport.lost("MPI_Iallreduce", error) from error

    def _wait(self, request: Any) -> None:
        transport = self._transport
        waiter: Any = None
        while not request.Test():
            waiter = waiter or transport.watchdog(lambda: "waits in MPI_Iallreduce for the other ranks")
            if waiter.pause(moving=True) and transport.reported():
                raise CallMismatch("a rank has failed")

    def free(self) -> None:
        """Free the communicator; collective."""
        if self._same and not self._kept:  # the same on all ranks
            self._comm.Free()
            self._comm = None
