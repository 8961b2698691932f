"""Build entry point. Metadata is in pyproject.toml, but for the README, whose figures a package index cannot show."""

import re
from pathlib import Path

from setuptools import setup

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
without_figures = re.sub(r"^!\[.*\]\(docs/.*\)\n\n", "", readme, flags=re.MULTILINE)
setup(long_description=without_figures, long_description_content_type="text/markdown")
