"""Memory: which arrays are a GPU's, and arrays for results whose pages are already there.

The first touch of fresh pages costs about as much as the work of a selection or a merge. `empty` hands out memory of
arrays that are gone; it goes back by itself when the last view of an array is dropped. At most RETAINED bytes wait for
another use.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

SMALLEST = 1 << 18  # bytes; below, malloc has warm memory itself
RETAINED = 1 << 30

_lock = threading.Lock()
_returned: deque[NDArray[np.uint8]] = deque()  # appended to by finalisers, which may run anywhere, in `empty` too
_waiting: dict[int, list[NDArray[np.uint8]]] = {}  # by size; the size that something came back to last is the last
_total = [0]  # bytes waiting. Both are changed under the lock alone


class _Block:
    """Owns memory while arrays use it: their base is this object."""

    __slots__ = ("__array_interface__", "raw")

    def __init__(self, raw: NDArray[np.uint8]) -> None:
        self.raw = raw
        self.__array_interface__ = raw.__array_interface__

    def __del__(self) -> None:
        _give_back(self.raw)


def _room(size: int) -> int:
    """Bytes to ask for: `size` rounded up to one of eight steps per power of two."""
    step = 1 << max(size.bit_length() - 4, 12)
    return -(-size // step) * step


def _give_back(raw: NDArray[np.uint8], returned: Any = _returned, lock: Any = _lock) -> None:
    returned.append(raw)
    if lock.acquire(blocking=False):  # else whoever holds it, or the next one, sorts it in
        try:
            _sort_in()
        finally:
            lock.release()


def _sort_in(waiting: Any = _waiting, returned: Any = _returned, total: Any = _total, limit: int = RETAINED) -> None:
    while returned:
        raw = returned.popleft()
        alike = waiting.pop(raw.size, [])
        alike.append(raw)
        waiting[raw.size] = alike
        total[0] += raw.size
    while total[0] > limit:
        size = next(iter(waiting))
        total[0] -= size
        waiting[size].pop(0)
        if not waiting[size]:
            del waiting[size]


def on_gpu(array: Any) -> bool:
    """Whether an array is CuPy's."""
    return type(array).__module__.partition(".")[0] == "cupy"


def to_host(array: Any) -> NDArray[Any]:
    """The array itself, or a copy of it if it is a GPU's (after the work on the current stream)."""
    return array.get() if on_gpu(array) else array  # type: ignore[no-any-return]


def asarray_like(host: NDArray[Any], like: Any) -> Any:
    """`host` where `like` is: itself, or a copy on the GPU."""
    return _gpu().to_device(host) if on_gpu(like) else host


def from_dlpack(array: Any) -> Any:
    """Another library's GPU array as CuPy's, of the same memory.

    Raises:
        TypeError: CuPy cannot be imported.
    """
    try:
        return _gpu().from_dlpack(array)
    except ImportError as error:
        raise TypeError(
            f"a {type(array).__name__} on the GPU needs CuPy (pip install cupy-cuda13x): {error}"
        ) from error


def bind_current_stream(call: Callable[[], T]) -> Callable[[], T]:
    """The call, to be made in another thread: GPU work in it goes to the stream that is current in this one."""
    return _gpu().bind_current_stream(call) if "cupy" in sys.modules else call  # type: ignore[no-any-return]


def contiguous(array: Any, dtype: Any = None) -> Any:
    """The array itself, or a contiguous copy as `dtype`, where it is."""
    array = array if dtype is None else array.astype(dtype, copy=False)
    return array if array.flags.c_contiguous else array.copy()


def data_ptr(array: Any) -> int:
    """Where an array's memory begins."""
    return int(array.data.ptr if on_gpu(array) else array.ctypes.data)


def may_share_memory(a: Any, b: Any) -> bool:
    """Whether two arrays may share memory: the stretches from their first byte to their last one do."""
    if not a.size or not b.size or on_gpu(a) != on_gpu(b):
        return False
    (start, stop), (first, beyond) = (_stretch(array) for array in (a, b))
    return start < beyond and first < stop


def _stretch(array: Any) -> tuple[int, int]:
    steps = [step * (size - 1) for step, size in zip(array.strides, array.shape, strict=True)]
    low = data_ptr(array) + sum(min(step, 0) for step in steps)
    return low, data_ptr(array) + sum(max(step, 0) for step in steps) + array.itemsize


def _gpu() -> Any:
    from sparsecoll.kernels.gpu import device

    return device


def empty(size: int, dtype: Any, like: Any = None) -> NDArray[Any]:
    """As numpy.empty(size, dtype) for one dimension; on the GPU if the array `like` is."""
    if like is not None and on_gpu(like):
        return _gpu().empty(size, dtype)  # type: ignore[no-any-return]
    dtype = np.dtype(dtype)
    needed = size * dtype.itemsize
    if needed < SMALLEST:
        return np.empty(size, dtype)
    room = _room(needed)
    with _lock:
        _sort_in()
        if room in _waiting:
            raw = _waiting[room].pop()
            _total[0] -= room
            if not _waiting[room]:
                del _waiting[room]
        else:
            raw = np.empty(room, np.uint8)
    return np.asarray(_Block(raw))[:needed].view(dtype)


def release() -> None:
    """Give all waiting memory back to the system."""
    with _lock:
        _sort_in()
        _waiting.clear()
        _total[0] = 0
