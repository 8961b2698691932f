"""Counted words per rank of each algorithm beside its formula: the papers' Table 1, measured.

    python perf/volume.py --ranks 4 16 64 --supports random same disjoint

Runs on the simulator, whose counts equal those over MPI (tests/mpi), so it needs no cluster. Prints a table and, with
--json FILE, saves rows. Words are 4 bytes, received by the busiest rank; COO, float32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import sparsecoll
from sparsecoll import model

SEARCH = ("agree", "repartition", "threshold")


def support(name: str, rank: int, P: int, n: int, k: int) -> np.ndarray:
    """Positions of one rank's k entries."""
    rng = np.random.default_rng([rank, 1])
    if name == "same":
        return np.sort(np.random.default_rng(5).choice(n, k, replace=False))
    if name == "disjoint":
        return rank * (n // P) + np.sort(rng.choice(n // P, min(k, n // P), replace=False))
    if name == "skewed":
        return np.unique((n * rng.random(2 * k) ** 4).astype(np.int64))[:k]
    return np.sort(rng.choice(n, k, replace=False))


def measure(algo: str, name: str, P: int, n: int, k: int) -> dict:
    """One row: words of entries and words spent on finding thresholds, boundaries and agreement."""

    def program(comm):
        places = support(name, comm.rank, P, n, k)
        values = np.random.default_rng([comm.rank, 2]).standard_normal(places.size).astype(np.float32)
        x = sparsecoll.SparseVector(places, values, n)
        traffic = sparsecoll.allreduce(comm, x, algo, k=k, format="coo", return_reduction=True).traffic
        search = sum(traffic.phases[p].words_received for p in SEARCH if p in traffic.phases)
        return traffic.words_received - search, search, traffic.messages_sent

    simulation = sparsecoll.simulate(P, program)
    moved, search, messages = np.max(simulation.results, axis=0).tolist()
    return {"algo": algo, "support": name, "P": P, "n": n, "k": k, "words": moved, "search": search,
            "messages": messages, "seconds": simulation.seconds}  # fmt: skip


def formula(algo: str, n: int, k: int, P: int) -> str:
    """The closed form, as words (a range where the paper gives one)."""
    if algo == "oktopk":
        low, high = model.oktopk_words(k, P)
        return f"{low:,.0f} ... {high:,.0f}"
    words = model.dense_words(n, P) if algo == "dense" else model.allgather_words(k, P)
    return f"{words:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--supports", nargs="+", default=["random", "same", "disjoint", "skewed"])
    parser.add_argument("--algos", nargs="+", default=["dense", "allgather", "oktopk"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    k = round(args.density * args.n)
    print(f"n = {args.n:,}, k = {k:,}; words received by the busiest rank; modelled seconds on 1 Gb/s, 50 us")
    columns = (
        f"{'algo':<10} {'support':<9} {'P':>4} {'counted':>12} {'formula':>22} {'search':>9} {'messages':>9} {'ms':>9}"
    )
    print(columns)
    rows = []
    for algo in args.algos:
        for name in args.supports:
            for P in args.ranks:
                row = measure(algo, name, P, args.n, k)
                rows.append(row)
                print(
                    f"{algo:<10} {name:<9} {P:>4} {row['words']:>12,.0f} {formula(algo, args.n, k, P):>22}"
                    f" {row['search']:>9,.0f} {row['messages']:>9,.0f} {1000 * row['seconds']:>9.2f}"
                )
    if args.json:
        args.json.write_text(json.dumps({"version": sparsecoll.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
