"""Costs of messages and computation: the alpha-beta model, and the simulator's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsecoll.errors import check_number


@dataclass(frozen=True)
class Network:
    """The alpha-beta model: a message of m bytes takes alpha + beta * m seconds.

    A rank sends one message at a time and receives one at a time.

    Args:
        alpha: latency, in seconds per message (default: 50e-6).
        beta: inverse bandwidth, in seconds per byte (default: 8e-9, which is 1 Gb/s).

    Raises:
        ValueError: One of them is negative, infinite or NaN.
        TypeError: One of them is not a number.
    """

    alpha: float = 50e-6
    beta: float = 8e-9

    def __post_init__(self) -> None:
        _check_costs(self)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of computation on the simulator, in seconds; by default computation takes no time.

    Args:
        select: seconds per value read by a selection.
        encode: seconds per entry encoded.
        decode: seconds per entry decoded.
        merge: seconds per input entry of a sparse sum.
        dense_merge: seconds per input entry in the alternative model of a sum, for many entries in few coordinates;
            the cheaper of the two models is used.
        dense_merge_span: seconds per coordinate in that model; 0 switches it off.
        dense: seconds per value of a dense vector.
        call: seconds per kernel call, however small.

    Raises:
        ValueError: One of them is negative, infinite or NaN.
        TypeError: One of them is not a number.
    """

    select: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    merge: float = 0.0
    dense_merge: float = 0.0
    dense_merge_span: float = 0.0
    dense: float = 0.0
    call: float = 0.0

    def __post_init__(self) -> None:
        _check_costs(self)

    def seconds(self, kind: str, amount: int, span: int = 0) -> float:
        """Return the seconds of one span of work.

        Args:
            kind: kind of work, see `sparsecoll.telemetry.trace`.
            amount: number of values or entries.
            span: number of coordinates from the first index to the last.
        """
        if kind == "wait":
            return 0.0
        seconds = amount * float(getattr(self, kind))
        if kind == "merge" and self.dense_merge_span:
            seconds = min(seconds, amount * self.dense_merge + span * self.dense_merge_span)
        return self.call + seconds


def check_model(argument: str, value: object, kind: type = Network) -> None:
    """Raise TypeError unless the value of an argument is a Network, or another `kind` of model, or None."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{argument}: expected a sparsecoll.{kind.__name__} or None, got {value!r}")


def _check_costs(costs: Any) -> None:
    """Raise unless all fields are finite numbers of at least 0."""
    for name, value in vars(costs).items():
        check_number(name, value, "[0, inf)", " seconds")


# By these, `auto` chooses unless it is given others; magnitudes matter, digits do not.
ONE_NODE = Network(50e-6, 3e-10)  # all ranks on one machine
BETWEEN_NODES = Network()
