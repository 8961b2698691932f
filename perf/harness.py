"""What the scripts of perf/ share: options, rows on file, tables on pages, process groups, and calls timed in turns."""

import argparse
import inspect
import itertools
import json
import os
import re
import tempfile
import time
from pathlib import Path

import numpy as np

from sparsecoll import SparseVector
from sparsecoll.bench import timing
from sparsecoll.transport.all_ranks import allgather

ROOT = Path(__file__).parent.parent
RESULTS, FIGURES = ROOT / "perf/results", ROOT / "docs/figures"
BLOCK = re.compile(r"(<!-- table: ([\w.]+) [^\n]*-->\n)(.*?)(<!-- end -->)", re.DOTALL)


def options(text, arguments=None, **defaults):
    """Return the options --json, --update, and one for each default: False is a switch; numbers may be like 24e6."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="save the rows")
    parser.add_argument("--update", action="store_true", help="keep the other rows of that file")
    for name, default in defaults.items():
        flag, one = "--" + name.replace("_", "-"), (default or [""])[0] if isinstance(default, list) else default
        kind = {int: lambda text: int(float(text)), float: float}.get(type(one), str)
        if default is False:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, nargs="*" if isinstance(default, list) else None, type=kind, default=default)
    parsed = parser.parse_args(arguments)
    if parsed.update and parsed.json is None:
        parser.error("--update: expected --json, the file whose rows stay")
    return parsed


def joined_about(options):
    """Return machine, versions and commit; with --update the machines and commits of the file, too."""
    about = timing.about()
    if options.update and options.json.exists():
        old = json.loads(options.json.read_text())["about"]
        about |= {
            name: "; ".join(dict.fromkeys((*old[name].split("; "), about[name]))) for name in ("machine", "commit")
        }
    return about


def kept_rows(options):
    """Return the rows of the file that --update keeps."""
    return json.loads(options.json.read_text())["rows"] if options.update and options.json.exists() else []


def record(rows, options, rank=0, key=(), hide=()):
    """Print each row when it is there, without some columns; rank 0 saves all so far with machine and commit.

    With --update, rows of the file stay unless a new row has the same values in the columns of `key`.
    """
    kept, about = kept_rows(options), joined_about(options)
    found = []
    for row in rows:
        found.append(row)
        kept = [old for old in kept if any(old.get(name) != row[name] for name in key)]
        if rank == 0:
            print("  ".join(f"{name} {cell(value)}" for name, value in row.items() if name not in hide), flush=True)
            if options.json:
                save(options.json, {"about": about, "rows": kept + found})


def run_sections(sections, options, **about):
    """Run the sections that --only names, or all; print each as a table, and save all as lists of rows by name."""
    saved = json.loads(options.json.read_text()) if options.update else {}
    saved["about"] = joined_about(options) | about
    for section in sections:
        if not options.only or section.__name__ in options.only:
            saved[section.__name__] = list(section(options))
            print(f"\n## {section.__name__}\n\n{inspect.getdoc(section)}\n\n{markdown(saved[section.__name__])}")
            if options.json:
                save(options.json, saved)


def save(path, content):
    """Write a file of rows, one a line."""
    path.write_text(json.dumps(content).replace("}, {", "},\n {") + "\n")


def load(name):
    """Return the content of a file in perf/results: "about", and "rows" or sections."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def source(*names):
    """Return machines and commits of files in perf/results, as a line below a table."""
    about = [load(name)["about"] for name in names]
    machines, commits = (", ".join(dict.fromkeys(a[what] for a in about)) for what in ("machine", "commit"))
    return f"{machines}; commit {commits}."


def cell(value):
    """Return a value as in a table: floats with three digits."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


def markdown(rows):
    """Return rows as a Markdown table."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(cell(row.get(head)) for head in heads) + " |" for row in rows])


def columns(rows, shown):
    """Return rows with those of their columns whose heads are shown."""
    return [{head: value for head, value in row.items() if shown(head)} for row in rows]


def rendered(tables):
    """Return the README and the pages of docs/ with these tables in their blocks."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {page: BLOCK.sub(lambda m: f"{m[1]}\n{tables[m[2]]}\n\n{m[4]}", page.read_text()) for page in pages}


def start_gloo(comm, interface):
    """Make torch's default process group of MPI's ranks, which meet at a file, since hosts may have no names."""
    import torch

    torch.set_num_threads(1)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    where = comm.bcast(tempfile.mkdtemp(prefix="gloo-") if comm.rank == 0 else None)
    torch.distributed.init_process_group("gloo", f"file://{where}/store", rank=comm.rank, world_size=comm.size)


def gloo_sparse(index, values, shape):
    """Sum a sparse_coo tensor by gloo; return its number of entries."""
    import torch

    index, values = torch.from_numpy(index.astype(np.int64))[None], torch.from_numpy(values.copy())
    tensor = torch.sparse_coo_tensor(index, values, shape, is_coalesced=True, check_invariants=False)
    torch.distributed.all_reduce(tensor)
    return int(tensor._nnz())


def link_bytes(interface):
    """Return the bytes that this host has sent and received at an interface, headers included; 0 without one."""
    files = [Path("/sys/class/net", interface, "statistics", f"{way}_bytes") for way in ("tx", "rx")]
    return np.array([int(file.read_text()) if interface else 0 for file in files])


def power_hook(model, start):
    """Register DDP's own PowerSGD of rank 4, from a step on: torch advises a tenth of all steps."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    state = power.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=start)
    model.register_comm_hook(state, power.powerSGD_hook)


def heavy(n, seed=0):
    """Return a heavy-tailed gradient: cubes of normal values."""
    x = np.random.default_rng(seed).standard_normal(n, dtype=np.float32)
    return x * x * x


def drawn(n, k, rank, count=3):
    """Return a function of a rank's next sparse vector, of `count`: nearly k (at most k) uniform indices below n."""
    rng, vectors = np.random.default_rng([8, rank]), []
    for _ in range(count):
        indices = np.cumsum(rng.geometric(k / n, k)) - 1
        indices = indices[indices < n]
        vectors.append(SparseVector(indices, rng.standard_normal(indices.size, dtype=np.float32), n))
    return itertools.cycle(vectors).__next__


def in_turns(transport, runs, repeat=7, warm=2):
    """Return the median seconds of several functions on the slowest rank; see `times_in_turns`."""
    return [float(np.median(times)) for times in times_in_turns(transport, runs, [repeat] * len(runs), warm)]


def times_in_turns(transport, runs, repeats, warm=2):
    """Return the seconds of several functions on the slowest rank, an array for each; collective.

    They are called in random order. Each is called twice in a row and the second call is timed, so that every one finds
    its own data in the caches. `runs` has each function with one that returns its next vector; `repeats`, the number of
    timed calls of each, are spread evenly over the turns, after `warm` rounds. The transport connects the ranks before
    each call and after the last one; the functions may use another.
    """
    times, turns = [[] for _ in runs], max(repeats)
    for turn in range(-warm, turns):
        for number in np.random.default_rng(turn + warm).permutation(len(runs)):
            run, vectors = runs[number]
            if turn >= 0 and turn * repeats[number] // turns == (turn + 1) * repeats[number] // turns:
                continue
            run(vectors())
            vector = vectors()
            timing.barrier(transport)
            start = transport.now()
            run(vector)
            if turn >= 0:
                times[number].append(transport.now() - start)
    return [allgather(transport, np.array(some)).max(axis=0) for some in times]


def medians(calls, repeat, before=None):
    """Return the median seconds of each call in this process; `before` runs untimed before each."""
    seconds = [[] for _ in calls]
    for number in range(repeat + 1):
        for call, times in zip(calls, seconds, strict=True):
            if before is not None:
                before()
            start = time.perf_counter()
            call()
            if number:  # the first round warms up
                times.append(time.perf_counter() - start)
    return [float(np.median(times)) for times in seconds]
