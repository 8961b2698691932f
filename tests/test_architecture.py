"""Imports go one way, and heavy packages are imported only in their home."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sparsecoll"

LAYERS = [  # one room a floor; a module may import from its own room and from those above it in this list
    "errors _version",
    "telemetry",
    "kernels",
    "vector",
    "formats",
    "select",
    "residual",
    "transport",
    "algorithms",
    "collectives",
    "torch",
    "testing",
    "cli",
    "__main__",
]
INTERNALS = {str(p.relative_to(PACKAGE)) for p in (PACKAGE / "kernels" / "cpu" / "intrinsics").glob("*.py")}
HOMES = {
    "mpi4py": {str(p.relative_to(PACKAGE)) for p in (PACKAGE / "transport" / "mpi").glob("*.py")},
    "numba": {str(p.relative_to(PACKAGE)) for p in (PACKAGE / "kernels" / "cpu").rglob("*.py")},
    "numba.core": INTERNALS,  # internals, which may change with any release
    "numba.cpython": INTERNALS,
    "llvmlite": INTERNALS,
    "rich": {"cli/main.py"},
    "cupy": {"kernels/gpu/device.py"},
    "torch": {str(p.relative_to(PACKAGE)) for p in (PACKAGE / "torch").rglob("*.py")} | {"testing/compressors.py"},
}
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ([f"sparsecoll.{a.name}" for a in node.names] if node.module == "sparsecoll" else [node.module])


def layer(name):
    return next(i for i, names in enumerate(LAYERS) if name in names.split())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    home = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "sparsecoll" and parts[1] != home:
            assert layer(parts[1]) <= layer(home), f"{path.name} imports {name}"
        for package, files in HOMES.items():
            if f"{name}.".startswith(f"{package}."):
                assert str(path.relative_to(PACKAGE)) in files, f"{path.name} imports {package}"


def test_import_is_light():
    code = (
        "import sys, sparsecoll; print([m for m in ('mpi4py', 'numba', 'torch', 'cupy', 'scipy') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).strip() == "[]"


def test_no_printing_and_no_pickle_in_the_library():
    for path in FILES:
        tree = ast.parse(path.read_text())
        calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        assert "print" not in calls, path
        assert "pickle" not in set(imported(path)), path


def test_no_decorator_is_applied_twice():
    """Chained class methods work until Python 3.12 and fail from 3.13 on."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                assert len(decorators) == len(set(decorators)), f"{path.name}: {node.name}"


@pytest.mark.slow
def test_pytest_collects_everything_where_mpi4py_finds_no_library(tmp_path):
    """An mpi4py that raises RuntimeError, as the one of PyPI does without libmpi."""
    fake = tmp_path / "mpi4py"
    fake.mkdir()
    (fake / "__init__.py").write_text("")
    (fake / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    parts = ["tests/mpi", "tests/transport", "tests/cli", "tests/algorithms/test_contract.py", "sparsecoll/transport"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *parts]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "test_contract.py" in done.stdout and "sim.py::" in done.stdout
