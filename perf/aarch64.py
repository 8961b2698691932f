"""Which loops of the portable kernels LLVM vectorises for a 64-bit ARM processor; needs no such processor.

    python perf/aarch64.py                     # a table: kernel, vector instructions (NEON) in its code
    python perf/aarch64.py --save FOLDER       # also the code

The kernels are compiled by Numba without optimisation, then optimised by LLVM for a Neoverse N1. Nothing is run, so
that this shows neither their speed nor that they are right: aarch64.sh runs the tests under an emulator.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import report

VECTOR = re.compile(r"^\t(\w+)\tv\d+\.(\d+[bhsd])", re.MULTILINE)
PLAIN = ("mov", "movi", "dup", "ins", "fmov")  # moves tell nothing about a loop


def optimised(text: str, machine: Any) -> str:
    """Return the machine code of unoptimised LLVM code, by the two passes that Numba makes."""
    text = re.sub(r"target triple = .*", 'target triple = "aarch64-unknown-linux-gnu"', text)
    text = re.sub(r"target datalayout = .*", f'target datalayout = "{machine.target_data}"', text)
    module = llvm.parse_assembly(re.sub(r'"target-(cpu|features)"="[^"]*"', "", text))
    for vectorise in (False, True):
        options = llvm.create_pipeline_tuning_options(speed_level=2 + vectorise)
        options.loop_vectorization = vectorise
        passes = llvm.create_pass_builder(machine, options).getModulePassManager()
        passes.add_loop_rotate_pass()
        passes.add_refprune_pass()
        passes.run(module, llvm.create_pass_builder(machine, options))
    return str(machine.emit_assembly(module))


def call_kernels(cpu: Any) -> None:
    """Call every kernel whose loop could be vectorised, with float32."""
    x = np.random.default_rng(0).standard_normal(20_001).astype(np.float32)
    indices, values = cpu.topk(x, 300, add=(x, 1.0), clear=True)
    cpu.select_at_least(x, 1 << 20, moments=np.zeros(4))
    cpu.select_at_least(x, 1 << 20)
    cpu.merge_sum([(indices, values)] * 2, x.dtype)
    cpu.count_at_least(x, 5), cpu.key_range(x), cpu.first_unsorted(indices, x.size)
    block = cpu.rice_block(indices)
    table = cpu.rice_table(indices, block)
    out = np.zeros(int(cpu.rice_offsets(table, indices.size, block)[-1]) + 8, np.uint8)
    cpu.rice_encode(indices, table, block, out)
    cpu.rice_decode(table, out, block, int(indices[0]), indices.size, x.size, indices.dtype)
    cpu.from_bfloat16(cpu.to_bfloat16(x))


def rows(cpu: Any, folder: Path | None) -> Iterator[report.Row]:
    """Yield the vector instructions of every kernel called, by the signature it was called with."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(cpu="neoverse-n1", opt=3)
    parts = (cpu.selection, cpu.selection_pass, cpu.largest, cpu.merge, cpu.windows, cpu.codecs, cpu.rice, cpu.sums)
    kernels = {
        kernel: name for module in parts for name, kernel in vars(module).items() if hasattr(kernel, "signatures")
    }
    for kernel, name in sorted(kernels.items(), key=lambda item: item[1]):
        for number, signature in enumerate(kernel.signatures):
            code = optimised(kernel.inspect_llvm(signature), machine)
            found = [f"{word}.{lanes}" for word, lanes in VECTOR.findall(code) if word not in PLAIN]
            yield {"kernel": name, "vector instructions": len(found), "among them": " ".join(sorted(set(found)))}
            if folder is not None:
                (folder / f"{name}-{number}.s").write_text(code)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="existing folder for the code")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "(?s).*Cannot cache")  # code that is not optimised is not cached
    with tempfile.TemporaryDirectory() as cache:  # Numba does not show code that it finds in a cache
        os.environ |= {"SPARSECOLL_KERNELS": "portable", "NUMBA_CACHE_DIR": cache}
        os.environ |= {"NUMBA_OPT": "0", "NUMBA_CPU_NAME": "generic"}
        from sparsecoll.kernels import cpu

        call_kernels(cpu)
        print(report.markdown(list(rows(cpu, options.save))))


if __name__ == "__main__":
    main()
