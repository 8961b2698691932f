"""What was sent, received and how long it took, in total and per phase. A word is 4 bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

WORD = 4


@dataclass
class Counts:
    """Exact counts of one rank: bytes of payload with the messages' own headers, not MPI's or TCP's."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    seconds: float = 0.0

    @property
    def words_received(self) -> float:
        """bytes_received / 4: the volume of the papers."""
        return self.bytes_received / WORD

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.bytes_sent - other.bytes_sent,
            self.bytes_received - other.bytes_received,
            self.messages_sent - other.messages_sent,
            self.messages_received - other.messages_received,
            self.seconds - other.seconds,
        )

    def copy(self) -> Counts:
        """The same counts, detached."""
        return replace(self)


@dataclass
class Traffic:
    """Counters of one rank on one communicator since it was first used (or since `reset`).

    `total` holds everything that calls send and receive; `phases` the same split by phase name ("agree", "select",
    "split", ...). Traffic outside a phase is in `total` alone. `seconds` of `total` is the time inside collective
    calls. `set_up` is what happens once in the life of a communicator, such as measuring it: it is part of neither.
    """

    total: Counts = field(default_factory=Counts)
    phases: dict[str, Counts] = field(default_factory=dict)
    set_up: Counts = field(default_factory=Counts)

    def reset(self) -> None:
        """Set every counter to zero."""
        self.total, self.set_up = Counts(), Counts()
        self.phases.clear()

    def copy(self) -> Traffic:
        """The same counters, detached."""
        phases = {name: counts.copy() for name, counts in self.phases.items()}
        return Traffic(self.total.copy(), phases, self.set_up.copy())

    def since(self, earlier: Traffic) -> Traffic:
        """What calls moved since `earlier`, a copy taken before; without `set_up`."""
        nothing = Counts()
        phases = {name: counts - earlier.phases.get(name, nothing) for name, counts in self.phases.items()}
        moved = {n: c for n, c in phases.items() if c != nothing}
        return Traffic(self.total - earlier.total, moved)

    @property
    def bytes_sent(self) -> int:
        """Total bytes sent."""
        return self.total.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Total bytes received."""
        return self.total.bytes_received

    @property
    def words_received(self) -> float:
        """Total words (4 bytes) received."""
        return self.total.words_received

    @property
    def messages_sent(self) -> int:
        """Total messages sent."""
        return self.total.messages_sent

    @property
    def seconds(self) -> float:
        """Seconds inside collective calls."""
        return self.total.seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        phases = {n: asdict(c) for n, c in self.phases.items()}
        return {"total": asdict(self.total), "phases": phases, "set_up": asdict(self.set_up)}

    def __str__(self) -> str:
        rows = [*self.phases.items(), ("total", self.total)]
        if self.set_up.messages_sent or self.set_up.messages_received:
            rows.append(("set-up", self.set_up))
        lines = [f"{'phase':<12}{'sent':>14}{'received':>14}{'messages':>10}{'seconds':>12}"]
        for name, c in rows:
            lines.append(
                f"{name:<12}{c.bytes_sent:>14,}{c.bytes_received:>14,}{c.messages_sent:>10,}{c.seconds:>12.6f}"
            )
        return "\n".join(lines)
