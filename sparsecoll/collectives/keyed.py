"""Collectives of types that have keys and no length: mappings from integers, strings or tuples.

`to_vector` makes vectors of them, of one length, dtype and table of keys on all ranks. All ranks use the wider of their
dtypes, and the largest integer of all ranks plus one as the length. The index of a string is its position in a table of
the keys of all ranks, see `convert.words`. With few keys, all entries go to all ranks together with the arguments,
in one round. A bound of the integers on each rank goes with the number of its keys: a result of mappings that int64 or
float64 might not hold exactly is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsecoll.collectives.convert import words
from sparsecoll.collectives.convert.mappings import EXACT, ToMapping, from_mapping
from sparsecoll.collectives.convert.words import Text, table_of, unpacked
from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.transport.call import AGREEMENT_BYTES, CollectiveCall
from sparsecoll.vector import VALUE_DTYPES, SparseVector, dtype_of
from sparsecoll.vector.values import common_dtype

if TYPE_CHECKING:
    from sparsecoll.collectives.options import CallOptions

KEYS = ("integers", "str", "bytes", "tuples")
KINDS = 64  # more than types of keys times dtypes
BOUNDS = 256  # more than the bits of an integer
INT64 = np.iinfo(np.int64).max
HEAD = 8  # bytes of a message for `_kind_of` the entries
KEY_BYTES = 64  # of a key on average, above which a rank does not send its keys in the first round

Keyed = tuple[SparseVector, ToMapping]


def to_vector(
    call: CollectiveCall, x: Any, options: CallOptions, at_once: dict[str, Any] | None = None
) -> tuple[SparseVector, ToMapping, bool]:
    """Return a type with keys as a vector, of the same length, dtype and keys on all ranks; collective.

    Args:
        at_once: further arguments of a sum, by name, which ranks compare while they send all entries, if these are few;
            None, the default, to send only keys here.

    Returns:
        (vector, Back of results, whether the vector is already the result).
    """
    message = None
    own, back = from_mapping(x)
    call.signature["keyed"] = True
    options.check_finite(own, back.words)
    plain = options.k is None and options.density is None and options.format == "auto" and options.value_dtype is None
    if plain and at_once is not None:
        call.signature |= options.signature() | at_once
        message = _message(own, back, call.transport.size)
    own, back, total = _agree_on_kinds(call, own, back, options, message)
    blocks, call.gathered = call.gathered, []
    if message is not None and all(block.size for block in blocks):
        options.check_operation(own)
        return *_combined(call, own, back, options, blocks), True
    vector, back = _with_common_keys(call, own, back, total, options.check)
    del call.signature["keyed"]
    return vector, back, False


def _agree_on_kinds(
    call: CollectiveCall, x: SparseVector, back: ToMapping, options: CallOptions, message: Buffer | None
) -> tuple[SparseVector, ToMapping, int]:
    """Return the entries of x in the dtype of all ranks, their Back, and the number of all ranks' keys.

    Raises:
        TypeError: Keys are integers on some ranks and strings on others, or of two types of strings.
        ValueError: The result for mappings might exceed what their dtype holds exactly.
    """
    numbers, kinds = np.divmod(call.agree(_kind_of(x, back), options.check, message), KINDS)
    counts, bounds = np.divmod(numbers, BOUNDS)
    kinds = kinds[counts > 0] if counts.any() else kinds
    found = np.unique(kinds // len(VALUE_DTYPES)).tolist()
    keys = KEYS[found[0]]
    if len(found) > 1:
        types = " and ".join(KEYS[kind] for kind in found)
        raise TypeError(f"x: expected keys of one type on all ranks, got {types}")
    wide = common_dtype(*{dtype_of(VALUE_DTYPES[kind]) for kind in (kinds % len(VALUE_DTYPES)).tolist()})
    if not counts.any() and (options.op == "mean" or options.value_dtype is not None):
        wide = np.dtype(np.float64)  # of nothing
    op = None if call.name in ("allgather", "gather") else options.operation.name
    wide = np.dtype(np.int64) if wide.kind == "b" and op == "sum" else wide  # as Python adds them
    _check_bounds(bounds.tolist(), wide, op)
    return x.astype(wide), replace(back, keys=keys), int(counts.sum())


def _kind_of(x: SparseVector, back: ToMapping) -> int:
    """Return one integer of the number of keys, a bound of the integers, the type of the keys, and the dtype.

    A bound of b > 0 stands for magnitudes up to 2^(b-1), and 0 for no integer but 0.
    """
    own, largest = KEYS.index(back.keys) * len(VALUE_DTYPES) + VALUE_DTYPES.index(x.dtype.name), back.largest
    if x.nnz and x.dtype.kind in "biu":
        largest = max(int(x.values.max()), -int(x.values.min()))
    bound = (largest - 1).bit_length() + 1 if largest else 0
    return (x.nnz * BOUNDS + bound) * KINDS + own


def _check_bounds(bounds: list[int], dtype: np.dtype[Any], op: str | None) -> None:
    """Raise unless `dtype` holds every result of integers within these bounds; `op` is None where none are combined."""
    powers, whole = [bound - 1 for bound in bounds if bound], dtype.kind in "biu"
    combined = {"sum": "sum", "mean": "sum", "prod": "product"}.get(op or "") if len(powers) > 1 else None
    if not powers or (whole and combined is None):
        return
    largest = 1 << max(powers)
    result = {"sum": sum(1 << p for p in powers), "product": 1 << sum(powers)}.get(combined or "", largest)
    if result > (INT64 if whole else EXACT):
        what = f"a {combined} of integers" if combined else "integers"
        limit = "below 2^63" if whole else "within 2^53 where other values are floats"
        found = f"magnitudes up to 2^{max(powers)} on rank {bounds.index(max(bounds))}"
        raise ValueError(f"x: expected {what} {limit}, got {found}: use float(value){'' if whole else ' on all ranks'}")


def _with_common_keys(call: CollectiveCall, x: SparseVector, back: ToMapping, total: int, check: bool) -> Keyed:
    """Return the entries of x as a vector of the length that all ranks agree on, and the Back of such vectors."""
    if not total:
        return x, back
    if back.keys == KEYS[0]:
        return x.shifted(0, max(call.agree(x.length, check, every=False))), back
    text, indices = table_of(call.transport, back.words, total)
    return SparseVector.from_pairs(indices, x.values, len(text), None), replace(back, words=text.keys(back.keys))


# Few keys


def _message(x: SparseVector, back: ToMapping, size: int) -> Buffer:
    """Return this rank's entries if they are few; in any case room for what `CollectiveCall.agree` adds."""
    few, keys = x.nnz * size <= words.FEW, np.empty(0, np.uint8)
    if few and len(back.words):
        keys = Text.of(back.words).packed()
        few = keys.size <= KEY_BYTES * x.nnz
    elif few:
        keys = x.indices.astype(np.int64).view(np.uint8)
    if not few:
        return np.empty(AGREEMENT_BYTES, np.uint8)
    head = np.array([_kind_of(x, back)], np.int64).view(np.uint8)
    return np.concatenate([head, x.values.view(np.uint8), keys, np.empty(AGREEMENT_BYTES, np.uint8)])


def _combined(
    call: CollectiveCall, x: SparseVector, back: ToMapping, options: CallOptions, blocks: list[Buffer]
) -> Keyed:
    """Return the entries of all ranks' messages combined, and their Back."""
    channel, last = options.channel(call.transport, x), len(blocks) - 1
    arrays, keys = zip(*map(_parts, blocks), strict=True)
    typed = [array.astype(x.dtype, copy=False) for array in arrays]
    values = [options.operation.prepared(array, rank == last) for rank, array in enumerate(typed)]
    if back.keys == KEYS[0]:
        indices = [np.frombuffer(own.tobytes(), np.int64) for own in keys]
        length = max(int(own[-1]) + 1 if own.size else 0 for own in indices)
    else:
        texts = [unpacked(own) if array.size else Text.of([]) for own, array in zip(keys, values, strict=True)]
        every = Text.concatenate(texts)
        numbers, first = every.numbers()
        indices, length = np.split(numbers, np.cumsum([len(text) for text in texts])[:-1]), int(first.size)
        back = replace(back, words=every.take(first).keys(back.keys))
    parts = [SparseVector.from_pairs(own, array, length, None) for own, array in zip(indices, values, strict=True)]
    return channel.merge(parts), back


def _parts(block: Buffer) -> tuple[Any, Buffer]:
    """Return the values in a message, and the bytes of the keys."""
    number, kind = divmod(int.from_bytes(block[:HEAD].tobytes(), "little"), KINDS)
    nnz, dtype = number // BOUNDS, dtype_of(VALUE_DTYPES[kind % len(VALUE_DTYPES)])
    end = HEAD + nnz * dtype.itemsize
    if end > block.size:
        raise CommunicationError(f"message: {block.size} bytes do not hold {nnz} values of {dtype}")
    return np.frombuffer(block[HEAD:end].tobytes(), dtype), block[end:]
