"""Costs of messages and computation: the alpha-beta model, the simulator's kernels, and measured costs."""

from __future__ import annotations

import bisect
import functools
import json
import math
import os
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sparsecoll.transport.base import Transport

FILE = "SPARSECOLL_TUNING"  # environment variable: a file of costs
NATIVE_REACH = 4  # times the largest array that was summed by MPI's own allreduce: up to here, time grows with size


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


@dataclass(frozen=True)
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

    def tuning(self, network: Network) -> Tuning:
        """Return what `sparsecoll.tune` would measure on this network with these costs.

        Further messages in flight are free on the simulator. Here they cost alpha / 100, so that `auto` avoids
        sending 2P of them.
        """
        code = self.encode + self.decode
        return Tuning(network.alpha, network.alpha / 100, network.beta, self.call, self.merge, code, 3 * self.dense)


@dataclass(frozen=True)
class Tuning:
    """Costs on a communicator, as `sparsecoll.tune` measures them; `algo="auto"` decides by these.

    Args:
        alpha: seconds from sending a message to having received it.
        overhead: seconds per further message in flight at the same time.
        beta: seconds per byte, while every rank sends.
        call: seconds per call of a kernel that encodes, decodes or sums, however few the entries.
        merge: seconds per input entry of a sum of sparse vectors, at a density of 1 %.
        code: seconds per entry to encode and decode it in the format packed.
        dense: seconds per value of a dense vector: filled from a sparse one, added, and converted to sparse again.
        calls: dict from algorithm to whole calls of growing size, each as (predicted seconds, measured seconds);
            predictions are corrected by these.
        native: MPI's own allreduce of growing size, each as (bytes, seconds); empty if it cannot be used.
        fixed: seconds of a call beyond its messages and kernels, as ranks that share a core delay each other; negative
            if it takes less than they do alone.
        sharing: seconds that the kernels of all ranks take at once, divided by their processor time: 2 if two ranks
            share a core. `call`, `merge`, `code`, `dense` and `copy` are those at once.
        copy: seconds of `beta` in which the processor copies for MPI and the operating system, or polls; a rank can
            encode, decode and sum only in the rest of it.

    See Also:
        `sparsecoll.tune`, `sparsecoll.Auto`.
    """

    alpha: float = 50e-6
    overhead: float = 1e-6
    beta: float = 8e-9
    call: float = 10e-6
    merge: float = 5e-9
    code: float = 5e-9
    dense: float = 2e-9
    calls: dict[str, list[tuple[float, float]]] = field(default_factory=dict, hash=False)
    native: list[tuple[float, float]] = field(default_factory=list, hash=False)
    fixed: float = 0.0
    sharing: float = 1.0
    copy: float = 0.0

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.alpha, self.overhead, self.beta, self.call, self.merge, self.code, self.dense))

    def __hash__(self) -> int:
        return self._hash  # `auto` looks up what it predicted in every short call

    @functools.cached_property
    def checksum(self) -> int:
        """A checksum of all costs, the same in every process."""
        return zlib.crc32(repr(self).encode())

    def native_seconds(self, size: float) -> float:
        """Return the seconds of MPI's own allreduce of `size` bytes; infinity far beyond the largest, or without it."""
        if not self.native:
            return math.inf
        largest, longest = self.native[-1]
        if size > NATIVE_REACH * largest:
            return math.inf
        return _interpolated(self.native, size) if size < largest else longest * size / largest

    def corrected(self, name: str, seconds: float) -> float:
        """Return predicted seconds, scaled by measured / predicted of calls of about that length (log-linear)."""
        calls = self.calls.get(name)
        if not calls:
            return seconds
        return seconds * _interpolated([(predicted, took / predicted) for predicted, took in calls], seconds)

    def save(self, path: str | Path) -> None:
        """Write the costs as JSON.

        Args:
            path: name of the file, for SPARSECOLL_TUNING or `load`.
        """
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Tuning:
        """Read what `save` wrote.

        Args:
            path: name of the file.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file does not contain these numbers.
        """
        try:
            saved = json.loads(Path(path).read_text())
            calls = {name: _pairs(rows) for name, rows in saved.pop("calls", {}).items()}
            native = _pairs(saved.pop("native", []))
            missing = {f.name for f in fields(cls)} - {"calls", "native", "fixed", "sharing", "copy"} - set(saved)
            if missing:
                raise ValueError(f"missing: {', '.join(sorted(missing))}")
            return cls(**{name: float(value) for name, value in saved.items()}, calls=calls, native=native)
        except (TypeError, AttributeError, ValueError) as error:
            names = ", ".join(f.name for f in fields(cls))
            raise ValueError(f"{path}: expected the numbers {names} ({error})") from None


def given_tuning(transport: Transport) -> Tuning | None:
    """Return the costs that need no measurement: those in the file of SPARSECOLL_TUNING, or the simulator's.

    The file is read once on a communicator, and again after a failed call.

    Raises:
        ValueError: The file does not exist or contains something else.
    """
    return transport.saved_tuning or transport.modelled()


def compared_tuning(transport: Transport) -> dict[str, str]:
    """Return what ranks compare of the costs in the file of SPARSECOLL_TUNING, by its name; empty if it is not set.

    Raises:
        ValueError: The file does not exist or contains something else.
    """
    saved = transport.saved_tuning
    return {} if saved is None else {FILE: f"costs with checksum {saved.checksum:08x}"}


def saved_tuning() -> Tuning | None:
    """Return the costs in the file of SPARSECOLL_TUNING; None if it is not set.

    Raises:
        ValueError: The file does not exist or contains something else.
    """
    path = os.environ.get(FILE)
    if not path:
        return None
    try:
        return _loaded(path, os.stat(path).st_mtime_ns)
    except (OSError, ValueError) as error:
        raise ValueError(f"{FILE}: expected a file that `sparsecoll tune --save` wrote ({error})") from error


@functools.lru_cache(maxsize=4)
def _loaded(path: str, mtime_ns: int) -> Tuning:
    return Tuning.load(path)


def _check_costs(costs: Any) -> None:
    """Raise unless all fields are finite numbers of at least 0."""
    for name, value in vars(costs).items():
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise TypeError(f"{name}: expected a number of seconds, got {value!r}")
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}: expected a finite number of seconds of at least 0, got {value}")


def _pairs(rows: list[list[float]]) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in rows]


def _interpolated(points: list[tuple[float, float]], at: float) -> float:
    """Return the value at `at` of a function given by points, log-linear between them, and constant beyond."""
    at = min(max(at, points[0][0]), points[-1][0])
    after = bisect.bisect_left(points, (at, 0.0))
    (lower, low), (upper, high) = points[max(after - 1, 0)], points[after]
    share = math.log(at / lower) / math.log(upper / lower) if upper > lower else 0.0
    return math.exp((1 - share) * math.log(low) + share * math.log(high))


# What `auto` assumes until a call is worth measuring for; magnitudes matter, digits do not.
IN_ONE_NODE = Tuning(*(20e-6, 5e-6, 3e-10, 20e-6, 6e-9, 6e-9, 6e-10), native=[(4e3, 1e-5), (4e5, 1e-4), (4e6, 1e-3)])
BETWEEN_NODES = Tuning(  # 1 Gb/s: what is short there is not measured
    *(50e-6, 5e-6, 8e-9, 20e-6, 6e-9, 6e-9, 6e-10), native=[(4e3, 2e-4), (4e5, 5e-3)]
)
