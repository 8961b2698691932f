"""Names that the examples in docstrings use."""

import numpy as np
import pytest

import sparsecoll


@pytest.fixture(autouse=True)
def names(doctest_namespace):
    doctest_namespace.update(
        np=np, sparsecoll=sparsecoll, TopK=sparsecoll.select.TopK, iallreduce=sparsecoll.iallreduce
    )
