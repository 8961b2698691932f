"""The cells of the notebooks of examples/ run in order and print what is stored.

`python tests/test_notebooks.py` stores what they print.
"""

import contextlib
import io
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))


def run(cells):
    """Run the cells of code in one namespace; yield each with what it prints."""
    names = {"__name__": "notebook"}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
        yield cell, printed.getvalue()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_cells_print_what_is_stored(path):
    for cell, printed in run(json.loads(path.read_text())["cells"]):
        stored = "".join(line for output in cell["outputs"] for line in output["text"])
        assert printed == stored, cell["id"]
        assert len(stored) < 2000


if __name__ == "__main__":
    for notebook in NOTEBOOKS:
        content = json.loads(notebook.read_text())
        for cell, printed in run(content["cells"]):
            text = {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
            cell["outputs"] = [text] if printed else []
        notebook.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
