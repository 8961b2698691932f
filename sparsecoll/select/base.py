"""The interface of selectors, and helpers that they share."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from sparsecoll.errors import NonFiniteError
from sparsecoll.vector import SMALLEST, DenseVector, SparseVector

Vector = SparseVector | DenseVector


@dataclass
class Stateful:
    """A dataclass of options whose other fields, with init=False, are its state: plain Python values, or Stateful."""

    def reset(self) -> None:
        """Discard the state kept between calls."""
        for part in self._state().values():
            if isinstance(part, Stateful):
                part.reset()
        fresh = vars(replace(self))
        vars(self).clear()
        vars(self).update(fresh)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a later run needs to continue with the same bits, as plain Python values.

        It consists of the fields with init=False, without those with compare=False, and the options' states.
        """
        state = self._state().items()
        return {name.lstrip("_"): part.state_dict() if isinstance(part, Stateful) else part for name, part in state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; raise ValueError, and change nothing, for a state of another class."""
        self.check_state(state)
        for name, part in self._state().items():
            saved = state[name.lstrip("_")]
            if isinstance(part, Stateful):
                part.load_state_dict(saved)
            else:
                setattr(self, name, saved)

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a state of another class."""
        for name, part in self._state().items():
            key, nested = name.lstrip("_"), isinstance(part, Stateful)
            if key not in state or (nested and not isinstance(state[key], dict)):
                raise ValueError(f"state: expected that of {type(self).__name__}, got one without {key!r}")
            if nested:
                part.check_state(state[key])

    def _state(self) -> dict[str, Any]:
        parts = {f: getattr(self, f.name) for f in fields(self) if f.compare}
        return {f.name: part for f, part in parts.items() if not f.init or isinstance(part, Stateful)}


@dataclass
class Selector(Stateful, ABC):
    """A method of choosing about k entries of a vector: derive a dataclass of its options, and define `select`.

    State is in fields with init=False, as plain Python values. A selector calls methods of vectors (`topk`,
    `threshold`, `sample`, `magnitude_stats`, `take`), so that `Residual.take` can add the gradient, select and clear in
    one pass over memory. One in NumPy works on `values = x.to_dense()`, which it must not change, and returns
    `checked(SparseVector.from_dense(np.where(chosen, values, 0)))`.
    """

    name: ClassVar[str]

    @abstractmethod
    def select(self, x: Vector, k: int) -> SparseVector:
        """Select about k entries of x, never zeros.

        Args:
            x: SparseVector or DenseVector.
            k: number of entries, at least 0.

        Raises:
            ValueError: `k` is negative.
            NonFiniteError: There is a NaN among the selected values (NaN has no order).
        """


@functools.cache
def built_in(kind: type) -> bool:
    """Return whether a class is the library's, not the user's."""
    return kind.__module__.partition(".")[0] == "sparsecoll"


def check_selector(selector: Any) -> None:
    """Raise TypeError unless `selector` is a Selector or None."""
    if selector is not None and not isinstance(selector, Selector):
        raise TypeError(f"selector: expected an object of sparsecoll.select or None, got {selector!r}")


def as_vector(x: Any) -> Vector:
    """Return a vector as it is, and an array as a DenseVector."""
    return x if isinstance(x, (SparseVector, DenseVector)) else DenseVector(x)


def check_order(x: SparseVector) -> SparseVector:
    """Return x; raise NonFiniteError if it contains a NaN."""
    if x.key_range()[1] >= x.nan_key():
        raise NonFiniteError("x: expected values that can be ordered by magnitude, got NaN (in an input, or inf - inf)")
    return x


def checked(x: SparseVector) -> SparseVector:
    """Return what a selector has selected: without explicit zeros, which are no entries.

    Args:
        x: the selected entries.

    Raises:
        NonFiniteError: There is a NaN among them.
    """
    lowest, highest = x.key_range()
    if x.nnz and highest >= x.nan_key():
        return check_order(x)
    return x if lowest > 0 or x.nnz == 0 else x.threshold(SMALLEST, x.nnz)
