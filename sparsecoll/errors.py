"""Exceptions that only this library raises, and checks of arguments."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np


class CommunicationError(RuntimeError):
    """Ranks pass different arguments, a peer does not answer within `timeout`, or a message is invalid.

    The message names the ranks, the argument and the values.
    """


class NonFiniteError(ValueError):
    """A gradient contains NaN or infinity on some rank.

    The message names the parameter and the rank.
    """


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
