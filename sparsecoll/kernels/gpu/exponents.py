"""Codes of floats' exponents in few bits (format packed): a block of threads codes a block of values."""

from __future__ import annotations

import numpy as np

from sparsecoll.kernels.gpu import device
from sparsecoll.kernels.gpu.device import Array, launch, types, u32
from sparsecoll.kernels.reference.exponents import EXPONENT_BLOCK, exponent_offsets as exponent_offsets


def exponent_table(stored: Array, bits: int) -> Array:
    table = device.empty(-(-stored.size // EXPONENT_BLOCK), np.uint32)
    given = (stored, stored.size, u32(bits), table)
    launch("exponents", "exponent_table", stored.size, *given, macros=types(stored), blocks=table.size)
    return table


def exponent_encode(stored: Array, bits: int, table: Array, out: Array) -> None:
    offsets = exponent_offsets(table, stored.size, bits, stored.itemsize)
    given = (stored, stored.size, u32(bits), table, offsets, out)
    launch("exponents", "exponent_encode", stored.size, *given, macros=types(stored), blocks=table.size)


def exponent_decode(coded: Array, bits: int, table: Array, out: Array) -> bool:
    damaged = device.zeros(1, np.uint32)
    given = (coded, u32(bits), table, exponent_offsets(table, out.size, bits, out.itemsize), out.size, out, damaged)
    launch("exponents", "exponent_decode", out.size, *given, macros=types(out), blocks=table.size)
    return not int(damaged[0])
