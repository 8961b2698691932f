"""The instruction set that this process compiles for: what the processor has, and what SPARSECOLL_KERNELS names."""

from __future__ import annotations

import os
from typing import Any

import llvmlite.binding as llvm
import numba as nb
from numba.core import codegen as _codegen, registry as _registry

codegen: Any = _codegen
config: Any = nb.config
if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set")
REGISTERS = {"avx512": 512, "avx2": 256, "portable": 512}  # bits of a register; LLVM divides portable ones
BLOCK = 32  # items of a block, in all sets


def _features() -> str:
    """The features of the processor that Numba compiles for, as "+avx2,-avx512f"."""
    chosen = config.CPU_FEATURES  # NUMBA_CPU_FEATURES
    return codegen.get_host_cpu_features() if chosen is None else str(chosen)


def _supported() -> tuple[str, ...]:
    """The instruction sets that can run here and that this LLVM has names for, the fastest first."""
    features = set(_features().split(","))
    wide = "+avx512f" in features and LLVM_COMPRESSES
    return ("avx512",) * wide + ("avx2",) * ({"+avx2", "+f16c"} <= features) + ("portable",)


def _chosen() -> str:
    """The instruction set that SPARSECOLL_KERNELS names, if it is supported; by default the fastest one."""
    wanted = os.environ.get("SPARSECOLL_KERNELS") or SUPPORTED[0]
    return wanted if wanted in SUPPORTED else "portable"


def _leave_out_avx512() -> bool:
    """Let Numba compile as for a processor without AVX-512; False if it has compiled for it before in this process."""
    words = _features().split(",")
    config.CPU_FEATURES = ",".join(f"-{w[1:]}" if w[1:].startswith(("avx512", "avx10")) else w for w in words)
    return "+avx512f" not in _registry.cpu_target.target_context.codegen().magic_tuple()[2]


LLVM_COMPRESSES = llvm.llvm_version_info[0] >= 20
SUPPORTED = _supported()
OUTDATED = "+avx512f" in _features() and not LLVM_COMPRESSES
ADVICE = "install a Numba with LLVM 20 or later: this processor has AVX-512" if OUTDATED else ""
SET = _chosen()
REGISTER = REGISTERS[SET]
LANES = REGISTER // 32  # items handled together: a register of 32-bit words, or two of 64-bit words
PURE = SET != "avx2" or "avx512" not in SUPPORTED or _leave_out_avx512()
