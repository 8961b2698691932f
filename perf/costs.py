"""The constants by which `auto` and the formats decide, measured on one core of this machine.

    python perf/costs.py                                  # beside those that are built in
    python perf/costs.py --json perf/results/costs.json   # also for perf/scaling.py --costs

Constants are in seconds per entry or per coordinate from the first index to the last; measurements at two densities
tell one from the other. The built-in constants were measured on a core with AVX-512. `auto` scales them by what it
measures on a communicator (`Tuning.code`, `Tuning.merge`), so only their ratios matter.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import Entries

from sparsecoll import Costs, DenseVector, SparseVector, formats
from sparsecoll.algorithms.auto import costmodel
from sparsecoll.algorithms.primitives.pipeline import MAX_CHUNKS
from sparsecoll.cli import bench
from sparsecoll.formats.costs import CODING, PACKED

REPEATS = 15
ENTRIES = 1 << 18
SPARSE, MANY = 0.01, (0.02, 0.1)  # densities
BY_SPAN = ("dense", "bitmap")  # formats whose time depends on the coordinates that are spanned
VALUES = 1 << 24  # of a dense vector
CALL = 10e-6  # of a piece of work, however small


def seconds(call: Callable[[], Any]) -> float:
    """Return the median time of some calls, after one that compiles."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def uniform(entries: int, density: float, seed: int = 0) -> SparseVector:
    """Return a vector of about this many entries at uniform indices."""
    return Entries(int(entries / density), entries, seed, count=1)()


def fitted(rows: list[tuple[int, int, float]]) -> tuple[float, float]:
    """Return seconds per entry and per coordinate, from two rows of (entries, coordinates, seconds)."""
    (k, n, low), (k2, n2, high) = rows
    entry, coordinate = np.linalg.solve([[k, n], [k2, n2]], [low, high])
    return max(float(entry), 0.0), max(float(coordinate), 0.0)


def coding() -> dict[str, float]:
    """Measure encoding and decoding in every format, per entry and, if it matters, per coordinate."""
    found: dict[str, float] = {}
    for name in CODING:
        form, rows = formats.FORMATS[name], []
        for density in (SPARSE, 0.25):
            x = uniform(ENTRIES, density)
            message = form.encode(x)
            encode = seconds(lambda form=form, x=x: form.encode(x))
            decode = seconds(lambda x=x, message=message: formats.decode(message, x.length))
            rows.append((x.nnz, x.length, encode, decode))
        for i, way in enumerate(("encode", "decode"), start=2):
            if name in BY_SPAN:
                found[f"{name}: {way}"], found[f"{name}: {way}_span"] = fitted([(r[0], r[1], r[i]) for r in rows])
            else:
                found[f"{name}: {way}"] = rows[0][i] / rows[0][0]
    return found


def merging() -> dict[str, float]:
    """Measure sums of four vectors: per entry at 1 %, and per entry and coordinate at high densities."""
    parts = [uniform(ENTRIES, SPARSE, rank) for rank in range(4)]
    entries = sum(part.nnz for part in parts)
    found = {"MERGE": seconds(lambda: SparseVector.merge(parts, parts[0].dtype)) / entries}
    rows = []
    for density in MANY:
        parts = [uniform(int(density * VALUES), density, rank) for rank in range(4)]
        took = seconds(lambda parts=parts: SparseVector.merge(parts, parts[0].dtype))
        rows.append((sum(part.nnz for part in parts), VALUES, took))
    found["DENSE_MERGE"], found["DENSE_MERGE_SPAN"] = fitted(rows)
    return found


def handling() -> dict[str, float]:
    """Measure copying an entry, from memory and from a chunk that was summed just now."""
    n = int(ENTRIES / SPARSE)
    parts = uniform(ENTRIES, SPARSE).split([n * j // 8 for j in range(9)])
    found = {"CONCATENATE": seconds(lambda: SparseVector.concatenate(parts)) / ENTRIES}
    edges = [n * j // MAX_CHUNKS for j in range(MAX_CHUNKS + 1)]
    chunks = list(zip(*(uniform(ENTRIES, SPARSE, rank).split(edges) for rank in range(4)), strict=True))

    def sums() -> Iterator[SparseVector]:
        return (SparseVector.merge(chunk, chunk[0].dtype) for chunk in chunks)

    entries = sum(chunk.nnz for chunk in sums())
    apart, whole = seconds(lambda: deque(sums(), 1)), seconds(lambda: SparseVector.collect(sums(), entries))
    return found | {"COLLECT": max(whole - apart, 0.0) / entries}


def of_this_machine() -> Costs:
    """Return the simulator's costs of computation, measured on this machine."""
    return charged(coding() | merging())


def charged(found: dict[str, float]) -> Costs:
    """Return the simulator's costs that follow from the constants."""
    dense = np.random.default_rng(0).standard_normal(VALUES, dtype=np.float32)
    k = VALUES // 100
    threshold = DenseVector(dense).topk(k)._kth_magnitude(k)
    return Costs(
        select=seconds(lambda: DenseVector(dense).threshold(threshold, k)) / VALUES,
        encode=found["packed: encode"],
        decode=found["packed: decode"],
        merge=found["MERGE"],
        dense_merge=found["DENSE_MERGE"],
        dense_merge_span=found["DENSE_MERGE_SPAN"],
        dense=seconds(lambda: np.add(dense, dense, out=dense)) / VALUES,
        call=CALL,
    )


def built_in() -> dict[str, float]:
    """Return the built-in constants under the same names."""
    known = {f"{name}: {way}": value for name, each in CODING.items() for way, value in vars(each).items()}
    known |= {
        name: getattr(costmodel, name)
        for name in ("MERGE", "DENSE_MERGE", "DENSE_MERGE_SPAN", "CONCATENATE", "COLLECT")
    }
    return known | {"PACKED": PACKED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="save them, with what perf/scaling.py needs")
    options = parser.parse_args()
    found = coding() | merging() | handling()
    found["PACKED"] = found["packed: encode"] + found["packed: decode"]
    known = built_in()
    print(f"{'constant':26} {'here':>10} {'built in':>10}")
    for name, value in found.items():
        print(f"{name:26} {value:10.3g} {known[name]:10.3g}")
    if options.json:
        rows = {"about": bench.about(), "constants": found, "costs": vars(charged(found))}
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
