"""The CUDA sources compile for real GPUs, the benchmark runs, and the pretence is no more generous than CuPy is."""

import ctypes
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sparsecoll

ROOT = Path(__file__).parent.parent.parent
SOURCES = ("selection", "sums", "codecs", "quantization", "rice", "exponents", "chunks")
VALUES = {"float16": "-DBITS=u16 -DVALUE=2", "float32": "-DBITS=u32 -DVALUE=4", "float64": "-DBITS=u64 -DVALUE=8",
          "int32": "-DBITS=u32 -DVALUE=14 -DFLOATS=0", "int64": "-DBITS=u64 -DVALUE=18 -DFLOATS=0"}  # fmt: skip
MORE = "-DINDEX=u64 -DADD=4 -DFROM=8 -DMOMENTS=1"


def _code(source):
    folder = Path(sparsecoll.__file__).parent / "kernels/gpu"
    return "\n".join((folder / f"{name}.cu").read_text() for name in ("common", source))


def _nvrtc():
    """NVIDIA's run-time compiler, from its wheel or the system."""
    places = [None]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        places += sorted(Path(folder).rglob("libnvrtc.so*"))
    for place in [*places[1:], "libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]:
        try:
            return ctypes.CDLL(str(place))
        except OSError:
            continue
    return None


@pytest.mark.parametrize("source", SOURCES)
def test_sources_compile_by_nvrtc(source):
    nvrtc = _nvrtc()
    if nvrtc is None:
        pytest.skip("no NVRTC (pip install nvidia-cuda-nvrtc)")
    for macros in VALUES.values():
        options = [b"--gpu-architecture=compute_80", b"--fmad=false", *(m.encode() for m in f"{macros} {MORE}".split())]
        program = ctypes.c_void_p()
        code = _code(source).encode()
        assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, b"kernels.cu", 0, None, None) == 0
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        assert status == 0, log.value.decode()


@pytest.mark.parametrize(("source", "dtype"), [*itertools.product(SOURCES, ["float16"])])
def test_sources_compile_by_nvcc(source, dtype, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    file = tmp_path / f"{source}.cu"
    file.write_text(_code(source))
    command = [nvcc, "-cubin", "-arch=sm_90", "--fmad=false", *f"{VALUES[dtype]} {MORE}".split()]
    done = subprocess.run(
        [*command, "-o", tmp_path / "kernels.cubin", file], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_pretence_has_no_functions_that_cupy_lacks(cp):
    """Compared with a CuPy that is installed, if only for its names."""
    pretend = pytest.importorskip("fake_cupy")
    code = "import cupy; print('\\n'.join(dir(cupy)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip("CuPy is not installed")
    assert set(done.stdout.split()) >= pretend.FUNCTIONS


def test_the_pretence_refuses_what_cupy_refuses(cp):
    if not hasattr(cp, "pretend"):
        pytest.skip("CuPy itself")
    a = cp.asarray(np.arange(4.0))
    for wrong in (lambda: np.asarray(a), lambda: a + np.ones(4), lambda: np.add(a, np.ones(4)), lambda: np.median(a)):
        with pytest.raises(TypeError):
            wrong()
    assert (a + a).get().tolist() == [0, 2, 4, 6]
    assert np.concatenate([a, a]).size == 8


@pytest.mark.parametrize("damage", ["barrier", "scan", "guard"])
def test_the_pretence_finds_broken_kernels(cp, damage, monkeypatch):
    """A barrier that is gone, a scan that is off by one, and a write beyond the end are seen."""
    if not hasattr(cp, "pretend"):
        pytest.skip("a GPU may get away with it")
    from sparsecoll.kernels import reference
    from sparsecoll.kernels.keys import key_of

    code = _code("selection")
    line = {
        "barrier": ("  __syncthreads();\n  u32 base = shared_base", "  u32 base = shared_base"),
        "scan": ("base = scanned - sum", "base = scanned"),
        "guard": ("|| (place < left && (key > above || all))", "|| (place < left + 1 && (key > above || all))"),
    }[damage]
    assert line[0] in code
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    expected = reference.select_at_least(values, key_of(0.0, values.dtype))
    right = []
    for order in "01":
        monkeypatch.setenv("SPARSECOLL_THREAD_ORDER", order)
        module = cp.RawModule(code=code.replace(*line), options=("--fmad=false",))
        v, scratch, tiles = cp.asarray(values), cp.zeros(4, np.uint64), cp.empty(2, np.uint64)
        places, staged = cp.empty(1 << 17, np.uint16), cp.empty(1 << 17, np.float32)  # 16 bits of position too many
        out_i, out_v = cp.empty(5000, np.uint32), cp.empty(5000, np.float32)
        u32, u64, null = np.uint32, np.uint64, np.uint64(0)
        what = (v, u64(5000), u32(0), u32(1), null)
        try:
            given = (*what, null, np.float64(0), places, staged, u64(5000), null, tiles, scratch)
            module.get_function("stage")((2,), (256,), given)
            given = (*what, null, null, u32(0), places, staged, tiles, u64(1), u32(4))
            module.get_function("gather")((4,), (256,), (*given, out_i, out_v, u64(5000), scratch))
            right.append(np.array_equal(out_i.get(), expected[0]) and int(scratch[1]) == 5000)
        except AssertionError:
            right.append(False)
    assert not all(right)


def test_benchmark_runs(cp, tmp_path):
    """The script of `make gpu`, on a small vector."""
    code = (
        "import sys; sys.path[:0] = ['tests/gpu', 'perf']; import fake_cupy; fake_cupy.device_library();"
        "import gpu; gpu.main(sys.argv[1:])"
    )
    arguments = ["--n", "20000", "--repeat", "1", "--densities", "0.01", "--json", str(tmp_path / "rows.json")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment, check=True, timeout=300)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows["selection"][0]["threshold, reads"] > 0
    assert {row["format"] for row in rows["encoding"]} >= {"slots", "packed", "densestream"}
    assert len(rows["decoding"]) == 5
