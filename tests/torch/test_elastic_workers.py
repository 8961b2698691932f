"""ElasticGroup between processes, some of which are killed or stopped, and others join (see elastic_workers.py)."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from launching import python

pytest.importorskip("torch.distributed")

from elastic_workers import DEADLINE, ENDS, ROUNDS, WORKERS


@pytest.mark.slow
def test_workers_are_killed_stopped_and_replaced():
    """None waits for longer than the deadline; all know who has contributed, have the same bits, and lose no change."""
    done = python(Path(__file__).with_name("elastic_workers.py"))
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    told = done.stdout[-3000:] + done.stderr[-3000:]
    killed = {row["killed"]: row for row in rows if "killed" in row}
    ended = [row["ended"] for row in rows if "ended" in row]
    assert sorted(ended) == [-9] * len(killed) + [0] * WORKERS, told
    assert killed.keys() == {end for end in ENDS.values() if isinstance(end, str)}, told
    assert max(row["seconds"] for row in rows if "seconds" in row) < DEADLINE + 20, told

    after = defaultdict(list)
    for row in rows:
        if "bits" in row:
            after[row["number"]].append(row)
    assert after.keys() == {*range(ROUNDS)}, told
    for seen in after.values():
        assert len({(row["bits"], *row["contributors"]) for row in seen}) == 1, told
    contributors = {number: seen[0]["contributors"] for number, seen in after.items()}
    for end, row in killed.items():
        last = max(number for number, names in contributors.items() if row["worker"] in names)
        assert last <= row["number"] - (end in ("before it sends", "while it sends")) or "state" in end, (row, told)
        assert last == row["number"] or end != "after it has sent", (row, told)
    stopped = [row["worker"] for row in rows if "stopped" in row]
    assert stopped[0] not in contributors[32] and stopped[1] not in contributors[40], told

    sends = {(row["worker"], row["number"]): row["sends"] for row in rows if "sends" in row}
    for number in range(1, ROUNDS):  # outer_lr is 1/2
        moved = 2 * (after[number - 1][0]["shared"] - after[number][0]["shared"])
        total = sum(sends[name, number] for name in contributors[number])
        assert moved * len(contributors[number]) == pytest.approx(total, abs=0.02), (number, told)
    for row in rows:
        if "bits" in row:
            name, numbers = row["worker"], range(row["number"] + 1)
            total = sum(sends[name, i] for i in numbers if name in contributors[i])
            assert row["made"] == pytest.approx(total + row["waiting"], abs=0.02), (row, told)
