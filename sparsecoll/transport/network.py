"""What messages and computation cost: a network by the alpha-beta model, the simulator's kernels, what was measured."""

from __future__ import annotations

import bisect
import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path


@dataclass(frozen=True)
class Network:
    """A message of m bytes costs alpha + beta * m seconds; a rank sends and receives one message at a time.

    Args:
        alpha: seconds per message.
        beta: seconds per byte (8e-9 for 1 Gb/s).
    """

    alpha: float = 50e-6
    beta: float = 8e-9

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.beta < 0:
            raise ValueError(f"Network: expected alpha >= 0 and beta >= 0, got {self.alpha} and {self.beta}")


@dataclass(frozen=True)
class Costs:
    """What computation costs on the simulator: seconds per amount of each kind of work (see `trace`), and per piece.

    Args:
        select: value looked at.
        encode, decode, merge: entry.
        crowded, window: entry and coordinate, where a sum costs less so (many entries in few coordinates).
        dense: value of a dense vector.
        call: piece of work, however small.
    """

    select: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    merge: float = 0.0
    crowded: float = 0.0
    window: float = 0.0
    dense: float = 0.0
    call: float = 0.0

    def seconds(self, kind: str, amount: int, span: int = 0) -> float:
        """Of one piece of work on so many items, spread over so many coordinates."""
        if kind == "wait":
            return 0.0
        seconds = amount * float(getattr(self, kind))
        if kind == "merge" and self.window:
            seconds = min(seconds, amount * self.crowded + span * self.window)
        return self.call + seconds

    def tuning(self, network: Network) -> Tuning:
        """What `sparsecoll.tune` would measure on this network with these costs.

        Further messages, which the simulator takes for free, cost a hundredth here: 2P of them are no good idea.
        """
        code = self.encode + self.decode
        return Tuning(network.alpha, network.alpha / 100, network.beta, self.call, self.merge, code, 3 * self.dense)


@dataclass(frozen=True)
class Tuning:
    """What `sparsecoll.tune` measures on a communicator: seconds per ...

    Args:
        alpha: message that is waited for.
        overhead: further message sent and received meanwhile.
        beta: byte, while every rank sends.
        call: encoding, decoding or summing, however few the entries.
        merge: entry that goes into a sum of sparse vectors, at 1 % density.
        code: entry encoded and decoded in the format packed.
        dense: value of a dense vector that is made from a sparse one, added to, and made sparse again.
        calls: for each algorithm whole calls of growing size, each as (seconds by the figures above, seconds measured).
    """

    alpha: float = 50e-6
    overhead: float = 1e-6
    beta: float = 8e-9
    call: float = 10e-6
    merge: float = 5e-9
    code: float = 5e-9
    dense: float = 2e-9
    calls: dict[str, list[tuple[float, float]]] = field(default_factory=dict, hash=False)

    def corrected(self, name: str, seconds: float) -> float:
        """A prediction, times measured over predicted of the calls of about that length (log-linear between two)."""
        calls = self.calls.get(name)
        if not calls:
            return seconds
        at = min(max(seconds, calls[0][0]), calls[-1][0])
        after = bisect.bisect_left(calls, (at, 0.0))
        (lower, low), (upper, high) = calls[max(after - 1, 0)], calls[after]
        share = math.log(at / lower) / math.log(upper / lower) if upper > lower else 0.0
        return seconds * math.exp((1 - share) * math.log(low / lower) + share * math.log(high / upper))

    def save(self, path: str | Path) -> None:
        """Write them as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Tuning:
        """Read what `save` wrote.

        Raises:
            OSError, ValueError: no such file; not these numbers.
        """
        try:
            saved = json.loads(Path(path).read_text())
            calls = {name: [(float(a), float(b)) for a, b in rows] for name, rows in saved.pop("calls", {}).items()}
            missing = {f.name for f in fields(cls)} - {"calls"} - set(saved)
            if missing:
                raise ValueError(f"missing: {', '.join(sorted(missing))}")
            return cls(**{name: float(value) for name, value in saved.items()}, calls=calls)
        except (TypeError, AttributeError, ValueError) as error:
            names = ", ".join(f.name for f in fields(cls))
            raise ValueError(f"{path}: expected the numbers {names} ({error})") from None


# What `auto` assumes until a call is worth measuring for; magnitudes matter, digits do not.
IN_ONE_NODE = Tuning(20e-6, 5e-6, 3e-10, 20e-6, 6e-9, 6e-9, 6e-10)
BETWEEN_NODES = Tuning(50e-6, 5e-6, 8e-9, 20e-6, 6e-9, 6e-9, 6e-10)  # 1 Gb/s: what is short there is not measured
