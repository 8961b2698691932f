"""Python blocks of the README and the docs run."""

import importlib
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block, capsys, monkeypatch):
    if "import torch" in block:
        pytest.importorskip("torch")
    if "import cupy" in block:
        if shutil.which("g++") is None:
            pytest.skip("no g++ for a pretended GPU")
        monkeypatch.syspath_prepend(ROOT / "tests/gpu")
        importlib.import_module("pretend").device_library()
    exec(compile(block, "block", "exec"), {"__name__": "block"})
    for expected in re.findall(r"print\(.*#\s*(\(.*?\))", block):
        assert expected in capsys.readouterr().out


def test_quickstart_runs_on_virtual_ranks(capsys):
    source = (ROOT / "examples" / "quickstart.py").read_text()
    names = {"__name__": "quickstart"}
    exec(compile(source, "quickstart.py", "exec"), names)
    import sparsecoll

    lines = sparsecoll.simulate(3, names["program"]).results
    assert all("entry 10 counts 3 ranks" in line for line in lines)


def test_every_link_of_the_pages_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
