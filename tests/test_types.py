"""Types tell the truth: to pyright and mypy, of right and wrong uses and of the code of the pages."""

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

import sparsecoll
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
MYPY = """
[mypy]
strict = True
follow_imports = silent
ignore_missing_imports = True
[mypy-{pages}]
allow_untyped_defs = True
allow_incomplete_defs = True
allow_untyped_calls = True
allow_redefinition = True
disable_error_code = union-attr, operator, has-type, var-annotated
[mypy-torch.*]
implicit_reexport = True
"""


def pages():
    """The blocks of the pages by file name, but for those with frameworks that are not typed."""
    found = {}
    for path in [TESTS.parent / "README.md", *sorted((TESTS.parent / "docs").glob("*.md"))]:
        blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.S | re.M)
        if path.stem.startswith("tutorial"):  # whose blocks make one file
            blocks = ["\n".join(blocks)]
        if path.name != "frameworks.md":
            found |= {f"{path.stem}_{number}.py": block for number, block in enumerate(blocks)}
    return found


def pyright(folder):
    """(file, line) of each error that pyright reports in strict mode, with its text."""
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("no pyright: pip install 'pyright[nodejs]'")
    off = {f"report{rule}": False for rule in OF_PAGES.split()}
    roots = [{"root": "pages", "extraPaths": PATHS, **off}, {"root": "typed", "extraPaths": PATHS}]
    config = {"include": ["pages", "typed"], "typeCheckingMode": "strict", "executionEnvironments": roots}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "-p", str(folder), "--pythonpath", sys.executable, "--outputjson"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)["generalDiagnostics"]
    return {(Path(e["file"]).name, e["range"]["start"]["line"] + 1): e["message"] for e in found}


def mypy(folder):
    """(file, line) of each error that mypy reports in strict mode, with its text."""
    pytest.importorskip("mypy")
    names = ",".join(path.stem for path in (folder / "pages").glob("*.py"))
    (folder / "mypy.ini").write_text(MYPY.format(pages=names))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--no-error-summary",
        "--cache-dir",
        str(TESTS.parent / ".mypy_cache"),
        ".",
    ]
    environment = os.environ | {"MYPYPATH": os.pathsep.join(PATHS)}
    found = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    errors = re.findall(r"^\w+/(\w+\.py):(\d+): error: (.*)$", found.stdout, re.M)
    assert errors or found.returncode == 0, found.stdout + found.stderr
    return {(name, int(line)): text for name, line, text in errors}


@pytest.fixture(scope="module", params=[pyright, mypy], ids=["pyright", "mypy"])
def errors(request, tmp_path_factory):
    """What a checker finds in right and wrong uses and in the pages, copied out of the repository, in one run."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp(request.param.__name__)
    typed = {name: (TYPED / name).read_text() for name in ("right.py", "wrong.py")}
    for kind, files in (("typed", typed), ("pages", pages())):
        (folder / kind).mkdir()
        for name, text in files.items():
            (folder / kind / name).write_text(text)
    return request.param(folder)


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


def test_options_pass_by_keyword():
    """At most five arguments by position, and those of torch.optim.SGD."""
    torch = pytest.importorskip("torch")
    named = vars(sparsecoll) | vars(importlib.import_module("sparsecoll.torch"))
    named |= importlib.import_module("sparsecoll.torch.compressors").COMPRESSORS
    named = {name: found for name, found in named.items() if not name.startswith("_") and callable(found)}
    limits = {name: 5 for name in named if not isinstance(named[name], type) or "__init__" in vars(named[name])}
    for name, most in (limits | {"SparseSGD": by_position(torch.optim.SGD)}).items():
        assert by_position(named[name]) <= most, name


def by_position(function):
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    return kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)


@pytest.mark.parametrize("option", ["missing", "nonfinite"])
def test_an_option_of_calls_takes_at_most_four_files(option):
    def names(node):
        return {getattr(node, kind, None) for kind in ("arg", "attr", "id")}

    paths = (TESTS.parent / "sparsecoll/collectives").rglob("*.py")
    touched = [path.name for path in paths if any(option in names(n) for n in ast.walk(ast.parse(path.read_text())))]
    assert len(touched) <= 4 and {"options.py", "signature.py"} <= set(touched)


@pytest.mark.slow
def test_right_uses_pass_and_wrong_ones_are_errors(errors):
    found = {place: text for place, text in errors.items() if place[0] in ("right.py", "wrong.py")}
    lines = enumerate((TYPED / "wrong.py").read_text().splitlines(), 1)
    expected = {("wrong.py", number) for number, line in lines if line.endswith("# wrong")}
    assert found.keys() == expected, {place: text for place, text in found.items() if place not in expected}


@pytest.mark.slow
def test_no_error_is_found_in_the_pages(errors):
    assert {place: text for place, text in errors.items() if place[0] in pages()} == {}
