"""Algorithms, selectors and compressors by text: `NAME[:OPTION=VALUE,...]`, where NAME may be `MODULE:CLASS`."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sparsecoll.algorithms import ALGORITHMS, Algorithm
from sparsecoll.select import SELECTORS, Selector

T = TypeVar("T")


def algorithm(text: str) -> Algorithm:
    """Return an algorithm: `NAME` or `NAME:OPTION=VALUE,...`, with a name in ALGORITHMS or `MODULE:CLASS`.

    A module is imported as `python -m` would do it, hence from the working directory, too. The option `selector` takes
    a selector in the same syntax, with one option of its own at most.

    Raises:
        ValueError: There is no such algorithm, class or option, or a value has the wrong type.

    >>> algorithm("sparcml:variant=dynamic").describe()
    "sparcml(k=None, selector=None, variant='dynamic', network=None)"
    """
    return _made("algo", text, ALGORITHMS, Algorithm)


def selector(text: str) -> Selector:
    """Return a selector, by a name in SELECTORS or `MODULE:CLASS`; as `algorithm`."""
    return _made("selector", text, SELECTORS, Selector)


def compressor(text: str, **options: Any) -> Any:
    """Return a compressor, by a name in COMPRESSORS or `MODULE:CLASS`; as `algorithm`. Needs torch.

    Args:
        text: name and options.
        options: more options, used if the compressor has them and the text does not.
    """
    from sparsecoll.torch.compressors import COMPRESSORS, Compressor

    return _made("compressor", text, COMPRESSORS, Compressor, **options)


def is_own(text: str) -> bool:
    """Return whether a text names a class by its module, which not every rank may be able to import."""
    return re.search(r"(^|=)[\w.]+:\w+(:|,|$)", text) is not None


def _made(what: str, text: str, registry: Mapping[str, Callable[..., T]], base: Any, **usual: Any) -> T:
    name, _, rest = text.partition(":")
    if (make := registry.get(name)) is None and re.match(r"\w+(:|$)", rest):
        own, _, rest = rest.partition(":")
        name = f"{name}:{own}"
        make = _own_class(what, name, base)
    if make is None:
        raise ValueError(f"{what}: expected one of {', '.join(registry)}, or MODULE:CLASS, got {text!r}")
    made = make if isinstance(make, type) else type(make())  # a preset has the options of its class
    known = list(inspect.signature(made).parameters)
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        option, equals, value = pair.partition("=")
        if not equals or option not in known:
            raise ValueError(f"{what}: expected OPTION=VALUE of {name} with one of {', '.join(known)}, got {pair!r}")
        options[option] = selector(value) if option == "selector" else _typed(name, made, option, _literal(value))
    options = {option: value for option, value in usual.items() if option in known} | options
    try:
        return make(**options)
    except TypeError as error:  # such as an abstract class, or an option that has no default
        raise ValueError(f"{what}: {error}") from None


def _own_class(what: str, path: str, base: Any) -> Any:
    """Return the class that MODULE:CLASS names."""
    module, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a module raises
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{what}: expected MODULE:CLASS that can be imported, got {path!r} ({why})") from None
    if not isinstance(found, type) or not issubclass(found, base):
        kind = f"the class {name}" if isinstance(found, type) else f"an object of {type(found).__name__}"
        raise ValueError(f"{what}: expected a class derived from {base.__name__}, got {path!r}, {kind}")
    return found


def _typed(name: str, make: Callable[..., Any], option: str, value: Any) -> Any:
    """Return an option's value if it has the declared type, where that can be told."""
    try:
        declared = typing.get_type_hints(make).get(option, Any)
    except NameError:  # imported for type checkers only
        return value
    types_ = typing.get_args(declared) if isinstance(declared, types.UnionType) else (declared,)
    if float in types_ and type(value) is int:
        return float(value)
    if type(value) not in types_ and all(isinstance(t, type) for t in types_):
        names = " or ".join("None" if t is types.NoneType else t.__name__ for t in types_)
        raise ValueError(f"{name}:{option}: expected {names}, got {value!r}")
    return value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
