"""Types tell the truth: to pyright and mypy, of right and wrong uses and of the code of the pages."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from sparsecoll.algorithms import ALGORITHMS, ROW_ALGORITHMS
from sparsecoll.algorithms.owners import OWNERS
from sparsecoll.collectives import signature
from sparsecoll.collectives.options import MISSING, NONFINITE, VALUE_DTYPES_ON_THE_WIRE, CallOptions
from sparsecoll.formats import FORMATS
from sparsecoll.vector.operation import OPERATIONS

TESTS = Path(__file__).parent
TYPED = TESTS / "typed"
PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]  # else as it is installed
# Rules that speak of what a page leaves out for brevity, or of torch: annotations of its own functions, None, stubs.
OF_PAGES = (
    "UnknownMemberType UnknownArgumentType UnknownVariableType UnknownParameterType UnknownLambdaType MissingImports"
    " MissingParameterType PrivateImportUsage MissingTypeStubs UntypedBaseClass UnusedImport PossiblyUnboundVariable"
    " OptionalMemberAccess OptionalOperand UnnecessaryComparison"
)


def of_pages():
    """The blocks of the pages by file name, but for those with frameworks that are not typed."""
    pages = [TESTS.parent / "README.md", *sorted((TESTS.parent / "docs").glob("*.md"))]
    return {
        f"{page.stem}_{number}.py": block
        for page in pages
        if page.name != "frameworks.md"
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M))
    }


def pyright(folder, off=""):
    """(file, line) of each error that pyright reports in strict mode, with its text."""
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("no pyright: pip install 'pyright[nodejs]'")
    rules = {f"report{rule}": False for rule in off.split()}
    config = {"include": [str(folder)], "typeCheckingMode": "strict", "extraPaths": PATHS, **rules}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "-p", str(folder), "--pythonpath", sys.executable, "--outputjson"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)["generalDiagnostics"]
    return {(Path(e["file"]).name, e["range"]["start"]["line"] + 1): e["message"] for e in found}


def mypy(folder, *flags):
    """(file, line) of each error that mypy reports in strict mode, with its text."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent", "--ignore-missing-imports"]
    command += [
        "--no-error-summary",
        "--hide-error-context",
        "--cache-dir",
        str(TESTS.parent / ".mypy_cache"),
        *flags,
        ".",
    ]
    environment = os.environ | {"MYPYPATH": os.pathsep.join(PATHS)}
    found = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    errors = re.findall(r"^(\w+\.py):(\d+): error: (.*)$", found.stdout, re.M)
    assert errors or found.returncode == 0, found.stdout + found.stderr
    return {(name, int(line)): text for name, line, text in errors}


def copied(tmp_path, files):
    """A folder with these files, outside of the repository."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_names_that_types_have_are_those_of_the_registries():
    names = {kind: set(get_args(getattr(signature, kind))) for kind in dir(signature)}
    assert names["AlgorithmName"] == {*ALGORITHMS, *ROW_ALGORITHMS}
    assert names["FormatName"] == set(FORMATS)
    assert names["OperationName"] == set(OPERATIONS)
    assert names["WireDtypeName"] == set(VALUE_DTYPES_ON_THE_WIRE)
    assert names["Missing"] == set(MISSING) and names["NonFinite"] == set(NONFINITE)
    assert names["Owner"] == set(OWNERS)


def test_the_options_of_calls_are_those_that_their_types_have():
    own = {"owner", "return_reduction"}
    named = set(signature.RegionOptions.__annotations__) | set(signature.AllreduceOptions.__annotations__)
    assert named - own == {field.name for field in fields(CallOptions)} == set(signature.DESCRIPTIONS) - own


@pytest.mark.parametrize("option", ["missing", "nonfinite"])
def test_an_option_of_calls_takes_at_most_four_files(option):
    def names(node):
        return {getattr(node, kind, None) for kind in ("arg", "attr", "id")}

    paths = (TESTS.parent / "sparsecoll/collectives").rglob("*.py")
    touched = [path.name for path in paths if any(option in names(n) for n in ast.walk(ast.parse(path.read_text())))]
    assert len(touched) <= 4 and {"options.py", "signature.py"} <= set(touched)


@pytest.mark.slow
@pytest.mark.parametrize("checker", [pyright, mypy], ids=["pyright", "mypy"])
def test_right_uses_pass_and_wrong_ones_are_errors(tmp_path, checker):
    pytest.importorskip("torch")
    files = {name: (TYPED / name).read_text() for name in ("right.py", "wrong.py")}
    lines = enumerate(files["wrong.py"].splitlines(), 1)
    expected = {("wrong.py", number) for number, line in lines if line.endswith("# wrong")}
    found = checker(copied(tmp_path, files))
    assert found.keys() == expected, {place: text for place, text in found.items() if place not in expected}


@pytest.mark.slow
def test_pyright_finds_no_error_in_the_pages(tmp_path):
    pytest.importorskip("torch")
    assert pyright(copied(tmp_path, of_pages()), OF_PAGES) == {}


@pytest.mark.slow
def test_mypy_finds_no_error_in_the_pages(tmp_path):
    pytest.importorskip("torch")
    flags = ["--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls", "--allow-redefinition"]
    flags.append("--implicit-reexport")
    off = ["union-attr", "operator", "has-type", "var-annotated"]  # see OF_PAGES
    found = mypy(copied(tmp_path, of_pages()), *flags, *(f"--disable-error-code={code}" for code in off))
    assert found == {}
