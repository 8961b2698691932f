"""The state of a bucket, whose changes take effect only when a step has succeeded."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

ALL = slice(None)


class Versioned:
    """An array of state in three versions, most of the time the same array; or an object that does not change.

    Args:
        array: the first version.
        places: returns the slices of named parameters in the array; `ALL` if it belongs to one of them. The default
            returns none: `Versions.exclude`, and `Versions.rollback` of some parameters, change nothing.

    Attributes:
        base: after the last step of the optimizer; this version is saved.
        current: after the reductions since then.
        trial: of the current reduction, or None.
    """

    def __init__(self, array: Any, places: Callable[[Collection[str]], list[slice]] = lambda names: []) -> None:
        self.base = self.current = array
        self.trial: Any = None
        self.places = places


class Versions:
    """The state of a bucket.

    A reduction writes trial versions. `accept` makes them the current ones once all buckets have been reduced on all
    ranks, otherwise `drop` discards them. `commit` makes the current ones permanent when the optimizer has stepped,
    otherwise `rollback` returns to those after the step before.
    """

    def __init__(self) -> None:
        self.arrays: list[Versioned] = []
        self.continued = False  # whether they begin after a reduction since the last step

    def add(self, versioned: Versioned) -> Versioned:
        """Add an array to the state."""
        self.arrays.append(versioned)
        return versioned

    @property
    def open(self) -> bool:
        """Whether a reduction was accepted after which the optimizer has not stepped yet."""
        return self.continued or any(v.current is not v.base for v in self.arrays)

    def accept(self) -> None:
        """Accept the trial versions: the next reduction begins with them."""
        for v in self.arrays:
            if v.trial is not None:
                v.current, v.trial = v.trial, None

    def drop(self) -> None:
        """Discard the trial versions."""
        for v in self.arrays:
            v.trial = None

    def exclude(self, names: Collection[str]) -> None:
        """Restore the trial versions of parameters that take no part in the current reduction."""
        for v in self.arrays:
            for part in v.places(names) if v.trial is not None else ():
                v.trial[part] = v.current[part]

    def commit(self) -> None:
        """Make the current versions permanent."""
        self.continued = False
        for v in self.arrays:
            v.base = v.current

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Return to the versions of the last step, for all or the named parameters."""
        self.continued = self.continued and names is not None
        for v in self.arrays:
            for part in [] if v.current is v.base else [ALL] if names is None else v.places(names):
                if part == ALL:
                    v.current = v.base
                else:
                    v.current[part] = v.base[part]
