"""Arrays of NumPy and of CuPy, and a pool of host memory for results.

Touching fresh pages for the first time costs about as much as a selection or a merge. `empty` therefore reuses the
memory of arrays that no longer exist: it returns to the pool when the last view of an array is garbage-collected. The
pool retains at most RETAINED bytes.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

SMALLEST = 1 << 18  # bytes; for smaller arrays malloc reuses memory itself
RETAINED = 1 << 30  # bytes
ALIGNMENT = 64  # bytes, a line of the caches: where larger arrays begin

_lock = threading.Lock()
_returned: deque[NDArray[np.uint8]] = deque()  # finalisers append to it; they may run anywhere, even inside `empty`
_free: dict[int, list[NDArray[np.uint8]]] = {}  # by size, in the order in which a block of this size last came back
_total = [0]  # bytes in _free; both are changed only while the lock is held


def _fitting(size: int) -> range:
    """The bytes of blocks that hold `size` bytes, of less than twice as many: eight steps per power of two."""
    step = 1 << max(size.bit_length() - 4, 12)
    rounded = -(-size // step) * step
    return range(rounded, 2 * rounded, step)


def _file_returned(free: Any = _free, returned: Any = _returned, total: Any = _total, limit: int = RETAINED) -> None:
    """Move returned blocks to `free`; drop the oldest beyond the limit. Defaults: globals may be gone at shutdown."""
    while returned:
        raw = returned.popleft()
        blocks = free.pop(raw.size, [])
        blocks.append(raw)
        free[raw.size] = blocks
        total[0] += raw.size
    while total[0] > limit:
        size = next(iter(free))
        total[0] -= size
        free[size].pop(0)
        if not free[size]:
            del free[size]


def _release_block(raw: Any, returned: Any = _returned, lock: Any = _lock, file: Any = _file_returned) -> None:
    returned.append(raw)
    if lock.acquire(blocking=False):  # otherwise the holder of the lock, or the next one, files it
        try:
            file()
        finally:
            lock.release()


class _Block:
    """The owner of a piece of memory, and the base of the arrays that use it."""

    __slots__ = ("__array_interface__", "raw")

    def __init__(self, raw: NDArray[np.uint8]) -> None:
        self.raw, self.__array_interface__ = raw, raw.__array_interface__

    def __del__(self, release: Any = _release_block) -> None:
        release(self.raw)


def on_gpu(array: Any) -> bool:
    """Whether an array is CuPy's."""
    return not isinstance(array, np.ndarray) and type(array).__module__.partition(".")[0] == "cupy"


def to_host(array: Any) -> NDArray[Any]:
    """The array itself, or a host copy of a GPU array, made after the work on the current stream."""
    return array if isinstance(array, np.ndarray) or not on_gpu(array) else array.get()  # type: ignore[no-any-return]


def asarray_like(host: NDArray[Any], like: Any) -> Any:
    """`host` itself, or a copy on the GPU if `like` is there."""
    return _gpu().to_device(host) if on_gpu(like) else host


def from_dlpack(array: Any) -> Any:
    """A CuPy array on the memory of another library's GPU array; raises TypeError if CuPy cannot be imported."""
    try:
        return _gpu().from_dlpack(array)
    except ImportError as error:
        raise TypeError(
            f"a {type(array).__name__} on the GPU needs CuPy (pip install cupy-cuda13x): {error}"
        ) from error


def _within(context: Callable[[], Any], call: Callable[[], T]) -> T:
    with context():
        return call()


def bind_current_stream(call: Callable[[], T]) -> Callable[[], T]:
    """`call` for use in another thread: its GPU work goes to the streams that are current in the calling thread now."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        call = partial(_within, partial(cuda.stream, cuda.current_stream()), call)
    return _gpu().bind_current_stream(call) if "cupy" in sys.modules else call  # type: ignore[no-any-return]


def native(array: Any) -> Any:
    """Return an array in the machine's byte order, itself if it is."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def contiguous(array: Any, dtype: Any = None) -> Any:
    """The array itself, or a contiguous copy on the same device, as `dtype`."""
    array = array if dtype is None else array.astype(dtype, copy=False)
    return array if array.flags.c_contiguous else array.copy()


def readonly(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view that cannot be written to: Numba compiles a kernel for each kind of view, so one kind is used."""
    view = array.view()
    view.flags.writeable = False
    return view


def data_ptr(array: Any) -> int:
    """The address of an array's first item."""
    if isinstance(array, np.ndarray) or not on_gpu(array):
        return array.__array_interface__["data"][0]  # type: ignore[no-any-return]
    return int(array.data.ptr)


def may_share_memory(a: Any, b: Any) -> bool:
    """Whether the address ranges of two arrays, from the lowest to the highest byte, overlap."""
    return on_gpu(a) == on_gpu(b) and bool(np.may_share_memory(a, b))


def _gpu() -> Any:
    from sparsecoll.kernels.gpu import device

    return device


def empty(size: int, dtype: Any, like: Any = None) -> NDArray[Any]:
    """A 1-D array of `size` uninitialised items of a native dtype, on the GPU if the array `like` is there."""
    if like is not None and on_gpu(like):
        return _gpu().empty(size, dtype)  # type: ignore[no-any-return]
    size, dtype = int(size), np.dtype(dtype).newbyteorder("=")
    nbytes = size * dtype.itemsize
    if nbytes < SMALLEST:
        return np.empty(size, dtype)
    fitting, raw = _fitting(nbytes), None
    if _lock.acquire(blocking=False):  # otherwise another thread is inside, or what a signal handler has interrupted
        try:
            _file_returned()
            if (found := next((size for size in fitting if size in _free), None)) is not None:
                raw = _free[found].pop()
                _total[0] -= found
                if not _free[found]:
                    del _free[found]
        finally:
            _lock.release()
    return np.asarray(_Block(_aligned(fitting[0]) if raw is None else raw))[:nbytes].view(dtype)


def filled(size: int, dtype: Any, kernel: Callable[..., object], *arguments: Any) -> NDArray[Any]:
    """A 1-D array of `size` items in host memory that kernel(*arguments, array) has filled."""
    out = empty(size, dtype)
    kernel(*arguments, out)
    return out


def grown(array: Any, count: int, size: int) -> Any:
    """An array of `size` items on the same device, of which the first `count` are those of `array`."""
    larger = empty(size, array.dtype, array)
    larger[:count] = array[:count]
    return larger


def _aligned(nbytes: int) -> NDArray[np.uint8]:
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -data_ptr(raw) % ALIGNMENT
    return raw[start : start + nbytes]


def release() -> None:
    """Return all memory of the pool to the system."""
    with _lock:
        _returned.clear()
        _free.clear()
        _total[0] = 0


def _forked() -> None:
    """Begin anew in a forked process: a thread that it does not have may have held the lock."""
    if _lock.locked():
        _lock.release()
    release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
