"""The device behind fake_cupy.py: its memory, a pretend driver's where there is one, streams and events."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time

import numpy as np

GUARD = 64  # bytes of known garbage on either side of an allocation


class Memory:
    """`size` bytes between guards: host memory, and its address on the device."""

    def __init__(self, size: int) -> None:
        whole = -(-size // 256) * 256 + 2 * GUARD
        self.driver = driver()
        if self.driver is None:
            self.raw = np.empty(whole, np.uint8)
            self.address = self.raw.ctypes.data + GUARD
        else:
            self.address, alias = self.driver.allocate(whole)
            self.raw = np.ctypeslib.as_array((ctypes.c_uint8 * whole).from_address(alias))
            self.address += GUARD
        self.raw[:] = 0xA5
        self.size = size

    def intact(self) -> bool:
        return bool((self.raw[:GUARD] == 0xA5).all() and (self.raw[GUARD + self.size :] == 0xA5).all())

    def __del__(self) -> None:
        if self.driver is not None:
            self.driver.free(self.address - GUARD)


class Borrowed:
    """Another library's memory, as if it were the device's."""

    def __init__(self, host) -> None:
        self.raw = np.lib.stride_tricks.as_strided(host)
        self.address, self.size, self.owner = host.ctypes.data, host.nbytes, host

    def intact(self) -> bool:
        return True


class Driver:
    """cuMemAlloc and its kin of a pretend driver, which also tells where its memory can be read."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        self.library.pretend_alias.restype = ctypes.c_void_p
        self.library.pretend_alias.argtypes = [ctypes.c_uint64]
        self.library.cuMemFree_v2.argtypes = [ctypes.c_uint64]

    def allocate(self, size: int) -> tuple[int, int]:
        address = ctypes.c_uint64()
        assert self.library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        return address.value, self.library.pretend_alias(address.value)

    def free(self, address: int) -> None:
        self.library.cuMemFree_v2(address)


@functools.cache
def driver() -> Driver | None:
    path = os.environ.get("SPARSECOLL_PRETEND_DRIVER")
    return Driver(path) if path else None


class Pointer:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class Stream:
    """Work is done when it is asked for, so there is nothing to wait for; the current one is kept by thread."""

    def __init__(self, *_, **__):
        self.ptr = id(self)

    def __enter__(self):
        streams().append(self)
        return self

    def __exit__(self, *_):
        streams().pop()

    def synchronize(self):
        counts["synchronize"] = counts.get("synchronize", 0) + 1

    def wait_event(self, event):
        counts["wait_event"] = counts.get("wait_event", 0) + 1


class Device:
    """There is one."""

    def __init__(self, number=0):
        self.id = number

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def use(self):
        pass


class Event:
    done = True

    def __init__(self, *_, **__):
        self.time = 0.0

    def record(self, stream=None):
        self.time = time.perf_counter()

    def synchronize(self):
        pass


counts: dict[str, int] = {}  # of calls that wait
reads: list[int] = []  # bytes of each read by the host that waits
_null = Stream()
_local = threading.local()


def streams():
    if not hasattr(_local, "streams"):
        _local.streams = [_null]
    return _local.streams
