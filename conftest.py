"""Names that the examples in docstrings use, an option, and what is not collected where no MPI library is found."""

import os
from pathlib import Path

import numpy as np
import pytest

import sparsecoll


def pytest_addoption(parser):
    """An option, which tests that start pytest do not pass on, as an environment variable would be."""
    parser.addoption("--passed", type=Path, metavar="FILE", help="run no test that FILE names, and add those that pass")


def pytest_configure():
    """One thread of torch's in each process, before it is imported: several processes share the cores."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def names(doctest_namespace):
    doctest_namespace.update(np=np, sparsecoll=sparsecoll, TopK=sparsecoll.select.TopK)


def pytest_ignore_collect(collection_path):
    """What needs MPI cannot be imported where mpi4py finds no MPI library; the simulator needs none."""
    if collection_path.parts[-3:] == ("sparsecoll", "transport", "mpi") or collection_path.name == "hostile_mpi.py":
        try:
            from mpi4py import MPI  # noqa: F401
        except (ImportError, RuntimeError):
            return True
    return None
