"""Keys that are strings: one table of the different keys of all ranks, in which a key's position is its index.

Keys travel as one text and are numbered without a string object for each of them (`kernels.number_words`), so that two
keys are never taken for one. A few keys go from every rank to all others. Many are divided by their hashes: every rank
sends each key to the rank that its hash names, and from there it goes to all ranks once, however many ranks have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.kernels import kernels_of
from sparsecoll.transport import Transport
from sparsecoll.transport.all_ranks import allgatherv, exchanged

FEW = 1 << 13  # keys of all ranks together that go to all of them at once
ENCODING = ("utf-8", "surrogatepass")
Keys = Sequence[Any]  # str or bytes, all of one type


class Text:
    """Some keys, one after the other, in one array of bytes.

    Args:
        text: uint8, UTF-8 if the keys are str.
        starts: int64, where each key begins.
        stops: int64, where each key ends.
    """

    def __init__(self, text: Buffer, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        self.text, self.starts, self.stops = text, starts, stops

    @classmethod
    def of(cls, keys: Keys) -> Text:
        """Return keys as a text in which each is followed by a zero, if none of them has one in it."""
        of_bytes = len(keys) > 0 and isinstance(keys[0], bytes)
        joined = b"\0".join([*keys, b""]) if of_bytes else "\0".join([*keys, ""]).encode(*ENCODING)
        text = np.frombuffer(joined, np.uint8)
        stops = np.flatnonzero(text == 0)
        if stops.size != len(keys):
            sizes = np.array([len(key if of_bytes else key.encode(*ENCODING)) for key in keys], np.int64)
            stops = np.cumsum(sizes + 1) - 1
        return cls(text, _starts(stops), stops)

    @classmethod
    def concatenate(cls, parts: Sequence[Text]) -> Text:
        """Return the keys of all parts."""
        offsets = np.cumsum([0, *(part.text.size for part in parts[:-1])])
        starts, stops = (
            np.concatenate([array + offset for array, offset in zip(arrays, offsets.tolist(), strict=True)])
            for arrays in ([part.starts for part in parts], [part.stops for part in parts])
        )
        return cls(np.concatenate([part.text for part in parts]), starts, stops)

    def __len__(self) -> int:
        return self.starts.size

    def take(self, positions: NDArray[np.int64]) -> Text:
        """Return the keys at some positions."""
        if positions.size == len(self):  # all of them
            return self
        starts, stops = self.starts[positions], self.stops[positions]
        text = kernels_of(self.text).join_words(self.text, starts, stops)
        stops = np.cumsum(stops - starts + 1) - 1
        return Text(text, _starts(stops), stops)

    def keys(self, kind: str) -> list[Any]:
        """Return the keys as objects, bytes if `kind` is "bytes" and str if not."""
        whole = self.text.tobytes()
        if whole.count(0) == len(self):
            return (whole.split(b"\0") if kind == "bytes" else whole.decode(*ENCODING).split("\0"))[:-1]
        parts = [whole[a:b] for a, b in zip(self.starts.tolist(), self.stops.tolist(), strict=True)]
        return parts if kind == "bytes" else [part.decode(*ENCODING) for part in parts]

    def numbers(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of each key, equal ones for equal keys, and the position of the first key of each."""
        return kernels_of(self.text).number_words(self.text, self.starts, self.stops)  # type: ignore[no-any-return]

    def owners(self, ranks: int) -> NDArray[np.int64]:
        """Return the rank that each key's hash names."""
        hashes: NDArray[np.uint64] = kernels_of(self.text).word_hashes(self.text, self.starts, self.stops)
        return (hashes % np.uint64(ranks)).astype(np.int64)

    def packed(self) -> Buffer:
        """Return one message: the number of keys, their sizes if some have a zero in them, and the text."""
        plain = bool(np.count_nonzero(self.text == 0) == len(self))
        sizes = [] if plain else (self.stops - self.starts).tolist()
        head = np.array([len(self) if plain else ~len(self), *sizes], np.int64)
        return np.concatenate([head.view(np.uint8), self.text])


def table_of(transport: Transport, keys: Keys, total: int) -> tuple[Text, NDArray[np.int64]]:
    """Return the different keys of all ranks, in the same order on all of them, and the index of each own key.

    Collective.

    Volume: all other ranks' keys, if they are few; otherwise a rank's share of them, then all others of the table.
    """
    own = Text.of(keys)
    with transport.phase("keys"):
        sent = own if total <= FEW else _owned(transport, own)
        parts = [unpacked(block) for block in allgatherv(transport, sent.packed())]
        transport.waitall()
    table = Text.concatenate(parts)
    if total <= FEW:  # with the keys that several ranks have
        numbers, first = table.numbers()
        start = sum(map(len, parts[: transport.rank]))
        return table.take(first), numbers[start : start + len(own)]
    return table, Text.concatenate([table, own]).numbers()[0][len(table) :]


def _owned(transport: Transport, own: Text) -> Text:
    """Return the different keys of all ranks whose hash names this rank."""
    owners = own.owners(transport.size)

    def part(owner: int) -> Text:
        return own.take(np.flatnonzero(owners == owner))

    arrived = [unpacked(message) for _, message in exchanged(transport, lambda to: part(to).packed())]
    every = Text.concatenate([part(transport.rank), *arrived])
    return every.take(every.numbers()[1])


def unpacked(message: Buffer) -> Text:
    """Invert `Text.packed`.

    Raises:
        CommunicationError: The message is damaged.
    """
    count = int(message[:8].copy().view(np.int64)[0]) if message.size >= 8 else -1
    plain, count = count >= 0, count if count >= 0 else ~count
    start = 8 if plain else 8 * count + 8
    text = message[start:]
    if count == 0 or start > message.size:
        stops = np.empty(0, np.int64)
    elif plain:
        stops = np.flatnonzero(text == 0)
    else:
        stops = np.cumsum(message[8:start].copy().view(np.int64) + 1) - 1
    starts = _starts(stops)
    ends = int(stops[-1]) + 1 if stops.size else 0
    if message.size < 8 or stops.size != count or ends != text.size or (stops < starts).any():
        raise CommunicationError(f"message: {message.size} bytes do not hold {count} keys")
    return Text(text, starts, stops)


def _starts(stops: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the starts of keys that end at `stops`, with one byte between two keys."""
    return np.append(0, stops + 1)[:-1]
