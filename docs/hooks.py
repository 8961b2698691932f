"""Hooks of the site: its footer names the version; files of the repository that are not on it are named, not linked."""

import re
from pathlib import Path
from typing import Any

VERSION = Path(__file__).parent.parent / "sparsecoll" / "_version.py"


def on_config(config: Any, **_: Any) -> None:
    """The version, without importing the package."""
    version = re.findall(r'__version__ = "(.+)"', VERSION.read_text())[0]
    config.copyright = f"sparsecoll {version}, Apache-2.0"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """`[text](../path)` becomes text and path."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", _named, markdown)


def _named(match: re.Match[str]) -> str:
    text, path = match.groups()
    return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
