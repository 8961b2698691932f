"""What selecting, coding, decoding and summing cost on one core, against peers in the same run.

    python perf/gradients.py                       # once: real gradients, in perf/data
    python perf/kernels.py --markdown docs/kernels.md --json perf/results/kernels.json

Sections (--only picks some): threshold, topk, edges, fused, packed, quantized, merge, steps, threads, table1, figure5,
figure5b, start. Times are medians of interleaved repetitions, on one thread except in `threads`. Ratios are to the peer
named in the column's head, on the same array in the same process. All takes about five minutes, and longer where the
kernels have not been compiled before: run it once with `--sizes 2000000 --repeat 1`, then again on an idle machine.
With `--only SECTION --update` a section alone is measured again, and the others are kept.

Every instruction set that the processor has runs in processes of its own (SPARSECOLL_KERNELS), section by section in
turn; the fastest one on all arrays, the others on those of up to 30 M values. NumPy and torch, too, are kept from
AVX-512 while `avx2` or `portable` is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import report
import torch
from kernel_formats import SPEEDS, figure5, figure5b, packed, quantized, table1
from kernel_selection import edges, fused, threshold, topk
from kernel_sums import merge, steps, threads
from report import Row

import sparsecoll
from sparsecoll.cli import bench
from sparsecoll.kernels import host_kernels
from sparsecoll.kernels import threads as pool

COLUMNS = {  # what is shown for every instruction set; the other columns are those of the fastest one
    "threshold": ("x np.sum",),
    "topk": ("x np.sum", "np.argpartition, times slower", "torch.topk, times slower"),
    "fused": ("threshold (reused), x np.add", "exact top-k, x np.add"),
    "packed": ("encode, M indices/s", "decode, M indices/s"),
    "quantized": SPEEDS,
    "merge": ("M entries/s",),
    "steps": ("sparse step, ms", "torch.optim.SGD, times slower", "torch.optim.SGD(fused=True), times slower"),
}
NOTES = Path(__file__).parent / "kernels.in.md"  # what the page says before the tables
WITHOUT_AVX512 = {  # for NumPy before 2.4 and since, and torch
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4",
    "ATEN_CPU_CAPABILITY": "avx2",
}


FIRST = """
from time import perf_counter as now
import numpy as np
rng = np.random.default_rng(0)
start = now()
import sparsecoll
print(now() - start)
for n in (100_000, 4_000_000, 4_000_000):
    x = rng.standard_normal(n).astype(np.float32)
    start = now()
    sparsecoll.simulate(2, lambda comm: sparsecoll.allreduce(comm, x, "oktopk", density=0.01, format="packed"))
    print(now() - start)
"""


def start(options: argparse.Namespace) -> Iterator[Row]:
    """The first import and the first sums (Ok-Topk, packed, two virtual ranks), from an empty and a warm cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        del environment["SPARSECOLL_KERNELS"]  # with it, Numba starts at once
        runs = [
            subprocess.run([sys.executable, "-c", FIRST], env=environment, capture_output=True, text=True, check=True)
            for _ in range(4)
        ]
    times = np.array([[float(word) for word in run.stdout.split()] for run in runs])
    heads = (
        "import sparsecoll, s",
        "first sum, 100,000 values: no Numba, s",
        "first sum of 4 M values: Numba starts, s",
        "again, s",
    )
    for name, row in (("empty", times[0]), ("warm", np.median(times[1:], axis=0))):
        yield {"cache of kernels": name} | dict(zip(heads, row.tolist(), strict=True))


SECTIONS = (threshold, topk, edges, fused, packed, quantized, merge, steps, threads, table1, figure5, figure5b, start)


def machine() -> Row:
    """Return a description of the machine and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
    return {
        "cpu": cpu,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "sparsecoll": sparsecoll.__version__,
        "commit": bench.about()["commit"],
    }


def rows_of(section: str, kernels: str, options: argparse.Namespace, brief: bool) -> list[Row]:
    """Return the rows of a section, measured by another process with these kernels."""
    sizes = [str(size) for size in options.sizes]
    command = [sys.executable, __file__, "--measure", section, "--repeat", str(options.repeat), "--sizes", *sizes]
    limits = {} if kernels == "avx512" else WITHOUT_AVX512
    with tempfile.NamedTemporaryFile("r") as file:
        command += ["--json", file.name] + ["--brief"] * brief
        subprocess.run(
            command, check=True, env=os.environ | {"SPARSECOLL_KERNELS": kernels, pool.VARIABLE: "1"} | limits
        )
        return list(json.load(file))


def merged(section: str, by_set: dict[str, list[Row]]) -> list[Row]:
    """Return the rows of the fastest instruction set, with a column for every set in place of those in COLUMNS."""
    named = {kernels: {str(list(row.values())[:2]): row for row in rows} for kernels, rows in by_set.items()}
    result = []
    for name, fastest in next(iter(named.values())).items():
        row = {head: value for head, value in fastest.items() if head not in COLUMNS[section]}
        for head in COLUMNS[section]:
            row |= {f"{head}, {kernels}": rows.get(name, {}).get(head) for kernels, rows in named.items()}
        result.append(row)
    return result


def across(section: report.Section) -> report.Section:
    """Return the section as run by a process for each instruction set."""

    def run(options: argparse.Namespace) -> Iterator[Row]:
        name = section.__name__
        sets = options.kernels if name in COLUMNS else options.kernels[:1]
        by_set = {kernels: rows_of(name, kernels, options, brief=kernels != sets[0]) for kernels in sets}
        yield from merged(name, by_set) if name in COLUMNS else by_set[sets[0]]

    run.__name__, run.__doc__ = section.__name__, section.__doc__
    return run


def main() -> None:
    """Measure, print, save."""
    supported = host_kernels().lanes.SUPPORTED  # type: ignore[attr-defined]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[24_000_000, 2_400_000, 240_000], help="of synthetic arrays"
    )
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--kernels", nargs="+", choices=supported, default=supported, help="the fastest one first")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # this section, in this process
    parser.add_argument("--brief", action="store_true", help=argparse.SUPPRESS)
    report.add_options(parser, SECTIONS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        section = next(s for s in SECTIONS if s.__name__ == options.measure)
        options.json.write_text(json.dumps(list(section(options))))
        return
    rendered = options.update and options.only == []  # without new rows
    about = json.loads(options.json.read_text())["machine"] if rendered else machine()
    versions = ", ".join(f"{name} {version}" for name, version in about.items() if name != "cpu")
    sets = f"kernels {', '.join(options.kernels)}"
    made = f"Measured by `python perf/kernels.py`: one thread, {about['cpu']}, {sets}; {versions}."
    heading = ["# Kernels: measured", made]
    if {"avx512", "avx2"} <= set(options.kernels):
        heading.append(
            "This processor has AVX-512. The code of `avx2` contains no AVX-512 instructions (a test checks the"
            " code), and NumPy and torch do not use them in comparisons with `avx2` and `portable`. `portable` is the"
            " code that LLVM generates from plain loops for this processor. The figures of `avx2` are those of AVX2"
            " code on this processor; processors that have AVX2 only do less per cycle."
        )
    heading.append(NOTES.read_text().strip())
    report.run([across(section) for section in SECTIONS], options, heading, {"machine": about})


if __name__ == "__main__":
    main()
