"""The device of these tests: a GPU through CuPy where there is one, else a pretence (pretend.py)."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import pretend


def device_library():
    """CuPy, or what stands in for it."""
    try:
        import cupy

        if hasattr(cupy, "pretend") or cupy.cuda.runtime.getDeviceCount():
            return cupy
    except Exception:  # not installed, or no driver
        for name in [name for name in sys.modules if name.split(".")[0] in ("cupy", "cupy_backends")]:
            del sys.modules[name]
    return pretend.install()


@pytest.fixture(scope="session")
def cp():
    """CuPy, or what stands in for it."""
    library = device_library()
    if hasattr(library, "pretend") and shutil.which("g++") is None:
        pytest.skip("no GPU, and no g++ for a pretence of one")
    return library
