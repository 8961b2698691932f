"""A process that ends with calls under way: it ends with its status, and the others are told (see exit_programs.py).

SPARSECOLL_EXITS=20 runs every case so many times, with two and three ranks each; without it, some run once.
"""

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
from launching import mpirun, python, run

PROGRAM = Path(__file__).parent / "exit_programs.py"
TIMES = int(os.environ.get("SPARSECOLL_EXITS", "0"))
ABORTED = re.compile(r"terminate called|Fatal Python|[Ss]egmentation|double free|corrupt")
# the exit status of the last rank, and whether the others get an error that names it
ENDS = {
    "outstanding, ends": (0, True),
    "outstanding, raises": (1, True),
    "outstanding, exits": (3, True),
    "matched": (0, False),
    "plan": (1, True),
    "plainly": (1, True),
    "early": (0, True),
    "gathered": (1, True),
    "gathered, ends": (0, True),
    "ddp, loss": (1, True),
    "ddp, hook": (1, True),
    "optimizer, loss": (1, True),
    "optimizer, hook": (1, True),
    "finalizers, all": (0, False),
    "finalizers, one": (0, False),
    "daemon": (0, True),
    "daemon, raises": (1, True),
    "thread": (0, True),
    "thread, raises": (1, True),
    "works on": (0, False),
    "forked": (0, False),
    "interrupted": (-2, True),
}
OVER_MPI = {**ENDS, "finalized": (0, True), "pending, finalized": (0, False), "freed": (1, True)}
OVER_MPI |= {"freed, interrupted": (-2, True), "freed, exits": (0, False), "freed, exits early": (0, True)}
TOGETHER = [
    f"together, {order}, {end}"
    for order in ("gms", "mgs", "gsm")
    for end in ("left", "outstanding", "destroy", "finalize", "finalize only")
]
SOME = ["outstanding, raises", "ddp, hook", "daemon", "interrupted", "works on"]
SILENT = ("finalizers, one", "pending, finalized")  # where other ranks have nothing to say
SOME_OVER_MPI = ["outstanding, raises", "matched", "finalized", "pending, finalized", "thread, raises", TOGETHER[6]]
SOME_OVER_MPI += ["gathered", "freed", "freed, interrupted", "freed, exits", "freed, exits early"]


def told(text):
    return re.findall(r"<rank (\d+): (.*?)>$", text, re.S | re.M)


def check(case, size, rank, text):
    """What one rank that is not the last one has printed."""
    failed = OVER_MPI.get(case, (0, False))[1]
    said = [what for number, what in told(text) if int(number) == rank]
    if failed:
        assert len(said) == 1 and f"rank {size - 1}" in said[0], (case, rank, text)
    else:
        assert set(said) == (set() if case in SILENT else {"done"}), (case, rank, text)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3] if TIMES else [3])
def test_over_sockets(size):
    pytest.importorskip("torch.distributed")
    cases = [*ENDS] * TIMES or SOME
    done = python(PROGRAM, size, *cases, timeout=60_000)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == size * len(cases), done.stdout + done.stderr
    for row in rows:
        case, rank, text = row["case"], row["rank"], row["text"]
        assert not ABORTED.search(text), row
        status, failed = ENDS[case]
        if rank == size - 1:
            assert row["status"] == status, row
        else:
            assert row["status"] == (5 if failed else 0), row
            check(case, size, rank, text)


FORKED_RANKS = """
import multiprocessing, sys, time
import numpy as np
import torch.distributed as dist
import sparsecoll

def work(rank):
    comm = sparsecoll.connect(dist.FileStore(sys.argv[1], 2), rank, 2)
    x = sparsecoll.SparseVector([rank], np.ones(1), 9)
    sparsecoll.allreduce(comm, x)
    time.sleep(rank)
    request = sparsecoll.iallreduce(comm, x)
    if rank == 1:  # rank 0 returns meanwhile
        print(request.wait().values.sum(), flush=True)

ranks = [multiprocessing.get_context("fork").Process(target=work, args=(rank,)) for rank in range(2)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
"""


@pytest.mark.slow
def test_calls_of_ranks_that_multiprocessing_has_forked_end_with_them(tmp_path):
    pytest.importorskip("torch.distributed")
    done = python("-c", FORKED_RANKS, tmp_path / "store")
    assert done.stdout == "2.0\n" and "lost rank" not in done.stderr, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("time", range(TIMES or 1))
@pytest.mark.parametrize("size", [2, 3] if TIMES else [3])
@pytest.mark.parametrize("case", [*OVER_MPI, *TOGETHER] if TIMES else SOME_OVER_MPI)
def test_over_mpi(case, size, time, tmp_path):
    if re.match("ddp|optimizer|together|forked", case) and importlib.util.find_spec("torch") is None:
        pytest.skip("no torch")
    done = run(*mpirun(size), PROGRAM, "mpi", case, variables={"ENDED": str(tmp_path)})
    text = done.stdout + done.stderr
    assert not ABORTED.search(text), text
    status, failed = OVER_MPI.get(case, (0, False))
    assert (done.returncode != 0) == (status != 0 or failed), text
    for rank in range(size - 1):
        check(case, size, rank, text)
