"""Arguments of the command line: their types, and a parser that prints once per job."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from sparsecoll.bench.names import compressor, is_own, selector
from sparsecoll.bench.timing import MPI_ALLREDUCE, Call
from sparsecoll.transport import launcher


class Parser(argparse.ArgumentParser):
    """Prints help and errors once per job, and an error as one line."""

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)", 2)

    def _print_message(self, message: str, file: Any = None) -> None:
        if launcher.rank() == 0:
            super()._print_message(message, file)


def fail(text: str, status: int, everywhere: bool = True) -> NoReturn:
    """Exit with one line on stderr, which only one rank prints if all have the error (`everywhere`)."""
    if launcher.rank() == 0 or not everywhere:
        sys.stderr.write(f"sparsecoll: {' '.join(text.split())}\n")
    sys.exit(status)


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    number = _number(text)
    if not 1 <= number <= sys.maxsize or int(number) != number:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1 and below 2^63, got {text!r}")
    return int(number)


def density(text: str) -> float:
    """Return a density in (0, 1]."""
    if not 0 < _number(text) <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and up to 1, such as 0.01, got {text!r}")
    return float(text)


def cost(text: str) -> float:
    """Return a finite number of seconds of at least 0."""
    if not 0 <= _number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number of at least 0, such as 50e-6, got {text!r}")
    return float(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


MADE: dict[str, Callable[[str], object]] = {
    "algo": lambda text: text == MPI_ALLREDUCE or Call(text, None).made(),
    "selector": selector,
    "compressor": compressor,
}


def checked(what: str) -> Callable[[str], str]:
    """Return the type of a text of MADE; one that names a module is checked later, on all ranks at once."""

    def text_of(text: str) -> str:
        try:
            if not is_own(text):
                MADE[what](text)
        except (ValueError, TypeError, ImportError) as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{what}: ")) from None
        return text

    return text_of
