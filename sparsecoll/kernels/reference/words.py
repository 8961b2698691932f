"""Words: strings of bytes in one text, numbered; for host memory only."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np

from sparsecoll.kernels.keys import Array

__all__ = ["join_words", "number_words", "word_hashes"]

OFFSET, PRIME = 0xCBF29CE484222325, 0x100000001B3  # FNV-1a, by Fowler, Noll and Vo


def word_hashes(text: Array, starts: Array, stops: Array) -> Array:
    """Return 64 bits for each word, uint64: FNV-1a, of which the upper half is mixed into the lower one.

    Args:
        text: uint8.
        starts: int64, where each word begins in `text`.
        stops: int64, where each word ends.
    """
    hashes = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        h = OFFSET
        for byte in text[start:stop].tolist():
            h = (h ^ byte) * PRIME & (1 << 64) - 1
        hashes.append(h ^ h >> 32)
    return np.array(hashes, np.uint64)


def number_words(text: Array, starts: Array, stops: Array) -> tuple[Array, Array]:
    """Return the number of each word, and for each number the position of its first word; both int64.

    Equal words have equal numbers, which count the different words in the order in which they first occur. The
    arguments are those of `word_hashes`.
    """
    numbers: defaultdict[bytes, int] = defaultdict(itertools.count().__next__)
    found = np.fromiter(map(numbers.__getitem__, _words(text, starts, stops)), np.int64, starts.size)
    return found, np.unique(found, return_index=True)[1].astype(np.int64)


def join_words(text: Array, starts: Array, stops: Array) -> Array:
    """Return the words one after the other, each followed by a zero; uint8. For the arguments see `word_hashes`."""
    return np.frombuffer(b"\0".join([*_words(text, starts, stops), b""]), np.uint8)


def _words(text: Array, starts: Array, stops: Array) -> list[bytes]:
    whole = text.tobytes()
    return [whole[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
