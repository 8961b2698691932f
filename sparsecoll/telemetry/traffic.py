"""Counters of bytes, messages and seconds, in total and by phase."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

WORD = 4


@dataclass
class Counts:
    """Exact counts of one rank. Bytes include the library's message headers, but not those of MPI or TCP.

    Attributes:
        bytes_sent: bytes.
        bytes_received: bytes.
        messages_sent: number of messages.
        messages_received: number of messages.
        seconds: time, in seconds.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    seconds: float = 0.0

    @property
    def words_received(self) -> float:
        """bytes_received / 4: the volume as papers count it, in words of 4 bytes."""
        return self.bytes_received / WORD

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __add__(self, other: Counts) -> Counts:
        return self - (Counts() - other)

    def copy(self) -> Counts:
        """Return a copy, which does not change with later calls."""
        return Counts(self.bytes_sent, self.bytes_received, self.messages_sent, self.messages_received, self.seconds)


@dataclass(repr=False)
class Traffic:
    """Counters of one rank on one communicator since its first use or the last `reset`; see `sparsecoll.traffic`.

    `print(traffic)`, and a cell of a notebook, shows a table by phase.

    Attributes:
        total: Counts of all calls; its `seconds` is the time inside collective calls.
        phases: dict from phase name ("agree", "select", "split", ...) to Counts. Messages outside a phase are counted
            in `total` only.
        set_up: Counts of what happens once per communicator, such as finding out which ranks share a machine; not part
            of `total` or `phases`.
        observer: called after each call with its algorithm, see `sparsecoll.telemetry.metrics`; None for nothing.
    """

    total: Counts = field(default_factory=Counts)
    phases: dict[str, Counts] = field(default_factory=dict)
    set_up: Counts = field(default_factory=Counts)
    observer: Callable[[str], None] | None = field(default=None, compare=False)

    def reset(self) -> None:
        """Set every counter to zero."""
        self.total, self.set_up = Counts(), Counts()
        self.phases.clear()

    def copy(self) -> Traffic:
        """Return a copy, which does not change with later calls."""
        phases = {name: counts.copy() for name, counts in self.phases.items()}
        return Traffic(self.total.copy(), phases, self.set_up.copy())

    def since(self, earlier: Traffic) -> Traffic:
        """Return the counts since `earlier`, a copy taken before; without `set_up`.

        Args:
            earlier: result of an earlier `copy()`.
        """
        nothing = Counts()
        phases = {name: counts - earlier.phases.get(name, nothing) for name, counts in self.phases.items()}
        return Traffic(self.total - earlier.total, {n: c for n, c in phases.items() if c != nothing})

    def as_dict(self) -> dict[str, Any]:
        """Return nested dicts of plain numbers, for JSON."""
        phases = {n: asdict(c) for n, c in self.phases.items()}
        return {"total": asdict(self.total), "phases": phases, "set_up": asdict(self.set_up)}

    def _table(self) -> list[tuple[str, ...]]:
        counts = [*self.phases.items(), ("total", self.total)]
        if self.set_up.messages_sent or self.set_up.messages_received:
            counts.append(("set-up", self.set_up))
        table: list[tuple[str, ...]] = [("phase", "sent", "received", "messages", "seconds")]
        for name, c in counts:
            numbers = f"{c.bytes_sent:,}", f"{c.bytes_received:,}", f"{c.messages_sent:,}", f"{c.seconds:.6f}"
            table.append((name, *numbers))
        return table

    def __str__(self) -> str:
        return "\n".join(f"{name:<12}{sent:>14}{got:>14}{n:>10}{s:>12}" for name, sent, got, n, s in self._table())

    def __repr__(self) -> str:
        c = self.total
        sent = f"sent {c.bytes_sent:,} bytes in {c.messages_sent:,} messages"
        return f"Traffic({sent}, received {c.bytes_received:,} bytes, {c.seconds:.6f} s)"

    def _repr_html_(self) -> str:
        rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self._table()]
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
