"""The device of these tests: a GPU through CuPy where there is one, else a pretence (pretend.py)."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import pretend


@pytest.fixture(scope="session")
def cp():
    """CuPy, or what stands in for it."""
    library = pretend.device_library()
    if hasattr(library, "pretend") and shutil.which("g++") is None:
        pytest.skip("no GPU, and no g++ for a pretence of one")
    return library
