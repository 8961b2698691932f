"""A short run of tests/soak.py: right results, failures that all ranks report, no thread and no send left over."""

import json
import sys

import pytest
import soak

pytestmark = pytest.mark.mpi


def test_a_short_run(mpi, tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "FAIL_EVERY", 40)
    monkeypatch.setattr(soak, "LARGE", (100_000, 1000))
    out = tmp_path / "soak.json"
    monkeypatch.setattr(sys, "argv", ["soak.py", "--small", "240", "--large", "24", "--json", str(out)])
    soak.main()
    if mpi.COMM_WORLD.rank == 0:
        (row,) = json.loads(out.read_text())["rows"]
        assert row["P"] == mpi.COMM_WORLD.size and row["small"] == 240 and row["open sends"] == 0
