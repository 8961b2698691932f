"""Measured times of every algorithm that `auto` can choose, beside its predictions.

    mpirun -n 2 python perf/breakeven.py                       # this machine's memory as network
    python perf/testbed.py run -- python perf/breakeven.py     # 4 hosts with 1 Gb/s

Every rank has a SparseVector with k of n coordinates, drawn uniformly, and receives the exact sum; nothing is selected.
MPI_Allreduce sums the same vectors as dense arrays. A row has the fastest algorithm, the time of `auto`, and the ratio
of predicted to measured time. Calls are made in turns, for a given time at each point, and times are medians.

The smallest of several medians is too small by chance, and `auto` would seem slower than the algorithm that it takes.
Therefore the time of the fastest choice comes from other calls than those that tell which choice that is: one half of
the calls finds the choice that the other half times, and the other way round; "ms" is the mean of the two. It is too
large, by up to 2 % for 150 calls of each and 5 to 8 % for 6 (the longest have 12), where a half finds a choice that is
a little slower.

`auto` is judged by two goals: at most FACTOR times the fastest choice plus NEAR, and at most FACTOR times MPI_Allreduce
plus MPI_NEAR.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import Entries, Row, Run, in_turns, times_in_turns
from numpy.typing import NDArray

from sparsecoll import Algorithm, Allgather, Auto, allreduce, formats
from sparsecoll.algorithms.auto import costmodel
from sparsecoll.algorithms.auto.tune import tuning_of
from sparsecoll.cli import bench
from sparsecoll.transport import as_transport, default_comm
from sparsecoll.transport.call import AGREEMENT_BYTES
from sparsecoll.transport.channel import Channel

CHOICES = [name for name in costmodel.CHOICES if name != "oktopk"]  # which gives the top k of the sum
FEWEST, MOST = 12, 999  # timed calls of each
FACTOR, NEAR, MPI_NEAR, MODEL = 1.05, 20e-6, 50e-6, 0.2  # the goals, and how far a prediction may be off


class AsDense:
    """The same entries as dense arrays, made for every call outside the timing."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    def __call__(self) -> np.ndarray:
        """Return the next vector."""
        return self._entries().to_dense()


def _allreduce(comm: Any, algorithm: Algorithm, form: str | formats.Format = "auto") -> Run:
    return lambda x: allreduce(comm, x, algorithm, format=form)


def _mpi_allreduce(comm: Any, n: int) -> Run:
    out = np.empty(n, np.float32)
    return lambda x: comm.Allreduce(x, out)


def points(comm: Any, lengths: list[int], densities: list[float], seconds: float) -> Iterator[Row]:
    """Yield a row for each length and density, the same on every rank."""
    transport = as_transport(comm)
    tuning = tuning_of(transport)
    form = formats.Auto(beta=tuning.beta)  # the format that auto uses
    for n in lengths:
        for density in densities:
            k = max(1, round(n * density))
            shape = costmodel.Shape(n, k, transport.size, 4, n, 1.0, transport.one_node, native=True)
            predicted = {name: costmodel.seconds(shape, tuning)[name] for name in CHOICES}
            predicted = {name: seconds for name, seconds in predicted.items() if seconds < math.inf}
            entries = Entries(n, k, transport.rank)
            early = Allgather().early(Channel(transport, n, form), entries())
            if early is not None and early.size > AGREEMENT_BYTES:  # entries are sent with the arguments
                predicted["allgather"] -= costmodel.agreement(transport.size, tuning)
            calls = [(_allreduce(comm, costmodel.CHOICES[name](), form), entries) for name in predicted]
            auto = Auto()
            calls += [(_allreduce(comm, auto), entries), (_mpi_allreduce(comm, n), AsDense(entries))]
            each = seconds / len(calls) / 2  # a timed call comes after one that is not
            once = in_turns(transport, calls, repeat=1, warm=0)
            repeats = [min(max(round(each / took), FEWEST), MOST) for took in once]
            times = times_in_turns(transport, calls, repeats, warm=1)
            yield _row(shape, density, predicted, times) | {"auto takes": _taken(auto)}


def _taken(auto: Auto) -> str:
    """Return what `auto` has chosen; it stores no choice of calls whose entries are sent with the arguments."""
    return " ".join(sorted({name for *_, name in auto.state_dict()["chosen"]})) or "allgather"


def fastest(times: list[NDArray[np.float64]]) -> float:
    """Return the median seconds of the fastest of several functions, from other calls than those that tell which it is.

    Args:
        times: the seconds of each function's calls.
    """
    halves = [[float(np.median(some[half::2])) for some in times] for half in (0, 1)]
    return float(np.mean([halves[1 - half][int(np.argmin(halves[half]))] for half in (0, 1)]))


def _row(shape: costmodel.Shape, density: float, predicted: dict[str, float], times: list[Any]) -> Row:
    """Return the row of one point from the times of its calls: those of CHOICES, auto and MPI."""
    *choices, auto, mpi = [float(np.median(some)) for some in times]
    measured = dict(zip(predicted, choices, strict=True))
    best, seconds = min(measured, key=lambda name: measured[name]), fastest(times[:-2])
    chosen = min(predicted, key=lambda name: predicted[name])
    low, high = np.percentile(times[list(predicted).index(best)], [25, 75]).tolist()
    return {
        "n": shape.n,
        "density": density,
        "P": shape.P,
        "calls": len(times[list(predicted).index(best)]),
        "fastest": best,
        "ms": seconds * 1e3,
        "quartiles": f"{low * 1e3:.3g} to {high * 1e3:.3g}",
        "model takes": chosen,
        "auto ms": auto * 1e3,
        "auto / fastest": auto / seconds,
        "MPI_Allreduce ms": mpi * 1e3,
        "auto / MPI_Allreduce": auto / mpi,
        "model / measured": predicted[chosen] / measured[chosen],
        **{f"{name} ms": took * 1e3 for name, took in measured.items()},
        **{f"{name} model": predicted[name] / took for name, took in measured.items()},
    }


def near_the_fastest(row: Row) -> bool:
    """Return whether `auto` reaches its first goal."""
    return bool(row["auto ms"] <= FACTOR * row["ms"] + NEAR * 1e3)


def near_mpi(row: Row) -> bool:
    """Return whether `auto` reaches its second goal."""
    return bool(row["auto ms"] <= FACTOR * row["MPI_Allreduce ms"] + MPI_NEAR * 1e3)


def judged(rows: list[Row]) -> str:
    """Return at how many points `auto` reaches its goals, as a sentence."""
    fastest, mpi = sum(near_the_fastest(r) for r in rows), sum(near_mpi(r) for r in rows)
    model = sum(abs(r["model / measured"] - 1) <= MODEL for r in rows)
    same = sum(r["auto takes"] == r["fastest"] for r in rows if not near_the_fastest(r))
    half = sum(0.5 <= r["model / measured"] <= 2 for r in rows)
    return (
        f"`auto` takes at most {FACTOR} times as long as the fastest choice plus {NEAR * 1e6:.0f} us in {fastest} of"
        f" {len(rows)} points (at {same} of the others, it runs the fastest one itself), and at most {FACTOR} times as"
        f" long as MPI_Allreduce plus {MPI_NEAR * 1e6:.0f} us in"
        f" {mpi}; the model is within {MODEL:.0%} of the measured time in {model}, within a factor of 2 in {half}."
    )


def main() -> None:
    """Measure and print; rank 0 saves the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", nargs="+", type=lambda t: int(float(t)), default=[10**5, 10**6, 10**7])
    parser.add_argument("--density", nargs="+", type=float, default=[1e-4, 1e-3, 0.01, 0.05, 0.1, 0.3])
    parser.add_argument("--seconds", type=float, default=6.0, help="for each point (default: 6)")
    parser.add_argument("--json", type=Path, help="save the rows")
    parser.add_argument("--update", action="store_true", help="keep the rows of other lengths in that file")
    options = parser.parse_args()
    comm = default_comm()
    rows = []
    kept = json.loads(options.json.read_text())["rows"] if options.update else []
    for row in points(comm, options.n, options.density, options.seconds):
        rows.append(row)
        if comm.rank == 0:
            shown = [name for name in CHOICES if f"{name} ms" in row]
            detail = " ".join(f"{name} {row[f'{name} ms']:.3f} ({row[f'{name} model']:.2f})" for name in shown)
            sys.stdout.write(
                f"{row['n']:>10} {row['density']:<7} {row['fastest']:>17} {row['ms']:9.3f} ms ({row['quartiles']}),"
                f" auto {row['auto ms']:9.3f} {row['auto / fastest']:.2f} x{'' if near_the_fastest(row) else ' !'},"
                f" MPI {row['MPI_Allreduce ms']:9.3f}{'' if near_mpi(row) else ' !'} | {detail}\n"
            )
            sys.stdout.flush()
    if comm.rank == 0:
        sys.stdout.write(judged(rows) + "\n")
        rows = sorted([*(row for row in kept if row["n"] not in options.n), *rows], key=lambda row: row["n"])
        if options.json:
            options.json.write_text(json.dumps({"about": bench.about(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
