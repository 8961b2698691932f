"""Counted words, fill-in and modelled time of the algorithms, beside formulas and figures of the papers.

    python perf/volume.py --markdown docs/volume.md --json perf/results/volume.json

Sections (--only picks some): table1, fill_in, figure7. Everything runs on the simulator, whose counts equal those over
MPI (tests/mpi), so no cluster is needed. Words are 4 bytes, received by the busiest rank; COO, float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import formulas
import numpy as np
import report
from report import Row

import sparsecoll
from sparsecoll import Algorithm, DenseStream, OkTopk, SparCML, SparseVector, select
from sparsecoll.algorithms.primitives import estimates
from sparsecoll.cli import bench

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

SEARCH = ("agree", "repartition", "threshold", "overlap", "nodes", "pattern")  # phases that move counts or bits


def support(name: str, rank: int, n: int, k: int) -> np.ndarray:
    """Return the indices of one rank's k entries."""
    rng = np.random.default_rng([rank, 1])
    if name == "identical":
        return np.sort(np.random.default_rng(5).choice(n, k, replace=False))
    if name == "skewed":
        return np.unique((n * rng.random(2 * k) ** 4).astype(np.int64))[:k]
    return np.sort(rng.choice(n, k, replace=False))


def vector(name: str, rank: int, n: int, k: int) -> SparseVector:
    """Return the input of one rank."""
    indices = support(name, rank, n, k)
    return SparseVector(indices, np.random.default_rng([rank, 2]).standard_normal(indices.size).astype(np.float32), n)


def words(low: float, high: float | None = None) -> str:
    """Format one number or a range."""
    return f"{low:,.0f}" if high is None else f"{low:,.0f} to {high:,.0f}"


ALGORITHMS: dict[str, tuple[Callable[[], Algorithm], str, Callable[[int, int, int], str]]] = {
    "dense": (sparsecoll.Dense, "2n(P-1)/P", lambda n, k, P: words(formulas.dense_words(n, P))),
    "allgather": (sparsecoll.Allgather, "2k(P-1)", lambda n, k, P: words(formulas.allgather_words(k, P))),
    "sparcml, recursive_double": (
        partial(SparCML, variant="recursive_double"),
        "2k log P to 2k(P-1)",
        lambda n, k, P: words(2 * k * estimates.rounds(P), 2 * k * (P - 1)),
    ),
    "sparcml, dynamic": (
        partial(SparCML, variant="dynamic"),
        "4k(P-1)/P to (2k+n)(P-1)/P",
        lambda n, k, P: words(*formulas.sparcml_words(n, k, P)),
    ),
    "densestream": (
        partial(DenseStream, repartition="average"),
        "4k(P-1)/P to 2k((log2(P)/2+1)P-1)",
        lambda n, k, P: words(*formulas.densestream_words(k, P)),
    ),
    "gtopk": (sparsecoll.GTopk, "2k log P, and as many sent", lambda n, k, P: words(formulas.gtopk_words(k, P) / 2)),
    "spardl": (sparsecoll.SparDL, "4k(P-1)/P", lambda n, k, P: words(formulas.spardl_words(k, P))),
    "spardl, 4 teams": (
        partial(sparsecoll.SparDL, teams=4),
        "2k(2(T-1) + 2)/T, T = P/4",
        lambda n, k, P: words(formulas.spardl_words(k, P, 4)),
    ),
    "cltk": (sparsecoll.CLTk, "at most k + 2k(P-1)/P", lambda n, k, P: words(formulas.cltk_words(k, P))),
    "exdyna": (sparsecoll.ExDyna, "at most 3k(P-1)/P", lambda n, k, P: words(formulas.exdyna_words(k, P))),
    "arctopk, rows of 400": (
        partial(sparsecoll.ARCTopK, columns=400),
        "2(k + n/100)(P-1)/P",
        lambda n, k, P: words(formulas.arctopk_words(n, k, P, 400)),
    ),
    "oktopk": (OkTopk, "2k(P-1)/P to 6k(P-1)/P", lambda n, k, P: words(*formulas.oktopk_words(k, P))),
}


def table1(options: argparse.Namespace) -> Iterator[Row]:
    """The papers' Table 1, counted: words received by the busiest rank + words for search and agreement."""
    n, k = options.n, round(options.density * options.n)
    for algo, (make, form, value) in ALGORITHMS.items():
        for P in options.ranks:
            row: Row = {"algorithm": algo, "formula": form, "P": P, "formula's words": value(n, k, P)}
            for name in ("random", "identical", "skewed"):
                if algo == "dense" and name != "random":
                    continue

                def program(
                    comm: Any, name: str = name, make: Callable[[], Algorithm] = make
                ) -> tuple[float, float, int]:
                    x = vector(name, comm.rank, n, k)
                    traffic = sparsecoll.allreduce(comm, x, make(), k=k, format="coo", return_reduction=True).traffic
                    search = sum(traffic.phases[p].words_received for p in SEARCH if p in traffic.phases)
                    return [traffic.total.words_received - search, search, traffic.total.messages_sent]

                moved, search, messages = np.max(sparsecoll.simulate(P, program).results, axis=0).tolist()
                row[name] = f"{moved:,.0f} + {search:,.0f}"
                row["messages"] = int(messages)
            yield row


def fill_in(options: argparse.Namespace) -> Iterator[Row]:
    """Density of the sum against P (Ok-Topk, section 5.2) on gradients of the model that examples/train.py trains.

    Each of P workers with error feedback selects 1 % on its own share of the digits; after 5 and after 40 steps.
    """
    import torch
    import train

    most, k_share = 64, 0.01
    _, (images, labels), _ = train.load_digits(0)
    torch.manual_seed(0)
    net = train.make_model(images.shape[-1])
    parameters = list(net.parameters())
    n = sum(p.numel() for p in parameters)
    residuals = [sparsecoll.Residual(n) for _ in range(most)]
    generators = [torch.Generator().manual_seed(worker) for worker in range(most)]
    for step in range(1, 41):
        chosen = []
        for worker in range(most):
            picked = worker + most * torch.randint(len(labels) // most, (16,), generator=generators[worker])
            net.zero_grad()
            torch.nn.functional.cross_entropy(net(images[picked]), labels[picked]).backward()
            gradient = torch.cat([p.grad.reshape(-1) for p in parameters]).numpy()
            chosen.append(residuals[worker].take(gradient, select.TopK(), round(k_share * n), scale=0.05))
        if step in (5, 40):
            held = np.zeros(n, bool)
            row: Row = {"step": step, "density of each": k_share}
            for worker, x in enumerate(chosen, start=1):
                held[x.indices] = True
                if worker in (4, 16, 64):
                    uniform = estimates.fill_in(n, round(k_share * n), worker) / n
                    row[f"P = {worker}"] = f"{held.mean():.1%} (uniform: {uniform:.1%})"
            yield row
        with torch.no_grad():
            update = torch.from_numpy(SparseVector.merge(chosen, np.dtype(np.float32)).to_dense()) / most
            for p, change in zip(parameters, update.split([p.numel() for p in parameters]), strict=True):
                p -= change.view_as(p)


def figure7(options: argparse.Namespace) -> Iterator[Row]:
    """Ok-Topk's Figure 7: repartition and balancing on and off, modelled ms per steady-state call (10 Gb/s, 20 us).

    Skewed supports, k = 1 % of n. A gain is the time without it divided by the time with it.
    """
    n, network = options.n, sparsecoll.Network(20e-6, 8e-10)
    k = round(0.01 * n)
    kinds = {
        "both": partial(OkTopk),
        "no repartition": partial(OkTopk, repartition="even", balance_factor=1.0),
        "no balancing": partial(OkTopk, repartition="even", balance_factor=1e9),
    }
    for P in [p for p in (16, 32, 64, 128, 256) if p <= max(options.ranks)]:
        row: Row = {"P": P}
        phases: dict[str, dict[str, float]] = {}
        for kind, make in kinds.items():

            def program(comm: Any, make: Callable[[], Algorithm] = make) -> tuple[float, float]:
                x, algorithm = vector("skewed", comm.rank, n, k), make()
                sparsecoll.allreduce(comm, x, algorithm, k=k, format="coo")
                y = sparsecoll.allreduce(comm, x, algorithm, k=k, format="coo", return_reduction=True)
                return y.traffic.phases["split"].seconds, y.traffic.phases["gather"].seconds

            split, gather = np.max(sparsecoll.simulate(P, program, network).results, axis=0).tolist()
            phases[kind] = {"split": split, "gather": gather}
            row[f"{kind}: split + gather, ms"] = f"{1e3 * split:.2f} + {1e3 * gather:.2f}"
        row["split and reduce: repartition gains"] = phases["no repartition"]["split"] / phases["both"]["split"]
        row["allgatherv: balancing gains"] = phases["no balancing"]["gather"] / phases["no repartition"]["gather"]
        yield row


SECTIONS = (table1, fill_in, figure7)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--density", type=float, default=0.005)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64, 256])
    report.add_options(parser, SECTIONS)
    options = parser.parse_args()
    k, commit = round(options.density * options.n), bench.about()["commit"]
    heading = [
        "# Volume: counted",
        f"Counted by `python perf/volume.py`, commit {commit}: n = {options.n:,}, k = {k:,} (table1), COO, float32.",
    ]
    about = {"version": sparsecoll.__version__, "commit": commit, "n": options.n, "density": options.density}
    report.run(SECTIONS, options, heading, about)


if __name__ == "__main__":
    main()
