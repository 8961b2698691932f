"""Numba's cache on disk, with a file for each function, signature, instruction set and processor.

Numba numbers the files of a function, and two processes that fill the cache at once may take the same number. It also
overlooks changes of functions in other files, does not know instruction sets, and trusts a damaged file, whose code may
end the process. The processes of a node that need the same kernel at once all compile it; here one does, and the others
wait for its file. Meanwhile, some of them compile what is needed next.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import logging
import os
import time
from pathlib import Path
from typing import Any

import numba as nb
from numba.core import bytecode as _bytecode, caching as _caching
from numba.core.runtime.nrt import rtsys as _runtime

from sparsecoll.kernels import AHEAD
from sparsecoll.kernels.cpu.intrinsics.target import SET

logger = logging.getLogger(__name__)
bytecode: Any = _bytecode
caching: Any = _caching
runtime: Any = _runtime
KERNELS = Path(__file__).parents[2]
AHEAD_BYTES = 1 << 62  # from here on are bytes of no kernel, locked by the processes that make the calls of AHEAD
WAIT_SECONDS = 30  # for the process that compiles a kernel: it may have been stopped
SOURCES = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(KERNELS.rglob("*.py")))).digest()


def _number_functions() -> None:
    """Let Numba count functions from a random number, which is a part of the names in their machine code.

    It counts from 1 in every process. Then two functions of one closure that two processes have compiled may have the
    same name, and a process that loads both from the cache calls the same code for both.
    """
    bytecode.FunctionIdentity._unique_ids = itertools.count(int.from_bytes(os.urandom(7), "little"))


_number_functions()
os.register_at_fork(after_in_child=_number_functions)


class CacheFile(caching.IndexDataCacheFile):  # type: ignore[misc]
    """The files of one function, each of which is replaced as a whole, and ends with a digest of sources and data."""

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._data_name(self.number(key)), data)

    def load(self, key: Any) -> Any:
        name = self._data_name(self.number(key))
        with contextlib.suppress(OSError):  # it does not exist
            stored = Path(self._data_path(name)).read_bytes()
            size = len(stored) - len(SOURCES)
            return self._load_data(name) if stored[size:] == _digest(stored[:size]) else None

    def _dump(self, data: Any) -> bytes:
        dumped: bytes = super()._dump(data)
        return dumped + _digest(dumped)

    def number(self, key: Any) -> int:
        return int.from_bytes(hashlib.sha256(repr((SET, nb.__version__, key)).encode()).digest()[:8], "little")


def _digest(dumped: bytes) -> bytes:
    return hashlib.sha256(SOURCES + dumped).digest()


def _described(function: Any) -> str:
    """Return the name of a kernel and what its closure holds."""
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    described = [_described(part.py_func) if hasattr(part, "py_func") else f"{type(part)} {part}" for part in held]
    return f"{function.__qualname__}({', '.join(described)})"


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file = CacheFile(self._cache_path, self._impl.filename_base, b"")
        self._locked: list[int] = []

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        """As Numba's, in which a kernel that is held by a closure has another name in every process."""
        return signature, codegen.magic_tuple(), _described(self._py_func)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """As Numba's, but without loading what only a compilation needs, SciPy's linear algebra among it.

        If it returns None, no other process compiles this kernel until `unlock` is called or this process ends.
        """
        runtime.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            found = self._load_overload(signature, target_context)
            if found is None:
                _announce(self._cache_path)
                with contextlib.suppress(OSError):  # a folder or a file system without locks
                    waited = self._lock(signature, target_context)
                    found = self._load_overload(signature, target_context)
                    if found is not None or waited:  # the other one could not save it: none waits twice
                        self.unlock()
        return found

    def save_overload(self, signature: Any, data: Any) -> None:
        with contextlib.suppress(OSError):  # such as a full disk, or a folder in which no file can be made any more
            super().save_overload(signature, data)

    def _lock(self, signature: Any, target_context: Any) -> bool:
        """Lock a kernel, one byte of the folder's file; return whether another process had it."""
        self._impl.locator.ensure_cache_path()
        file = _lock_file(self._cache_path)
        byte = self._cache_file.number(self._index_key(signature, target_context.codegen())) >> 2  # an off_t
        start, free = time.monotonic(), True
        while not _locked(file, byte) and time.monotonic() < start + WAIT_SECONDS:
            free = False
            _compile_ahead(self._cache_path)
            time.sleep(0.01)
        self._locked.append(byte)
        return not free

    def unlock(self) -> None:
        """Let other processes compile what this one has locked last."""
        if self._locked:
            fcntl.lockf(_lock_file(self._cache_path), fcntl.LOCK_UN, 1, self._locked.pop())


@functools.cache
def _lock_file(folder: str) -> int:
    """Open the file whose bytes are locked, once: a process that closes it loses all of its locks."""
    return os.open(os.path.join(folder, "kernels.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _locked(file: int, byte: int) -> bool:
    with contextlib.suppress(BlockingIOError, PermissionError):  # POSIX allows both for a lock of another process
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        return True
    return False


def _compile_ahead(folder: str) -> None:
    """Make a call of AHEAD that no other process of the node makes."""
    calls = AHEAD.copy()
    AHEAD.clear()  # first: the call may wait, too
    for number, call in enumerate(calls):
        if _locked(_lock_file(folder), AHEAD_BYTES + number):
            with contextlib.suppress(Exception):  # it will be raised where such a call is made
                call()
            break


@functools.cache
def _announce(folder: str) -> None:
    """Log once in this process that a kernel is compiled."""
    logger.info("kernels are compiled for the first time, into %s (`sparsecoll warmup` compiles all)", folder)


def jit(function: Any) -> Any:
    """`function`, compiled when it is first called with arguments of these types; releases the GIL, and is cached."""
    compiled: Any = nb.njit(nogil=True)(function)
    with contextlib.suppress(RuntimeError):  # there is no folder that this process may write to
        compiled._cache = kernels = _Cache(function)

        def compile_and_unlock(signature: Any, compile_: Any = compiled.compile) -> Any:
            try:
                return compile_(signature)
            finally:
                kernels.unlock()

        compiled.compile = compile_and_unlock
    return compiled
