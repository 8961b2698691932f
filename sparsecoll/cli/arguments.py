"""Arguments of the command line: their types, and a parser that prints once per job."""

from __future__ import annotations

import argparse
import ast
import math
import sys
import types
import typing
from dataclasses import fields
from typing import Any, NoReturn

from sparsecoll.algorithms import ALGORITHMS, Algorithm
from sparsecoll.errors import check_choice
from sparsecoll.select import SELECTORS
from sparsecoll.transport import launcher

MPI_ALLREDUCE = "MPI_Allreduce"  # the name of MPI's own dense sum among the algorithms


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
        sys.stderr.write(f"sparsecoll: {text}\n")
    sys.exit(status)


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    try:
        number = float(text)
        whole = int(number)
    except (ValueError, OverflowError):
        whole, number = 0, 1.0
    if whole != number or not 1 <= whole <= sys.maxsize:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, such as 8 or 24e6, got {text!r}")
    return whole


def density(text: str) -> float:
    """Return a density in (0, 1]."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and up to 1, such as 0.01, got {text!r}")
    return share


def cost(text: str) -> float:
    """Return a finite number of seconds of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number of at least 0, such as 50e-6, got {text!r}")
    return number


def algorithm_text(text: str) -> str:
    """Return the text of a valid algorithm, or MPI_ALLREDUCE; k is that of --density."""
    try:
        k = None if text == MPI_ALLREDUCE else algorithm(text).k
        if k is not None:
            raise ValueError(f"{text}: expected --density instead of k, which it would override, got k={k}")
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("algo: ")) from None
    return text


def algorithm(text: str) -> Algorithm:
    """Return an algorithm from `name` or `name:option=value,option=value`; `selector=` takes a selector's name.

    Raises:
        ValueError: There is no such algorithm, option or selector, or the value has the wrong type.

    >>> algorithm("sparcml:variant=dynamic").describe()
    "sparcml(k=None, selector=None, variant='dynamic', network=None)"
    """
    name, _, rest = text.partition(":")
    check_choice("algo", name, ALGORITHMS)
    known = {f.name for f in fields(ALGORITHMS[name]) if f.init}
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        option, equals, value = pair.partition("=")
        if not equals or option not in known:
            raise ValueError(f"algo: expected {name}:OPTION=VALUE with one of {', '.join(sorted(known))}, got {pair!r}")
        if option == "selector":
            check_choice("selector", value, SELECTORS)
            options[option] = SELECTORS[value]()
        else:
            options[option] = _typed(name, option, _literal(value))
    return ALGORITHMS[name](**options)


def _typed(name: str, option: str, value: Any) -> Any:
    """Return an option's value if it has the type that the algorithm declares."""
    declared = typing.get_type_hints(ALGORITHMS[name])[option]
    types_ = typing.get_args(declared) if isinstance(declared, types.UnionType) else (declared,)
    if float in types_ and type(value) is int:
        return float(value)
    if type(value) not in types_:
        names = " or ".join("None" if t is types.NoneType else t.__name__ for t in types_)
        raise ValueError(f"{name}:{option}: expected {names}, got {value!r}")
    return value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
