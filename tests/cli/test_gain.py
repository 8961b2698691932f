"""`gain` predicts times and bytes, and advises."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparsecoll import bench
from sparsecoll.algorithms.auto.costmodel import fastest
from sparsecoll.cli import gain
from sparsecoll.cli.main import NETWORKS, main


@pytest.mark.parametrize("P", [2, 3, 6, 16])
@pytest.mark.parametrize("density", [0.01, 0.1])
def test_bytes_are_those_that_are_counted(P, density):
    n, network = 400_000, NETWORKS["1gbit"]
    found = {p.method.partition(" ")[0]: p for p in gain.predict(n, density, P, network)}
    for row in bench.rows(P, ["allgather", "oktopk", "auto"], n, density, network=network, repeat=1):
        assert found[row["algo"]].bytes == pytest.approx(row["bytes_received"], rel=0.25), row["algo"]
    assert found["MPI_Allreduce"].bytes == pytest.approx(2 * 4 * n * (P - 1) / P)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("n, density, P", [(24_000_000, 0.01, 8), (1000, 0.5, 4), (10**6, 0.001, 512)])
def test_auto_is_what_auto_would_choose(n, density, P, network):
    chosen = gain.predict(n, density, P, NETWORKS[network])[-1].method
    assert chosen == f"auto ({fastest(n, round(n * density), P, 4, False, NETWORKS[network])})"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            "--n 24e6 --density 0.01 --ranks 8 --network 1gbit",
            "yes: oktopk is predicted to be .* times faster than MPI_All",
        ),
        (
            "--n 1000 --ranks 4",
            "no: stay with dense: .*, the fastest sparse sum, is predicted to take .* times as long",
        ),
        ("--ranks 1", "no: one rank sends nothing"),
        ("--n 1e6 --density 0.3 --ranks 2 --alpha 0 --beta 1.28e-9", "(hardly|no|yes): "),
        ("--network memory --density 0.5", "no: "),
    ],
)
def test_advice(arguments, expected, capsys):
    main(["gain", *arguments.split()])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and re.match(expected, lines[5]), lines
    assert "(dense), the fastest sparse" not in lines[5]
    assert "0.43 ns per value" in lines[7] and "docs/kernels.md" in lines[7]


def test_the_page_shows_what_is_printed(capsys):
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    command, shown = re.search(r"\n```\n\$ sparsecoll (gain .*)\n([^`]*)```", page).groups()
    main(command.split())
    assert capsys.readouterr().out == shown


def test_without_mpi():
    program = "import sys; sys.modules['mpi4py'] = None; from sparsecoll.cli.main import main; main(['gain'])"
    assert "yes: " in subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60)


def test_selection_costs_what_the_page_says():
    """The row of 24 M values at 1 % of docs/kernels.md, fused."""
    file = Path(__file__).parents[2] / "perf" / "results" / "kernels.json"
    rows = [row for row in json.loads(file.read_text())["fused"] if "24 M" in row["data"] and row["density"] == 0.01]
    seconds = rows[0]["np.add ms"] * rows[0]["exact top-k, x np.add, avx512"] / 1e3
    assert seconds / 24e6 == pytest.approx(gain.SELECT, rel=0.15)
