"""A griffe extension: the house's short forms of docstrings as Google's style wants them, one entry a parameter."""

import re
from typing import Any

import griffe

GROUP = re.compile(r"^(    )(\w+(?:, \w+)+): (.*)$")


class Examples(griffe.Extension):
    """Puts a heading before the first `>>>`, and splits `a, b: text` into an entry for a and one for b."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class and function."""
        if obj.docstring is None:
            return
        lines = _ungrouped(obj.docstring.value.splitlines())
        first = next((i for i, line in enumerate(lines) if line.startswith(">>> ")), None)
        if first is not None:
            lines = [*lines[:first], "Examples:", *(f"    {line}" for line in lines[first:])]
        obj.docstring.value = "\n".join(lines)


def _ungrouped(lines: list[str]) -> list[str]:
    """`a, b: text` of the sections Args and Attributes, with the lines that go on from it, once for each name."""
    made: list[str] = []
    section = ""
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        if line and not line.startswith(" "):
            section = line
        group = GROUP.match(line) if section in ("Args:", "Attributes:") else None
        if group is None:
            made.append(line)
            continue
        more = []
        while index < len(lines) and lines[index].startswith("     "):
            more.append(lines[index])
            index += 1
        for name in group[2].split(", "):
            made += [f"    {name}: {group[3]}", *more]
    return made
