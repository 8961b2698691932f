"""Commands on real ranks: each thing is said once, and what goes wrong on one rank ends all of them."""

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import sparsecoll
from sparsecoll.cli.main import main
from sparsecoll.kernels import host_kernels

pytestmark = pytest.mark.mpi
DENSE = "dense" if "TORCHELASTIC_RUN_ID" in os.environ else "MPI_Allreduce"
ALGOS = ["--algo", DENSE, "allgather", "--density", "0.1", "--repeat", "1"]


@pytest.fixture
def folder(comm, tmp_path):
    """One folder for all ranks."""
    return Path(comm.bcast(str(tmp_path)))


def test_gradients_from_files(comm, folder, capfd):
    np.save(folder / f"g{comm.rank}.npy", np.arange(3000, dtype=np.float32))
    main(["bench", "--gradient", str(folder / "g{rank}.npy"), *ALGOS, "--json", str(folder / "rows.json")])
    printed = capfd.readouterr().out.splitlines()
    assert len(printed) == (0 if comm.rank else 3 + (comm.size > 1))
    assert comm.rank or comm.size == 1 or printed[-1].startswith(f"messages, rank 0 to {comm.size - 1}: Network(alpha=")
    comm.Barrier()
    saved = json.loads((folder / "rows.json").read_text())
    assert [(row["P"], row["n"]) for row in saved["rows"]] == [(comm.size, 3000)] * 2
    assert comm.rank or comm.size == 1 or printed[-1].endswith(repr(sparsecoll.Network(**saved["network"])))


def test_gradients_of_float16_have_no_row_of_mpi(comm, folder, capfd):
    np.save(folder / f"g{comm.rank}.npy", np.arange(2000, dtype=np.float16))
    main(["bench", "--gradient", str(folder / "g{rank}.npy"), *ALGOS, "--json", str(folder / "rows.json")])
    comm.Barrier()
    rows = json.loads((folder / "rows.json").read_text())["rows"]
    assert [row["algo"] for row in rows] == ["dense"] * (comm.size > 1 or DENSE == "dense") + ["allgather"]


def test_the_work_of_a_compressor_is_in_its_row(comm):
    """It is done on the progress thread."""
    compressors = pytest.importorskip("sparsecoll.torch").compressors
    (row,) = sparsecoll.bench.rows(comm, [compressors.TopKCompressor(0.01)], n=200_000)
    assert row["select"] > 0 and row["dense"] > 0 and row["other"] < row["seconds"]
    assert comm.size == 1 or row["wait"] > 0


def test_what_one_rank_sees_ends_all(comm, folder, capfd):
    if comm.size == 1:
        pytest.skip("needs two ranks")
    last = comm.size - 1
    gradient = ["bench", "--gradient", str(folder / "g{rank}.npy"), *ALGOS]
    length = 3000 + (comm.rank == last)
    for arguments, expected, status in (
        (["bench", *ALGOS, "--json", str(folder / "no" / "rows.json")], "expected a file in an existing folder", 2),
        (gradient, f"rank {last}: {folder / f'g{last}.npy'}: expected a .npy file", 2),
        (gradient, "length: expected the same value on all ranks", 2),
        (gradient, "dtype: expected the same value on all ranks", 2),
    ):
        if expected.startswith("rank") and comm.rank != last:
            np.save(folder / f"g{comm.rank}.npy", np.ones(3000, np.float32))
        elif expected.startswith("length"):
            np.save(folder / f"g{comm.rank}.npy", np.ones(length, np.float32))
        elif expected.startswith("dtype"):
            np.save(folder / f"g{comm.rank}.npy", np.ones(3000, np.float64 if comm.rank == last else np.float32))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        printed = capfd.readouterr().err
        assert ended.value.code == status
        assert (expected in printed and printed.count("\n") == 1) if comm.rank == 0 else printed == ""
    assert comm.allreduce(1) == comm.size


MINE = """
from sparsecoll import Allgather
class Mine(Allgather):
    pass
"""


def test_a_method_that_one_rank_cannot_import_ends_all(comm, folder, capfd, monkeypatch):
    """One line for the job, and status 2 on all ranks; with the module on all of them, it is measured."""
    own = folder / str(comm.rank)
    own.mkdir()
    monkeypatch.chdir(own)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    arguments = ["bench", "--n", "1000", *ALGOS, "--algo", "my_own_methods:Mine", "--json", str(folder / "rows.json")]
    last = comm.size - 1
    if comm.rank < last:
        (own / "my_own_methods.py").write_text(MINE)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = "".join(line for line in capfd.readouterr().err.splitlines(True) if "1 rank" not in line)
    assert ended.value.code == 2
    where = f"rank {last}: " * (comm.size > 1)
    expected = f"sparsecoll: {where}algo: expected MODULE:CLASS that can be imported, got 'my_own_methods:Mine'"
    assert (printed.startswith(expected) and printed.count("\n") == 1) if comm.rank == 0 else printed == ""
    (own / "my_own_methods.py").write_text(MINE)
    importlib.invalidate_caches()
    main(arguments)
    comm.Barrier()
    assert [row["algo"] for row in json.loads((folder / "rows.json").read_text())["rows"]] == ["my_own_methods:Mine"]
    sys.modules.pop("my_own_methods")


@pytest.mark.parametrize("name, value", [("KERNELS", "nonsense"), ("ON_TIMEOUT", "abrt")])
def test_doctor_survives_a_variable_with_which_no_sum_is_possible(comm, name, value, capfd, monkeypatch):
    monkeypatch.setenv(f"SPARSECOLL_{name}", value)
    if name == "KERNELS":
        monkeypatch.setattr("sparsecoll.kernels.host_kernels", host_kernels.__wrapped__)
        monkeypatch.setattr("sparsecoll.cli.doctor.host_kernels", host_kernels.__wrapped__)
    status = contextlib.nullcontext() if comm.rank else pytest.raises(SystemExit)
    with status:
        main(["doctor"])
    printed = capfd.readouterr()
    shown = printed.out.startswith("broken ") and f"SPARSECOLL_{name}: {value}\n" in printed.out
    assert shown == (comm.rank == 0) and not printed.err
    comm.Barrier()


def test_doctor_on_the_ranks_of_the_job(comm, folder, capfd):
    """Doctor finds them all, and measures the transport that they use."""
    main(["doctor", "--json", str(folder / "findings.json")])
    printed = capfd.readouterr().out
    comm.Barrier()
    if comm.rank:
        assert printed == ""
        return
    assert f"ranks: {comm.size} on " in printed
    found = {row["subject"]: row["found"] for row in json.loads((folder / "findings.json").read_text())["findings"]}
    assert found["ranks"].startswith(f"{comm.size} on ")
    if comm.size > 1:
        over = "sockets" if "TORCHELASTIC_RUN_ID" in os.environ else "MPI"
        network, where = found["messages"].split(" over ")
        assert eval(network, {"Network": sparsecoll.Network}).alpha > 0
        assert where == f"{over}, rank 0 to {comm.size - 1}"
        assert found["self-test"] == f"sums on {comm.size} ranks are right"
