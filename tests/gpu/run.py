"""All GPU checks, one after the other: `make gpu`, or

    python tests/gpu/run.py                               # on a machine with a GPU
    python tests/gpu/run.py --cuda-mpi /opt/ompi-cuda     # and device pointers, with a CUDA-aware Open MPI
    python tests/gpu/run.py --pretend --cuda-mpi ...      # without a GPU: device pointers of a pretended driver

Needs in this Python: cupy, mpi4py, numba, pytest, pytest-mpi, hypothesis; and an mpirun. No network. Kernels are
compared with the reference, under compute-sanitizer too where it is found; ranks share the GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
OPEN_MPI = {  # for containers, where everything runs as root, and for more ranks than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def device(pretend: bool) -> str:
    """The GPU's name; ends the program if there is none."""
    if pretend:
        return "none (pretended)"
    try:
        import cupy

        return str(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())
    except Exception as error:
        sys.exit(f"no GPU that CuPy can use: {error}")


def cuda_mpi(folder: Path) -> dict[str, str]:
    """The environment of a CUDA-aware Open MPI installed at `folder`; the folder's own env.sh where it has one."""
    script = folder / "env.sh"
    if script.exists():
        text = subprocess.check_output(["bash", "-c", f". {script} && env -0"], text=True)
        return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
    library = folder / "lib"
    return os.environ | {
        "OPAL_PREFIX": str(folder),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{library}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "MPI4PY_LIBMPI": str(library / "libmpi.so"),
    }


def pretended_driver(folder: str) -> dict[str, str]:
    """Build the pretended driver; the environment in which it is found."""
    library = Path(folder) / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", library, HERE / "fake_driver.c"]
    subprocess.run(command, check=True)
    return {"SPARSECOLL_PRETEND_DRIVER": str(library), "OMPI_MCA_btl_smcuda_use_cuda_ipc": "0"}


def main() -> None:
    """Run what this machine can run; the exit status says whether all of it passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda-mpi", type=Path, help="folder of an Open MPI that was built with CUDA")
    parser.add_argument(
        "--pretend", action="store_true", help="no GPU: kernels on the host, device memory of a pretence"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--n", type=int, default=134_000_000, help="values in the benchmarks; 0: no benchmarks")
    parser.add_argument("--out", type=Path, default=ROOT / "perf/results/gpu.json")
    options = parser.parse_args()
    print(f"device: {device(options.pretend)}", flush=True)
    python, tests = [sys.executable, "-m", "pytest", "-q", "--color=no"], [str(HERE)]
    over_ranks = ["--with-mpi", "-m", "mpi"]
    plain = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "SPARSECOLL_GPU_TESTS": "all"}
    spread = ["-n", str(min(16, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    alone = [*python, *spread, "-m", "not mpi", *tests]
    steps: list[tuple[str, list[str], dict[str, str]]] = [("kernels, vectors and training", alone, plain)]
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer and not options.pretend:
        few = [str(HERE / f"test_gpu_{name}.py") for name in ("kernels", "codecs")]
        few += ["-k", "float32 or rice or blocks or bitmaps or slots or scattering"]
        for tool in ("memcheck", "racecheck"):
            command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all", *python, *few]
            steps.append((f"compute-sanitizer {tool}", command, plain))

    def over_mpi(name: str, environment: dict[str, str]) -> None:
        for ranks in options.ranks:
            mpirun = shutil.which("mpirun", path=environment["PATH"])
            if mpirun is None:
                sys.exit("mpirun: not found")
            command = [mpirun, "-n", str(ranks), *python, *over_ranks, *tests]
            steps.append((f"{name}, {ranks} ranks", command, environment | OPEN_MPI))

    over_mpi("MPI through the host", plain | {"SPARSECOLL_GPU_DIRECT": "0"})
    with tempfile.TemporaryDirectory() as folder:
        if options.cuda_mpi:
            environment = plain | cuda_mpi(options.cuda_mpi.resolve())
            if options.pretend:
                environment |= pretended_driver(folder)
                environment["LD_LIBRARY_PATH"] = f"{folder}:{environment['LD_LIBRARY_PATH']}"
            over_mpi("MPI on device pointers", environment | {"SPARSECOLL_GPU_DIRECT": "1"})
        if options.n and not options.pretend:
            arguments = ["--n", str(options.n), "--json", str(options.out)]
            steps.append(("benchmarks", [sys.executable, str(ROOT / "perf/gpu.py"), *arguments], plain))
        failed = []
        for name, command, environment in steps:
            print(f"\n== {name}", flush=True)
            if subprocess.run(command, cwd=ROOT, env=environment, timeout=1200).returncode:
                failed.append(name)
    print(
        f"\n{len(steps) - len(failed)} of {len(steps)} parts passed"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
