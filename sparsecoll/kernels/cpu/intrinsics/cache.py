"""Numba's cache on disk, with a file for each function, signature, instruction set and processor.

Numba numbers the files of a function, and two processes that fill the cache at once may take the same number. It also
overlooks changes of functions in other files, does not know instruction sets, and trusts a damaged file, whose code may
end the process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from pathlib import Path
from typing import Any

import numba as nb
from numba.core import caching as _caching
from numba.core.runtime.nrt import rtsys as _runtime

from sparsecoll.kernels.cpu.intrinsics.target import SET

logger = logging.getLogger(__name__)
caching: Any = _caching
runtime: Any = _runtime
KERNELS = Path(__file__).parents[2]
SOURCES = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(KERNELS.rglob("*.py")))).digest()


class CacheFile(caching.IndexDataCacheFile):  # type: ignore[misc]
    """The files of one function, each of which is replaced as a whole, and ends with a digest of sources and data."""

    def save(self, key: Any, data: Any) -> None:
        with contextlib.suppress(OSError):  # such as a full disk
            self._save_data(self._data_name(self._number(key)), data)

    def load(self, key: Any) -> Any:
        name = self._data_name(self._number(key))
        with contextlib.suppress(OSError):  # it does not exist
            stored = Path(self._data_path(name)).read_bytes()
            size = len(stored) - len(SOURCES)
            return self._load_data(name) if stored[size:] == _digest(stored[:size]) else None

    def _dump(self, data: Any) -> bytes:
        dumped: bytes = super()._dump(data)
        return dumped + _digest(dumped)

    def _number(self, key: Any) -> int:
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

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        """As Numba's, in which a kernel that is held by a closure has another name in every process."""
        return signature, codegen.magic_tuple(), _described(self._py_func)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """As Numba's, but without loading what only a compilation needs, SciPy's linear algebra among it."""
        runtime.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            found = self._load_overload(signature, target_context)
        if found is None:
            _announce(self._cache_path)
        return found


@functools.cache
def _announce(folder: str) -> None:
    """Log once in this process that a kernel is compiled."""
    logger.info("kernels are compiled for the first time, into %s (`sparsecoll warmup` compiles all)", folder)


def jit(function: Any) -> Any:
    """`function`, compiled when it is first called with arguments of these types; releases the GIL, and is cached."""
    compiled: Any = nb.njit(nogil=True)(function)
    with contextlib.suppress(RuntimeError):  # there is no folder that this process may write to
        compiled._cache = _Cache(function)
    return compiled
