"""Draws the figures of docs/benchmarks.md from the rows in perf/results.

    python perf/plot.py [--out docs/figures]

For rows of your own: python -m sparsecoll plot.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sparsecoll.cli import plot

ROOT = Path(__file__).parent.parent


def draw(results: Path = ROOT / "perf" / "results", out: Path = ROOT / "docs" / "figures") -> list[Path]:
    """Draw all figures and return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    names = ("phases", "density", "scaling_time", "scaling_volume")
    phases, density, time, volume = (out / f"{name}.svg" for name in names)
    found = [r for r in plot.rows_of(results / "allreduce.json") if r["n"] == 24_000_000]
    library = [r for r in found if r["density"] == 0.1 and not r["name"].startswith("gloo")]
    plot.stacked(library, phases, "n = 24 M, density 10 %, 4 hosts, 1 Gb/s; from dense gradient to sum")
    plot.lines(found, "density", "seconds", density, "n = 24 M, 4 hosts, 1 Gb/s; from dense gradient to sum", 1e3)
    rows = plot.rows_of(results / "scaling.json")
    bert = [r for r in rows if r["model"] == "BERT" and r["network"] == "1 Gb/s"]
    plot.lines(bert, "P", "seconds", time, "BERT's gradient, density 1 %, 1 Gb/s (modelled)", 1e3)
    plot.lines(bert, "P", "bytes_received", volume, "BERT's gradient, density 1 % (counted)", 1e-6)
    return [phases, density, time, volume]


def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    draw(out=parser.parse_args().out)


if __name__ == "__main__":
    main()
