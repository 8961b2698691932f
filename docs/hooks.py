"""Hooks of the site: files of the repository that are not on it are named, not linked."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """`[text](../path)` becomes text and path."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", _named, markdown)


def _named(match: re.Match[str]) -> str:
    text, path = match.groups()
    return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
