"""Hostile bytes: every decoder gets damaged, spliced and random messages. An error or a valid vector, nothing else.

    python tests/corrupt_messages.py --count 1000000

Memory is limited to 2 GiB more than at the start: a message of some hundred bytes must not ask for it.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np

from sparsecoll import CommunicationError, DenseVector, SparseVector, formats
from sparsecoll.formats import FORMATS
from sparsecoll.testing.formats import check_vector, damaged
from sparsecoll.transport.collectives import joined, separated

ROOM = 2 << 30
LENGTHS = (1, 100, 5000, 2**20, 2**33, 2**62)


def originals(rng: np.random.Generator) -> list[tuple[np.ndarray, int]]:
    """Good messages of all formats, with the length they were made for."""
    made = []
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
    return made


def main() -> None:
    """Decode; say how many were refused and how many passed as other valid messages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    np.seterr(all="ignore")  # values are as damaged as the rest
    rng = np.random.default_rng(options.seed)
    good = originals(rng)
    for message, length in good:
        formats.decode(message, length)  # compiles the kernels
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + ROOM, pages + ROOM))
    dense = DenseVector(np.zeros(5000, np.float32))
    refused = passed = 0
    start = time.perf_counter()
    for number in range(options.count):
        message, length = good[rng.integers(len(good))]
        if rng.integers(0, 10) == 0:
            length = int(rng.choice(LENGTHS))
        buffer = damaged(rng, message, good[rng.integers(len(good))][0])
        try:
            if number % 10 == 0:
                separated(buffer if number % 20 else joined([buffer, message])[: buffer.size], 2)
            elif number % 10 == 1 and length == 5000:
                formats.add_into(dense, [buffer])
            else:
                check_vector(formats.decode(buffer, length), length)
            passed += 1
        except CommunicationError:
            refused += 1
        except BaseException:
            sys.stderr.write(f"seed {options.seed}, buffer {number}, length {length}: {bytes(buffer)!r}\n")
            raise
    seconds = time.perf_counter() - start
    print(f"{options.count} buffers, {refused} refused, {passed} valid, {seconds:.0f} s")


if __name__ == "__main__":
    main()
