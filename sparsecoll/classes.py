"""What a class of a user's own must be: a dataclass, whose fields are its options, with a name."""

from __future__ import annotations

import functools
import sys
from dataclasses import fields
from inspect import get_annotations, signature
from typing import Any


def check_class(argument: str, part: Any) -> None:
    """Raise TypeError unless the class of an object has a name, and options as `check_options` wants them.

    Args:
        argument: what the message begins with.
        part: an Algorithm, a RowAlgorithm, a Format or a Compressor.
    """
    check_options(argument, part)
    name = getattr(part, "name", None)
    if not isinstance(name, str):
        kind = type(part).__name__
        raise TypeError(
            f"{argument}: expected a class with a string `name`, got {kind} with {name}: add name = '...' to it"
        )


def check_options(argument: str, part: Any) -> None:
    """Raise TypeError unless the options of an object, which may be of a class of the user's, are dataclass fields.

    Ranks compare these fields, copies are made with them, and `Stateful.reset` makes a new object of them.

    Args:
        argument: what the message begins with.
        part: an object of a class that is derived from a dataclass, such as a Selector.
    """
    kind: type = type(part)
    wrong = _not_fields(kind)
    if wrong:
        raise TypeError(f"{argument}: expected a dataclass, whose options are its fields, got {wrong}")


@functools.cache
def _not_fields(kind: type) -> str:
    """Return what of a class derived from a dataclass makes options that are no fields, and the cure; "" if nothing."""
    for base in kind.__mro__:
        if not hasattr(base, "__dataclass_fields__") or "__dataclass_fields__" in vars(base):
            continue
        if "__init__" in vars(base):
            return f"{base.__name__} with an __init__ of its own: add @dataclass, and make its options annotated fields"
        options = [name for name, hint in _annotations(base).items() if not _is_class_variable(hint)]
        if options:
            return f"{base.__name__}, which is none, with {', '.join(options)}: add @dataclass"
    options, arguments = [f.name for f in fields(kind) if f.init], list(signature(kind).parameters)
    if sorted(options) != sorted(arguments):
        return (
            f"{kind.__name__} with an __init__ of {', '.join(arguments) or 'nothing'} beside the fields"
            f" {', '.join(options) or 'none'}: make its options annotated fields, and let @dataclass write __init__"
        )
    return ""


def _annotations(kind: type) -> dict[str, Any]:
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(kind, format=annotationlib.Format.STRING)
    return get_annotations(kind)


def _is_class_variable(hint: Any) -> bool:
    text = hint if isinstance(hint, str) else str(hint)
    return text.partition("[")[0].rpartition(".")[2] == "ClassVar"
