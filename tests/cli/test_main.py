"""`sparsecoll doctor` and `simulate`, the script, and errors as one line."""

import ast
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import launching
import pytest

from sparsecoll import Network, simulate
from sparsecoll.cli import doctor
from sparsecoll.cli.main import main
from sparsecoll.cli.network import measured_network
from sparsecoll.cli.report import save
from sparsecoll.transport import LocalTransport, launcher

ROOT = Path(__file__).parent.parent.parent


def test_doctor_finds_this_machine_well(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "SELF_TEST_SECONDS", 600)  # other tests run meanwhile
    try:
        importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError):
        pytest.skip("no MPI library, which doctor would find fault with")
    main(["doctor", "--json", str(tmp_path / "findings.json")])
    printed = capsys.readouterr().out
    findings = {f["subject"]: f for f in json.loads((tmp_path / "findings.json").read_text())["findings"]}
    assert {"sparsecoll", "Python", "numpy", "ranks", "cores", "kernels", "self-test, MPI"} <= set(findings)
    with_torch = importlib.util.find_spec("torch") is not None and sys.modules.get("torch", 0) is not None
    assert ("self-test, sockets" in findings) == with_torch
    assert Path(findings["sparsecoll"]["found"].split(", ")[1]).name == "sparsecoll"
    assert all(f["state"] != doctor.BAD for f in findings.values())
    assert all(f["advice"] for f in findings.values() if f["state"] != doctor.GOOD)
    assert all(f["found"] in printed and f["advice"] in printed for f in findings.values())


def test_doctor_says_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setenv("SPARSECOLL_KERNEL", "cpu")
    assert any(f.subject == "SPARSECOLL_KERNEL" and f.state == doctor.WORSE for f in doctor._variables())
    monkeypatch.setattr(doctor, "simulate", lambda P, fn: simulate(P, lambda comm: doctor.Finding("x", "y", "broken")))
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    assert "broken" in capsys.readouterr().out


CACHE = """
from numba.core import caching
for locator in {unusable}:
    setattr(getattr(caching, locator), "from_function", classmethod(lambda *_: None))
from sparsecoll.cli import doctor
print(next((row.found, row.state) for row in doctor._kernels() if row.subject == "Numba cache"))
"""
IN_TREE, IN_HOME = "InTreeCacheLocator", "UserWideCacheLocator"


@pytest.mark.parametrize(
    ("chosen", "unusable"), [(True, [IN_TREE, IN_HOME]), (False, []), (False, [IN_TREE]), (False, [IN_TREE, IN_HOME])]
)
def test_doctor_names_the_folder_in_which_kernels_are_cached(unusable, chosen, tmp_path):
    """A folder that a user may not write to is passed over by Numba; as root, there is no such folder."""
    own = {"NUMBA_CACHE_DIR": str(tmp_path / "chosen")} if chosen else {}
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "home")}
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | own | home
    command = [sys.executable, "-c", CACHE.format(unusable=unusable)]
    printed = subprocess.check_output(command, text=True, env=environment, timeout=600)
    folder, state = ast.literal_eval(printed)
    place = (tmp_path / "chosen") if chosen else tmp_path / "home" if unusable else Path(doctor.__file__).parents[1]
    if unusable == [IN_TREE, IN_HOME] and not chosen:
        assert (folder, state) == ("none", doctor.WORSE)
    else:
        assert Path(folder).is_relative_to(place) and state == doctor.GOOD


def found(subject, monkeypatch, **environment):
    """The row of doctor's variables or ranks, on one rank."""
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    rows = [*doctor._variables(), *doctor._ranks(LocalTransport(), [])]
    return next(row for row in rows if row.subject == subject)


def rows_before(subject, printed):
    """The states of the rows of doctor up to the one of a subject."""
    lines = [line for line in printed.splitlines() if not line.startswith(" ")]
    last = next(i for i, line in enumerate(lines) if line[17:].startswith(f"{subject}:"))
    return [line[:17].strip() for line in lines[: last + 1]]


@pytest.mark.parametrize("name, value", [("KERNELS", "nonsense"), ("THREADS", "0")])
def test_doctor_survives_a_wrong_variable(name, value, tmp_path):
    """What is not good comes first, though every sum fails."""
    environment = os.environ | {f"SPARSECOLL_{name}": value}
    command = [sys.executable, "-m", "sparsecoll", "doctor", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (1, ""), done.stdout + done.stderr
    states = rows_before(f"SPARSECOLL_{name}", done.stdout)
    assert set(states) <= {doctor.BAD} and "expected" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert {"sparsecoll", "MPI", "ranks"} <= {row["subject"] for row in found}


@pytest.mark.parametrize("launcher", [launching.mpirun, launching.torchrun])
def test_doctor_survives_a_wrong_variable_on_one_rank_of_a_job(launcher, tmp_path):
    program = "import os; os.environ['SPARSECOLL_ON_TIMEOUT'] = 'abrt' * (os.environ[{!r}] == '1')"
    program = program.format("RANK" if launcher is launching.torchrun else RANK_OF_MPI)
    (tmp_path / "doctor.py").write_text(f"{program}\nfrom sparsecoll.cli.main import main\nmain(['doctor', *{JSON}])\n")
    done = launching.run(*launcher(2), tmp_path / "doctor.py", cwd=tmp_path, variables={"PYTHONPATH": str(ROOT)})
    assert done.returncode and "Traceback" not in done.stdout, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert any("SPARSECOLL_ON_TIMEOUT: expected one of raise, abort" in row["found"] for row in found)
    assert {"sparsecoll", "MPI", "ranks", "kernels"} <= {row["subject"] for row in found}


JSON = ["--json", "found.json"]
RANK_OF_MPI = "OMPI_COMM_WORLD_RANK" if launching.OPEN_MPI else "PMI_RANK"
LAUNCHED = {"PMI_SIZE": "1"}  # then no self-tests are started, which take some seconds
BROKEN = {
    "torch": ("raise ImportError('libtorch_cpu.so: cannot open')", {}),
    "mpi4py": ("raise ImportError('no libmpi.so')", LAUNCHED),
    "mpi4py/MPI": ("raise RuntimeError('cannot load MPI library')", LAUNCHED),
    "numba": ("raise ImportError('llvmlite is too old')", LAUNCHED),
    "torch, by torchrun": (
        "raise ImportError('libtorch_cpu.so: cannot open')",
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_doctor_survives_a_package_that_cannot_be_imported(name, tmp_path):
    text, variables = BROKEN[name]
    package, _, module = name.partition(",")[0].partition("/")
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("" if module else text)
    if module:
        (tmp_path / package / f"{module}.py").write_text(text)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])} | variables
    command = [sys.executable, "-m", "sparsecoll", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert "Traceback" not in done.stdout + done.stderr
    if module:
        assert re.search("(?m)^broken .*cannot load MPI library", done.stdout)
    else:
        why = re.escape(text.split("'")[1])
        assert re.search(f"(?m)^broken +{package}: cannot be imported: ImportError: {why}$", done.stdout), done.stdout


def test_doctor_shows_rows_as_they_come(monkeypatch, capsys):
    """Rows that take no time in the order of their states, then those of the self-tests."""
    shown = []

    def tests():
        shown.append(capsys.readouterr().out)
        yield doctor.Finding("self-test", "wrong", doctor.BAD, "x")

    monkeypatch.setattr(doctor, "_launched_self_tests", tests)
    monkeypatch.setattr(doctor, "_sockets", lambda: iter([doctor.Finding("sockets", "none", doctor.WORSE, "y")]))
    monkeypatch.setattr(doctor, "_variables", lambda: iter([doctor.Finding("X", "bad", doctor.BAD, "z")]))
    with pytest.raises(SystemExit):
        main(["doctor"])
    lines = [line[:17].strip() for line in shown[0].splitlines() if not line.startswith(" ")]
    assert lines == sorted(lines, key=doctor.ORDER.index) and lines[0] == doctor.BAD and len(lines) > 9
    assert capsys.readouterr().out.startswith("broken           self-test: wrong\n")


def test_doctor_finds_the_launcher_of_another_mpi(monkeypatch):
    assert found("ranks", monkeypatch).state == doctor.GOOD
    for variable, advice in (("PMI_SIZE", "another MPI"), ("WORLD_SIZE", "torchrun")):
        row = found("ranks", monkeypatch, **{variable: 3})
        assert row.state == doctor.BAD and f"{variable} is 3" in row.found and advice in row.advice
    row = found("ranks", monkeypatch, SLURM_STEP_NUM_TASKS=16)
    assert row.state == doctor.BAD and "srun" in row.advice
    assert found("ranks", monkeypatch, SLURM_STEP_NUM_TASKS=16, PMI_SIZE=1).state == doctor.GOOD


def test_doctor_reads_the_variables(monkeypatch):
    for name, good, bad in (("SPARSECOLL_ON_TIMEOUT", "abort", "abrt"), ("SPARSECOLL_THREADS", 2, 0)):
        assert found(name, monkeypatch, **{name: good}).state == doctor.GOOD
        row = found(name, monkeypatch, **{name: bad})
        assert row.state == doctor.BAD and row.advice
        monkeypatch.delenv(name)
    for name in doctor.VARIABLES:  # an empty one counts as none, or is refused as the library does
        refused = name in ("SPARSECOLL_THREADS", "SPARSECOLL_GPU_DIRECT")
        assert (found(name, monkeypatch, **{name: ""}).state == doctor.BAD) == refused
        monkeypatch.delenv(name)


def test_doctor_shows_the_line_that_says_most():
    rule = "-" * 70
    assert doctor.telling_line(f"{rule}\nThere are not enough slots\nfor you\n{rule}\n") == "There are not enough slots"
    assert doctor.telling_line("Traceback\n  File\nRuntimeError: no libmpi\nbye\n") == "RuntimeError: no libmpi"


def test_doctor_cuts_no_folder(capsys, monkeypatch):
    long = "/".join(["folder"] * 60)
    monkeypatch.setattr(doctor, "examine", lambda *_: [doctor.Finding("cache", long)])
    monkeypatch.setenv("COLUMNS", "80")
    main(["doctor"])
    assert capsys.readouterr().out == f"good             cache: {long}\n"


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


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("bench --algo bst", "argument --algo: expected one of auto, "),
        ("bench --algo oktopk:tau=abc", "argument --algo: oktopk:tau: expected int, got 'abc'"),
        ("bench --n abc", "argument --n/--length: expected a whole number of at least 1 and below 2^63, got 'abc'"),
        ("bench --n -5", "argument --n/--length: expected a whole number"),
        ("bench --n 1e400", "argument --n/--length: expected a whole number"),
        ("bench --repeat 0", "argument --repeat: expected a whole number"),
        ("bench --density 2", "argument --density: expected a number above 0 and up to 1, such as 0.01, got '2'"),
        ("bench --json no/folder.json", "no/folder.json: expected a file in an existing folder, got no folder 'no'"),
        ("bench --gradient no.npy --repeat 1", "no.npy: expected a .npy file with a 1-D array of floats (No such file"),
        ("simulate --n 1e30", "argument --n/--length: expected a whole number"),
        ("simulate --alpha -1", "argument --alpha: expected a finite number of at least 0, such as 50e-6, got '-1'"),
        ("simulate --beta nan", "argument --beta: expected a finite number of at least 0"),
        ("simulate --algo MPI_Allreduce", "--algo: MPI_Allreduce is MPI's own and cannot be simulated"),
        ("plot no.json", "no.json: expected the JSON rows of bench or simulate (No such file or directory)"),
        (
            "bench --algo allgather oktopk --format slots",
            "format: expected one that loses nothing with algo='oktopk'",
        ),
        ("simulate --format slots", "format: expected one that loses nothing with algo='sparcml'"),
        (
            "simulate --algo oktopk:k=5",
            "argument --algo: expected --density instead of k, which it would override, got",
        ),
        ("gain --n 0", "argument --n: expected a whole number of at least 1 and below 2^63, got '0'"),
        ("gain --n 1e19", "argument --n: expected a whole number of at least 1 and below 2^63, got '1e19'"),
        ("gain --network 5g", "argument --network: invalid choice: '5g'"),
        ("benhc", "argument COMMAND: invalid choice: 'benhc'"),
    ],
)
def test_errors_are_one_line(arguments, expected, capsys, monkeypatch):
    monkeypatch.setattr("sparsecoll.cli.main._warn_of_one_rank", lambda comm: None)
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    assert printed.err.startswith(f"sparsecoll: {expected}") and printed.err.count("\n") == 1


def test_plot_without_matplotlib(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["plot", "rows.json"])
    assert capsys.readouterr().err == (
        "sparsecoll: plot needs matplotlib, which is not installed: pip install matplotlib\n"
    )


def test_one_process_of_a_job_prints(capsys, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setenv("PMI_RANK", "1")
    small = ["--ranks", "2", "--n", "1000", "--algo", "allgather", "--repeat", "1"]
    failing = ["bench", "--n", "abc"], ["plot", "no.json"], ["simulate", "--algo", "no:Such"]
    for arguments in (["--version"], ["--help"], ["gain"], ["warmup"], ["simulate", *small], *failing):
        with contextlib.suppress(SystemExit):
            main(arguments)
        assert capsys.readouterr() == ("", "")


def test_bench_on_one_rank_says_so(capsys, monkeypatch):
    monkeypatch.setattr("sparsecoll.cli.job.default_comm", LocalTransport)
    small = ["bench", "--n", "1000", "--algo", "MPI_Allreduce", "allgather", "--density", "0.1", "--repeat", "1"]
    main(small)
    printed = capsys.readouterr()
    assert "note: there is only 1 rank" in printed.err and "MPI_Allreduce is left out" in printed.err
    assert len(printed.out.splitlines()) == 2
    monkeypatch.setenv("PMI_SIZE", "3")
    main(small)
    assert "this job has 1 rank, but PMI_SIZE=3" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_bench_under_the_launcher_of_another_mpi_is_refused_in_one_line(rank, capsys, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setenv("PMI_RANK", str(rank))
    monkeypatch.setattr("sparsecoll.cli.job.default_comm", lambda: launcher.refuse_one_rank())
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--n", "1000"])
    err = capsys.readouterr().err
    assert ended.value.code == 1 and err.count("\n") == (rank == 0)
    assert err.startswith("sparsecoll: comm: expected 3 ranks, as PMI_SIZE says, got one" if rank == 0 else "")


def test_simulate_on_one_rank_has_no_ratio(capsys):
    main(["simulate", "--ranks", "1", "--n", "1000", "--algo", "dense", "allgather", "--repeat", "1"])
    assert [line.split()[7] for line in capsys.readouterr().out.splitlines()[1:]] == ["-", "-"]


def test_help_names_the_default_ranks(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    assert "(default: 4 16 64)" in " ".join(capsys.readouterr().out.split())


def test_an_error_while_measuring_has_another_status(capsys, monkeypatch):
    monkeypatch.setattr("sparsecoll.bench.timing.measure", lambda *_: int("x"))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--n", "1000", "--algo", "allgather"])
    assert ended.value.code == 1 and "invalid literal" in capsys.readouterr().err


def test_the_network_is_measured_as_it_is():
    network = Network(alpha=3e-5, beta=2e-9)
    assert simulate(3, measured_network, network).results == [network] * 3
    assert simulate(3, doctor.speed, network).results[0].found == f"{network} over sockets, rank 0 to 2"


def test_script_is_installed():
    script = Path(sys.executable).parent / "sparsecoll"
    if not script.exists():
        pytest.skip("the package is not installed here")
    assert subprocess.check_output([script, "--version"], text=True, timeout=60).strip()


def test_a_file_of_rows_keeps_its_mode_and_a_link_to_it(tmp_path):
    file, link = tmp_path / "rows.json", tmp_path / "latest.json"
    file.touch()
    file.chmod(0o604)
    link.symlink_to("rows.json")
    save(link, {"rows": [1]})
    assert json.loads(file.read_text()) == {"rows": [1]} and link.is_symlink()
    with pytest.raises(TypeError):
        save(link, {"rows": [object()]})
    assert file.stat().st_mode & 0o777 == 0o604 and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_bench_without_mpi4py_is_refused_once_for_the_job(rank, capsys, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setenv("PMI_RANK", str(rank))
    monkeypatch.setattr("sparsecoll.cli.job.importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--n", "1000"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.count("mpi4py: expected it to be installed for the 3 ranks") == (rank == 0)


@pytest.mark.parametrize("command", ["simulate --ranks 2 --n 1000 --algo dense --json", "doctor --json", "gain"])
@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_pipe_that_closes_ends_a_command_without_a_word(command, buffered, tmp_path):
    """The row that could not be printed is saved."""
    read, write = os.pipe()
    os.close(read)
    arguments = [*command.split(), *([str(tmp_path / "rows.json")] if "json" in command else [])]
    kept = os.environ | {"PYTHONUNBUFFERED": buffered}
    command = [sys.executable, "-m", "sparsecoll", *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=kept)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")
    if len(arguments) > 1:
        saved = json.loads((tmp_path / "rows.json").read_text())
        assert len(saved.get("rows") or saved["findings"]) == 1
