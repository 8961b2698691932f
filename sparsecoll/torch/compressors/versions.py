"""The state of a bucket, whose changes take effect only when a step has succeeded."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from sparsecoll.torch.tensors.layout import Array, Layout

ALL = slice(None)
MOST_FREE = 2  # arrays of the bucket's length that are retained for later gradients, for each one in the state


class Versioned:
    """An array of state in three versions, most of the time the same array; or an object that does not change.

    Args:
        array: the first version.
        places: returns the slices of named parameters in the array; `ALL` if it belongs to one of them. The default
            returns none: `Versions.exclude`, and `Versions.rollback` of some parameters, change nothing.
        flat: whether the array is of the bucket's length and dtype.

    Attributes:
        base: after the last step of the optimizer; this version is saved.
        current: after the reductions since then.
        trial: of the current reduction, or None.
    """

    def __init__(
        self, array: Any, places: Callable[[Collection[str]], list[slice]] = lambda names: [], flat: bool = False
    ) -> None:
        self.base = self.current = array
        self.trial: Any = None
        self.places, self.flat = places, flat


V = TypeVar("V", bound=Versioned)


class Versions:
    """The state of a bucket, and memory of versions that are no longer needed.

    A reduction writes trial versions. `accept` makes them the current ones once all buckets have been reduced on all
    ranks, otherwise `drop` discards them. `commit` makes the current ones permanent when the optimizer has stepped,
    otherwise `rollback` returns to those after the step before.
    """

    def __init__(self, layout: Layout) -> None:
        self.arrays: list[Versioned] = []
        self._layout = layout
        self._free: list[Array] = []

    def add(self, versioned: V) -> V:
        """Add an array to the state."""
        self.arrays.append(versioned)
        return versioned

    def empty(self) -> Array:
        """Return an array of the bucket's length whose values are not set."""
        return self._free.pop() if self._free else self._layout.empty()

    def recycle(self, array: Array) -> None:
        """Retain an array of the bucket's length that is no longer needed."""
        self._free.append(array)
        del self._free[: -MOST_FREE * max(sum(v.flat for v in self.arrays), 1)]

    def clear(self) -> None:
        """Retain no memory."""
        self._free.clear()

    def accept(self) -> None:
        """Accept the trial versions: the next reduction begins with them."""
        for v in self.arrays:
            if v.trial is not None:
                old, v.current, v.trial = v.current, v.trial, None
                self._release(v, old)

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
        for v in self.arrays:
            old, v.base = v.base, v.current
            self._release(v, old)

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Return to the versions of the last step, for all or the named parameters."""
        for v in self.arrays:
            for part in [] if v.current is v.base else [ALL] if names is None else v.places(names):
                if part == ALL:
                    old, v.current = v.current, v.base
                    self._release(v, old)
                else:
                    v.current[part] = v.base[part]

    def _release(self, v: Versioned, old: Any) -> None:
        """Retain the memory of a version, unless another version has the same."""
        if v.flat and old is not v.base and old is not v.current:
            self.recycle(old)
