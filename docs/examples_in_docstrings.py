"""A griffe extension: a heading before the first `>>>` of a docstring, and the options of a call for `**options`."""

import inspect
from typing import Any

import griffe

import sparsecoll


class Examples(griffe.Extension):
    """Makes a section of the examples, which docstrings have at their end without a heading."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Edit the docstring of a module, class or function."""
        if obj.docstring is None and obj.path.startswith("sparsecoll.collectives.nonblocking.i"):
            obj.docstring = griffe.Docstring(f"Nonblocking `sparsecoll.{obj.name[1:]}`.", parent=obj)
        if obj.docstring is None:
            return
        if obj.name in sparsecoll.__all__ and "**options: " in obj.docstring.value:
            _show_options(obj, getattr(sparsecoll, obj.name))
        lines = obj.docstring.value.splitlines()
        first = next((i for i, line in enumerate(lines) if line.startswith(">>> ")), None)
        if first is not None:
            lines = [*lines[:first], "Examples:", *(f"    {line}" for line in lines[first:])]
            obj.docstring.value = "\n".join(lines)


def _show_options(obj: griffe.Object, call: Any) -> None:
    """Take the arguments and the docstring that the decorator `takes` has given to a function."""
    obj.docstring.value = inspect.getdoc(call)
    del obj.parameters["options"]
    for p in inspect.signature(call).parameters.values():
        if p.name not in obj.parameters:
            kind = griffe.ParameterKind.keyword_only
            obj.parameters.add(griffe.Parameter(p.name, kind=kind, annotation=p.annotation, default=repr(p.default)))
