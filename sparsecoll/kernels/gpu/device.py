"""CuPy, as the kernels and the transports use it: compiled sources, launches, memory, streams."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import cupy
import numpy as np

T = TypeVar("T")

THREADS = 256  # of a block, as in common.cu
BLOCKS = 4096  # of a launch whose threads walk through their items, at most

CODES = {"float16": 2, "float32": 4, "float64": 8, "int32": 14, "int64": 18}  # of value types, see common.cu


@functools.cache
def _module(source: str, macros: tuple[str, ...]) -> Any:
    folder = Path(__file__).parent
    code = "\n".join((folder / f"{name}.cu").read_text() for name in ("common", source))
    return cupy.RawModule(code=code, options=("--fmad=false", *macros))


@functools.cache
def _kernel(source: str, name: str, macros: tuple[str, ...]) -> Any:
    return _module(source, macros).get_function(name)


def types(values: Any = None, indices: Any = None) -> tuple[str, ...]:
    """The macros that say what the arrays (or dtypes) hold."""
    macros: tuple[str, ...] = ()
    if values is not None:
        dtype = np.dtype(getattr(values, "dtype", values))
        macros += (f"-DBITS=u{8 * dtype.itemsize}",)
        if dtype.name in CODES:
            macros += (f"-DVALUE={CODES[dtype.name]}", f"-DFLOATS={int(dtype.kind == 'f')}")
    if indices is not None:
        macros += (f"-DINDEX=u{8 * np.dtype(getattr(indices, 'dtype', indices)).itemsize}",)
    return macros


def code(dtype: Any) -> int:
    """The number that stands for a type of values in the sources."""
    return CODES[np.dtype(dtype).name]


def launch(
    source: str, name: str, count: int, *args: Any, macros: tuple[str, ...] = (), blocks: int | None = None
) -> None:
    """Start a kernel of `source`.cu for `count` items, on the current stream.

    Args:
        args: arrays, and numbers of NumPy types that have the sizes of the parameters; None for a null pointer.
        blocks: of threads; by default as many as items need, up to BLOCKS.
    """
    if count == 0:
        return
    grid = min(-(-count // THREADS), BLOCKS) if blocks is None else blocks
    given = tuple(np.uint64(0) if arg is None else arg for arg in args)
    _kernel(source, name, macros)((grid,), (THREADS,), given)


def u64(x: int) -> np.uint64:
    """An argument of type u64."""
    return np.uint64(x)


def u32(x: int) -> np.uint32:
    """An argument of type u32."""
    return np.uint32(x)


def empty(size: int, dtype: Any) -> Any:
    """An array of `size` values that are whatever was there."""
    return cupy.empty(size, dtype)


def zeros(size: int, dtype: Any) -> Any:
    """An array of `size` zeros."""
    return cupy.zeros(size, dtype)


def to_device(array: Any) -> Any:
    """A copy of a host array."""
    return cupy.asarray(array)


def from_dlpack(array: Any) -> Any:
    """The memory of another library's array, of a torch CUDA tensor, say. What is queued on its stream comes first."""
    return cupy.from_dlpack(array)


def pinned(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """`size` bytes of host memory that the GPU copies to and from at full speed, beside other work."""
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)


def copy_out(array: Any, host: Any) -> Any:
    """Begin to copy `array` into pinned memory, after the work on the current stream; an event that tells the end."""
    array.get(out=host, blocking=False)
    return recorded()


def copy_in(host: Any, array: Any) -> Any:
    """Begin to copy pinned memory into `array`, before later work on this stream; an event that tells the end."""
    array.set(host)
    return recorded()


def recorded() -> Any:
    """An event after the work so far on the current stream; `done`, `synchronize()`."""
    event = cupy.cuda.Event(disable_timing=True)
    event.record(cupy.cuda.get_current_stream())
    return event


def names() -> list[str]:
    """Of all devices; raises what CuPy raises if there is none."""
    runtime = cupy.cuda.runtime
    return [runtime.getDeviceProperties(i)["name"].decode() for i in range(runtime.getDeviceCount())]


def synchronize() -> None:
    """Wait for the work so far on the current stream, and for no other."""
    cupy.cuda.get_current_stream().synchronize()


def bind_current_stream(call: Callable[[], T]) -> Callable[[], T]:
    """The call, to be made later in any thread: on the device and the stream that are current now."""
    device, stream = cupy.cuda.Device(), cupy.cuda.get_current_stream()

    def later() -> T:
        with device, stream:
            return call()

    return later


@contextlib.contextmanager
def using(index: int, pointer: int) -> Iterator[None]:
    """Work inside goes to another library's stream of device number `index`."""
    with cupy.cuda.Device(index), cupy.cuda.ExternalStream(pointer):
        yield
