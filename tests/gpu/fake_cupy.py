"""A stand-in for CuPy where there is no GPU: its arrays are host memory that refuses to be used as such.

`install()` makes it the module `cupy`. Kernels are compiled by the C++ compiler over cuda_on_host.h: they are run, not
assumed. Arrays mix with NumPy's neither in functions nor in arithmetic, convert to them by `get` alone, begin with
garbage, and are checked for writes beyond their ends after each launch. Functions have names that CuPy has, no others.

With SPARSECOLL_PRETEND_DRIVER=libcuda.so.1 (fake_driver.c) memory is the driver's: its addresses cannot be read by
the host, as those of a GPU, and a CUDA-aware MPI copies from and to them through that driver.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
import weakref
from pathlib import Path

import numpy as np
from fake_device import GUARD, Borrowed, Device, Event, Memory, Pointer, Stream, counts as counts, reads, streams

HERE = Path(__file__).parent
FLAGS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-w",
         "-fsanitize=alignment,shift", "-fsanitize-undefined-trap-on-error")  # fmt: skip
_FUNCTIONS = """
abs add any all append arange argsort array asarray ascontiguousarray bitwise_and bitwise_or concatenate
    bincount copysign count_nonzero cumsum diff divide empty empty_like equal flatnonzero full full_like greater
    greater_equal invert isfinite isinf isnan less less_equal logical_and logical_not logical_or maximum minimum
    multiply nan_to_num negative not_equal packbits left_shift right_shift remainder floor_divide absolute rint
    searchsorted sign sort sqrt subtract sum true_divide unpackbits where zeros zeros_like power square
    bitwise_xor ones outer repeat argmax argmin max min stack nonzero shape ndim size result_type can_cast
    may_share_memory take dot clip unique array_equal from_dlpack
"""
_OPERATORS = """
    add sub mul floordiv truediv mod and or xor lshift rshift lt le gt ge eq ne neg invert abs radd rsub rmul rfloordiv
    rtruediv rand ror rxor rlshift rrshift iadd isub imul iand ior ixor pow
"""
FUNCTIONS, OPERATORS = set(_FUNCTIONS.split()), set(_OPERATORS.split())
METHODS = ("sum", "any", "all", "min", "max", "argmax", "argmin", "argsort", "cumsum", "ravel", "repeat", "nonzero")


def _plain(x):
    """x for NumPy; NumPy's own arrays are refused."""
    if isinstance(x, ndarray):
        return x._host
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError(f"Unsupported type {type(x)}")
    if isinstance(x, (list, tuple)):
        return type(x)(_plain(item) for item in x)
    return x


def _wrapped(x):
    if isinstance(x, np.ndarray):
        return ndarray._of(x)
    if isinstance(x, np.generic):  # CuPy has no scalars of its own
        return ndarray._of(np.asarray(x))
    if isinstance(x, (list, tuple)):
        return type(x)(_wrapped(item) for item in x)
    return x


def _call(function, args, kwargs):
    out = kwargs.get("out")
    if isinstance(out, tuple):
        out = kwargs["out"] = out[0]
    result = function(*_plain(list(args)), **{name: _plain(value) for name, value in kwargs.items()})
    return out if out is not None else _wrapped(result)


class ndarray:
    """Device memory."""

    __slots__ = ("__weakref__", "_host", "_memory")

    @classmethod
    def _of(cls, host, memory=None):
        """An array over `host`; copied into device memory unless it is there."""
        array = object.__new__(cls)
        if memory is None:
            memory = _memory_of(host)
        if memory is None:
            memory = Memory(host.nbytes)
            inside = memory.raw[GUARD : GUARD + host.nbytes].view(host.dtype).reshape(host.shape)
            inside[...] = host
            host = inside
        array._host, array._memory = host, memory
        _owners[memory.raw.ctypes.data] = memory
        return array

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if method != "__call__" or ufunc.__name__ not in FUNCTIONS:
            return NotImplemented
        return _call(ufunc, inputs, kwargs)

    def __array_function__(self, function, _types, args, kwargs):
        if function.__name__ not in FUNCTIONS:
            return NotImplemented
        kwargs.pop("like", None)
        return _call(function, args, kwargs)

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.data.ptr, False), "version": 3,
                "strides": None if self.flags.c_contiguous else self.strides}  # fmt: skip

    @property
    def data(self):
        if isinstance(self._memory, Borrowed):
            return Pointer(self._host.ctypes.data)
        offset = self._host.ctypes.data - (self._memory.raw.ctypes.data + GUARD)
        return Pointer(self._memory.address + offset)

    def get(self, stream=None, order="C", out=None, blocking=True):
        assert self._memory.intact(), "a kernel wrote beyond the end of an array"
        if blocking:
            reads.append(self.nbytes)
        if out is None:
            return self._host.copy()
        if not out.flags.c_contiguous or out.dtype != self.dtype or out.shape != self.shape:
            raise ValueError("out: another shape or dtype")
        out[...] = self._host
        return out

    def set(self, host, stream=None):
        if not isinstance(host, np.ndarray) or host.dtype != self.dtype or host.shape != self.shape:
            raise ValueError("set: expected a NumPy array of the same shape and dtype")
        self._host[...] = host

    def astype(self, dtype, copy=True):
        return self if not copy and np.dtype(dtype) == self.dtype else ndarray._of(self._host.astype(dtype))

    def view(self, dtype):
        return ndarray._of(self._host.view(dtype), self._memory)

    def reshape(self, *shape):
        return ndarray._of(self._host.reshape(*shape), self._memory)

    def copy(self):
        return ndarray._of(self._host.copy())

    def sort(self):
        self._host.sort()

    def fill(self, value):
        self._host.fill(value or 0)  # CuPy clears the memory: -0.0 becomes +0.0

    def __getitem__(self, key):
        return _wrapped_of(self._host[_plain(key)], self)

    def __setitem__(self, key, value):
        self._host[_plain(key)] = 0 if isinstance(value, (int, float)) and not value else _plain(value)  # as `fill`

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __len__(self):
        return len(self._host)

    def __dlpack__(self, **_):
        raise BufferError("a pretend array has no DLPack capsule")


def _wrapped_of(host, base):
    if isinstance(host, np.generic):
        return ndarray._of(np.asarray(host))
    inside = np.shares_memory(host, base._host) if host.size else False
    return ndarray._of(host, base._memory) if inside else ndarray._of(host.copy())


_owners: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # memory by where the host finds it


def _memory_of(host):
    """The device memory that `host` lies in: what a NumPy function returned may be a view of it."""
    base = host
    while isinstance(base, np.ndarray) and base.base is not None and isinstance(base.base, np.ndarray):
        base = base.base
    memory = _owners.get(base.ctypes.data) if isinstance(base, np.ndarray) else None
    return memory if memory is not None and memory.raw.size == base.nbytes else None


def _forward(name):
    def method(self, *args, **kwargs):
        return _call(getattr(np.ndarray, name), (self, *args), kwargs)

    return method


for _name in METHODS:
    setattr(ndarray, _name, _forward(_name))
ndarray.argsort = lambda self: ndarray._of(self._host.argsort(kind="stable"))
for _name in OPERATORS:

    def _operator(self, *others, _special=f"__{_name}__", _inplace=_name[0] == "i" and _name != "invert"):
        if any(isinstance(other, np.ndarray) and other.ndim for other in others):
            raise TypeError(f"Unsupported type {np.ndarray}")
        result = getattr(self._host, _special)(*(_plain(other) for other in others))
        if result is NotImplemented:
            return result
        return self if _inplace else _wrapped(result)

    setattr(ndarray, f"__{_name}__", _operator)
for _name in ("int", "float", "bool", "index", "complex"):

    def _scalar(self, _special=f"__{_name}__"):
        reads.append(self.nbytes)
        return getattr(self._host, _special)()

    setattr(ndarray, f"__{_name}__", _scalar)
for _name in ["dtype", "shape", "size", "nbytes", "ndim", "itemsize", "flags", "strides", "T"]:
    setattr(ndarray, _name, property(lambda self, _name=_name: getattr(self._host, _name)))
ndarray.tolist = lambda self: self.get().tolist()
ndarray.__hash__ = None
ndarray.__module__ = "cupy"


@functools.cache
def _compiled(code: str, macros: tuple[str, ...]) -> tuple[ctypes.CDLL, dict[str, list[str]]]:
    """(library, the types of each kernel's parameters)."""
    run = functools.partial(subprocess.run, text=True, capture_output=True, check=True)
    expanded = run(["g++", "-E", "-P", *macros, "-x", "c++", "-"], input=code).stdout
    declared = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(([^)]*)\)', expanded)
    parameters = {
        name: [" ".join(p.replace("*", "* ").split()[:-1]) for p in text.split(",")] for name, text in declared
    }
    calls = []
    for name, kinds in parameters.items():
        given = ", ".join(f"*({kind}*)a[{i}]" for i, kind in enumerate(kinds))
        calls.append(f"static void {name}_with(void** a) {{ {name}({given}); }}")
        launch = f"{{ return host::launch({name}_with, a, g, b); }}"
        calls.append(f'extern "C" int {name}_on_host(void** a, unsigned g, unsigned b) {launch}')
    header = HERE / "cuda_on_host.h"
    source = "\n".join([f'#include "{header}"', code, *calls])
    key = hashlib.sha256("\0".join([source, header.read_text(), *macros, *FLAGS]).encode()).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"sparsecoll-kernels-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    library = folder / f"{key[:32]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            file = Path(scratch) / "kernels.so"
            run(["g++", *FLAGS, *macros, "-x", "c++", "-", "-o", str(file)], input=source)
            file.replace(library)
    return ctypes.CDLL(str(library)), parameters


class RawModule:
    def __init__(self, code, options=(), **_):
        self._code, self._macros = code, tuple(option for option in options if option.startswith("-D"))

    def get_function(self, name):
        library, parameters = _compiled(self._code, self._macros)
        return _Function(getattr(library, f"{name}_on_host"), name, parameters[name])


class _Function:
    def __init__(self, function, name, parameters):
        self._function, self._name, self._parameters = function, name, parameters

    def __call__(self, grid, block, args, **_):
        if len(args) != len(self._parameters):
            raise TypeError(f"{self._name}: expected {len(self._parameters)} arguments, got {len(args)}")
        held, arrays = [], []
        for kind, arg in zip(self._parameters, args, strict=True):
            if isinstance(arg, ndarray):
                if "*" not in kind or not arg.flags.c_contiguous:
                    raise TypeError(f"{self._name}: {kind} got an array, contiguous: {arg.flags.c_contiguous}")
                held.append(ctypes.c_void_p(arg._host.ctypes.data))
                arrays.append(arg)
            elif "*" in kind:
                if not isinstance(arg, np.uint64) or arg:
                    raise TypeError(f"{self._name}: {kind} got {type(arg)}")
                held.append(ctypes.c_void_p(0))
            else:
                sizes = {"u64": 8, "i64": 8, "double": 8, "u32": 4, "int": 4, "float": 4, "u16": 2, "u8": 1}
                if not isinstance(arg, np.generic) or arg.dtype.itemsize != sizes.get(kind, arg.dtype.itemsize):
                    raise TypeError(f"{self._name}: {kind} got {type(arg)}")
                if (kind in ("double", "float")) != (arg.dtype.kind == "f"):
                    raise TypeError(f"{self._name}: {kind} got {type(arg)}")
                held.append((ctypes.c_uint8 * arg.dtype.itemsize).from_buffer_copy(arg.tobytes()))
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
        status = self._function(pointers, grid[0], block[0])
        assert status == 0, f"{self._name}: not all threads reach a barrier"
        for array in arrays:
            assert array._memory.intact(), f"{self._name} wrote beyond the end of an array"


def empty(shape, dtype=float):
    dtype = np.dtype(dtype)
    memory = Memory(int(np.prod(shape)) * dtype.itemsize)
    return ndarray._of(memory.raw[GUARD : GUARD + memory.size].view(dtype).reshape(shape), memory)


def zeros(shape, dtype=float):
    array = empty(shape, dtype)
    array._host[...] = 0
    return array


def asarray(x, dtype=None):
    if isinstance(x, ndarray):
        return x if dtype is None else x.astype(dtype, copy=False)
    return ndarray._of(np.array(x, dtype))


def borrowed(host):
    """A NumPy array's memory as a device array."""
    return ndarray._of(host, Borrowed(host))


def asnumpy(x):
    return x.get() if isinstance(x, ndarray) else np.asarray(x)


def _named(name, *args, **kwargs):
    return _call(getattr(np, name), args, kwargs)


def device_library() -> types.ModuleType:
    """CuPy if it has a GPU, else what stands in for it."""
    try:
        import cupy

        if hasattr(cupy, "pretend") or cupy.cuda.runtime.getDeviceCount():
            return cupy
    except Exception:  # not installed, or no driver
        for name in [name for name in sys.modules if name.split(".")[0] in ("cupy", "cupy_backends")]:
            del sys.modules[name]
    return install()


def install() -> types.ModuleType:
    """Make this module `cupy`."""
    if shutil.which("g++") is None:
        raise RuntimeError("the pretend CuPy needs g++")
    module = types.ModuleType("cupy")
    module.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    for name in FUNCTIONS:
        setattr(module, name, functools.partial(_named, name))
    module.empty, module.zeros, module.asarray, module.array, module.asnumpy = empty, zeros, asarray, asarray, asnumpy
    module.arange = lambda *args, **kwargs: ndarray._of(np.arange(*args, **kwargs))
    module.ndarray, module.RawModule, module.pretend = ndarray, RawModule, sys.modules[__name__]
    for name in ("uint8", "uint16", "uint32", "uint64", "int32", "int64", "float16", "float32", "float64"):
        setattr(module, name, getattr(np, name))
    module.__version__ = np.__version__
    module.cuda = types.SimpleNamespace(
        Device=Device,
        Stream=Stream,
        ExternalStream=Stream,
        Event=Event,
        get_current_stream=lambda: streams()[-1],
        alloc_pinned_memory=lambda size: bytearray(size),
        get_elapsed_time=lambda start, stop: 1e3 * (stop.time - start.time),
        runtime=types.SimpleNamespace(
            getDeviceProperties=lambda number: {"name": b"none, pretended"},
            getDeviceCount=lambda: 1,
            driverGetVersion=lambda: 0,
            runtimeGetVersion=lambda: 0,
        ),
    )
    sys.modules["cupy"] = module
    return module
