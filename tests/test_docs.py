"""Python blocks of the README and the docs run."""

import importlib
import inspect
import os
import re
import shutil
import sys
from pathlib import Path

import launching
import pytest
from launching import python

from sparsecoll.formats import FORMATS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TUTORIALS = [page for page in PAGES if page.name.startswith("tutorial")]
BLOCKS = [
    pytest.param(*found, id=f"{page.name}-{number}")
    for page in PAGES
    if page not in TUTORIALS
    for number, found in enumerate(
        re.findall(r"^```python\n(.*?)^```\n(?:\n^```text\n(.*?)^```\n)?", page.read_text() + "\n", re.S | re.M)
    )
]


@pytest.mark.parametrize(("block", "output"), BLOCKS)
def test_block_runs(block, output, capsys, monkeypatch, tmp_path):
    """It prints what the block of text below it shows, and the tuples in its comments."""
    for package in ("torch", "transformers", "lightning"):
        if re.search(rf"^\s*(import|from) (\w+\.)?{package}\b", block, re.M):
            pytest.importorskip(package)
    if "from mpi4py import MPI" in block:
        try:
            importlib.import_module("mpi4py.MPI")
        except (ImportError, RuntimeError):
            pytest.skip("no MPI library")
    if "import cupy" in block:
        if shutil.which("g++") is None:
            pytest.skip("no g++ for a pretended GPU")
        monkeypatch.syspath_prepend(ROOT / "tests/gpu")
        importlib.import_module("fake_cupy").device_library()
    monkeypatch.chdir(tmp_path)  # for the files that it writes
    environment, known = dict(os.environ), dict(FORMATS)
    exec(compile(block, "block", "exec"), {"__name__": "block"})
    os.environ.clear()
    os.environ.update(environment)
    FORMATS.clear()
    FORMATS.update(known)
    if "init_process_group" in block:
        distributed = importlib.import_module("torch.distributed")
        if distributed.is_initialized():
            distributed.destroy_process_group()
    printed = capsys.readouterr().out
    assert not output or printed == output
    for expected in re.findall(r"print\(.*#\s*(\(.*?\))", block):
        assert expected in printed


def masked(text):
    """Without times, without what depends on the processor (losses and accuracies), and the widths of columns."""
    numbers = r"\d+\.\d{6}\b|\d[\d.]*(?= m?s\b)|(?<=loss )[\d.]+|\d+(?= % right)"
    return re.sub(numbers, "T", re.sub(" +", " ", text))


def runs_of(page):
    """Each file that a tutorial makes of its blocks of Python, a command that runs it, and the output that it shows.

    A block that begins with a comment like `# sums.py` begins a file, and those after it are appended. A block of text
    directly below a block of Python, or below a command with the file's name, is what the last command prints.
    """
    name, command, code, runs = "", "", {}, {}
    blocks = re.finditer(r"^```(\w+)\n(.*?)^```$(?=(\n\n```text)?)", page.read_text(), re.S | re.M)
    for kind, content, followed in (match.groups() for match in blocks):
        if kind == "python":
            begun = re.match(r"# (\w+\.py)\n", content)
            name = begun[1] if begun else name
            code[name] = ("" if begun else code[name]) + content
            of_file = [known for known, (file, _) in runs.items() if file == name]
            command = [f"python {name}", *of_file][-1] if followed else ""
        elif kind == "text" and command:
            runs.setdefault(command, [name, ""])[1] += content
        elif kind == "sh":
            here = followed and f" {name}" in content and "--nnodes" not in content
            command = content.strip() if here else ""
    return [pytest.param(file, code[file], command, text, id=command) for command, (file, text) in runs.items()]


@pytest.mark.parametrize(("file", "code", "command", "text"), [run for page in TUTORIALS for run in runs_of(page)])
def test_tutorial_prints_what_it_shows(file, code, command, text, tmp_path):
    for package in ("torch", "matplotlib", "scipy"):
        if f"import {package}" in code:
            pytest.importorskip(package)
    program, *arguments = command.split()
    found = shutil.which(program, path=Path(sys.executable).parent)
    if found is None:
        pytest.skip(f"no {program}")
    (tmp_path / file).write_text(code)
    path = os.pathsep.join([str(Path(found).parent), os.environ["PATH"]])  # where mpirun finds python
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path}
    run = launching.run(found, *arguments, variables=variables, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert masked(run.stdout) == masked(text)
    right, shown = (list(map(int, re.findall(r"(\d+) % right", lines))) for lines in (run.stdout, text))
    assert all(abs(a - b) <= 1 for a, b in zip(right, shown, strict=True))


def test_sparse_training_is_as_good_as_dense_on_the_page_that_shows_it():
    pages = "".join(page.read_text() for page in TUTORIALS)
    dense, *sparse = map(int, re.findall(r"4 ranks: (\d+) % right", pages))
    assert sparse and all(abs(right - dense) <= 1 for right in sparse)


def test_code_fits_the_page():
    """A page 1400 pixels wide holds 117 characters; a tutorial is also read beside a terminal."""
    for page in PAGES:
        for block in re.findall(r"^```.*\n(.*?)^```", page.read_text(), re.S | re.M):
            widest = max(block.splitlines(), key=len, default="")
            assert len(widest) <= (80 if page in TUTORIALS else 112), (page.name, widest)


def test_classes_of_the_frameworks_page_are_those_of_the_examples():
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "frameworks.md").read_text(), re.S | re.M)
    examples = "\n".join(path.read_text() for path in (ROOT / "examples").glob("*.py"))
    parts = [part for block in blocks for part in re.split(r"\n\n\n", block)[1:]]
    shown = [part.strip() for part in parts if not part.startswith("def main")]
    assert shown and all(part in examples for part in shown)


@pytest.mark.parametrize("P", [1, 3, 12, 24])
def test_quickstart_runs_on_virtual_ranks(P):
    source = (ROOT / "examples" / "quickstart.py").read_text()
    names = {"__name__": "quickstart"}
    exec(compile(source, "quickstart.py", "exec"), names)
    import sparsecoll

    lines = sparsecoll.simulate(P, names["program"]).results
    assert all(f"entry {P} counts {P} ranks" in line for line in lines)


@pytest.mark.parametrize("P", [1, 12, 24])
def test_the_first_program_of_the_readme_runs_on_many_ranks(P):
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    names = {"__name__": "readme"}
    exec(block[1].rpartition("print(")[0], names)
    indices, values = names["sparsecoll"].simulate(P, names["program"]).results[-1]
    assert indices.tolist() == [*range(P), 999_999] and values.tolist() == [1.0] * P + [2.5 * P]


def test_scripts_for_slurm_hand_their_cores_to_srun():
    for script in ("examples/job.slurm", "docs/clusters.md"):
        text = (ROOT / script).read_text()
        assert text.index("SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK") < text.index("srun --mpi=pmix"), script


def test_every_link_of_the_pages_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_has_no_link_that_is_dead_on_a_package_index():
    """Figures are left out there, see setup.py."""
    found = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert all(target.startswith("docs/figures/" if figure else "https://") for figure, target in found), found
    assert re.search(r"^!\[.*\]\(docs/.*\)\n\n", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_files_that_the_pages_name_exist():
    for page in [ROOT / "CONTRIBUTING.md", *PAGES]:
        for name in re.findall(r"`((?:docs|examples|tests)/[\w./]+\.\w+)`", page.read_text()):
            assert "NAME" in name or (ROOT / name).exists(), f"{page.name}: {name}"


def test_error_texts_of_the_troubleshooting_page_are_those_of_the_package():
    sources = "\n".join(path.read_text() for path in (ROOT / "sparsecoll").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)  # a text that goes on in the next line
    texts = re.findall(r"^### `(.*)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    assert 10 < len(texts) <= 25
    assert not [text for text in texts if text not in joined]


def test_every_table_has_heads():
    for page in PAGES:
        assert not re.findall(r"^(?:\| *)+\|\n\|[-|:]+$", page.read_text(), re.M), page.name


def test_measured_tables_are_those_of_the_rows_and_every_one_is_shown():
    pytest.importorskip("torch")
    code = (
        "import benchmarks, harness; made = benchmarks.tables(); pages = harness.rendered(made);"
        "assert not [page.name for page, text in pages.items() if page.read_text() != text], 'benchmarks.py --render';"
        "assert made.keys() == {block[2] for text in pages.values() for block in harness.BLOCK.finditer(text)}"
    )
    run = python("-c", code, cwd=ROOT / "perf")
    assert run.returncode == 0, run.stderr


def _entries(text):
    """The names that have an entry in the sections Args and Attributes of a docstring."""
    sections = re.findall(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", inspect.cleandoc(text), re.S | re.M)
    return {name for section in sections for name in re.findall(r"^    \**(\w+):", section, re.M)}


@pytest.mark.parametrize(
    "module",
    ["sparsecoll", "sparsecoll.select", "sparsecoll.torch", "sparsecoll.torch.compressors", "sparsecoll.torch.fsdp"],
)
def test_every_public_argument_has_an_entry_of_its_own(module):
    if "torch" in module:
        pytest.importorskip("torch")
    missing = {}
    for name, obj in vars(importlib.import_module(module)).items():
        if not (inspect.isclass(obj) or inspect.isfunction(obj)) or not obj.__module__.startswith("sparsecoll"):
            continue
        if name[0] != "_" and not name.endswith("Error") and name not in ("Comm", "Request"):
            lacking = set(inspect.signature(obj).parameters) - _entries(obj.__doc__ or "")
            missing |= {name: lacking} if lacking else {}
    assert not missing


def test_every_public_name_is_in_the_reference():
    import sparsecoll

    pages = "\n".join((ROOT / "docs" / name).read_text() for name in ("api.md", "api_parts.md", "api_torch.md"))
    listed = set(re.findall(r"^::: sparsecoll\.(\w+)$", pages, re.M))
    listed |= {name.strip() for group in re.findall(r"members: \[([^\]]+)\]", pages) for name in group.split(",")}
    modules = {"formats", "select"}
    missing = {name for name in sparsecoll.__all__ if name not in listed | modules}
    assert not missing
    for name in sparsecoll.__all__:
        assert name.startswith("__") or getattr(sparsecoll, name).__doc__, name


def test_the_reference_shows_functions_and_classes_not_modules_of_their_name():
    griffe = pytest.importorskip("griffe")
    package = griffe.load("sparsecoll", search_paths=[ROOT], resolve_aliases=True)
    names = re.findall(r"^::: sparsecoll\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert not [name for name in names if package[name].is_module]


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text()
    assert all(f" {page.name}" in nav for page in (ROOT / "docs").glob("*.md"))
