"""Names that the examples in docstrings use, and what is not collected where no MPI library is found."""

import numpy as np
import pytest

import sparsecoll


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
