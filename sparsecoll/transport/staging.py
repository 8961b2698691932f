"""Messages from and to GPU memory. Imported with the first of them, since it needs CuPy.

An MPI that accepts device pointers gets them. For any other, and for sockets, messages go through pinned host memory in
chunks: while one chunk travels, the next one is copied. All copies are queued on the current stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from sparsecoll.formats import Buffer
from sparsecoll.kernels.gpu import device

CHUNK = 4 << 20  # bytes; a longer message goes through host memory in several


class Staging:
    """One rank's copies between a GPU and MPI or a socket.

    Args:
        direct: whether MPI accepts device pointers.

    Attributes:
        chunk: bytes of a full chunk that goes through host memory.
    """

    chunk = CHUNK

    def __init__(self, direct: bool) -> None:
        self.direct = direct
        self._uploads: deque[tuple[Any, Buffer]] = deque()  # pinned memory is kept until it has been copied

    def sendable(self, buffer: Any, chunk: int) -> Iterator[Any]:
        """Yield the chunks of a device buffer, each as soon as it may be sent; the last one is not full."""
        size = chunk if self.direct else self.chunk
        chunks = [buffer[start : start + size] for start in range(0, buffer.size + 1, size)]
        if self.direct:
            device.synchronize()
            yield from (chunk if chunk.size else np.empty(0, np.uint8) for chunk in chunks)
            return
        ahead = self._copied_out(chunks[0])
        for following in [*chunks[1:], None]:
            (event, host), ahead = ahead, ahead if following is None else self._copied_out(following)
            event.synchronize()
            yield host

    @staticmethod
    def _copied_out(chunk: Any) -> tuple[Any, Buffer]:
        if not chunk.size:
            return device.recorded(), np.empty(0, np.uint8)
        host = device.pinned(chunk.size)
        return device.copy_out(chunk, host), host

    def memory(self, size: int) -> Any:
        """Return device memory for a whole message."""
        return device.empty(size, np.uint8)

    def room(self, size: int, into: Any = None) -> Any:
        """Return memory that may receive a chunk of a message; `into`, device memory, if MPI can write to it."""
        if size == 0:
            return np.empty(0, np.uint8)
        if not self.direct:
            return device.pinned(size)
        memory = device.empty(size, np.uint8) if into is None else into
        device.synchronize()  # the last user of this memory may still read it on the stream
        return memory

    def arrived(self, chunk: Any, into: Any | None) -> Any:
        """Return a chunk that was received, in device memory."""
        if self.direct and chunk.size:
            return chunk
        target = device.empty(chunk.size, np.uint8) if into is None else into
        while self._uploads and self._uploads[0][0].done:
            self._uploads.popleft()
        if chunk.size:
            self._uploads.append((device.copy_in(chunk, target), chunk))
        return target
