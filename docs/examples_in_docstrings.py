"""A griffe extension that puts the heading "Examples:" before the first `>>>` of a docstring."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Makes a section of the examples, which docstrings have at their end without a heading."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Edit the docstring of a module, class or function."""
        if obj.docstring is None:
            return
        lines = obj.docstring.value.splitlines()
        first = next((i for i, line in enumerate(lines) if line.startswith(">>> ")), None)
        if first is not None:
            lines = [*lines[:first], "Examples:", *(f"    {line}" for line in lines[first:])]
            obj.docstring.value = "\n".join(lines)
