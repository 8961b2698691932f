"""Exceptions that only this library raises, and checks of arguments."""

from __future__ import annotations

import numbers
from collections.abc import Collection
from typing import Any

import numpy as np


class CommunicationError(RuntimeError):
    """Ranks pass different arguments, a peer does not answer within `timeout`, or a message is invalid.

    The message names the ranks, the argument and the values.
    """


class NonFiniteError(ValueError):
    """A gradient contains NaN or infinity on some rank.

    The message names the parameter and the rank.
    """


def on_all_ranks(error: RuntimeError) -> RuntimeError:
    """Mark an exception that every rank raises by itself, so that none reports it to the others; return it."""
    error.on_all_ranks = True  # type: ignore[attr-defined]
    return error


def is_known(error: BaseException, transport: Any) -> bool:
    """Return whether all ranks of a communicator raise an exception, since a call on it, or each by itself, did."""
    known = getattr(error, "on_all_ranks", False)
    return known is True or known == transport.number


def check_choice(argument: str, value: str, choices: Collection[str]) -> None:
    """Raise unless the value of an argument is one of several.

    Args:
        argument: its name.
        value: the value passed.
        choices: the values allowed.

    Raises:
        ValueError: `value` is not in `choices`.
    """
    if value not in choices:
        raise ValueError(f"{argument}: expected one of {', '.join(choices)}, got {value!r}")


def check_flag(argument: str, value: object) -> None:
    """Raise TypeError unless the value of an argument is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument}: expected True or False, got {value!r}")


def check_integer(argument: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Return the value of an argument, an integer, also of NumPy, of at least `least` and at most `most`, or raise."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{argument}: expected an integer, got {value!r}")
    if (least is not None and value < least) or (most is not None and value > most):
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{argument}: expected {expected}, got {value}")
    return int(value)


def check_number(argument: str, value: Any, interval: str, source: str = "") -> float:
    """Return the value of an argument, a real number, also of NumPy or torch, or raise.

    Args:
        argument: its name.
        value: the value passed.
        interval: where it must be, as "[0, 1)" or "(0, inf)".
        source: what an error says at its end (default: nothing).

    Raises:
        TypeError: `value` is no number.
        ValueError: `value` is outside the interval, or NaN.
    """
    number = value.item() if getattr(value, "shape", None) in ((), (1,)) else value
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise TypeError(f"{argument}: expected a number in {interval}, got {value!r}{source}")
    number, low, high = float(number), *map(float, interval[1:-1].split(","))
    if not low <= number <= high or (number == low and interval[0] == "(") or (number == high and interval[-1] == ")"):
        raise ValueError(f"{argument}: expected in {interval}, got {value}{source}")
    return number
