"""AutoFormat: encodes each message in the smallest or fastest format, by exact sizes computed before encoding."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sparsecoll.errors import check_number
from sparsecoll.formats.base import Chooser, Encoding, Format, WireDtype
from sparsecoll.formats.bitmap import BitmapFormat
from sparsecoll.formats.coo import CooFormat
from sparsecoll.formats.dense import DenseFormat
from sparsecoll.formats.densestream import DenseStreamFormat
from sparsecoll.formats.packed import PackedFormat
from sparsecoll.vector import SparseVector

COO = CooFormat()
SPARSE = "coo", "bitmap", "packed"  # formats whose messages have the entries' values alone
SMALL_NNZ = 32  # up to so many entries, formats other than coo and packed would save a few bytes at most
SAMPLES = 512  # number of pairs of neighbouring entries by which DenseStream is judged


@dataclass(frozen=True)
class Coding:
    """Seconds to encode and to decode: per entry, and per coordinate from the first index to the last (`_span`)."""

    encode: float
    decode: float
    encode_span: float = 0.0
    decode_span: float = 0.0


CODING = {  # on a core with AVX-512; magnitudes matter, digits do not
    "coo": Coding(0.6e-9, 0.15e-9),
    "dense": Coding(2.9e-9, 0.6e-9, 0.17e-9, 0.16e-9),
    "bitmap": Coding(1.0e-9, 0.9e-9, 0.0, 0.08e-9),
    "packed": Coding(4.5e-9, 2.6e-9),  # exponents included
    "densestream": Coding(20e-9, 10e-9),
}


@dataclass(frozen=True)
class AutoFormat(Chooser):
    """Chooses a format for each message; the header of the message names the format chosen.

    Messages of up to 32 entries are coo or packed. DenseStream is considered for a long message only if a sample of
    the entries suggests that it may be the smallest.

    Args:
        beta: seconds per byte of the link (8e-9 for 1 Gb/s). The format with the least time to encode, send and decode
            is taken, which is coo if encoding is slower than sending. None, the default, takes the smallest message.
        choose: names of the formats to choose from, of "coo", "dense", "bitmap", "packed" and "densestream" (default:
            all).

    Raises:
        ValueError: `choose` is empty or contains another name.
    """

    name = "auto"
    choices: ClassVar[tuple[Format, ...]] = (COO, DenseFormat(), BitmapFormat(), PackedFormat(), DenseStreamFormat())

    beta: float | None = None
    choose: tuple[str, ...] = ("coo", "dense", "bitmap", "packed", "densestream")

    def __post_init__(self) -> None:
        names = [form.name for form in self.choices]
        if not self.choose or any(name not in names for name in self.choose):
            raise ValueError(f"choose: expected some of {', '.join(names)}, got {self.choose}")
        if self.beta is not None:
            check_number("beta", self.beta, "[0, inf)", ": seconds per byte")

    def planned(self, x: SparseVector, wire: WireDtype) -> tuple[Format, Encoding]:
        if self.beta is not None and _coo_is_fastest(self.beta, tuple(self.choose), x.indices.dtype.itemsize):
            return COO, COO.plan(x, wire)
        small = [name for name in ("coo", "packed") if name in self.choose] if x.nnz <= SMALL_NNZ else []
        choices = [form for form in self.choices if form.name in (small or self.choose)]
        form, plan = self._best_of(choices, x, wire)
        if form.fitting(x, wire) is form:
            return form, plan
        fitting = [other for other in choices if other.fitting(x, wire) is other]
        return self._best_of(fitting or [form.fitting(x, wire)], x, wire)

    def _best_of(self, choices: Sequence[Format], x: SparseVector, wire: WireDtype) -> tuple[Format, Encoding]:
        best: tuple[Format, Encoding] | None = None
        least = 0.0
        for form in choices:
            if best and (
                self._cost(form, form.least_size(x, wire), x) > least or self._hopeless(form, x, wire, best[1].size)
            ):
                continue
            planned = form.planned(x, wire) if isinstance(form, PackedFormat) else (form, form.plan(x, wire))
            cost = self._cost(form, planned[1].size, x)
            if best is None or cost < least:
                best, least = planned, cost
        assert best is not None
        return best

    def _cost(self, form: Format, size: int, x: SparseVector) -> float:
        if self.beta is None:
            return size
        c = CODING[form.name]
        return self.beta * size + ((c.encode + c.decode) * x.nnz + (c.encode_span + c.decode_span) * x.extent)

    @staticmethod
    def _hopeless(form: Format, x: SparseVector, wire: WireDtype, best: int) -> bool:
        """Return whether a sample predicts that DenseStream, the slowest to plan, is 10 % larger than the best."""
        long = x.nnz > 2 * SAMPLES
        return long and isinstance(form, DenseStreamFormat) and form.estimate(x, wire, SAMPLES) > 1.1 * best

    def sparse(self) -> Format:
        return choosing(self.beta, self._of(SPARSE))

    def sparse_or(self, dense: Format) -> Format:
        own = dense in self.choices
        return choosing(self.beta, self._of((*SPARSE, dense.name))) if own else super().sparse_or(dense)

    def _of(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name in self.choose) or names


@functools.lru_cache
def choosing(beta: float | None, choose: tuple[str, ...] = AutoFormat.choose) -> AutoFormat:
    """Return `AutoFormat(beta, choose)`, the same object each time."""
    return AutoFormat(beta, choose)


@functools.lru_cache
def _coo_is_fastest(beta: float, choose: tuple[str, ...], index_bytes: int) -> bool:
    """Return whether no format could be faster than coo for any vector, because the link is faster than encoding."""
    least = {name: c.encode + c.decode + c.encode_span + c.decode_span for name, c in CODING.items()}  # per entry
    others = [least[name] for name in choose if name != "coo"]
    return "coo" in choose and least["coo"] + beta * index_bytes <= min(others, default=math.inf)
