"""Instruction sets: the same bits on each that this machine has, code and caches that do not mix."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparsecoll.kernels import cpu
from sparsecoll.kernels.cpu.intrinsics import cache

ROOT = Path(__file__).parent.parent.parent
OTHERS = [name for name in ("avx512", "avx2", "portable") if name != cpu.lanes.SET]
SUITES = [f"tests/kernels/test_{name}.py" for name in ("kernels", "codecs", "dense", "union")]
SAME = (
    "several_threads",
    "rice",
    "exponents",
    "blocks",
    "bitmaps",
    "hashed",
    "marked",
    "random_indices",
)  # kernels without lanes
DTYPES = {  # a type of floats and one of integers, and both widths of lanes; without lanes all types have one source
    "avx512": "float32 int64",
    "avx2": "float32 int64",
    "portable": "float32",
}


def start(*arguments, **variables):
    """A Python process with these arguments and environment variables."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPARSECOLL_")} | variables
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def output(process):
    """What it printed, (stdout, stderr), once it has ended well."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, f"{out[-4000:]}\n{err[-4000:]}"
    return out.strip(), err.strip()


def supported(name):
    if name not in cpu.lanes.SUPPORTED:
        pytest.skip(f"this processor has no {name}, or this LLVM cannot use it")
    return name


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_kernels_on_every_other_instruction_set(name):
    """With fewer types and examples than on this machine's own set: almost all of the time is compilation."""
    options = [
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-k",
        f"not ({' or '.join(SAME)})",
    ]
    variables = {"SPARSECOLL_EXAMPLES": "10", "SPARSECOLL_DTYPES": DTYPES[name]}
    output(start(*options, *SUITES, SPARSECOLL_KERNELS=supported(name), **variables))


def test_a_set_that_the_processor_lacks_is_refused_in_one_line():
    program = "import numpy as np; from sparsecoll.kernels import kernels_of; kernels_of(np.empty(0))"
    process = start("-c", program, SPARSECOLL_KERNELS="avx512", NUMBA_CPU_FEATURES="-avx512f")
    last = process.communicate(timeout=600)[1].strip().splitlines()[-1]
    expected = "ValueError: SPARSECOLL_KERNELS: 'avx512' cannot run here, expected one of portable, reference"
    assert process.returncode == 1 and last == expected


PROGRAM = """
import numpy as np
from sparsecoll.kernels import cpu
from sparsecoll.kernels.cpu.intrinsics import cache
from sparsecoll.kernels.keys import Pass
x, ones = np.arange(20_000, dtype=np.float32), np.ones(20_000, np.float32)
for key in (np.float32(19_500).view(np.uint32), 1):
    found = cpu.select_at_least(x, int(key), work=Pass(add=(ones, 0.5), clear=True))
total = cpu.merge_sum([found, found], x.dtype)
half = cpu.to_float16(x)
assert total[0].size == found[0].size and (cpu.from_float16(half)[:2049] == x[:2049]).all()
for module in (cpu.selection, cpu.selection_pass, cpu.radix, cpu.merge, cpu.windows, cpu.codecs):
    for kernel in vars(module).values():
        for signature in getattr(kernel, "signatures", ()):
            print(kernel.inspect_asm(signature))
"""
AVX512 = re.compile(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])\b")
AVX2 = re.compile(r"\bvpermd\b.*%ymm")


@pytest.mark.slow
def test_the_code_has_no_instructions_of_another_set_even_with_one_cache(tmp_path):
    """Numba shows only code that it has compiled now, so that nothing came from the cache of another set."""
    for name in cpu.lanes.SUPPORTED:
        code, _ = output(start("-c", PROGRAM, SPARSECOLL_KERNELS=name, NUMBA_CACHE_DIR=str(tmp_path)))
        if name == "avx512":
            assert AVX512.search(code)
        if name == "avx2":
            assert AVX2.search(code) and not AVX512.search(code)


FILL = """
import numpy as np
from sparsecoll.kernels import cpu
from sparsecoll.kernels.cpu.intrinsics import cache
for dtype in {dtypes}:
    x = np.arange(-500, 500).astype(dtype)
    assert cpu.key_range(np.array([-3, 2, 300], dtype)) == tuple(cpu.magnitude_keys(np.array([2, 300], dtype)).tolist())
    assert cpu.count_at_least(x, int(cpu.magnitude_keys(x[:1])[0])) == 1
print(sum(sum(kernel.stats.cache_hits.values()) for kernel in (cpu.selection._count, cpu.selection.range_of)))
"""


@pytest.mark.slow
def test_processes_that_fill_one_cache_at_once_and_a_damaged_one(tmp_path):
    """With Numba's own cache two processes may take the same number for files of different types."""

    def hits(*orders):
        processes = [start("-c", FILL.format(dtypes=order), NUMBA_CACHE_DIR=str(tmp_path)) for order in orders]
        return [int(output(process)[0]) for process in processes]

    orders = (["f4", "i4"], ["i4", "f4"])
    hits(*orders)
    assert hits(orders[0]) == [4] and not list(tmp_path.rglob("*.tmp.*"))
    cut, changed = (lambda data: data[:100]), (lambda data: data[:-5000] + bytes(10) + data[-4990:])
    for path, damage in zip(sorted(tmp_path.rglob("*.nbc")), itertools.cycle((cut, changed))):
        path.write_bytes(damage(path.read_bytes()))
    assert hits(orders[0]) == [0] and hits(orders[0]) == [4]


@pytest.mark.parametrize("stored", [1, b"x" * 300, {"code": [b"y" * 100, None, 2.5]}])
def test_a_file_of_the_cache_with_any_bit_flipped_counts_as_missing(stored, tmp_path):
    file = cache.CacheFile(str(tmp_path), "kernel", b"")
    assert file.load("signature") is None
    file.save("signature", stored)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert file.load("signature") is None, bit
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert file.load("signature") is None, size
    path.write_bytes(data)
    assert file.load("signature") == stored
