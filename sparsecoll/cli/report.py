"""Prints each row of `bench` and `simulate` as a line of a table, and saves all rows so far as a JSON file."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsecoll.bench.timing import MPI_ALLREDUCE, Row, about
from sparsecoll.transport.network import Network

SHOWN = ("select", "encode", "decode", "merge", "dense", "wait", "other")
DENSE = (MPI_ALLREDUCE, "dense")


class Report:
    """Prints and saves rows.

    Args:
        algos: names of the algorithms in the rows, for the width of their column.
        path: the JSON file; None saves nothing.
    """

    def __init__(self, algos: Sequence[str], path: Path | None = None) -> None:
        self._path = path
        self._rows: list[Row] = []
        self._dense: dict[tuple[Any, ...], float] = {}  # seconds of dense sums, by P, n and the dtype of values
        self._width = max(map(len, algos), default=0) + 2

    def add(self, row: Row) -> None:
        """Print a row, and save it together with the earlier ones."""
        self._rows.append(row)
        self._save()  # first, since a pipe may refuse the line
        if len(self._rows) == 1:
            what = f"{'algo':<{self._width}}{'P':>5}{'n':>13}{'density':>9}{'format':>14}{'values':>10}{'ms':>10}"
            sys.stdout.write(what + f"{'x dense':>9}{'MB in':>9}" + "".join(f"{kind:>8}" for kind in SHOWN) + "\n")
        if row["algo"] in DENSE:
            for key in _dense_sums(row):
                self._dense.setdefault(key, row["seconds"])
        sys.stdout.write(self._line(row) + "\n")
        sys.stdout.flush()

    def end(self, network: Network, last: int) -> None:
        """Print and save the network that was measured between rank 0 and the last one."""
        self._save(network=asdict(network))
        sys.stdout.write(f"messages, rank 0 to {last}: {network}\n")

    def _save(self, **more: Any) -> None:
        if self._path:
            save(self._path, {"about": about(), "rows": self._rows, **more})

    def _line(self, row: Row) -> str:
        dense = next((self._dense[key] for key in _dense_sums(row) if key in self._dense), None)
        received = row["bytes_received"]
        ratio = "-" if dense is None or not row["seconds"] else f"{dense / row['seconds']:.2f}"
        moved = "-" if received is None else f"{received / 1e6:.2f}" if received >= 1e6 else f"{received / 1e6:.3g}"
        what = f"{row['algo']:<{self._width}}{row['P']:>5}{row['n']:>13,}{row['density']:>9.4g}{row['format']:>14}"
        numbers = f"{row['value_dtype']:>10}{row['seconds'] * 1e3:>10.2f}{ratio:>9}{moved:>9}"
        return what + numbers + "".join(f"{row[kind] * 1e3:>8.1f}" for kind in SHOWN)


def _dense_sums(row: Row) -> list[tuple[Any, ...]]:
    """Return the dense sums that a row is compared with: that of the same dtype on the wire, else the first one."""
    return [(row["P"], row["n"], row["value_dtype"]), (row["P"], row["n"])]


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically: a reader sees the old content or the new one. Its mode, and a link to it, stay."""
    path = Path(os.path.realpath(path))
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(content, indent=1) + "\n")
        if path.exists():
            shutil.copymode(path, part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def check_writable(*paths: Path | None) -> None:
    """Check before hours of measuring that files can be written; None is no file.

    Raises:
        ValueError: A folder is missing or not writable, or a path is not a regular file.
    """
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise ValueError(f"{path}: expected a file in an existing folder, got no folder {str(path.parent)!r}")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: expected a file, got a folder or device")
        if not os.access(path.parent, os.W_OK):
            raise ValueError(f"{path}: expected a writable folder, got {str(path.parent)!r}")
