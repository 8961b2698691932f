"""Auto: each message in the smallest format, from exact sizes known before encoding."""

from __future__ import annotations

from sparsecoll.formats.base import Buffer, Format
from sparsecoll.formats.coo import Coo
from sparsecoll.formats.dense import Dense
from sparsecoll.vector import SparseVector


class Auto(Format):
    """Chooses; it has no bytes of its own (id 0 never travels), so it decodes nothing."""

    id = 0
    name = "auto"
    choices: tuple[Format, ...] = (Coo(), Dense())

    def _best(self, x: SparseVector, value_dtype: str | None) -> Format:
        return min(self.choices, key=lambda form: form.size(x, value_dtype))

    def size(self, x: SparseVector, value_dtype: str | None = None) -> int:
        return self._best(x, value_dtype).size(x, value_dtype)

    def encode(self, x: SparseVector, value_dtype: str | None = None) -> Buffer:
        return self._best(x, value_dtype).encode(x, value_dtype)

    def decode(self, buffer: Buffer, length: int) -> SparseVector:
        chosen = {form.id: form for form in self.choices}
        return chosen.get(int(buffer[0]) if buffer.size else 0, self.choices[0]).decode(buffer, length)
