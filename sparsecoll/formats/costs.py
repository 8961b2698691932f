"""Costs of encoding and decoding in each format, on one core."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coding:
    """Seconds to encode and to decode: per entry, and per coordinate from the first index to the last (`_span`)."""

    encode: float
    decode: float
    encode_span: float = 0.0
    decode_span: float = 0.0


PACKED = 4.8e-9  # seconds to encode and decode an entry in the format packed, encode + decode below
CODING = {  # on a core with AVX-512; magnitudes matter, digits do not
    "coo": Coding(0.6e-9, 0.15e-9),
    "dense": Coding(2.9e-9, 0.6e-9, 0.17e-9, 0.16e-9),
    "bitmap": Coding(1.0e-9, 0.9e-9, 0.0, 0.08e-9),
    "packed": Coding(3.0e-9, 1.8e-9),
    "densestream": Coding(20e-9, 10e-9),
}
