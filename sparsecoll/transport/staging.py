"""Messages from and to GPU memory. Imported with the first of them, since it needs CuPy.

An MPI that accepts device pointers gets them. For any other, and for sockets, messages go through pinned host memory in
pieces: while one piece travels, the next one is copied. All copies are queued on the current stream; nothing waits for
the whole device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from sparsecoll.formats import Buffer
from sparsecoll.kernels.gpu import device

PIECE = 4 << 20  # bytes; a longer message is sent in several pieces


class Staging:
    """One rank's copies between a GPU and MPI or a socket.

    Args:
        direct: whether MPI accepts device pointers.
    """

    def __init__(self, direct: bool) -> None:
        self.direct = direct
        self._uploads: deque[tuple[Any, Buffer]] = deque()  # pinned memory is kept until it has been copied

    def sendable(self, buffer: Any, chunk: int) -> Iterator[Any]:
        """Yield the pieces of a device buffer, each as soon as it may be sent; the last one is not full."""
        size = chunk if self.direct else PIECE
        pieces = [buffer[start : start + size] for start in range(0, buffer.size + 1, size)]
        if self.direct:
            device.synchronize()
            yield from (piece if piece.size else np.empty(0, np.uint8) for piece in pieces)
            return
        ahead = self._copied_out(pieces[0])
        for following in [*pieces[1:], None]:
            (event, host), ahead = ahead, ahead if following is None else self._copied_out(following)
            event.synchronize()
            yield host

    @staticmethod
    def _copied_out(piece: Any) -> tuple[Any, Buffer]:
        if not piece.size:
            return device.recorded(), np.empty(0, np.uint8)
        host = device.pinned(piece.size)
        return device.copy_out(piece, host), host

    @property
    def piece(self) -> int:
        """Bytes of a full piece that goes through host memory."""
        return PIECE

    def memory(self, size: int) -> Any:
        """Return device memory for a whole message."""
        return device.empty(size, np.uint8)

    def room(self, size: int) -> Any:
        """Return memory that may receive a piece of a message."""
        if size == 0:
            return np.empty(0, np.uint8)
        if not self.direct:
            return device.pinned(size)
        fresh = device.empty(size, np.uint8)
        device.synchronize()  # the last user of this memory may still read it on the stream
        return fresh

    def ready(self) -> None:
        """Wait until MPI may write to memory that kernels have used."""
        if self.direct:
            device.synchronize()

    def arrived(self, piece: Any, into: Any | None) -> Any:
        """Return a piece that was received, in device memory."""
        if self.direct and piece.size:
            return piece
        target = device.empty(piece.size, np.uint8) if into is None else into
        while self._uploads and self._uploads[0][0].done:
            self._uploads.popleft()
        if piece.size:
            self._uploads.append((device.copy_in(piece, target), piece))
        return target
