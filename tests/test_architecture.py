"""Imports go one way, and heavy packages are imported only in their home."""

import ast
import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import python

import sparsecoll

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
    "bench",
    "cli",
    "__main__",
]
TORCH = [
    "tensors",
    "compressors",
    "replica",
    "reduction",
    "optimizers",
    "ddp fsdp backend __init__",
]  # likewise, in torch/
PRIVATE = {"tensors/private.py", "fsdp/groups.py"}  # which use what torch keeps private
INTERNALS = {str(p.relative_to(PACKAGE)) for p in (PACKAGE / "kernels" / "cpu" / "intrinsics").glob("*.py")}
HOMES = {
    "mpi4py": {str(p.relative_to(PACKAGE)) for p in (PACKAGE / "transport" / "mpi").glob("*.py")},
    "numba": {str(p.relative_to(PACKAGE)) for p in (PACKAGE / "kernels" / "cpu").rglob("*.py")},
    "numba.core": INTERNALS,  # internals, which may change with any release
    "numba.cpython": INTERNALS,
    "llvmlite": INTERNALS,
    "cupy": {"kernels/gpu/device.py"},
    "torch": {str(p.relative_to(PACKAGE)) for p in (PACKAGE / "torch").rglob("*.py")}
    | {"testing/compressors.py", "bench/compressors.py"},
}
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ([f"sparsecoll.{a.name}" for a in node.names] if node.module == "sparsecoll" else [node.module])


def layer(name, layers=LAYERS):
    return next(i for i, names in enumerate(layers) if name in names.split())


def modules():
    """Name -> path of the modules of the package."""
    names = ((".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), p) for p in FILES)
    return dict(names)


def imported_modules(path):
    """The modules of the package that one imports anywhere in it, also in a function or for types only."""
    known = modules()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{name}" if f"{node.module}.{name}" in known else node.module for name in names}
        yield from known.keys() & set(names)


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


@pytest.mark.parametrize("path", sorted((PACKAGE / "torch").rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way_in_torch(path):
    home = path.relative_to(PACKAGE / "torch").parts[0].removesuffix(".py")
    for name in imported_modules(path):
        if name.startswith("sparsecoll.torch"):
            other = [*name.split("."), "__init__"][2]
            assert layer(other, TORCH) <= layer(home, TORCH), f"{path.name} imports {name}"


def test_no_circle_of_imports_in_torch():
    imports = {name: {*imported_modules(p)} for name, p in modules().items() if name.startswith("sparsecoll.torch")}
    while imports:
        leaves = {name for name, others in imports.items() if not others & imports.keys()}
        assert leaves, f"in a circle, or above one: {sorted(imports)}"
        imports = {name: others for name, others in imports.items() if name not in leaves}


def test_private_interfaces_of_torch_stand_in_one_file():
    """Names with an underscore are torch's if nothing in the package has them, or `private.py` uses them of torch."""
    nodes = {p: list(ast.walk(ast.parse(p.read_text()))) for p in FILES}
    own = {"_replace", "_asdict", "_fields"}  # of named tuples
    for node in (n for found in nodes.values() for n in found):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            own.add(node.id if isinstance(node, ast.Name) else node.attr)
    own -= set(used_of_torch(nodes[PACKAGE / "torch" / "tensors" / "private.py"]))
    for path in (PACKAGE / "torch").rglob("*.py"):
        names = {*used_of_torch(nodes[path]), *(part for name in imported(path) for part in name.split("."))}
        private = {name for name in names if re.match("_[A-Za-z]", name)} - own
        assert not private or str(path.relative_to(PACKAGE / "torch")) in PRIVATE, f"{path.name}: {private}"


def used_of_torch(nodes):
    """The names of attributes of other objects than `self`, also as arguments of getattr and the like."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "attrgetter"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


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


LISTED = {  # names of code in tests that inject exceptions, where a new name would go unnoticed
    "collectives/test_injected.py": ["BINDING"],
    "torch/test_added_groups.py": ["LATE"],
    "torch/test_every_line.py": ["ADAPTER"],
    "mpi/test_every_line_fsdp.py": ["BINDING", "TORCHS", "REPEATED"],
    "mpi/test_every_line_mpi.py": ["HOOKS", "REPORTS"],
}


def qualified_names(code):
    """The names of the functions in a code object, and of those in them."""
    for inner in (constant for constant in code.co_consts if hasattr(constant, "co_qualname")):
        yield inner.co_qualname
        yield from qualified_names(inner)


def test_listed_names_are_those_of_existing_code():
    known = {name for path in FILES for name in qualified_names(compile(path.read_text(), str(path), "exec"))}
    for file, variables in LISTED.items():
        nodes = ast.parse((ROOT / "tests" / file).read_text()).body
        values = {ast.unparse(n.targets[0]): n.value for n in nodes if isinstance(n, ast.Assign)}
        for variable in variables:
            listed = ast.literal_eval(values[variable])
            for name in [listed] if isinstance(listed, str) else listed:
                begins = name.endswith((".", "<")) and any(one.startswith(name) for one in known)
                assert begins or name in known, f"{file}: {variable}: {name}"


@pytest.mark.slow
def test_pytest_collects_everything_where_mpi4py_finds_no_library(tmp_path):
    """An mpi4py that raises RuntimeError, as the one of PyPI does without libmpi."""
    fake = tmp_path / "mpi4py"
    fake.mkdir()
    (fake / "__init__.py").write_text("")
    (fake / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    parts = ["tests/mpi", "tests/transport", "tests/cli", "tests/algorithms/test_contract.py", "sparsecoll/transport"]
    done = python("-m", "pytest", "--collect-only", "-q", *parts, cwd=ROOT, variables={"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout[-2000:]
    assert "test_contract.py" in done.stdout and "sim.py::" in done.stdout


def files_on_the_path(comm, x, **options):
    """The files, but for kernels, whose functions get x or an array or vector made of it, until the algorithm runs."""
    from sparsecoll.vector.values import Values

    allreduce, found, running = sparsecoll.allreduce, set(), [0]
    for _ in range(2):
        allreduce(comm, x, **options)

    def profile(frame, event, _):
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        if PACKAGE not in path.parents or event not in ("call", "return"):
            return
        file = str(path.relative_to(PACKAGE))
        if event == "call" and not running[0] and not file.startswith("kernels/"):
            arguments = [frame.f_locals[name] for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
            if any(isinstance(value, (Values, np.ndarray)) for value in arguments):
                found.add(file)
        if file.startswith("algorithms/") and code.co_name == "__call__":
            running[0] += 1 if event == "call" else -1

    sys.setprofile(profile)
    try:
        allreduce(comm, x, **options)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(
    "options",
    [{"algo": "dense"}, {"algo": "allgather", "k": 50}, {"k": 50}, {"algo": sparsecoll.OkTopk(), "k": 50}],
    ids=["dense", "allgather", "auto", "oktopk"],
)
def test_the_path_of_x_through_allreduce_enters_13_files(options):
    def program(comm):
        x = np.random.default_rng(comm.rank).standard_normal(10_000).astype(np.float32)
        return files_on_the_path(comm, x, **copy.deepcopy(options))

    for found in sparsecoll.simulate(3, program).results:
        assert "collectives/allreduce.py" in found and "vector/dense.py" in found
        assert len(found) <= 13, sorted(found)
