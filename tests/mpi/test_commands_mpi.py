"""Commands on real ranks: each thing is said once, and what goes wrong on one rank ends all of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from sparsecoll.cli.main import main

pytestmark = pytest.mark.mpi
ALGOS = ["--algo", "MPI_Allreduce", "allgather", "--density", "0.1", "--repeat", "1"]


@pytest.fixture
def folder(comm, tmp_path):
    """One folder for all ranks."""
    return Path(comm.bcast(str(tmp_path)))


def test_gradients_from_files(comm, folder, capfd):
    np.save(folder / f"g{comm.rank}.npy", np.arange(3000, dtype=np.float32))
    main(["bench", "--gradient", str(folder / "g{rank}.npy"), *ALGOS, "--json", str(folder / "rows.json")])
    printed = capfd.readouterr().out.splitlines()
    assert len(printed) == (3 if comm.rank == 0 else 0)
    comm.Barrier()
    rows = json.loads((folder / "rows.json").read_text())["rows"]
    assert [(row["P"], row["n"]) for row in rows] == [(comm.size, 3000)] * 2


def test_what_one_rank_sees_ends_all(comm, folder, capfd):
    if comm.size == 1:
        pytest.skip("needs two ranks")
    last = comm.size - 1
    gradient = ["bench", "--gradient", str(folder / "g{rank}.npy"), *ALGOS]
    length = 3000 + (comm.rank == last)
    for arguments, expected in (
        (["bench", *ALGOS, "--json", str(folder / "no" / "rows.json")], "expected a file in an existing folder"),
        (gradient, f"rank {last} failed: FileNotFoundError"),
        (gradient, "length: expected the same value on all ranks"),
    ):
        if expected.startswith("rank") and comm.rank != last:
            np.save(folder / f"g{comm.rank}.npy", np.ones(3000, np.float32))
        elif expected.startswith("length"):
            np.save(folder / f"g{comm.rank}.npy", np.ones(length, np.float32))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        printed = capfd.readouterr().err
        assert ended.value.code == 1
        assert (expected in printed and printed.count("\n") == 1) if comm.rank == 0 else printed == ""
    assert comm.allreduce(1) == comm.size
