"""Operations that Numba's vectoriser cannot produce, built from LLVM instructions.

This is the only module that uses internals of Numba and of llvmlite, which may change with any release. lanes.py takes
the portable code in its place where an internal is missing, and pyproject.toml bounds the versions to those tested.

A block is LANES items, in registers of REGISTER bits. The two instruction sets differ only in `_packed`, which moves
the chosen lanes of a register to its front. The packed register is then stored whole: the instruction that stores only
the chosen lanes is slow on AMD processors.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import caching as _caching
from numba.core import cgutils as _cgutils
from numba.core import codegen as _codegen
from numba.core import registry as _registry
from numba.core import types
from numba.cpython.unsafe import numbers as _numbers
from numba.extending import intrinsic as _intrinsic

intrinsic: Any = _intrinsic
caching: Any = _caching
cgutils: Any = _cgutils
codegen: Any = _codegen
config: Any = nb.config
trailing_zeros: Any = _numbers.trailing_zeros
I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
SHAPES = {"avx512": (16, 512), "avx2": (8, 256), "portable": (1, 0)}  # (lanes, bits of a register)


def _features() -> str:
    """The features of the processor that Numba compiles for, as "+avx2,-avx512f"."""
    chosen = config.CPU_FEATURES  # NUMBA_CPU_FEATURES
    return codegen.get_host_cpu_features() if chosen is None else str(chosen)


def _supported() -> tuple[str, ...]:
    """The instruction sets that this processor has and this LLVM has names for, the fastest first."""
    features = set(_features().split(","))
    wide = "+avx512f" in features and LLVM_COMPRESSES
    return ("avx512",) * wide + ("avx2",) * ({"+avx2", "+f16c"} <= features)


def _chosen() -> str:
    """The instruction set that SPARSECOLL_KERNELS names, if it is supported; by default the fastest one."""
    wanted = os.environ.get("SPARSECOLL_KERNELS") or (*SUPPORTED, "portable")[0]
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
LANES, REGISTER = SHAPES[SET]
IN_BLOCKS = SET != "portable"
PURE = SET != "avx2" or "avx512" not in SUPPORTED or _leave_out_avx512()
SOURCES = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(Path(__file__).parents[1].rglob("*.py")))).digest()


class _CacheFile(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Numba's cache on disk with a file for each key, so that processes that fill it at once never mix theirs up.

    Numba numbers the files of a function, and two processes may take the same number. It also overlooks changes of
    functions in other files, and does not know instruction sets.
    """

    def save(self, key: Any, data: Any) -> None:
        with contextlib.suppress(OSError):  # such as a full disk
            self._save_data(self._data_name(self._number(key)), (SOURCES, data))  # replaces the file as a whole

    def load(self, key: Any) -> Any:
        try:
            sources, data = self._load_data(self._data_name(self._number(key)))
        except Exception:  # it does not exist, or is damaged
            return None
        return data if sources == SOURCES else None

    def _number(self, key: Any) -> int:
        return int.from_bytes(hashlib.sha256(repr((SET, nb.__version__, key)).encode()).digest()[:8], "little")


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file = _CacheFile(self._cache_path, self._impl.filename_base, b"")


def jit(function: Any) -> Any:
    """`function`, compiled when it is first called with arguments of these types; releases the GIL, and is cached."""
    compiled: Any = nb.njit(nogil=True)(function)
    with contextlib.suppress(RuntimeError):  # there is no folder that this process may write to
        compiled._cache = _Cache(function)
    return compiled


def _splat(builder: Any, value: Any) -> Any:
    vector = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def _data(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    return cgutils.create_struct_proxy(array_type)(context, builder, array).data


def _load(builder: Any, data: Any, offset: Any) -> Any:
    vector = ir.VectorType(data.type.pointee, LANES)
    loaded = builder.load(builder.bitcast(builder.gep(data, [offset]), vector.as_pointer()))
    loaded.align = 1
    return loaded


def _store(builder: Any, value: Any, data: Any, offset: Any) -> None:
    stored = builder.store(value, builder.bitcast(builder.gep(data, [offset]), value.type.as_pointer()))
    stored.align = 1


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
    orders = ir.Constant(ir.ArrayType(I64, 1 << lanes), _orders(lanes))
    table = cgutils.global_constant(builder.module, f"sparsecoll_orders{lanes}", orders)
    number = builder.zext(builder.bitcast(chosen, ir.IntType(lanes)), I64)
    order = builder.load(builder.gep(table, [ir.Constant(I64, 0), number]))
    words = ir.VectorType(I32, 8)
    order = builder.zext(builder.bitcast(order, ir.VectorType(I8, 8)), words)
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


def _popcount(builder: Any, chosen: Any, result: Any) -> Any:
    width = ir.IntType(chosen.type.count)
    return builder.zext(_call(builder, f"llvm.ctpop.i{width.width}", width, [builder.bitcast(chosen, width)]), result)


def _magnitude(builder: Any, signed: bool, value: Any, mask: Any) -> Any:
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
        return _magnitude(builder, value.signed, *arguments)

    return unsigned(value, mask), generate


def _accumulated(builder: Any, values: Any, addend: Any, scale: Any) -> Any:
    """values + scale * addend of float bit patterns; the product is rounded before the sum."""
    float_type = {32: ir.FloatType(), 64: ir.DoubleType()}[values.type.element.width]
    floats = ir.VectorType(float_type, LANES)
    product = builder.fmul(_splat(builder, scale), builder.bitcast(addend, floats))
    return builder.bitcast(builder.fadd(builder.bitcast(values, floats), product), values.type)


@intrinsic  # type: ignore[untyped-decorator]
def compress_block(
    context: Any,
    bits: Any,
    start: Any,
    mask: Any,
    key: Any,
    indices: Any,
    addend: Any,
    scale: Any,
    out_i: Any,
    out_v: Any,
    count: Any,
    clear: Any,
) -> Any:
    """Append those of the LANES items from `start` on whose key is >= `key` to out_i and out_v; return the new count.

    `indices` gives their indices; None: their positions. Unless `addend` (bit patterns) is None, scale * addend is
    added to the items first. Unless `clear` is None, the items taken are zero in `bits` afterwards. All arrays are
    contiguous. Writes up to LANES items beyond the count.
    """
    signature = types.int64(bits, types.int64, mask, key, indices, addend, scale, out_i, out_v, types.int64, clear)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a_bits, start, mask, key, a_indices, a_addend, scale, a_i, a_v, count, _ = arguments
        source = _data(context, builder, bits, a_bits)
        values = _load(builder, source, start)
        if not isinstance(addend, types.NoneType):
            added = _load(builder, _data(context, builder, addend, a_addend), start)
            values = _accumulated(builder, values, added, scale)
        chosen = builder.icmp_unsigned(
            ">=", _magnitude(builder, bits.dtype.signed, values, _splat(builder, mask)), _splat(builder, key)
        )
        target = _data(context, builder, out_i, a_i)
        if isinstance(indices, types.NoneType):
            element = target.type.pointee
            first = builder.trunc(start, element) if element.width < 64 else start
            lane = ir.Constant(ir.VectorType(element, LANES), list(range(LANES)))
            lane_indices = builder.add(_splat(builder, first), lane)
        else:
            lane_indices = _load(builder, _data(context, builder, indices, a_indices), start)
        _compress_store(builder, lane_indices, chosen, target, count)
        _compress_store(builder, values, chosen, _data(context, builder, out_v, a_v), count)
        if not isinstance(clear, types.NoneType):
            _store(builder, builder.select(chosen, ir.Constant(values.type, None), values), source, start)
        elif not isinstance(addend, types.NoneType):
            _store(builder, values, source, start)
        return builder.add(count, _popcount(builder, chosen, count.type))

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def emit_block(context: Any, bits: Any, start: Any, base: Any, out_i: Any, out_v: Any, count: Any) -> Any:
    """Append those of the LANES floats (bit patterns) from `start` on that are not -0, and reset them to -0.

    out_i gets base + position, out_v the bit patterns; returns the new count. Writes up to LANES items beyond it.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a_bits, start, base, a_i, a_v, count = arguments
        source = _data(context, builder, bits, a_bits)
        values = _load(builder, source, start)
        width = values.type.element.width
        blank = ir.Constant(values.type, [1 << (width - 1)] * LANES)
        chosen = builder.icmp_unsigned("!=", values, blank)
        target = _data(context, builder, out_i, a_i)
        element = target.type.pointee
        first = builder.add(base, start)
        first = builder.trunc(first, element) if element.width < 64 else first
        lane = ir.Constant(ir.VectorType(element, LANES), list(range(LANES)))
        _compress_store(builder, builder.add(_splat(builder, first), lane), chosen, target, count)
        _compress_store(builder, values, chosen, _data(context, builder, out_v, a_v), count)
        _store(builder, blank, source, start)
        return builder.add(count, _popcount(builder, chosen, count.type))

    return types.int64(bits, types.int64, types.uint64, out_i, out_v, types.int64), generate


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


@intrinsic  # type: ignore[untyped-decorator]
def popcount(context: Any, word: Any) -> Any:
    """How many bits of a uint64 are 1."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def load64(context: Any, data: Any, offset: Any) -> Any:
    """The eight bytes from `offset` on of a contiguous uint8 array as a little-endian uint64; any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.gep(_data(context, builder, data, arguments[0]), [arguments[1]])
        loaded = builder.load(builder.bitcast(pointer, I64.as_pointer()))
        loaded.align = 1
        return loaded

    return types.uint64(data, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store64(context: Any, data: Any, offset: Any, word: Any) -> Any:
    """Write a uint64 to the eight bytes from `offset` on of a contiguous uint8 array, little-endian; any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.gep(_data(context, builder, data, arguments[0]), [arguments[1]])
        stored = builder.store(arguments[2], builder.bitcast(pointer, I64.as_pointer()))
        stored.align = 1
        return context.get_dummy_value()

    return types.none(data, types.int64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def narrow_block(context: Any, bits: Any, start: Any, out: Any) -> Any:
    """LANES float32 (bit patterns) to float16 (bit patterns), finite ones cut to the largest finite value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        floats = ir.VectorType(ir.FloatType(), LANES)
        word = _load(builder, _data(context, builder, bits, arguments[0]), arguments[1])
        x = builder.bitcast(word, floats)
        infinity = ir.Constant(word.type, [0x7F800000] * LANES)
        magnitude = builder.and_(word, ir.Constant(word.type, [0x7FFFFFFF] * LANES))
        finite = builder.icmp_unsigned("<", magnitude, infinity)
        for sign, side in ((1.0, ">"), (-1.0, "<")):
            limit = ir.Constant(floats, [sign * 65504.0] * LANES)
            beyond = builder.and_(finite, builder.fcmp_ordered(side, x, limit))
            x = builder.select(beyond, limit, x)
        half = builder.fptrunc(x, ir.VectorType(ir.HalfType(), LANES))
        target = _data(context, builder, out, arguments[2])
        _store(builder, builder.bitcast(half, ir.VectorType(ir.IntType(16), LANES)), target, arguments[1])
        return context.get_dummy_value()

    return types.none(bits, types.int64, out), generate


@intrinsic  # type: ignore[untyped-decorator]
def widen_block(context: Any, bits: Any, start: Any, out: Any) -> Any:
    """LANES float16 (bit patterns) to float32 (bit patterns)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = _load(builder, _data(context, builder, bits, arguments[0]), arguments[1])
        half = builder.bitcast(word, ir.VectorType(ir.HalfType(), LANES))
        wide = builder.fpext(half, ir.VectorType(ir.FloatType(), LANES))
        target = _data(context, builder, out, arguments[2])
        _store(builder, builder.bitcast(wide, ir.VectorType(I32, LANES)), target, arguments[1])
        return context.get_dummy_value()

    return types.none(bits, types.int64, out), generate


@jit
def _probe(words, halves, raw, address):  # type: ignore[no-untyped-def]
    """Uses each of the above once."""
    key, count = np.uint32(1), 0
    if IN_BLOCKS:
        count = compress_block(words, 0, key, key, None, None, None, words, words, count, None)
        count = emit_block(words, 0, np.uint64(0), words, words, count)
        narrow_block(words, 0, halves)
        widen_block(halves, 0, words)
    store64(raw, 0, load64(raw, 0) + np.uint64(magnitude_key(words[0], key)) + popcount(np.uint64(9)))
    return count + array_at(address, 1, words)[0] + trailing_zeros(np.uint64(8))


def probe() -> None:
    """Raise whatever Numba or LLVM raises if an operation of this module cannot be compiled any more."""
    words = np.ones(3 * LANES, np.uint32)
    _probe(words, np.ones(LANES, np.uint16), np.ones(8, np.uint8), words.ctypes.data)
