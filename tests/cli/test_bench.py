"""bench and plot: what they measure, what they refuse, and their commands."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from harness import drawn, in_turns

from sparsecoll import Costs, LowBit, Network, SparseVector, simulate
from sparsecoll.bench import algorithm, rows, timing
from sparsecoll.bench.timing import Call
from sparsecoll.cli.main import main
from sparsecoll.cli.report import SHOWN, Report
from sparsecoll.formats import FORMATS
from sparsecoll.transport import LocalTransport, as_transport


def test_algorithms_and_their_options_are_read_from_text():
    made = algorithm("oktopk:tau=4,exact=True,selector=dgc,repartition=even")
    assert (made.tau, made.exact, made.repartition, type(made.selector).__name__) == (
        4,
        True,
        "even",
        "SampledThreshold",
    )
    for text, message in (
        ("best", "algo: expected one of auto, .*, got 'best'"),
        ("oktopk:tua=4", "expected OPTION=VALUE of oktopk with one of .*tau.*, got 'tua=4'"),
        ("oktopk:tau", "got 'tau'"),
        ("dense:selector=all", "selector: expected one of topk, .*, got 'all'"),
        ("oktopk:tau=abc", "oktopk:tau: expected int, got 'abc'"),
        ("oktopk:k=few", "oktopk:k: expected int or None, got 'few'"),
        ("oktopk:exact=1", "oktopk:exact: expected bool, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            algorithm(text)
    assert algorithm("oktopk:balance_factor=2").balance_factor == 2.0


def test_every_call_gets_another_vector():
    vectors = timing.heavy_tailed(1000, rank=0, spare=50_000)
    a = vectors().copy()
    b = vectors().copy()
    assert a.size == b.size == 1000 and not np.array_equal(a, b)
    np.testing.assert_allclose(vectors.base[: a.size] / 1.01, a, rtol=1e-5)
    np.testing.assert_array_equal(b, vectors.base[timing.STEP : timing.STEP + 1000])
    entries = drawn(10_000, 500, rank=1)
    x, y = entries(), entries()
    assert 400 < x.nnz <= 500 and x.length == 10_000 and not np.array_equal(x.indices, y.indices)


def test_files_of_gradients_are_read_and_others_refused(tmp_path):
    np.save(tmp_path / "g_2.npy", np.arange(5, dtype=np.float32))
    assert timing.from_file(tmp_path / "g_{rank}.npy", 2)().size == 5
    np.save(tmp_path / "g_3.npy", np.arange(5))
    with pytest.raises(ValueError, match="expected a 1-D array of floats, got int64"):
        timing.from_file(tmp_path / "g_{rank}.npy", 3)
    (tmp_path / "g_4.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"g_4\.npy: expected a \.npy file"):
        timing.from_file(tmp_path / "g_{rank}.npy", 4)
    np.savez(tmp_path / "g.npz", np.ones(3))
    with pytest.raises(ValueError, match=r"g\.npz: expected a \.npy file .* got an archive"):
        timing.from_file(tmp_path / "g.npz", 0)


def test_a_row_is_the_same_on_all_ranks_and_its_parts_add_up():
    costs = Costs(select=1e-9, encode=2e-8, decode=3e-8, merge=4e-8, call=1e-6)

    def program(comm):
        return timing.measure(comm, Call("allgather", 0.01), timing.heavy_tailed(20_000, comm.rank), repeat=3, note="x")

    rows = simulate(4, program, Network(1e-5, 1e-8), costs=costs).results
    assert all({**row, "memory": 0} == {**rows[0], "memory": 0} for row in rows)
    row = rows[0]
    assert row["note"] == "x" and row["P"] == 4 and row["n"] == 20_000 and 200 <= row["entries"] <= 800
    assert 600 * 5 < row["bytes_received"] < 600 * 6 + 1000 and row["messages"] == 2  # Bruck; the call is known
    parts = sum(row[kind] for kind in ("select", "encode", "decode", "merge", "dense", "wait", "other"))
    assert row["least"] <= row["seconds"] <= row["most"] and parts == pytest.approx(row["seconds"], rel=0.05)
    assert row["select"] == pytest.approx(20_000e-9 + 1e-6) and row["merge"] == pytest.approx(800 * 4e-8 + 1e-6)
    assert row["encode"] > 0 and row["decode"] > 0 and row["wait"] > 0


def test_the_kernels_start_before_calls_are_timed(monkeypatch):
    started = []
    monkeypatch.setattr(timing, "host_kernels", lambda: started.append(True))
    timing.measure(
        LocalTransport(), Call("allgather", 0.1), timing.heavy_tailed(100, 0), 1, run=lambda _: (*started, 0, 0, 0)
    )
    assert started == [True]
    simulate(2, lambda comm: timing.measure(comm, Call("allgather", 0.1), timing.heavy_tailed(100, 0), 1))
    assert started == [True]  # the simulator's seconds are modelled


def test_an_algorithm_that_sums_dense_vectors_has_rows():
    (row,) = rows(2, [LowBit(bits=4)], 1000, repeat=1)
    assert (row["algo"], row["density"], row["entries"]) == ("lowbit", 1.0, 1000)
    assert 0 < row["bytes_received"] < 1000


def test_calls_take_turns():
    def program(comm):
        entries = drawn(5000, 50, comm.rank)
        calls = [Call("allgather", None), Call("dense", None)]
        return in_turns(as_transport(comm), [(timing.runner(comm, call), entries) for call in calls], repeat=3)

    few, all_of_them = simulate(3, program, Network(1e-5, 1e-8)).results[0]
    assert few < all_of_them  # 3 x 50 entries against 5,000 values


def test_sparse_and_dense_inputs_and_the_wire():
    def program(comm):
        x = SparseVector([comm.rank, 7], np.ones(2, np.float32), 100)
        return [
            timing.measure(comm, c, lambda: x, repeat=1)["entries"] for c in (Call("auto", None), Call("oktopk", None))
        ]

    assert simulate(2, program).results == [[3, 2]] * 2


def test_bench_saves_rows_and_plot_draws_them(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "rows.json"
    algos = ["--algo", "MPI_Allreduce", "allgather", "oktopk", "dense"]
    options = ["--n", "2e3", "--density", "0.01", "0.1", "--value-dtype", "float32", "float16", "--repeat", "2"]
    main(["bench", *algos, *options, "--json", str(path)])
    shown = capsys.readouterr().out.splitlines()
    content = json.loads(path.read_text())
    assert content["rows"][0]["bytes_received"] is None and shown[1].split()[8] == "-"  # not counted is not zero
    assert (
        len(shown) == 1 + 1 + 4 + 4 + 2 == 1 + len(content["rows"])
    )  # dense ones once, MPI_Allreduce in its own dtype
    assert content["about"]["machine"] and content["about"]["versions"]["numpy"]
    main(["plot", str(path), "--out", str(tmp_path / "figures")])
    drawn = capsys.readouterr().out.split()
    assert len(drawn) == 2 and all("<svg" in Path(name).read_text() for name in drawn)
    for content, message in (
        ("[]", "expected the JSON rows of bench or simulate, got something else"),
        ("{nonsense", "expected the JSON rows of bench or simulate ("),
        (
            '{"rows": [{"algo": "x"}]}',
            "expected a number for n, P, density, seconds in each row, got {'algo'",
        ),
        ('{"rows": [{"algo": "x", "n": 9, "P": "2", "density": 1, "seconds": 1}]}', "expected a number for P in each"),
    ):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(SystemExit) as ended:
            main(["plot", str(tmp_path / "other.json")])
        assert ended.value.code == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"sparsecoll: {tmp_path / 'other.json'}: {message}") and printed.count("\n") == 1


def test_figures_that_would_have_the_same_name_are_refused(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    row = {"algo": "x", "n": 9, "P": 2, "density": 0.1, "seconds": 1}
    paths = [tmp_path / folder / "rows.json" for folder in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text(json.dumps({"rows": [row]}))
    with pytest.raises(SystemExit) as ended:
        main(["plot", *map(str, paths), "--out", str(tmp_path)])
    assert ended.value.code == 2 and "FILE: expected files of different names" in capsys.readouterr().err


def test_rows_are_compared_with_the_dense_sum_of_their_own_dtype(capsys):
    report = Report(["dense", "allgather"])
    row = {"P": 2, "n": 9, "density": 1.0, "format": "auto", "bytes_received": 1, **dict.fromkeys(SHOWN, 0.0)}
    for algo, dtype, seconds in (("dense", "float16", 1.0), ("dense", "float32", 2.0), ("allgather", "float32", 1.0)):
        report.add({**row, "algo": algo, "value_dtype": dtype, "seconds": seconds})
    report.add({**row, "algo": "allgather", "value_dtype": "bfloat16", "seconds": 1.0})
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[7] for line in lines] == ["1.00", "1.00", "2.00", "1.00"]


def test_columns_are_apart(capsys):
    report = Report(["allgather"])
    for name in FORMATS:
        row = {"algo": "allgather", "P": 2, "n": 9, "density": 0.01234, "format": name, "bytes_received": 1}
        report.add(row | {"value_dtype": "bfloat16", "seconds": 1.0} | dict.fromkeys(SHOWN, 0.0))
    assert {len(line.split()) for line in capsys.readouterr().out.splitlines()[1:]} == {9 + len(SHOWN)}


def test_a_folder_for_figures_that_is_a_file(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    row = {"algo": "x", "n": 9, "P": 2, "density": 0.1, "seconds": 1}
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [row]}))
    with pytest.raises(SystemExit) as ended:
        main(["plot", str(tmp_path / "rows.json"), "--out", str(tmp_path / "rows.json")])
    assert ended.value.code == 2
    assert "rows.json: expected a folder for the figures (File exists)" in capsys.readouterr().err


def test_gradient_from_a_file(tmp_path, capsys):
    np.save(tmp_path / "g0.npy", np.random.default_rng(0).standard_normal(3000).astype(np.float32))
    options = ["--algo", "allgather", "dense", "--density", "0.1", "--repeat", "1"]
    main(["bench", "--gradient", str(tmp_path / "g{rank}.npy"), *options])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["allgather", "1", "3,000"], ["dense", "1", "3,000"]]
    np.save(tmp_path / "int.npy", np.arange(9))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--gradient", str(tmp_path / "int.npy")])
    assert ended.value.code == 2 and "expected a 1-D array of floats, got int64" in capsys.readouterr().err


def test_rows_are_saved_as_they_come(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    measured = timing.measure

    def breaks(comm, call, vectors, repeat):
        if path.exists():
            raise OSError("the machine goes down")
        return measured(comm, call, vectors, repeat)

    monkeypatch.setattr(timing, "measure", breaks)
    with pytest.raises(SystemExit):
        main(["bench", "--algo", "allgather", "oktopk", "--n", "2000", "--repeat", "1", "--json", str(path)])
    assert [row["algo"] for row in json.loads(path.read_text())["rows"]] == ["allgather"]


def test_the_commit_is_that_of_the_checkout_and_nothing_without_git_or_in_another_repository(monkeypatch, tmp_path):
    if (
        shutil.which("git")
        and subprocess.run(["git", "-C", Path(timing.__file__).parent, "ls-files"], capture_output=True).stdout
    ):
        assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", timing.about()["commit"])
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
        monkeypatch.setattr(timing, "__file__", str(tmp_path / "venv" / "timing.py"))
        (tmp_path / "venv").mkdir()
        assert timing.about()["commit"] == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert timing.about()["commit"] == ""
