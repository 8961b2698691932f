"""Density schedules: which share of a vector to send, by step and by layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase


class Schedule(ABC):
    """A density by step (from 0 on)."""

    @abstractmethod
    def at(self, step: int) -> float:
        """The density, in (0, 1]."""


def _check(density: float) -> float:
    if isinstance(density, bool) or not isinstance(density, (int, float)) or not 0 < density <= 1:
        raise ValueError(f"density: expected in (0, 1], got {density!r}")
    return float(density)


@dataclass(frozen=True)
class Constant(Schedule):
    """The same density at every step."""

    density: float

    def __post_init__(self) -> None:
        _check(self.density)

    def at(self, step: int) -> float:
        return self.density


@dataclass(frozen=True)
class WarmUp(Schedule):
    """From `start` to `density` in `stages` equal factors over `steps` steps, then constant.

    Deep Gradient Compression (Lin and others, ICLR 2018, section 3.4) begins with 25 % and takes 4 epochs to 0.1 %.

    >>> [round(WarmUp(0.001, steps=8).at(step), 4) for step in (0, 2, 4, 6, 8)]
    [0.25, 0.0629, 0.0158, 0.004, 0.001]
    """

    density: float
    steps: int
    start: float = 0.25
    stages: int = 4

    def __post_init__(self) -> None:
        _check(self.density)
        _check(self.start)
        if self.steps < 1 or self.stages < 1:
            raise ValueError(f"steps, stages: expected at least 1, got {self.steps} and {self.stages}")

    def at(self, step: int) -> float:
        stage = min(step * self.stages // self.steps, self.stages)
        return float(self.start * (self.density / self.start) ** (stage / self.stages))


Density = float | Schedule | Mapping[str, "float | Schedule"]


@dataclass(frozen=True)
class Densities:
    """What a `density` argument says: one schedule for all, or the first that matches for each layer.

    Args:
        rules: (pattern of names as in fnmatch, schedule); the pattern None is for whole buckets.
    """

    rules: tuple[tuple[str | None, Schedule], ...]

    @classmethod
    def of(cls, density: Density) -> Densities:
        """Read the argument.

        Raises:
            ValueError: a density outside (0, 1]; an empty mapping.
        """
        if isinstance(density, Mapping):
            if not density:
                raise ValueError("density: expected at least one pattern, got none")
            return cls(tuple((name, _schedule(value)) for name, value in density.items()))
        return cls(((None, _schedule(density)),))

    @property
    def by_layer(self) -> bool:
        """Whether layers have densities of their own."""
        return self.rules[0][0] is not None

    def k(self, length: int, step: int, name: str | None = None) -> int:
        """Entries to select of a bucket, or of the layer of this name; at least one.

        Raises:
            ValueError: no pattern matches the name.
        """
        for pattern, schedule in self.rules:
            if pattern is None or (name is not None and fnmatchcase(name, pattern)):
                return min(length, max(1, round(schedule.at(step) * length)))
        raise ValueError(f"density: expected a pattern for every layer, got none for {name!r} (add '*')")


def _schedule(density: float | Schedule) -> Schedule:
    return density if isinstance(density, Schedule) else Constant(density)
