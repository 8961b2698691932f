"""Operations on blocks of BLOCK items, LANES of them at a time, in registers of REGISTER bits.

The instruction sets differ only in `_packed`, which moves the chosen lanes of a register to its front. The packed
register is then stored whole: the instruction that stores only the chosen lanes is slow on AMD processors.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import types

from sparsecoll.kernels.cpu.intrinsics.target import BLOCK, LANES, REGISTER, SET
from sparsecoll.kernels.cpu.intrinsics.words import cgutils, data_of, intrinsic, magnitude_of

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _splat(builder: Any, value: Any) -> Any:
    vector = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def _load(builder: Any, data: Any, offset: Any) -> Any:
    vector = ir.VectorType(data.type.pointee, LANES)
    loaded = builder.load(builder.bitcast(builder.gep(data, [offset]), vector.as_pointer()))
    loaded.align = 1
    return loaded


def _store(builder: Any, value: Any, data: Any, offset: Any, stream: bool = False) -> None:
    """Write a register; with `stream` past the caches, to an address that is a multiple of its size."""
    stored = builder.store(value, builder.bitcast(builder.gep(data, [offset]), value.type.as_pointer()))
    stored.align = 1
    if stream:
        stored.align = value.type.count * value.type.element.width // 8
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    signature = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def _half(builder: Any, value: Any, number: int) -> Any:
    half = value.type.count // 2
    lanes = ir.Constant(ir.VectorType(I32, half), list(range(number * half, (number + 1) * half)))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), lanes)


def _orders(lanes: int) -> list[int]:
    """For each set of lanes the numbers of their 32-bit words, a byte each, in ascending order: for `_packed`."""
    words = 8 // lanes
    return [
        sum(
            (lane * words + word) << (8 * (place * words + word))
            for place, lane in enumerate(lane for lane in range(lanes) if chosen >> lane & 1)
            for word in range(words)
        )
        for chosen in range(1 << lanes)
    ]


def _packed(builder: Any, value: Any, chosen: Any) -> Any:
    """The chosen lanes of a register moved to its front; the others are undefined."""
    lanes = value.type.count
    if SET == "avx512":
        name = f"llvm.experimental.vector.compress.v{lanes}i{value.type.element.width}"
        return _call(builder, name, value.type, [value, chosen, ir.Constant(value.type, ir.Undefined)])
    words = ir.VectorType(I32, 8)
    order = _order(builder, chosen)
    return builder.bitcast(
        _call(builder, "llvm.x86.avx2.permd", words, [builder.bitcast(value, words), order]), value.type
    )


def _compress_store(builder: Any, value: Any, chosen: Any, data: Any, offset: Any) -> None:
    """Pack the chosen lanes together and write them from `offset` on."""
    width = value.type.element.width
    if width * value.type.count > REGISTER:
        low = _half(builder, chosen, 0)
        _compress_store(builder, _half(builder, value, 0), low, data, offset)
        offset = builder.add(offset, _popcount(builder, low, offset.type))
        _compress_store(builder, _half(builder, value, 1), _half(builder, chosen, 1), data, offset)
        return
    wide = builder.zext(value, ir.VectorType(I32, LANES)) if width < 32 else value
    packed = _packed(builder, wide, chosen)
    _store(builder, builder.trunc(packed, value.type) if width < 32 else packed, data, offset)


def _order(builder: Any, chosen: Any) -> Any:
    """The numbers of the chosen 32-bit words of a register, in ascending order; numbers that follow mean nothing."""
    lanes = chosen.type.count
    orders = ir.Constant(ir.ArrayType(I64, 1 << lanes), _orders(lanes))
    table = cgutils.global_constant(builder.module, f"sparsecoll_orders{lanes}", orders)
    number = builder.zext(builder.bitcast(chosen, ir.IntType(lanes)), I64)
    order = builder.load(builder.gep(table, [ir.Constant(I64, 0), number]))
    return builder.zext(builder.bitcast(order, ir.VectorType(I8, 8)), ir.VectorType(I32, 8))


def _compress_indices(builder: Any, given: Any, start: Any, chosen: Any, data: Any, offset: Any) -> None:
    """Write the indices of the chosen lanes from `offset` on: their positions, from `start` on, or those `given`."""
    element = data.type.pointee
    if given is not None:
        _compress_store(builder, _load(builder, given, start), chosen, data, offset)
        return
    first = _splat(builder, builder.trunc(start, element) if element.width < 64 else start)
    if SET == "avx2" and element.width == 32:
        _store(builder, builder.add(_order(builder, chosen), first), data, offset)
    else:
        lane = ir.Constant(first.type, list(range(LANES)))
        _compress_store(builder, builder.add(first, lane), chosen, data, offset)


def _popcount(builder: Any, chosen: Any, result: Any) -> Any:
    width = ir.IntType(chosen.type.count)
    return builder.zext(_call(builder, f"llvm.ctpop.i{width.width}", width, [builder.bitcast(chosen, width)]), result)


def _append(
    builder: Any, values: Any, chosen: Any, given: Any, start: Any, target_i: Any, target_v: Any, count: Any
) -> Any:
    """Append the indices and values of the chosen lanes; the new count."""
    _compress_indices(builder, given, start, chosen, target_i, count)
    _compress_store(builder, values, chosen, target_v, count)
    return builder.add(count, _popcount(builder, chosen, count.type))


def _floats(values: Any) -> Any:
    """The type of the floats of which these are bit patterns."""
    return ir.VectorType({32: ir.FloatType(), 64: ir.DoubleType()}[values.type.element.width], LANES)


def _accumulated(builder: Any, values: Any, addend: Any, scale: Any) -> Any:
    """values + scale * addend of float bit patterns; the product is rounded before the sum. No scale (None) is 1."""
    term = builder.bitcast(addend, _floats(values))
    if scale is not None:
        term = builder.fmul(_splat(builder, scale), term)
    return builder.bitcast(builder.fadd(builder.bitcast(values, _floats(values)), term), values.type)


def _scaled_sum(builder: Any, first: Any, second: Any, scale: Any) -> Any:
    """scale * (first + second) of float bit patterns; the sum is rounded before the product."""
    total = builder.fadd(*(builder.bitcast(term, _floats(first)) for term in (first, second)))
    return builder.bitcast(builder.fmul(_splat(builder, scale), total), first.type)


def _starts(builder: Any, start: Any) -> list[Any]:
    """Where each LANES items of the block from `start` on begin."""
    return [builder.add(start, ir.Constant(start.type, part)) for part in range(0, BLOCK, LANES)]


def _any(builder: Any, chosen: Any) -> Any:
    """Whether a lane is chosen."""
    word = builder.bitcast(chosen, ir.IntType(chosen.type.count))
    return builder.icmp_unsigned("!=", word, ir.Constant(word.type, 0))


@intrinsic  # type: ignore[untyped-decorator]
def compress_block(
    context: Any,
    bits: Any,
    origin: Any,
    start: Any,
    mask: Any,
    key: Any,
    indices: Any,
    addend: Any,
    scale: Any,
    velocity: Any,
    new_velocity: Any,
    factor: Any,
    out_i: Any,
    out_v: Any,
    count: Any,
    clear: Any,
    nesterov: Any,
    often: Any,
) -> Any:
    """Append those of the BLOCK items from `start` on whose key is >= `key` to out_i and out_v; return the new count.

    The items are those of `bits`, or of `origin`, from which they are copied to `bits`. `indices` gives their indices;
    None: their positions. Unless `addend` (bit patterns) is None, scale * addend is added to the items first, and
    before that, unless `velocity` is None, `kernels.keys.Momentum` replaces them. Unless `clear` is None, the items
    taken are zero in `bits` afterwards. All arrays are contiguous. Writes up to BLOCK items beyond the count. A block
    without such items is skipped by a branch, unless there are some so `often` that the processor would often predict
    it wrongly.
    """
    momentum_types = velocity, new_velocity, factor
    given_types = bits, origin, types.int64, mask, key, indices, addend, scale, *momentum_types, out_i, out_v
    signature = types.int64(*given_types, types.int64, clear, nesterov, types.boolean)
    added, cleared = (not isinstance(kind, types.NoneType) for kind in (addend, clear))
    moved = added or not isinstance(origin, types.NoneType)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a_bits, a_origin, start, mask, key, a_indices, a_addend, scale, *momentum, a_i, a_v, count, _, _, often = (
            arguments
        )
        target, starts = data_of(context, builder, bits, a_bits), _starts(builder, start)
        source = target if isinstance(origin, types.NoneType) else data_of(context, builder, origin, a_origin)
        items = [_load(builder, source, at) for at in starts]
        if not isinstance(velocity, types.NoneType):
            kinds = zip((velocity, new_velocity), momentum, strict=False)
            old, new = (builder.bitcast(data_of(context, builder, *kind), target.type) for kind in kinds)
            moving = [_load(builder, old, at) for at in starts]
            if isinstance(nesterov, types.NoneType):
                items = [_accumulated(builder, x, v, momentum[2]) for x, v in zip(items, moving, strict=True)]
                moving = items
            else:
                moving = [_scaled_sum(builder, v, x, momentum[2]) for x, v in zip(items, moving, strict=True)]
                items = [_accumulated(builder, x, v, None) for x, v in zip(items, moving, strict=True)]
            for v, at in zip(moving, starts, strict=True):
                _store(builder, v, new, at)
        if added:
            terms = data_of(context, builder, addend, a_addend)
            items = [
                _accumulated(builder, x, _load(builder, terms, at), scale) for x, at in zip(items, starts, strict=True)
            ]
        given = None if isinstance(indices, types.NoneType) else data_of(context, builder, indices, a_indices)
        key, mask = _splat(builder, key), _splat(builder, mask)
        keys = [magnitude_of(builder, bits.dtype.signed, x, mask) for x in items]
        largest = functools.reduce(lambda a, b: builder.select(builder.icmp_unsigned(">", a, b), a, b), keys)
        target_i, target_v = data_of(context, builder, out_i, a_i), data_of(context, builder, out_v, a_v)
        end = count
        taken = _any(builder, builder.icmp_unsigned(">=", largest, key))
        with builder.if_else(builder.or_(taken, often)) as (some, none):
            with some:
                for x, k, at in zip(items, keys, starts, strict=True):
                    chosen = builder.icmp_unsigned(">=", k, key)
                    end = _append(builder, x, chosen, given, at, target_i, target_v, end)
                    if cleared:
                        x = builder.select(chosen, ir.Constant(x.type, None), x)
                    if moved or cleared:
                        _store(builder, x, target, at)
                after_some = builder.block
            with none:
                for x, at in zip(items, starts, strict=True):
                    if moved:
                        _store(builder, x, target, at)
                after_none = builder.block
        result = builder.phi(count.type)
        result.add_incoming(end, after_some)
        result.add_incoming(count, after_none)
        return result

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def emit_block(context: Any, bits: Any, start: Any, base: Any, out_i: Any, out_v: Any, count: Any) -> Any:
    """Append those of the BLOCK floats (bit patterns) from `start` on that are not -0, and reset them to -0.

    out_i gets base + position, out_v the bit patterns; returns the new count. Writes up to BLOCK items beyond it.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a_bits, start, base, a_i, a_v, count = arguments
        source = data_of(context, builder, bits, a_bits)
        target_i, target_v = data_of(context, builder, out_i, a_i), data_of(context, builder, out_v, a_v)
        for at in _starts(builder, start):
            values = _load(builder, source, at)
            blank = ir.Constant(values.type, [1 << (values.type.element.width - 1)] * LANES)
            chosen = builder.icmp_unsigned("!=", values, blank)
            count = _append(builder, values, chosen, None, builder.add(base, at), target_i, target_v, count)
            _store(builder, blank, source, at)
        return count

    return types.int64(bits, types.int64, types.uint64, out_i, out_v, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def stream_block(context: Any, bits: Any, start: Any, out: Any, at: Any) -> Any:
    """Move BLOCK items from `start` on to `out` from `at` on, past the caches, and set them to zero.

    `out` begins at a multiple of ALIGNMENT, and `at` is one of BLOCK.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = data_of(context, builder, bits, arguments[0]), data_of(context, builder, out, arguments[2])
        for here, there in zip(_starts(builder, arguments[1]), _starts(builder, arguments[3]), strict=True):
            values = _load(builder, source, here)
            _store(builder, values, target, there, stream=True)
            _store(builder, ir.Constant(values.type, None), source, here)
        return context.get_dummy_value()

    return types.none(bits, types.int64, out, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def end_stream(context: Any) -> Any:
    """Let other threads see what was written past the caches before they see what is written from now on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, "llvm.x86.sse.sfence", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic  # type: ignore[untyped-decorator]
def narrow_block(context: Any, bits: Any, start: Any, out: Any) -> Any:
    """BLOCK float32 (bit patterns) to float16 (bit patterns), finite ones cut to the largest finite value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = data_of(context, builder, bits, arguments[0]), data_of(context, builder, out, arguments[2])
        floats = ir.VectorType(ir.FloatType(), LANES)
        for at in _starts(builder, arguments[1]):
            word = _load(builder, source, at)
            x = builder.bitcast(word, floats)
            infinity = ir.Constant(word.type, [0x7F800000] * LANES)
            magnitude = builder.and_(word, ir.Constant(word.type, [0x7FFFFFFF] * LANES))
            finite = builder.icmp_unsigned("<", magnitude, infinity)
            for sign, side in ((1.0, ">"), (-1.0, "<")):
                limit = ir.Constant(floats, [sign * 65504.0] * LANES)
                beyond = builder.and_(finite, builder.fcmp_ordered(side, x, limit))
                x = builder.select(beyond, limit, x)
            half = builder.fptrunc(x, ir.VectorType(ir.HalfType(), LANES))
            _store(builder, builder.bitcast(half, ir.VectorType(ir.IntType(16), LANES)), target, at)
        return context.get_dummy_value()

    return types.none(bits, types.int64, out), generate


@intrinsic  # type: ignore[untyped-decorator]
def widen_block(context: Any, bits: Any, start: Any, out: Any) -> Any:
    """BLOCK float16 (bit patterns) to float32 (bit patterns)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = data_of(context, builder, bits, arguments[0]), data_of(context, builder, out, arguments[2])
        for at in _starts(builder, arguments[1]):
            half = builder.bitcast(_load(builder, source, at), ir.VectorType(ir.HalfType(), LANES))
            wide = builder.fpext(half, ir.VectorType(ir.FloatType(), LANES))
            _store(builder, builder.bitcast(wide, ir.VectorType(I32, LANES)), target, at)
        return context.get_dummy_value()

    return types.none(bits, types.int64, out), generate
