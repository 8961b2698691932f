"""The device of these tests: a GPU through CuPy where there is one, else a pretence (fake_cupy.py).

SPARSECOLL_GPU_TESTS=all (run.py sets it) runs the tests that are left out in continuous integration, and more examples.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fake_cupy


@pytest.fixture(scope="session")
def cp():
    """CuPy, or what stands in for it."""
    library = fake_cupy.device_library()
    if hasattr(library, "pretend") and shutil.which("g++") is None:
        pytest.skip("no GPU, and no g++ for a pretence of one")
    return library


@pytest.fixture
def gpu(cp):
    """The kernels of GPUs."""
    from sparsecoll.kernels import gpu

    return gpu


@pytest.fixture(autouse=True)
def few_ranks(request):
    """A pretence is slow: with many ranks on few cores the tests run only where all are asked for."""
    if request.node.get_closest_marker("mpi") and os.environ.get("SPARSECOLL_GPU_TESTS") != "all":
        from sparsecoll.transport import launcher

        if launcher.processes()[1] > 4:
            pytest.skip("more than 4 ranks: SPARSECOLL_GPU_TESTS=all")
