"""CONTRIBUTING.md and the Makefile tell the truth: the files that a new member touches, and the tests that run."""

import ast
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from sparsecoll.algorithms import ALGORITHMS
from sparsecoll.collectives.options import CallOptions
from sparsecoll.formats import FORMATS
from sparsecoll.select import SELECTORS

ROOT = Path(__file__).parent.parent
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for pattern in ("*.md", "docs/*.md", "perf/*.py", "sparsecoll/**/*.py")
    for path in ROOT.glob(pattern)
    if path.name != "CONTRIBUTING.md"
}
COLLECTIVES = ("allreduce", "reduce", "reduce_scatter", "allgather", "gather", "scatter")
COLLECTIVES += ("bcast", "alltoall", "alltoallv")


def compressors():
    pytest.importorskip("torch")
    from sparsecoll.torch.compressors import COMPRESSORS

    return COMPRESSORS


def forms(name, member=None):
    """How files name a member of a registry: as a string or code of a page, or by its class."""
    return [f'"{name}"', f"`{name}`", getattr(member, "__name__", type(member).__name__)]


def registered(registry):
    return [forms(name, member) for name, member in registry.items()]


MEMBERS = {
    "algorithm": lambda: registered(ALGORITHMS),
    "format": lambda: registered(FORMATS),
    "selector": lambda: registered(SELECTORS),
    "compressor": lambda: registered(compressors()),
    "collective": lambda: [
        [f"sparsecoll.{name}", f"{name} as {name}", f"`{name}`", f"i{name}"] for name in COLLECTIVES
    ],
}


def listed(kind):
    """The files in the columns "register in" and "document in" of the table's row."""
    row = re.search(rf"^\| {kind} \|(.*)\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    _, register, document, _ = row[1].split("|")
    return {name for name in re.findall(r"`([\w./]+)`", register + document) if "/" in name or name.endswith(".md")}


@pytest.mark.parametrize("kind", MEMBERS)
def test_the_table_lists_the_files_that_name_every_member_and_no_others(kind):
    ways = r'"\w+"', r"`\w+`", r"\w+", r"sparsecoll\.\w+", r"\w+ as"
    found = {path: {name for way in ways for name in re.findall(way, text)} for path, text in TEXTS.items()}
    assert {p for p in TEXTS if all(found[p] & {*names} for names in MEMBERS[kind]())} == listed(kind)


def test_the_table_lists_the_files_that_name_every_option_and_no_others():
    def names(text):
        for node in ast.walk(ast.parse(text)):
            yield from (getattr(node, kind, None) for kind in ("arg", "attr", "id"))
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value

    options = {field.name for field in fields(CallOptions)}
    sources = {path: text for path, text in TEXTS.items() if path.startswith("sparsecoll/")}
    assert {path for path, text in sources.items() if options <= {*names(text)}} == listed("option of calls")


def test_make_runs_every_file_of_tests_over_mpi():
    """Those that need torchrun, or a framework, by their names; the others as a folder."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    command = ["make", "--dry-run", "test", "frameworks"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"tests/[\w/]+\.py", printed))
    assert all((ROOT / name).exists() for name in named)
    for path in (ROOT / "tests/mpi").glob("test_*.py"):
        by_torchrun = re.search(r"^pytestmark = .*\bTORCHRUN\b", path.read_text(), re.M)
        assert not by_torchrun or str(path.relative_to(ROOT)) in named, path.name


def test_files_of_tests_have_at_most_400_lines():
    long = {path.name: lines for path in ROOT.glob("tests/**/*.py") if (lines := path.read_text().count("\n")) > 400}
    assert not long


def test_every_file_of_tests_has_a_module_name_of_its_own():
    """As pytest imports them: outside packages by the bare name of the file."""
    modules = [path for path in ROOT.glob("tests/**/test_*.py") if not (path.parent / "__init__.py").exists()]
    assert len(modules) == len({path.name for path in modules})
