"""Sums of what has few keys: all entries go to all ranks together with the arguments that are compared, in one round.

Otherwise the ranks first agree on the types, then on the keys, and then send the values (`convert.keyed`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparsecoll.collectives.convert import words
from sparsecoll.collectives.convert.back import Back
from sparsecoll.collectives.convert.keyed import KINDS, ToMapping, agree_on_keys, agree_on_kinds, kind_of, united
from sparsecoll.collectives.convert.words import Text, unpacked
from sparsecoll.collectives.options import CallOptions
from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.kernels.keys import index_dtype
from sparsecoll.transport.call import AGREEMENT_BYTES, CollectiveCall
from sparsecoll.vector import VALUE_DTYPES, SparseVector, dtype_of

HEAD = 8  # bytes of a message for `kind_of` the entries
KEY_BYTES = 64  # of a key on average, above which a rank does not send its keys in the first round

Combine = Callable[[], tuple[SparseVector, Back]]


def combine_keys(
    call: CollectiveCall,
    x: SparseVector,
    back: Back,
    options: CallOptions,
    arguments: dict[str, Any] | None,
    apart: bool = False,
) -> tuple[SparseVector, Back, Combine | None]:
    """Agree on the keys of all ranks. Collective.

    Args:
        call: the call.
        x: this rank's entries.
        back: what converts results.
        options: of the call.
        arguments: those of this collective alone, by name, which ranks compare; None if keys cannot be sent at once.
        apart: as of `agree_on_keys` (default: False).

    Returns:
        This rank's entries with the indices that all ranks use; what converts results; and, if each rank has few keys
        that it sent at once, what combines those of all ranks.
    """
    message = None
    plain = options.k is None and options.density is None and options.format == "auto" and options.value_dtype is None
    if plain and arguments is not None:
        options.check_finite(x)
        call.signature |= options.signature() | arguments
        message = _message(x, back, call.transport.size)
    x, back, total = agree_on_kinds(call, x, back, options.check, message)
    blocks = call.gathered
    if message is None or not all(block.size for block in blocks):
        return *agree_on_keys(call, x, back, total, options.check, apart), None
    options.check_operation(x)
    return x, back, lambda: _combined(call, x, back, options, blocks)


def _message(x: SparseVector, back: Back, size: int) -> Buffer:
    """Return this rank's entries if they are few; in any case room for what `CollectiveCall.agree` adds."""
    few, keys = x.nnz * size <= words.FEW, np.empty(0, np.uint8)
    if few and isinstance(back, ToMapping) and len(back.words):
        keys = Text.of(back.words).packed()
        few = keys.size <= KEY_BYTES * x.nnz
    elif few:
        keys = x.indices.astype(np.int64).view(np.uint8)
    if not few:
        return np.empty(AGREEMENT_BYTES, np.uint8)
    head = np.array([kind_of(x, back)], np.int64).view(np.uint8)
    return np.concatenate([head, x.values.view(np.uint8), keys, np.empty(AGREEMENT_BYTES, np.uint8)])


def _combined(
    call: CollectiveCall, x: SparseVector, back: Back, options: CallOptions, blocks: list[Buffer]
) -> tuple[SparseVector, Back]:
    """Return the entries of all ranks combined, and what converts them."""
    channel, last = options.channel(call.transport, x.length), len(blocks) - 1
    arrays, keys = zip(*map(_parts, blocks), strict=True)
    typed = [array.astype(x.dtype, copy=False) for array in arrays]
    values = [options.operation.prepared(array, rank == last) for rank, array in enumerate(typed)]
    if isinstance(back, ToMapping) and back.keys != "integers":
        texts = [unpacked(own) if array.size else Text.of([]) for own, array in zip(keys, values, strict=True)]
        parts, back = united(texts, values, back)
    else:
        indices = [np.frombuffer(own.tobytes(), np.int64) for own in keys]
        length = max(int(own[-1]) + 1 if own.size else 0 for own in indices)
        each = zip(indices, values, strict=True)
        dtype = index_dtype(length)
        parts = [SparseVector.from_sorted_unchecked(own.astype(dtype), array, length) for own, array in each]
    return channel.merge(parts, x.dtype), back


def _parts(block: Buffer) -> tuple[Any, Buffer]:
    """Return the values in a message, and the bytes of the keys."""
    nnz, kind = divmod(int.from_bytes(block[:HEAD].tobytes(), "little"), KINDS)
    dtype = dtype_of(VALUE_DTYPES[kind % len(VALUE_DTYPES)])
    end = HEAD + nnz * dtype.itemsize
    if end > block.size:
        raise CommunicationError(f"message: {block.size} bytes do not hold {nnz} values of {dtype}")
    return np.frombuffer(block[HEAD:end].tobytes(), dtype), block[end:]
