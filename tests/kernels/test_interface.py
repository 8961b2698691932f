"""The three implementations of the kernels have the same functions with the same parameters."""

import ast
import inspect
from pathlib import Path

import pytest

from sparsecoll import kernels
from sparsecoll.kernels import reference

MODULES = [
    getattr(reference, name)
    for name in ("chunks", "codecs", "exponents", "quantization", "rice", "rows", "selection", "sums")
]
OF_HOST = {"join_rows", "split_rows"}
KERNELS = sorted(name for module in MODULES for name in module.__all__ if name not in OF_HOST)


def functions(folder):
    """The public functions of an implementation, from its sources: CuPy need not be installed."""
    found = {}
    for path in (Path(kernels.__file__).parent / folder).glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = [a.arg for a in node.args.args + node.args.kwonlyargs]
            if isinstance(node, ast.ImportFrom) and "reference" in (node.module or ""):
                found |= {
                    a.name: list(inspect.signature(getattr(reference, a.name)).parameters)
                    for a in node.names
                    if a.name in KERNELS
                }
    return found


@pytest.mark.parametrize("folder", ["cpu", "gpu"])
def test_the_kernels_of_the_reference_and_their_parameters(folder):
    mine = functions(folder)
    assert len(KERNELS) == len(set(KERNELS)) > 30
    for name in KERNELS:
        assert mine.get(name) == list(inspect.signature(getattr(reference, name)).parameters), name
