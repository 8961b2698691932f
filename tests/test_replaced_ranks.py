"""Killed ranks are replaced by new processes, which meet the survivors in the store (see replaced_ranks.py)."""

import json
from pathlib import Path

import pytest
from launching import python

pytest.importorskip("torch.distributed")

PROGRAM = Path(__file__).parent / "replaced_ranks.py"
LOSSES, STEPS = 2, 3


@pytest.mark.slow
@pytest.mark.parametrize("P", [2, 3])
def test_survivors_and_new_processes_go_on(P):
    done = python(PROGRAM, P)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    told = done.stdout + done.stderr
    assert sorted(row["ended"] for row in rows if "ended" in row) == [-9] * LOSSES + [0] * P, told
    for generation in range(LOSSES + 1):
        own = [row for row in rows if row.get("generation") == generation]
        seen = {rank: [row["seen"] for row in own if row["rank"] == rank and "seen" in row] for rank in range(P)}
        assert all(len(steps) == STEPS and steps == seen[0] for steps in seen.values()), told
        joined = [row for row in own if "before" in row]
        assert len(joined) == P, told
        for row in joined if generation else []:
            new = row["pid"] not in {row["pid"] for row in rows if row.get("generation", generation) < generation}
            for kind, kept in row["before"].items():
                assert new or (kept == row["after"][kind] and (kind == "sums" or set(kept) != {"0x0.0p+0"})), told
        errors = [row["error"] for row in own if "error" in row]
        assert len(errors) == (P - 1 if generation < LOSSES else 0), told
