"""Density schedules: which fraction of a vector to send, by step."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sparsecoll.errors import check_integer, check_number

RARE = 0.1  # the density below which an entry waits for more than ten steps on average
ENTRIES = "entries by density, which may depend on the step alone"  # what errors call k if ranks have another one


class Schedule(ABC):
    """A density that depends on the step. Derive from this class and define `at` for a schedule of your own.

    `at` is called only for steps that are taken, in any order, and must return the same density on every rank. A value
    that is not in (0, 1], or that selects another number of entries than on other ranks, is an error on all ranks.
    Ranks compare their schedules by `repr`, which shows the attributes of the object; define `__repr__` if some of them
    differ between ranks or change from step to step.
    """

    @abstractmethod
    def at(self, step: int) -> float:
        """Return the density of a step.

        Args:
            step: number of optimizer steps before this one (0 in the first step); in LocalOptimizer, of means of a
                fragment.

        Returns:
            Fraction of the entries to send, in (0, 1].
        """

    def settles_at(self) -> float | None:
        """Return the density of all late steps; None, the default, if it is not known.

        It decides whether rank 0 warns about optimizers that do not work with a low density; None counts as low.
        """
        return None

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return without_addresses(f"{type(self).__qualname__}({options})")


def without_addresses(text: str) -> str:
    """Return a representation of an object without addresses in memory, which differ between ranks."""
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", text)


def check_density(density: float, schedule: Schedule | None = None, method: str = "") -> float:
    """Return a density, of the named method of a schedule if there is one.

    Raises:
        ValueError: It is outside (0, 1].
        TypeError: It is no number.
    """
    source = "" if schedule is None else f" from {method} of {schedule!r}: return the share of the entries as a float"
    return check_number("density", density, "(0, 1]", source)


@dataclass(frozen=True)
class Constant(Schedule):
    """The same density at every step.

    Args:
        density: fraction of the entries to send, in (0, 1].

    Raises:
        ValueError: The density is outside (0, 1].
        TypeError: It is no number.
    """

    density: float

    def __post_init__(self) -> None:
        check_density(self.density)

    def at(self, step: int) -> float:
        return self.density

    def settles_at(self) -> float:
        return self.density


@dataclass(frozen=True)
class WarmUp(Schedule):
    """Falls from `start` to `density`, then stays constant.

    With `steps`, it falls by equal factors in `stages` stages: Deep Gradient Compression (Lin and others, ICLR 2018,
    section 3.4) starts at 25 % and reaches 0.1 % after 4 epochs. Without, the density of step t is 1 / (t + 1): 1 % is
    reached after 100 steps, which have sent as many entries as four gradients have.

    Args:
        density: final density, in (0, 1].
        steps: number of optimizer steps until it is reached; None, the default, needs no knowledge of their number.
        start: density of the first step, in (0, 1] (default: 0.25).
        stages: number of times that the density changes (default: 4).

    Raises:
        ValueError: A density is outside (0, 1], or `steps` or `stages` is below 1.
        TypeError: A density is no number, or `steps` or `stages` no integer.

    >>> [round(WarmUp(0.001, steps=8).at(step), 4) for step in (0, 2, 4, 6, 8)]
    [0.25, 0.0629, 0.0158, 0.004, 0.001]
    >>> [WarmUp(0.01).at(step) for step in (0, 3, 9, 99)]
    [0.25, 0.25, 0.1, 0.01]
    """

    density: float
    steps: int | None = None
    start: float = 0.25
    stages: int = 4

    def __post_init__(self) -> None:
        check_density(self.density)
        check_density(self.start)
        check_integer("steps", 1 if self.steps is None else self.steps, 1)
        check_integer("stages", self.stages, 1)

    def at(self, step: int) -> float:
        if self.steps is None:
            return max(self.density, min(self.start, 1 / (step + 1)))
        stage = min(step * self.stages // self.steps, self.stages)
        return float(self.start * (self.density / self.start) ** (stage / self.stages))

    def settles_at(self) -> float:
        return self.density


Density = float | Schedule


def as_schedule(density: Density) -> Schedule:
    """Return the schedule that an argument `density` stands for.

    Raises:
        ValueError: It is a number outside (0, 1].
        TypeError: It is neither a number nor a Schedule.
    """
    if isinstance(density, Mapping):
        raise TypeError(
            f"density: expected a number or a Schedule, got the mapping {density!r}: layers that need another one get"
            " an optimizer of their own, and small ones are sent whole by dense_below"
        )
    return density if isinstance(density, Schedule) else Constant(check_density(density))


def is_rare(schedule: Schedule) -> bool:
    """Return whether entries wait for many steps in the end, as far as is known."""
    end = schedule.settles_at()
    return end is None or check_density(end, schedule, "settles_at()") < RARE


@contextlib.contextmanager
def as_row_density() -> Iterator[None]:
    """Context manager: errors name the argument `row_density`."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"row_{error}") from None
