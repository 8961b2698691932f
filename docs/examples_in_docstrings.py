"""A griffe extension: doctests at the end of a docstring are shown as examples."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Puts a heading before the first `>>>` of a docstring, as Google's style wants it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class and function."""
        if obj.docstring is None or "\n>>> " not in f"\n{obj.docstring.value}":
            return
        lines = obj.docstring.value.splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith(">>> "))
        examples = [f"    {line}" for line in lines[first:]]
        obj.docstring.value = "\n".join([*lines[:first], "Examples:", *examples])
