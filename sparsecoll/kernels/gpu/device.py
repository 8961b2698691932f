"""All use of CuPy: compiled sources, launches, memory, streams."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import cupy
import numpy as np

T = TypeVar("T")
Array = Any  # of CuPy

THREADS = 256  # per block, as in common.cu
BLOCKS = 4096  # the most blocks of a launch; their threads loop over the items (grid-stride loop)

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
    """The macros that define the types of values and indices in the CUDA sources, from arrays or dtypes.

    Those that common.cu defines by default are left out, so that one compiled module serves all of their combinations.
    """
    return _macros(*(None if x is None else np.dtype(getattr(x, "dtype", x)) for x in (values, indices)))


@functools.cache
def _macros(values: np.dtype[Any] | None, indices: np.dtype[Any] | None) -> tuple[str, ...]:
    macros: tuple[str, ...] = ()
    if values is not None:
        macros += (f"-DBITS=u{8 * values.itemsize}",)
        if values.name in CODES:
            macros += (f"-DVALUE={CODES[values.name]}", f"-DFLOATS={int(values.kind == 'f')}")
    if indices is not None and indices.itemsize == 8:
        macros += ("-DINDEX=u64",)
    return macros


def code(dtype: Any) -> int:
    """The number of a dtype of values in the CUDA sources."""
    return CODES[np.dtype(dtype).name]


def launch(
    source: str, name: str, count: int, *args: Any, macros: tuple[str, ...] = (), blocks: int | None = None
) -> None:
    """Launch a kernel on the current stream.

    Args:
        source: name of the .cu file.
        name: of the kernel in it.
        count: number of items; nothing is launched for 0.
        args: arguments of the kernel: arrays, int for u64, other NumPy scalars, None for a null pointer.
        macros: options of the compiler, as `types` returns them.
        blocks: number of blocks of threads; by default one thread per item, in at most BLOCKS blocks.
    """
    if count == 0:
        return
    grid = min(-(-count // THREADS), BLOCKS) if blocks is None else blocks
    given = tuple(np.uint64(arg or 0) if arg is None or isinstance(arg, int) else arg for arg in args)
    _kernel(source, name, macros)((grid,), (THREADS,), given)


u32 = np.uint32  # for parameters of a kernel that have 32 bits
empty, zeros, to_device, from_dlpack = cupy.empty, cupy.zeros, cupy.asarray, cupy.from_dlpack


def pinned(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """`size` bytes of page-locked host memory, for asynchronous copies."""
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)


def copy_out(array: Any, host: Any) -> Any:
    """Start a copy of `array` to pinned memory on the current stream; returns an event that completes with it."""
    array.get(out=host, blocking=False)
    return recorded()


def copy_in(host: Any, array: Any) -> Any:
    """Start a copy of pinned memory to `array` on the current stream; returns an event that completes with it."""
    array.set(host)
    return recorded()


def recorded() -> Any:
    """A new event, recorded on the current stream; it has `done` and `synchronize()`."""
    event = cupy.cuda.Event(disable_timing=True)
    event.record(cupy.cuda.get_current_stream())
    return event


def names() -> list[str]:
    """The names of all devices. CuPy raises an exception if there is none."""
    runtime = cupy.cuda.runtime
    return [runtime.getDeviceProperties(i)["name"].decode() for i in range(runtime.getDeviceCount())]


def synchronize() -> None:
    """Wait until the current stream has completed its work."""
    cupy.cuda.get_current_stream().synchronize()


def bind_current_stream(call: Callable[[], T]) -> Callable[[], T]:
    """`call` for use in any thread: it runs on the device and the stream that are current now."""
    try:
        device, stream = cupy.cuda.Device(), cupy.cuda.get_current_stream()
    except cupy.cuda.runtime.CUDARuntimeError:  # there is CuPy, but no GPU or driver
        return call

    def later() -> T:
        with device, stream:
            return call()

    return later


@contextlib.contextmanager
def using(index: int, pointer: int) -> Iterator[None]:
    """Context manager: GPU work goes to another library's stream, given by its pointer, on device `index`."""
    with cupy.cuda.Device(index), cupy.cuda.ExternalStream(pointer):
        yield
