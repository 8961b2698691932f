"""`sparsecoll doctor` and `simulate`, the script, and errors as one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparsecoll import doctor, simulate
from sparsecoll.__main__ import main

ROOT = Path(__file__).parent.parent


def test_doctor_finds_this_machine_well(tmp_path, capsys):
    main(["doctor", "--json", str(tmp_path / "findings.json")])
    assert "sparsecoll doctor" in capsys.readouterr().out
    findings = {f["subject"]: f for f in json.loads((tmp_path / "findings.json").read_text())["findings"]}
    assert {"sparsecoll", "Python", "numpy", "ranks", "cores", "kernels", "self-test"} <= set(findings)
    assert all(f["state"] != doctor.BAD for f in findings.values())
    assert all(f["advice"] for f in findings.values() if f["state"] != doctor.GOOD)


def test_doctor_says_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setenv("SPARSECOLL_KERNEL", "cpu")
    assert any(f.subject == "SPARSECOLL_KERNEL" and f.state == doctor.WORSE for f in doctor._variables())
    monkeypatch.setattr(doctor, "simulate", lambda P, fn: simulate(P, lambda comm: doctor.Finding("x", "y", "broken")))
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    assert "broken" in capsys.readouterr().out


def test_self_test_on_many_ranks():
    for P in (1, 2, 3, 5):
        findings = simulate(P, doctor.self_test).results
        assert {f.state for f in findings} == {doctor.GOOD}


def test_every_variable_of_the_library_is_in_the_table():
    used = set()
    for path in Path(doctor.__file__).parent.rglob("*.py"):
        used |= set(re.findall(r'"(SPARSECOLL_[A-Z_]+)"', path.read_text()))
    used.discard("SPARSECOLL_")
    assert used == set(doctor.VARIABLES)
    page = (ROOT / "docs" / "command_line.md").read_text()
    assert all(f"`{name}`" in page for name in doctor.VARIABLES)


def test_simulate_counts_and_models(tmp_path, capsys):
    path = tmp_path / "rows.json"
    arguments = ["--ranks", "2", "8", "--n", "1e4", "--network", "10gbit", "--repeat", "2", "--json", str(path)]
    main(["simulate", "--algo", "dense", "oktopk", *arguments])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["P"], row["algo"]) for row in rows] == [(2, "dense"), (2, "oktopk"), (8, "dense"), (8, "oktopk")]
    assert 4 * 10_000 * 2 * 7 // 8 <= rows[2]["bytes_received"] <= 4 * 10_000 * 2 * 7 // 8 + 200  # and the agreement
    assert rows[3]["seconds"] > 0 and rows[3]["bytes_received"] < rows[2]["bytes_received"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "1.00" in lines[1]


def test_errors_are_one_line():
    command = [sys.executable, "-m", "sparsecoll"]
    for arguments, expected in (
        (["bench", "--algo", "bst"], "sparsecoll: algo: expected one of auto, "),
        (["simulate", "--alpha", "-1"], "sparsecoll: Network: expected alpha >= 0"),
        (["plot", "no.json"], "sparsecoll: [Errno 2]"),
    ):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 1 and done.stderr.startswith(expected) and done.stderr.count("\n") == 1


def test_script_is_installed():
    script = Path(sys.executable).parent / "sparsecoll"
    if not script.exists():
        pytest.skip("the package is not installed here")
    assert subprocess.check_output([script, "--version"], text=True, timeout=60).strip()
