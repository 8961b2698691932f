"""tests/mpi/LOOPS.md shows what the tests of training loops expect."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[1] / "mpi"))

from matrix import PAGE, page


def test_the_table_is_that_of_the_tests():
    text = PAGE.read_text()
    assert page(text) == text, "run python tests/mpi/matrix.py"
