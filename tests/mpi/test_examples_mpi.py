"""The examples that need MPI: an assembly of finite elements, and sums that are written by hand otherwise."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi


def example(name):
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_way_to_assemble_gives_the_serial_matrix(mpi, capsys):
    pytest.importorskip("scipy")
    error = example("fem").main(["--cells", "12", "--repeat", "1"])
    assert error < 1e-13
    if mpi.COMM_WORLD.rank == 0:
        assert capsys.readouterr().out.count("bytes  error") == 3


def test_sums_by_hand_and_by_one_call(mpi):
    pytest.importorskip("scipy")
    pytest.importorskip("matplotlib")
    counts = example("counts")
    lines = counts.main(["--repeat", "1"])
    if mpi.COMM_WORLD.rank == 0:
        assert [line.split()[0] for line in lines] == ["words", "colours", "graph"]
    page = " ".join((Path(__file__).parents[2] / "docs" / "from_mpi4py.md").read_text().split())
    by_hand = [counts.lines_of(getattr(counts, f"{name}_by_hand")) for name in ("words", "colours", "graph")]
    assert f"in {min(by_hand)} to {max(by_hand)} lines" in page
