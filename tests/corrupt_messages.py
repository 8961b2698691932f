"""Hostile bytes: every decoder gets damaged, spliced and random messages. An error or a valid vector, nothing else.

    python tests/corrupt_messages.py --count 1000000

Each message ends where an unreadable page begins, or begins where one ends, and so does the memory that decoders and
sums get for their results: a byte too far ends the process. The program runs them in another one, and prints the number
of the message with which that one ended; `--first NUMBER --count 1` replays it. Memory is limited to 2 GiB more than at
the start: a message of some hundred bytes must not ask for it.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import mmap
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from sparsecoll import CommunicationError, DenseVector, RowSparse, SparseVector, formats
from sparsecoll.collectives.convert import words
from sparsecoll.formats import FORMATS
from sparsecoll.kernels import memory
from sparsecoll.testing.formats import check_vector, damaged
from sparsecoll.transport.all_ranks import joined, separated
from sparsecoll.vector import accumulator_dtype

ROOM = 2 << 30
LENGTHS = (1, 100, 5000, 2**20, 2**33, 2**62)
AREA, AREAS = 1 << 17, 48  # bytes, and how many results of a decoder are against a page at the same time
ROW_LENGTHS = ((100, 3), (5000, 1), (2**33, 64))


class Guarded:
    """Memory in areas, each between two pages that nobody may read or write."""

    def __init__(self) -> None:
        page = mmap.PAGESIZE
        self._area = mmap.mmap(-1, AREAS * (AREA + page) + page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._area))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for number in range(AREAS + 1):
            where = ctypes.c_void_p(start + number * (AREA + page))
            if protect(where, ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        whole = np.frombuffer(self._area, np.uint8)
        self._areas = [whole[n * (AREA + page) + page : (n + 1) * (AREA + page)] for n in range(AREAS)]
        self._next = 0
        self.count = 0

    def take(self, size: int, at_end: bool) -> np.ndarray:
        """Return memory of this size, which the AREAS-th next caller gets again."""
        self._next = (self._next + 1) % AREAS
        self.count += 1
        area = self._areas[self._next]
        return area[AREA - size :] if at_end else area[:size]

    def empty(self, size: int, dtype: object, like: object = None) -> np.ndarray:
        """Do as `kernels.memory.empty`."""
        kind = np.dtype(dtype)
        if size * kind.itemsize > AREA:
            return REAL(size, dtype) if like is None else REAL(size, dtype, like)
        return self.take(size * kind.itemsize, True).view(kind)


REAL = memory.empty


def originals(rng: np.random.Generator) -> list[tuple[np.ndarray, object]]:
    """Good messages of all formats, with the length they were made for; of rows, with the shape; of keys, with None."""
    made: list[tuple[np.ndarray, object]] = []
    for length, width in ROW_LENGTHS:
        for nnz in (0, 1, 7, 300):
            rows = np.sort(rng.choice(min(length, 4000), min(nnz, length), replace=False))
            for dtype in (np.float16, np.float32, np.int64):
                x = RowSparse(rows, np.ones((rows.size, width), dtype), length)
                made.append((np.array(formats.encode(x, "packed")), (length, width)))
    for keys in ([], ["a"], ["", "b"], [f"w{i}" for i in range(200)], [b"", b"\0", b"xx"], ["\ud800", "\u00fc" * 30]):
        made.append((np.array(words.Text.of(keys).packed()), None))
    for length in LENGTHS[1:]:
        span = min(length, 4000)
        for nnz in (0, 1, 7, 300):
            indices = np.sort(rng.choice(span, min(nnz, span), replace=False)).astype(np.int64)
            for dtype in (np.float16, np.float32, np.float64, np.int32):
                x = SparseVector(indices, rng.integers(1, 99, indices.size).astype(dtype), length)
                for form in FORMATS.values():
                    if not form.lossy or dtype in (np.float32, np.float64):
                        made.append((np.array(form.encode(x, None)), length))
                if dtype == np.float32:
                    made += [(np.array(formats.encode(x, "packed", wire)), length) for wire in ("float16", "bfloat16")]
        coded = np.sort(rng.choice(span, 1500 if span == 4000 else 0, replace=False)).astype(np.int64)
        x = SparseVector(coded, rng.standard_normal(coded.size).astype(np.float32), length)  # exponents are coded
        wires = ("float32", "float16", "bfloat16")
        made += [(np.array(formats.encode(x, "packed", wire)), length) for wire in wires]
    return made


def decode(buffer: np.ndarray, shape: object, number: int, message: np.ndarray, dense: DenseVector) -> None:
    """Decode a message as what it was, or as another thing."""
    if shape is None:
        text = words.unpacked(buffer)
        text.numbers()
        text.take(np.arange(0, len(text), 2)).packed()
        text.owners(3)
    elif isinstance(shape, tuple):
        x = formats.decode(buffer, *shape)
        check_rows(x, shape)
        RowSparse.merge([x, x], accumulator_dtype(x.dtype))
    elif number % 10 == 0:
        separated(buffer if number % 20 else joined([buffer, message])[: buffer.size], 2)
    elif number % 10 == 1 and shape == dense.length:
        formats.add_into(dense, [buffer])
    else:
        x = formats.decode(buffer, shape)
        check_vector(x, shape)
        if number % 10 < 6:  # the entries are in the message itself, where the format allows it
            check_vector(SparseVector.merge([x, x.take(np.arange(0, x.nnz, 2)), x], accumulator_dtype(x.dtype)), shape)


def check_rows(x: RowSparse, shape: tuple[int, int]) -> None:
    """Raise AssertionError unless x is a valid RowSparse of this shape."""
    assert x.shape == shape and x.values.shape == (x.rows.size, shape[1])
    assert not x.rows.size or ((x.rows[1:] > x.rows[:-1]).all() and int(x.rows[-1]) < shape[0])


def run(options: argparse.Namespace) -> None:
    """Decode; say how many were refused and how many passed as other valid messages."""
    faulthandler.enable()
    np.seterr(all="ignore")  # values are as damaged as the rest
    good = originals(np.random.default_rng(options.seed))
    dense = DenseVector(np.zeros(5000, np.float32))
    for message, shape in good:
        decode(message, shape, 2, message, dense)  # compiles the kernels
        if shape == dense.length:
            decode(message, shape, 1, message, dense)
    guarded = Guarded()
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("sparsecoll.") and getattr(module, "empty", None) is REAL:
            module.empty = guarded.empty
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + ROOM, pages + ROOM))
    refused = passed = 0
    start = time.perf_counter()
    progress = np.memmap(options.child, np.int64, "r+", shape=1)
    for number in range(options.first, options.first + options.count):
        progress[0] = number
        rng = np.random.default_rng([options.seed, number])
        message, shape = good[rng.integers(len(good))]
        if isinstance(shape, int) and rng.integers(0, 10) == 0:
            shape = int(rng.choice(LENGTHS))
        buffer = message if rng.integers(0, 10) == 0 else damaged(rng, message, good[rng.integers(len(good))][0])
        if buffer.size <= AREA:
            copy = guarded.take(buffer.size, bool(rng.integers(0, 3)))
            copy[:] = buffer
        try:
            decode(copy if buffer.size <= AREA else buffer, shape, number, message, dense)
            passed += 1
        except CommunicationError:
            refused += 1
        except BaseException:
            sys.stderr.write(f"seed {options.seed}, buffer {number}, length {shape}: {bytes(buffer)[:4000]!r}\n")
            raise
    seconds = time.perf_counter() - start
    print(
        f"{options.count} buffers, {refused} refused, {passed} valid, {guarded.count} against a page, {seconds:.0f} s"
    )


def main() -> None:
    """Run the decoders in another process, and say with which message it ended if it was killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run(options)
        return
    with tempfile.NamedTemporaryFile() as progress:
        progress.write(bytes(8))
        progress.flush()
        status = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--child", progress.name], check=False
        ).returncode
        if status < 0:
            number = int.from_bytes(Path(progress.name).read_bytes(), "little")
            sys.exit(f"signal {-status} at --seed {options.seed} --first {number} --count 1")
        sys.exit(status)


if __name__ == "__main__":
    main()
