"""Algorithms, selectors and compressors of one's own: MODULE:CLASS in the commands, objects in `bench.rows`."""

import json
import re
import sys
from functools import partial

import numpy as np
import pytest

from sparsecoll import Network, OkTopk, SparCML, bench, simulate
from sparsecoll.cli.main import main

MODULE = '''
from dataclasses import dataclass
import numpy as np
import sparsecoll
from sparsecoll.select import Selector


@dataclass
class Ring(sparsecoll.Algorithm):
    """Exact sum: every rank's entries go round a ring, `laps` times."""

    name = "ring"
    semantics = "exact_sum"
    sends_sums = False
    laps: int = 1

    def __call__(self, channel, x, k):
        rank, P, parts = channel.rank, channel.size, {channel.rank: x}
        with channel.phase("ring"):
            for step in range(self.laps * P - 1):
                channel.isend((rank + 1) % P, parts[(rank - step) % P])
                parts[(rank - step - 1) % P] = channel.recv((rank - 1) % P)
        return sparsecoll.Reduction(channel.merge([parts[source] for source in range(P)]), x)


@dataclass
class Half(Selector):
    """Half of the top k."""

    name = "half"
    of: int = 2

    def select(self, x, k):
        return x.topk(k // self.of)


class Nothing:
    pass


ring = Ring()
'''
SIGNS = """
from dataclasses import dataclass
import numpy as np
from sparsecoll.torch.compressors import ArrayCompressor


@dataclass
class Signs(ArrayCompressor):
    name = "signs"

    def compress(self, acc):
        return np.packbits(acc > 0), np.abs(acc).mean(keepdims=True)

    def decompress(self, arrays, n):
        bits, magnitude = arrays
        return np.where(np.unpackbits(bits)[:n], magnitude, -magnitude)
"""
SMALL = ["--n", "2000", "--density", "0.1", "--repeat", "1"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with the modules `mine` and `signs`."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "signs.py").write_text(SIGNS)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield tmp_path
    for name in ("mine", "signs", "broken"):
        sys.modules.pop(name, None)


def rows_of(command, path, *arguments):
    main([command, *arguments, *SMALL, "--json", str(path)])
    return {row["algo"]: row for row in json.loads(path.read_text())["rows"]}


def test_in_simulate(here, capsys):
    chosen = ["--algo", "allgather", "mine:Ring", "mine:Ring:laps=2", "--selector", "topk", "mine:Half:of=4"]
    rows = rows_of("simulate", here / "rows.json", *chosen, "--ranks", "5")
    selectors = ("topk", "mine:Half:of=4")
    algorithms = {"allgather": ":", "mine:Ring": ":", "mine:Ring:laps=2": ","}
    assert list(rows) == [f"{algo}{sign}selector={one}" for algo, sign in algorithms.items() for one in selectors]
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
    assert [row["messages"] for row in rows.values()] == [3, 3, 4, 4, 9, 9]  # of Bruck, and of one lap and of two
    whole, quarter = (rows[f"mine:Ring:selector={one}"]["bytes_received"] for one in selectors)
    assert 3 * quarter < whole < 4 * quarter


@pytest.mark.parametrize("command", ["bench", "simulate"])
def test_compressors(command, here):
    pytest.importorskip("torch")
    chosen = ["--algo", "dense", "--compressor", "signs:Signs", "powersgd:rank=2", "nesterovtopk"]
    ranks = ["--ranks", "3"] if command == "simulate" else []
    rows = rows_of(command, here / "rows.json", *chosen, *ranks)
    assert list(rows) == [
        "dense",
        *(f"compressor {name}" for name in ("signs:Signs", "powersgd:rank=2", "nesterovtopk")),
    ]
    assert [row["density"] for row in rows.values()] == [1, 1, 1, 0.1]
    if ranks:
        received = [row["bytes_received"] for row in rows.values()]
        assert 2 * 250 < received[1] < 2 * 250 + 200 and received[0] > max(received[1:])


def test_presets_take_the_options_of_their_class():
    pytest.importorskip("torch")
    from sparsecoll.torch.compressors import COMPRESSORS, TopKCompressor

    presets = [name for name, make in COMPRESSORS.items() if isinstance(make(), TopKCompressor)]
    assert {"topk", "oktopk", "dgc", "sgdtopk"} <= {*presets}
    for name in presets:
        made = bench.compressor(f"{name}:clip=1,density=0.2,momentum=0.5")
        assert (made.clip, made.density, made.momentum) == (1.0, 0.2, 0.5) and made.name == name
    assert bench.compressor("topk:momentum=None").momentum is None
    with pytest.raises(ValueError, match="got 'options=1'"):
        bench.compressor("oktopk:options=1")


def test_compressors_are_measured_with_the_dtype_of_the_gradient():
    pytest.importorskip("torch")
    from sparsecoll.bench.compressors import Mean

    def program(comm, dtype):
        return Mean(comm, bench.compressor("none"))(np.ones(3000, dtype))[1]

    double, single = (simulate(3, partial(program, dtype=dtype)).results for dtype in ("f8", "f4"))
    assert all(1.9 * few < many < 2 * few for many, few in zip(double, single, strict=True))


def test_in_bench_from_the_script(here, capsys, monkeypatch):
    """Whose first folder in sys.path is its own."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    main(["bench", "--algo", "mine:Ring", *SMALL])
    assert capsys.readouterr().out.splitlines()[1].startswith("mine:Ring ")


NOT_IMPORTED = "expected MODULE:CLASS that can be imported, got"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("--algo bst", "argument --algo: expected one of auto, dense, .* or MODULE:CLASS, got 'bst'"),
        ("--algo nowhere:Ring", f"algo: {NOT_IMPORTED} 'nowhere:Ring' .ModuleNotFoundError: No module"),
        ("--algo mine:Rng", f"algo: {NOT_IMPORTED} 'mine:Rng' .AttributeError: module 'mine' has no attribute 'Rng'"),
        ("--algo broken:Ring", f"algo: {NOT_IMPORTED} 'broken:Ring' .ZeroDivisionError: "),
        ("--algo mine:Nothing", "algo: expected a class derived from Algorithm, got 'mine:Nothing', the class Nothing"),
        ("--algo mine:ring", "algo: expected a class derived from Algorithm, got 'mine:ring', an object of Ring"),
        ("--algo mine:Half", "algo: expected a class derived from Algorithm, got 'mine:Half', the class Half"),
        (
            "--algo mine:Ring:lap=2",
            "algo: expected OPTION=VALUE of mine:Ring with one of k, selector, laps, got 'lap=2'",
        ),
        ("--algo mine:Ring:laps=x", "mine:Ring:laps: expected int, got 'x'"),
        ("--algo mine:Ring:k=5", "algo: expected --density instead of k, which it would override, got 'mine:Ring:k=5'"),
        (
            "--algo oktopk:selector=mine:Ring",
            "selector: expected a class derived from Selector, got 'mine:Ring'",
        ),
        ("--algo sparsecoll:Algorithm", "algo: .*abstract"),
        ("--selector tpk", "argument --selector: expected one of topk, reuse, .* or MODULE:CLASS, got 'tpk'"),
        ("--selector mine:Ring", "selector: expected a class derived from Selector, got 'mine:Ring', the class Ring"),
        ("--compressor topq", "argument --compressor: expected one of none, free, .* or MODULE:CLASS, got 'topq'"),
        ("--compressor mine:Ring", "compressor: expected a class derived from Compressor, got 'mine:Ring'"),
        ("--compressor powersgd:rnk=2", "argument --compressor: expected OPTION=VALUE of powersgd with one of rank, "),
    ],
)
@pytest.mark.parametrize("command", ["bench", "simulate"])
def test_errors_are_one_line(command, arguments, expected, here, capsys, monkeypatch):
    monkeypatch.setattr("sparsecoll.cli.main._warn_of_one_rank", lambda comm: None)
    if "compressor" in arguments:
        pytest.importorskip("torch")
    with pytest.raises(SystemExit) as ended:
        main([command, *arguments.split(), *SMALL])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == "" and printed.err.count("\n") == 1
    assert re.match(f"sparsecoll: {expected}", printed.err), printed.err


def own_ring(here):
    return bench.algorithm("mine:Ring")


def test_rows_of_virtual_ranks(here, tmp_path):
    """An object of one's own beside Ok-Topk, which `plot` draws."""
    ring = own_ring(here)
    named = {"mine": ring, "Ok-Topk": "oktopk", "Ok-Topk, tau": OkTopk(tau=2)}
    rows = bench.rows([2, 5], named, n=[3000], density=iter([0.01, 0.1]), repeat=2, network=Network(1e-5, 1e-9))
    assert [(row["P"], row["algo"], row["density"]) for row in rows] == [
        (P, name, density) for P in (2, 5) for name in named for density in (0.01, 0.1)
    ]
    own = [row for row in rows if row["algo"] == "mine"]
    assert [row["messages"] for row in own] == [1, 1, 4, 4] and all(row["seconds"] > 1e-5 for row in own)
    pytest.importorskip("matplotlib")
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows}))
    main(["plot", str(tmp_path / "rows.json"), "--out", str(tmp_path), "--algo", "mine", "Ok-Topk"])
    drawn = (tmp_path / "rows_density_n3000_P5.svg").read_text()
    assert "<!-- mine -->" in drawn and "<!-- Ok-Topk -->" in drawn and "tau" not in drawn


def test_rows_of_a_communicator(here):
    ring = own_ring(here)

    def program(comm):
        return bench.rows(comm, [ring, "oktopk", "dense"], n=1000, density=0.1, value_dtype="float16", repeat=2)

    first, *others = simulate(4, program).results
    assert [row["algo"] for row in first] == ["ring", "oktopk", "dense"] and all(rows == first for rows in others)
    assert {row["value_dtype"] for row in first} == {"float16"} and {row["P"] for row in first} == {4}


def test_rows_of_compressors():
    pytest.importorskip("torch")
    made = {"top 1 %": bench.compressor("topk:density=0.01"), "dense": "dense"}
    few, dense = bench.rows(3, made, n=5000, repeat=1)
    assert few["bytes_received"] < dense["bytes_received"] / 10


@pytest.mark.parametrize(
    "algos, more, error, text",
    [
        (["oktopk", "oktopk"], {}, ValueError, "algos: expected different names, got oktopk for 2"),
        ([SparCML(), SparCML(variant="dynamic")], {}, ValueError, "algos: expected different names"),
        (["best"], {}, ValueError, "algo: expected one of auto"),
        (
            ["MPI_Allreduce"],
            {},
            ValueError,
            "algo: expected another one without a communicator of MPI, got .*: use dense",
        ),
        ([OkTopk], {}, TypeError, "algo: expected text, an Algorithm or a Compressor object, got the class OkTopk"),
        (["dense"], {"n": 0}, ValueError, "n: expected at least 1, got 0"),
        (["oktopk"], {"density": 2.0}, ValueError, "density: expected"),
        (["oktopk"], {"format": "slots"}, ValueError, "format: expected one that loses nothing with algo='oktopk'"),
    ],
)
def test_wrong_arguments_of_rows(algos, more, error, text):
    with pytest.raises(error, match=text):
        bench.rows(2, algos, **({"n": 100, "repeat": 1} | more))


def test_rows_have_the_density_that_they_name():
    """Whatever a compressor has, which is its own if none is given; what names another one is refused."""
    compressors = pytest.importorskip("torch") and pytest.importorskip("sparsecoll.torch").compressors
    rows = bench.rows(4, {"half": compressors.TopKCompressor(0.5)}, n=10_000, density=[0.01, 0.1], repeat=1)
    few, many = (row["bytes_received"] for row in rows)
    assert 5 * few < many
    named = {f"top {density}": compressors.TopKCompressor(density) for density in (0.01, 0.1)}
    few, many = bench.rows(4, named, n=10_000, repeat=1)
    assert 5 * few["bytes_received"] < many["bytes_received"] and (few["density"], many["density"]) == (0.01, 0.1)

    class Late(compressors.schedule.Schedule):
        end = 0.01

        def at(self, step):
            return 0.5 if step < 100 else 0.01

        def settles_at(self):
            return self.end

    (same,) = bench.rows(4, [compressors.TopKCompressor(Late())], n=10_000, repeat=1)
    assert same["bytes_received"] < 2 * few["bytes_received"] and json.dumps(same)
    Late.end = None
    with pytest.raises(ValueError, match="density: expected a number for 'topk', whose schedule has no end"):
        bench.rows(4, [compressors.TopKCompressor(Late())], n=10_000, repeat=1)
    (later,) = bench.rows(4, [compressors.sgdtopk()], n=10_000, repeat=1)
    assert later["density"] == 0.01 and later["bytes_received"] < 2 * few["bytes_received"]
    with pytest.raises(ValueError, match=r"algo: expected density instead of k, which it would override, got OkTopk"):
        bench.rows(2, [OkTopk(k=500)])
    with pytest.raises(ValueError, match=r"compressor: expected --density instead of density, got 'topk"):
        bench.timing.Call("topk:density=0.5", 0.01, compressor=True).made()
