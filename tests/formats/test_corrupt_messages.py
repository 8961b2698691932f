"""A short run of corrupt_messages.py; `make fuzz` has the long one, also of the portable kernels."""

from pathlib import Path

import pytest
from launching import python

PROGRAM = Path(__file__).parent.parent / "corrupt_messages.py"


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("portable", "reference")]


@pytest.mark.parametrize("kernels", ["", *SLOW])
def test_corrupt_bytes_are_refused_without_damage(kernels, monkeypatch):
    monkeypatch.setenv("SPARSECOLL_KERNELS", kernels)
    count = 1000 if kernels == "reference" else 10_000
    done = python(PROGRAM, "--count", count)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"{count} buffers")


@pytest.mark.parametrize("beyond", ["area[size]", "area[-1]"])
def test_a_decoder_that_reads_too_far_is_reported_with_its_message(beyond, tmp_path):
    """One that reads the byte behind a message, or the one before it."""
    broken = tmp_path / "broken.py"
    decoder = (
        "import corrupt_messages, ctypes\n"
        "def decode(buffer, shape, number, message, dense):\n"
        "    area, size = ctypes.cast(buffer.ctypes.data, ctypes.POINTER(ctypes.c_ubyte)), buffer.size\n"
        f"    if number > 2:\n        {beyond}\n"
        "corrupt_messages.decode = decode\n"
        "corrupt_messages.__file__ = __file__\n"
        "corrupt_messages.main()\n"
    )
    broken.write_text(f"import sys\nsys.path.insert(0, {str(PROGRAM.parent)!r})\n{decoder}")
    done = python(broken, "--count", 100, "--seed", 7)
    assert done.returncode == 1 and "signal 11 at --seed 7 --first " in done.stderr, done.stderr[-2000:]
