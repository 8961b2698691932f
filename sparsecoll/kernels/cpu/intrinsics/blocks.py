"""Operations on blocks of BLOCK items, LANES of them at a time, in registers of REGISTER bits.

The instruction sets differ in how the chosen lanes of a register are written: `_packed` moves them to its front, and
the register is stored whole, since the instruction that stores only the chosen lanes is slow on AMD processors;
`portable` stores one lane after the other, and leaves registers to LLVM.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import types

from sparsecoll.kernels.cpu.intrinsics.target import BLOCK, LANES, REGISTER, SET
from sparsecoll.kernels.cpu.intrinsics.words import call, cgutils, data_of, fetch, intrinsic, load, magnitude_of, store

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
AHEAD = 1024  # items from a block to the one that is loaded meanwhile


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


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
        return call(builder, name, value.type, [value, chosen, ir.Constant(value.type, ir.Undefined)])
    words = ir.VectorType(I32, 8)
    order = _order(builder, chosen)
    return builder.bitcast(
        call(builder, "llvm.x86.avx2.permd", words, [builder.bitcast(value, words), order]), value.type
    )


def _compress_store(builder: Any, value: Any, chosen: Any, data: Any, offset: Any) -> None:
    """Pack the chosen lanes together and write them from `offset` on."""
    width = value.type.element.width
    if SET == "portable" or value.type.count == 1:
        for lane in range(value.type.count):
            one, taken = (builder.extract_element(x, ir.Constant(I32, lane)) for x in (value, chosen))
            builder.store(one, builder.gep(data, [offset]))
            offset = builder.add(offset, builder.zext(taken, offset.type))
        return
    if width * value.type.count > REGISTER:
        low = _half(builder, chosen, 0)
        _compress_store(builder, _half(builder, value, 0), low, data, offset)
        offset = builder.add(offset, _popcount(builder, low, offset.type))
        _compress_store(builder, _half(builder, value, 1), _half(builder, chosen, 1), data, offset)
        return
    wide = builder.zext(value, ir.VectorType(I32, value.type.count)) if width < 32 else value
    packed = _packed(builder, wide, chosen)
    store(builder, builder.trunc(packed, value.type) if width < 32 else packed, data, offset)


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
    element, lanes = data.type.pointee, chosen.type.count
    if given is not None:
        _compress_store(builder, load(builder, given, start, lanes), chosen, data, offset)
        return
    first = _splat(builder, builder.trunc(start, element) if element.width < 64 else start, lanes)
    if SET == "avx2" and element.width == 32 and lanes > 1:
        store(builder, builder.add(_order(builder, chosen), first), data, offset)
    else:
        lane = ir.Constant(first.type, list(range(lanes)))
        _compress_store(builder, builder.add(first, lane), chosen, data, offset)


def _popcount(builder: Any, chosen: Any, result: Any) -> Any:
    width = ir.IntType(chosen.type.count)
    return builder.zext(call(builder, f"llvm.ctpop.i{width.width}", width, [builder.bitcast(chosen, width)]), result)


def _append(
    builder: Any, values: Any, chosen: Any, given: Any, start: Any, target_i: Any, target_v: Any, count: Any
) -> Any:
    """Append the indices and values of the chosen lanes; the new count."""
    _compress_indices(builder, given, start, chosen, target_i, count)
    _compress_store(builder, values, chosen, target_v, count)
    return builder.add(count, _popcount(builder, chosen, count.type))


def _floats(values: Any) -> Any:
    """The type of the floats of which these are bit patterns."""
    return ir.VectorType({32: ir.FloatType(), 64: ir.DoubleType()}[values.type.element.width], values.type.count)


def _accumulated(builder: Any, values: Any, addend: Any, scale: Any) -> Any:
    """values + scale * addend of float bit patterns; the product is rounded before the sum. No scale (None) is 1."""
    term = builder.bitcast(addend, _floats(values))
    if scale is not None:
        term = builder.fmul(_splat(builder, scale, term.type.count), term)
    return builder.bitcast(builder.fadd(builder.bitcast(values, _floats(values)), term), values.type)


def _scaled_sum(builder: Any, first: Any, second: Any, scale: Any) -> Any:
    """scale * (first + second) of float bit patterns; the sum is rounded before the product."""
    total = builder.fadd(*(builder.bitcast(term, _floats(first)) for term in (first, second)))
    return builder.bitcast(builder.fmul(_splat(builder, scale, total.type.count), total), first.type)


def _starts(builder: Any, start: Any) -> list[Any]:
    """Where each LANES items of the block from `start` on begin."""
    return [builder.add(start, ir.Constant(start.type, part)) for part in range(0, BLOCK, LANES)]


@intrinsic
def compress_block(
    context: Any, bits: Any, start: Any, mask: Any, key: Any, work: Any, indices: Any, out: Any, count: Any, how: Any
) -> Any:
    """Append those of the BLOCK items from `start` on whose key is >= `key` to both arrays of `out`; the new count.

    `work`, (clear,) or (origin, addend, scale, velocity, new_velocity, factor, nesterov, clear), is other work on the
    items, with None for each part that is not done: they are read from `origin` and written to `bits`, replaced by
    `kernels.keys.Momentum`, scale * addend is added, and those taken are cleared in `bits`. `indices` gives their
    indices; None: their positions. All arrays are contiguous, and those of floats have the width of `bits`. Writes up
    to BLOCK items beyond the count.

    `how` is (often, far); None for a single item in place of a block. A block without such items is skipped by a
    branch, unless `often`: the processor would often predict it wrongly. If `far`, a later block of the memory that is
    written is prefetched, since stores wait longer for memory than loads.
    """
    signature = types.int64(bits, types.int64, mask, key, work, indices, out, types.int64, how)
    lanes = 1 if isinstance(how, types.NoneType) else LANES
    first = len(work.types) - 8
    origin, addend, _, velocity, new_velocity, _, nesterov, clear = [types.none] * -first + [*work.types]
    has_origin, added, moving, by_nesterov, cleared, has_indices = (
        not isinstance(kind, types.NoneType) for kind in (origin, addend, velocity, nesterov, clear, indices)
    )

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a_bits, start, mask, key, a_work, a_indices, a_out, count, a_how = arguments
        target = data_of(context, builder, bits, a_bits)
        starts = _starts(builder, start) if lanes > 1 else [start]

        def item(place: int) -> Any:
            return builder.extract_value(a_work, first + place)

        def data(kind: Any, place: int) -> Any:
            return builder.bitcast(data_of(context, builder, kind, item(place)), target.type)

        def loaded(source: Any) -> list[Any]:
            return [load(builder, source, at, lanes) for at in starts]

        if lanes > 1 and not has_origin:
            with builder.if_then(builder.extract_value(a_how, 1)):
                for memory in [target, data(new_velocity, 4)] if moving else [target]:
                    for place in range(AHEAD, AHEAD + BLOCK, 512 // target.type.pointee.width):
                        fetch(builder, builder.gep(memory, [builder.add(start, ir.Constant(I64, place))]))
        items = loaded(data(origin, 0) if has_origin else target)
        if moving:
            moved = zip(items, loaded(data(velocity, 3)), strict=True)
            if by_nesterov:
                velocities = [_scaled_sum(builder, v, x, item(5)) for x, v in moved]
                items = [_accumulated(builder, x, v, None) for x, v in zip(items, velocities, strict=True)]
            else:
                items = velocities = [_accumulated(builder, x, v, item(5)) for x, v in moved]
            for v, at in zip(velocities, starts, strict=True):
                store(builder, v, data(new_velocity, 4), at)
        if added:
            terms = zip(items, loaded(data(addend, 1)), strict=True)
            items = [_accumulated(builder, x, term, item(2)) for x, term in terms]
        given = data_of(context, builder, indices, a_indices) if has_indices else None
        key, mask = _splat(builder, key, lanes), _splat(builder, mask, lanes)
        keys = [magnitude_of(builder, bits.dtype.signed, x, mask) for x in items]
        largest = functools.reduce(lambda a, b: builder.select(builder.icmp_unsigned(">", a, b), a, b), keys)
        to_i, to_v = (data_of(context, builder, kind, builder.extract_value(a_out, n)) for n, kind in enumerate(out))
        end, written = count, has_origin or moving or added
        word = builder.bitcast(builder.icmp_unsigned(">=", largest, key), ir.IntType(lanes))
        taken = builder.icmp_unsigned("!=", word, ir.Constant(word.type, 0))
        if lanes > 1 and SET != "portable":
            taken = builder.or_(taken, builder.extract_value(a_how, 0))
        with builder.if_else(taken) as (some, none):
            with some:
                for x, k, at in zip(items, keys, starts, strict=True):
                    chosen = builder.icmp_unsigned(">=", k, key)
                    end = _append(builder, x, chosen, given, at, to_i, to_v, end)
                    if cleared:
                        x = builder.select(chosen, ir.Constant(x.type, None), x)
                    if written or cleared:
                        store(builder, x, target, at)
                after_some = builder.block
            with none:
                for x, at in zip(items, starts, strict=True):
                    if written:
                        store(builder, x, target, at)
                after_none = builder.block
        result = builder.phi(count.type)
        result.add_incoming(end, after_some)
        result.add_incoming(count, after_none)
        return result

    return signature, generate


@intrinsic
def at_least(context: Any, bits: Any, start: Any, mask: Any, key: Any) -> Any:
    """Which of the 64 bit patterns of floats from `start` on have a magnitude key >= `key`: bit j for the j-th."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a_bits, start, mask, key = arguments
        values = load(builder, data_of(context, builder, bits, a_bits), start, 64)
        keys = builder.and_(values, _splat(builder, mask, 64))
        return builder.bitcast(builder.icmp_unsigned(">=", keys, _splat(builder, key, 64)), I64)

    return types.uint64(bits, types.int64, mask, key), generate


@intrinsic
def emit_block(context: Any, bits: Any, start: Any, base: Any, out_i: Any, out_v: Any, count: Any) -> Any:
    """Append those of the BLOCK floats (bit patterns) from `start` on that are not -0, and reset them to -0.

    out_i gets base + position, out_v the bit patterns; returns the new count. Writes up to BLOCK items beyond it.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a_bits, start, base, a_i, a_v, count = arguments
        source = data_of(context, builder, bits, a_bits)
        target_i, target_v = data_of(context, builder, out_i, a_i), data_of(context, builder, out_v, a_v)
        for at in _starts(builder, start):
            values = load(builder, source, at, LANES)
            blank = ir.Constant(values.type, [1 << (values.type.element.width - 1)] * LANES)
            chosen = builder.icmp_unsigned("!=", values, blank)
            count = _append(builder, values, chosen, None, builder.add(base, at), target_i, target_v, count)
            store(builder, blank, source, at)
        return count

    return types.int64(bits, types.int64, types.uint64, out_i, out_v, types.int64), generate
