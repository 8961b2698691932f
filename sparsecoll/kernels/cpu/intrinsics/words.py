"""Operations on single words: bit counts, keys of magnitudes, unaligned loads and stores, addresses."""

from __future__ import annotations

from typing import Any

import numba as nb
from llvmlite import ir
from numba.core import cgutils as _cgutils, types
from numba.cpython.unsafe import numbers as _numbers
from numba.extending import intrinsic as _intrinsic

intrinsic: Any = _intrinsic
cgutils: Any = _cgutils
trailing_zeros: Any = _numbers.trailing_zeros
I64 = ir.IntType(64)


def data_of(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    return cgutils.create_struct_proxy(array_type)(context, builder, array).data


def magnitude_of(builder: Any, signed: bool, value: Any, mask: Any) -> Any:
    """Float bits without the sign; |x| of a signed integer."""
    if not signed:
        return builder.and_(value, mask)
    zero = ir.Constant(value.type, None)
    return builder.select(builder.icmp_signed("<", value, zero), builder.sub(zero, value), value)


@intrinsic  # type: ignore[untyped-decorator]
def magnitude_key(context: Any, value: Any, mask: Any) -> Any:
    """The magnitude key of one value (an unsigned bit pattern of a float, or a signed integer)."""
    unsigned = types.Integer.from_bitwidth(value.bitwidth, signed=False)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return magnitude_of(builder, value.signed, *arguments)

    return unsigned(value, mask), generate


@intrinsic  # type: ignore[untyped-decorator]
def popcount(context: Any, word: Any) -> Any:
    """How many bits of a uint64 are 1."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def narrowed(context: Any, value: Any) -> Any:
    """The bits of a float32 as float16, rounded to nearest even. Without F16C, LLVM calls a function for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def widened(context: Any, bits: Any) -> Any:
    """The float32 of the bits of a float16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic  # type: ignore[untyped-decorator]
def load64(context: Any, data: Any, offset: Any) -> Any:
    """The eight bytes from `offset` on of a contiguous uint8 array as a little-endian uint64; any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.gep(data_of(context, builder, data, arguments[0]), [arguments[1]])
        loaded = builder.load(builder.bitcast(pointer, I64.as_pointer()))
        loaded.align = 1
        return loaded

    return types.uint64(data, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store64(context: Any, data: Any, offset: Any, word: Any) -> Any:
    """Write a uint64 to the eight bytes from `offset` on of a contiguous uint8 array, little-endian; any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.gep(data_of(context, builder, data, arguments[0]), [arguments[1]])
        stored = builder.store(arguments[2], builder.bitcast(pointer, I64.as_pointer()))
        stored.align = 1
        return context.get_dummy_value()

    return types.none(data, types.int64, types.uint64), generate


def prefetch_at(builder: Any, pointer: Any) -> None:
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, locality, data = (ir.Constant(number, n) for n in (0, 2, 1))
    builder.call(function, [builder.bitcast(pointer, byte), read, locality, data])


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(context: Any, array: Any, offset: Any) -> Any:
    """Have the processor load the item at `offset` of a contiguous array into its second-level cache; any offset."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        prefetch_at(builder, builder.gep(data_of(context, builder, array, arguments[0]), [arguments[1]]))
        return context.get_dummy_value()

    return types.none(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(context: Any, address: Any, like: Any) -> Any:
    pointer: Any = types.CPointer(like.dtype)  # type: ignore[no-untyped-call]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.intp, like), generate


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def array_at(address, size, like):  # type: ignore[no-untyped-def]
    """The array of `size` items of the dtype of `like` at an address."""
    return nb.carray(_pointer(address, like), (size,))
