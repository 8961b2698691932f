"""Writes the table of training loops in LOOPS.md from what the tests expect: `python tests/mpi/matrix.py`."""

import sys
from pathlib import Path

from loop import SAME
from loops import LOOPS
from runs import HOOK, LOCAL, OVERLAP, SPARSE

PAGE = Path(__file__).parent / "LOOPS.md"
BEGIN, END = "<!-- loops: begin (tests/mpi/matrix.py) -->", "<!-- loops: end -->"
WAYS = (OVERLAP, LOCAL, HOOK, SPARSE)
ELSEWHERE = [  # rows whose tests have a file of their own
    ("`GradScaler`, passed as `grad_scaler=`, an overflow on one rank", {}),
    ("`autocast` to bfloat16", {}),
    ("ranks with different numbers of batches: `with optimizer.join():`", {HOOK: "DDP's own `join()`"}),
]
PLAIN = ("zero_grad()`", "zero_grad` at all", "skip", "frozen", "learning rate", "param_groups")  # in words above it


def table():
    """Loops that have the same cells in one row, as Markdown, without plain ones; the largest groups first."""
    groups = {}
    for loop in LOOPS.values():
        groups.setdefault(tuple(loop.cell(way) for way in WAYS), []).append(loop.title)
    for title, cells in ELSEWHERE:
        groups.setdefault(tuple(cells.get(way, SAME) for way in WAYS), []).append(title)
    everywhere = groups[(SAME,) * len(WAYS)]
    everywhere[:] = [title for title in everywhere if not any(word in title for word in PLAIN)]
    heads = ["loop", "`DistributedOptimizer`", "with `overlap=False`", "DDP hook", "`SparseSGD`"]
    rows = sorted(groups.items(), key=lambda group: -len(group[1]))
    lines = [heads, ["---"] * 5, *(["<br>".join(titles), *cells] for cells, titles in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(text):
    """The page with the table of today."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    sys.exit(0)
