"""Modelled time and counted volume for P = 4 to 1024: the library's own code on the simulator.

    python perf/scaling.py --json perf/results/scaling.json
    python perf/scaling.py --levels --ranks 64 256 1024 4096 --json perf/results/levels.json

Every virtual rank has k entries at uniform indices and makes two calls with one algorithm object, of which the second
is measured. A message takes alpha + beta * bytes, and computation what `costs.py` measures on one core of this machine.
Nothing is selected, but the costs of a selection are added.

A vector that is s times shorter takes the same time on a network and a processor that are s times slower, except for
message headers of 16 to 50 bytes, which count s times as much. So that 1024 ranks fit in memory and end in minutes, n
is divided by the `scale` in each row; the shortest messages still have some 300 entries (70 at 1024 ranks).

With --levels, Ok-Topk in one level and in two: 4,000 entries a rank of 400,000 coordinates on 10 Gb/s, without the
search for boundaries and thresholds, with the processor time of a rank in Python on this machine. One level is
simulated up to --most ranks. Two levels are simulated for all of --ranks, above 1024 ranks in the first call, on even
regions. Rows of 16,384 and 65,536 ranks have counted messages, the split's seconds of the library's model, and the
processor time of a message at the most ranks that were simulated.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import costs
import numpy as np
from entries import Entries
from report import Row
from rich.console import Console

import sparsecoll
from sparsecoll import Costs, DenseVector, Network
from sparsecoll.algorithms.primitives import estimates, pipeline
from sparsecoll.algorithms.primitives.grid import Grid
from sparsecoll.cli import arguments, bench
from sparsecoll.transport.channel import Channel

MODELS = {"BERT": (133_547_324, 0.01), "VGG-16": (14_728_266, 0.02), "LSTM": (27_569_568, 0.02)}  # Ok-Topk, Table 2
NETWORKS = {"1 Gb/s": Network(50e-6, 8e-9), "10 Gb/s": Network(20e-6, 8e-10), "100 Gb/s": Network(2e-6, 8e-11)}
PUBLISHED = {  # in Ok-Topk's figures: (algorithm, format)
    "Dense": ("dense", "auto"),
    "TopkA": ("allgather", "coo"),
    "TopkDSA": ("sparcml:variant=dynamic", "coo"),
    "gTopk": ("gtopk", "coo"),
    "Ok-Topk": ("oktopk", "coo"),
}
OURS = {  # (algorithm, value dtype)
    "exact sum": ("auto", None),
    "top k of sum": ("auto:want=top_k_of_sum", None),
    "top k of sum, float16": ("auto:want=top_k_of_sum", "float16"),
}
LEVELS_N, LEVELS_K = 400_000, 4_000
LEAST = 300  # entries of a message
MOST_IN_CHUNKS = 64  # with more ranks, messages are not divided into chunks, of which there would be millions


def scaled(costs: Costs, scale: float) -> Costs:
    """Return the costs of a processor that is `scale` times slower, with the same overhead per call."""
    return Costs(**{name: value * (1 if name == "call" else scale) for name, value in vars(costs).items()})


def simulated(
    n: int,
    density: float,
    P: int,
    network: Network,
    costs: Costs,
    algo: str,
    form: str,
    value_dtype: str | None,
    scale: int,
) -> dict[str, Any]:
    """Simulate a call; return seconds, the words that the busiest rank receives without search, and its messages."""
    short = n // scale
    k = max(1, round(short * density))
    slow = Network(network.alpha, network.beta * scale)

    def program(comm: Any) -> tuple[float, float, float, float, int]:
        algorithm = arguments.algorithm(algo)
        x = Entries(short, k, comm.rank, count=1)()
        dense = DenseVector(x.to_dense()) if algorithm.takes_dense else None
        transport = comm.transport

        def call() -> sparsecoll.Traffic:
            before = transport.traffic.copy()
            if dense is not None:  # as a gradient is: already dense
                algorithm(Channel(transport, short), dense, k)
            else:
                sparsecoll.allreduce(comm, x, algorithm, k=k, format=form, value_dtype=value_dtype)
            return transport.traffic.since(before)

        call()
        sparsecoll.transport.collectives.allgather(transport, np.zeros(1))
        start = transport.now()
        moved = call()
        search = sum(moved.phases[p].words_received for p in ("agree", "repartition", "threshold") if p in moved.phases)
        return start, transport.now(), moved.total.words_received, search, moved.total.messages_sent

    whole_piece = pipeline.CHUNK_BYTES
    pipeline.CHUNK_BYTES = max(pipeline.CHUNK_BYTES // scale, 1) if P <= MOST_IN_CHUNKS else 1 << 60
    try:
        results = sparsecoll.simulate(P, program, slow, costs=scaled(costs, scale)).results
    finally:
        pipeline.CHUNK_BYTES = whole_piece
    seconds = max(r[1] for r in results) - max(r[0] for r in results)
    selecting = 0.0 if algo == "dense" else costs.select * n
    return {
        "seconds": seconds + selecting,
        "select": selecting,
        "words": max(r[2] - r[3] for r in results) * scale,
        "search": max(r[3] for r in results),
        "bytes_received": int(4 * max(r[2] for r in results) * scale),
        "messages": max(r[4] for r in results),
    }


def in_levels(P: int, levels: int, costs: Costs) -> Row:
    """Simulate a call of Ok-Topk in one level or two."""
    few = P <= 1024

    def program(comm: Any) -> tuple[float, ...]:
        algorithm = sparsecoll.OkTopk(levels=levels, repartition="histogram" if few else "even", tau_prime=1 << 20)
        x, transport = Entries(LEVELS_N, LEVELS_K, comm.rank, count=1)(), comm.transport
        if few:
            sparsecoll.allreduce(comm, x, algorithm, k=LEVELS_K)
        before, start, used = transport.traffic.copy(), transport.now(), time.thread_time()
        sparsecoll.allreduce(comm, x, algorithm, k=LEVELS_K)
        used = time.thread_time() - used
        moved = transport.traffic.since(before)
        parts = [moved.phases[name] for name in ("split", "gather")]
        messages, words = sum(part.messages_sent for part in parts), sum(part.words_received for part in parts)
        whole = moved.total.messages_sent
        return parts[0].seconds, messages, words, used * messages / whole, transport.now() - start

    found = np.array(sparsecoll.simulate(P, program, NETWORKS["10 Gb/s"], costs=costs).results)
    seconds, messages, words = found[:, :3].max(axis=0).tolist()
    row = {"P": P, "levels": levels, "how": "simulated", "split": seconds, "messages": int(messages), "words": words}
    return row | {"processor": float(found[:, 3].mean())}


def modelled(P: int, levels: int, processor: float, costs: Costs) -> Row:
    """Return a row of counted messages and modelled seconds; `processor`: seconds of a message."""
    width = Grid(P).width
    split = P - 1 if levels == 1 else width + Grid(P).rows - 2
    gather = estimates.rounds(P) if levels == 1 else estimates.rounds(width) + estimates.rounds(Grid(P).rows)
    network, code = NETWORKS["10 Gb/s"], costs.encode + costs.decode
    message = network.alpha / 100 + 2 * costs.call
    seconds = estimates.oktopk_split_seconds(LEVELS_N, LEVELS_K, P, network, message, code, costs.merge)[levels - 1]
    row = {"P": P, "levels": levels, "how": "model", "split": seconds, "messages": split + gather}
    return row | {"words": None, "processor": processor * (split + gather)}


def levels_rows(options: argparse.Namespace, costs: Costs, known: set[tuple[int, int]]) -> Iterator[Row]:
    """Yield the rows of --levels, without those that are known."""
    for P in options.ranks:
        for levels in (1, 2):
            if (P, levels) not in known:
                small = levels == 2 or options.most >= P
                yield in_levels(P, levels, costs) if small else modelled(P, levels, math.nan, costs)
    for P in (16_384, 65_536):
        for levels in (1, 2):
            if (P, levels) not in known:
                yield modelled(P, levels, math.nan, costs)


def with_processor(found: list[Row]) -> list[Row]:
    """Return the rows with the processor time of modelled ones: that of a message at the most ranks simulated."""
    for row in found:
        alike = [r for r in found if r["how"] == "simulated" and r["levels"] == row["levels"]]
        if row["how"] == "model" and alike:
            most = max(alike, key=lambda r: r["P"])
            row["processor"] = most["processor"] / most["messages"] * row["messages"]
    return found


def main_of_levels(options: argparse.Namespace, charged: Costs) -> None:
    """Measure, print and save the rows of --levels."""
    found: list[Row] = json.loads(options.json.read_text())["rows"] if options.resume else []
    for row in levels_rows(options, charged, {(row["P"], row["levels"]) for row in found}):
        found = with_processor([*found, row])
        if options.json:
            about = bench.about() | {"costs": vars(charged)}
            options.json.write_text(json.dumps({"about": about, "rows": found}, indent=1) + "\n")
    for row in sorted(found, key=lambda row: (row["P"], row["levels"])):
        words = "" if row["words"] is None else f"{row['words'] / LEVELS_K:.2f} k words"
        sys.stdout.write(
            f"{row['P']:>6} {row['levels']} {row['how']:<10}{row['split'] * 1e3:>9.2f} ms {row['messages']:>6} messages"
            f" {row['processor'] * 1e3:>9.2f} ms of processor {words}\n"
        )


def scale_of(kind: str, n: int, density: float, P: int, work: float) -> int:
    """Return the divisor of n, see the top of this file."""
    k, total = n * density, estimates.fill_in(n, int(n * density), P)
    shortest = {"Dense": n / P, "TopkA": k, "gTopk": k}.get(kind, k / P)
    handled = P * {"Dense": 2 * n, "TopkA": k * P, "TopkDSA": total, "exact sum": total}.get(kind, k)
    return max(1, int(min(shortest, pipeline.CHUNK_BYTES / 5) / LEAST), int(np.ceil(handled / work)))


def rows(options: argparse.Namespace, costs: Costs, known: set[tuple[Any, ...]]) -> Iterator[Row]:
    """Yield the rows of every model on every network, without those that are known."""
    for name in options.models:
        n, density = MODELS[name]
        for P in options.ranks:
            for network_name in options.networks if options.most >= P else options.networks[:1]:
                kinds: dict[str, tuple[str, str, str | None]] = {a: (*spec, None) for a, spec in PUBLISHED.items()}
                kinds |= {a: (algo, "auto", dtype) for a, (algo, dtype) in OURS.items()}
                for kind, (algo, form, value_dtype) in kinds.items():
                    if (name, P, network_name, kind) in known:
                        continue
                    scale = scale_of(kind, n, density, P, options.work)
                    found = simulated(n, density, P, NETWORKS[network_name], costs, algo, form, value_dtype, scale)
                    about = {"model": name, "n": n, "density": density, "P": P, "network": network_name, "algo": kind}
                    yield about | {"scale": scale} | found


def main() -> None:
    """Simulate, print and save the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 16, 64, 256, 1024])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--most", type=int, default=256, help="ranks; with more, the first network only")
    parser.add_argument("--levels", action="store_true", help="Ok-Topk in one level and in two, for many ranks")
    parser.add_argument("--work", type=float, default=1e8, help="entries that all ranks of a run may handle together")
    parser.add_argument("--costs", type=Path, help="what perf/costs.py --json wrote, in place of measuring")
    parser.add_argument("--json", type=Path, help="save the rows")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are in that file, run the others")
    options = parser.parse_args()
    charged = Costs(**json.loads(options.costs.read_text())["costs"]) if options.costs else costs.of_this_machine()
    console, found = Console(), []
    console.print(charged)
    if options.levels:
        main_of_levels(options, charged)
        return
    if options.resume:
        found = json.loads(options.json.read_text())["rows"]
    known = {(row["model"], row["P"], row["network"], row["algo"]) for row in found}
    for row in rows(options, charged, known):
        found.append(row)
        sys.stdout.write(
            f"{row['model']:<8}{row['P']:>5} {row['network']:<9}{row['algo']:<24}{row['seconds'] * 1e3:>10.1f} ms"
            f" {row['words'] / (row['n'] * row['density']):>8.2f} k words, {row['messages']} messages,"
            f" 1/{row['scale']}\n"
        )
        sys.stdout.flush()
        if options.json:
            about = bench.about() | {"costs": vars(charged)}
            options.json.write_text(json.dumps({"about": about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
