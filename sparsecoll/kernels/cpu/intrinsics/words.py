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
viewed: Any = _numbers.viewer  # viewed(x, dtype) has the bits of x
BYTES = ir.VectorType(ir.IntType(8), 8)
HALF = ir.HalfType()


def data_of(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    return cgutils.create_struct_proxy(array_type)(context, builder, array).data


def load(builder: Any, data: Any, offset: Any, lanes: int) -> Any:
    """The vector of `lanes` items from `offset` on; any alignment."""
    vector = ir.VectorType(data.type.pointee, lanes)
    loaded = builder.load(builder.bitcast(builder.gep(data, [offset]), vector.as_pointer()))
    loaded.align = 1
    return loaded


def store(builder: Any, value: Any, data: Any, offset: Any) -> None:
    """Write a vector; any alignment."""
    stored = builder.store(value, builder.bitcast(builder.gep(data, [offset]), value.type.as_pointer()))
    stored.align = 1


def call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Call a function of LLVM."""
    signature = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def magnitude_of(builder: Any, signed: bool, value: Any, mask: Any) -> Any:
    """Float bits without the sign; |x| of a signed integer."""
    if not signed:
        return builder.and_(value, mask)
    zero = ir.Constant(value.type, None)
    return builder.select(builder.icmp_signed("<", value, zero), builder.sub(zero, value), value)


@intrinsic
def magnitude_key(context: Any, value: Any, mask: Any) -> Any:
    """The magnitude key of one value (an unsigned bit pattern of a float, or a signed integer)."""
    unsigned = types.Integer.from_bitwidth(value.bitwidth, signed=False)
    return unsigned(value, mask), lambda _, builder, __, given: magnitude_of(builder, value.signed, *given)


@intrinsic
def popcount(context: Any, word: Any) -> Any:
    """How many bits of a uint64 are 1."""
    return types.uint64(types.uint64), lambda _, builder, __, given: builder.ctpop(given[0])


@intrinsic
def narrowed(context: Any, value: Any) -> Any:
    """The bits of a float32 as float16, rounded to nearest even. Without F16C, LLVM calls a function for it."""
    return types.uint16(types.float32), lambda _, b, __, given: b.bitcast(b.fptrunc(given[0], HALF), ir.IntType(16))


@intrinsic
def widened(context: Any, bits: Any) -> Any:
    """The float32 of the bits of a float16."""
    return types.float32(types.uint16), lambda _, b, __, given: b.fpext(b.bitcast(given[0], HALF), ir.FloatType())


@intrinsic
def load64(context: Any, data: Any, offset: Any) -> Any:
    """The eight bytes from `offset` on of a contiguous uint8 array as a little-endian uint64; any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        loaded = load(builder, data_of(context, builder, data, arguments[0]), arguments[1], 8)
        return builder.bitcast(loaded, ir.IntType(64))

    return types.uint64(data, types.int64), generate


@intrinsic
def store64(context: Any, data: Any, offset: Any, word: Any) -> Any:
    """Write a uint64 to the eight bytes from `offset` on of a contiguous uint8 array, little-endian; any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target = data_of(context, builder, data, arguments[0])
        store(builder, builder.bitcast(arguments[2], BYTES), target, arguments[1])
        return context.get_dummy_value()

    return types.none(data, types.int64, types.uint64), generate


def fetch(builder: Any, pointer: Any) -> None:
    read, locality, data = (ir.Constant(ir.IntType(32), n) for n in (0, 2, 1))
    place = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, read, locality, data])


@intrinsic
def prefetch(context: Any, array: Any, offset: Any) -> Any:
    """Have the processor load the item at `offset` of a contiguous array into its second-level cache; any offset."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        fetch(builder, builder.gep(data_of(context, builder, array, arguments[0]), [arguments[1]]))
        return context.get_dummy_value()

    return types.none(array, types.int64), generate


@intrinsic
def _pointer(context: Any, address: Any, like: Any) -> Any:
    pointer: Any = types.CPointer(like.dtype)  # type: ignore[no-untyped-call]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.intp, like), generate


@nb.njit(inline="always")
def array_at(address, size, like):  # type: ignore[no-untyped-def]
    """The array of `size` items of the dtype of `like` at an address."""
    return nb.carray(_pointer(address, like), (size,))
