"""Auto: each message in the format that arrives first, from exact sizes known before encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparsecoll.formats.base import Buffer, Format, Plan, WireDtype, wire_dtype
from sparsecoll.formats.bitmap import Bitmap
from sparsecoll.formats.coo import Coo
from sparsecoll.formats.dense import Dense
from sparsecoll.formats.densestream import DenseStream
from sparsecoll.formats.packed import Packed
from sparsecoll.vector import SparseVector

# Seconds per entry to plan, write and decode; `perf/kernels.py` measures them. Magnitudes matter, digits do not.
CODING = {"coo": 1.0e-9, "dense": 2.0e-9, "bitmap": 4.0e-9, "densestream": 6.0e-9, "packed": 5.0e-9}


@dataclass(frozen=True)
class Auto(Format):
    """Chooses; it has no bytes of its own (id 0 never travels), so it decodes nothing.

    Args:
        choose: names of the formats to choose from; all of them by default.
        beta: seconds per byte of the link (8e-9 for 1 Gb/s). The format with the least time to code and to send is
            taken, which is COO where coding is slower than sending. None: the smallest message.
    """

    id = 0
    name = "auto"
    choices: ClassVar[tuple[Format, ...]] = (Coo(), Dense(), Bitmap(), Packed(), DenseStream())

    beta: float | None = None
    choose: tuple[str, ...] = ("coo", "dense", "bitmap", "packed", "densestream")

    def __post_init__(self) -> None:
        names = [form.name for form in self.choices]
        if not self.choose or any(name not in names for name in self.choose):
            raise ValueError(f"choose: expected some of {', '.join(names)}, got {self.choose}")

    def _best(self, x: SparseVector, wire: WireDtype) -> tuple[Format, Plan]:
        plans = [(form, form.plan(x, wire)) for form in self.choices if form.name in self.choose]
        if self.beta is None:
            return min(plans, key=lambda pair: pair[1].size)
        beta = self.beta
        return min(plans, key=lambda pair: beta * pair[1].size + CODING[pair[0].name] * x.nnz)

    def plan(self, x: SparseVector, wire: WireDtype) -> Plan:
        return self._best(x, wire)[1]

    def encode(self, x: SparseVector, value_dtype: str | None = None) -> Buffer:
        wire = wire_dtype(x.dtype, value_dtype)
        form, plan = self._best(x, wire)
        return form.written(plan, x, wire)

    def decode(self, buffer: Buffer, length: int) -> SparseVector:
        chosen = {form.id: form for form in self.choices}
        return chosen.get(int(buffer[0]) if buffer.size else 0, self.choices[0]).decode(buffer, length)
