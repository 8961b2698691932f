"""A short run of perf/soak.py: right results, failures that all ranks report, no thread and no send left over."""

import importlib
import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi


def test_a_short_run(mpi, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "perf")
    soak = importlib.import_module("soak")
    monkeypatch.setattr(soak, "FAIL_EVERY", 40)
    monkeypatch.setattr(soak, "LARGE", (100_000, 1000))
    out = tmp_path / "soak.json"
    monkeypatch.setattr(sys, "argv", ["soak.py", "--small", "240", "--large", "24", "--json", str(out)])
    soak.main()
    if mpi.COMM_WORLD.rank == 0:
        (row,) = json.loads(out.read_text())["rows"]
        assert row["P"] == mpi.COMM_WORLD.size and row["small"] == 240 and row["open sends"] == 0
