"""Draws figures from rows of `bench`: stacked phases, time against density, time and volume against P.

Needs matplotlib. Bars differ by hatch and lines as in `style`, so that figures are legible in black and white.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsecoll.bench.timing import Row
from sparsecoll.cli.style import STYLES, axes_of, draw, save
from sparsecoll.telemetry.trace import KINDS

PARTS = (*KINDS, "other")
HATCHES = dict(zip(PARTS, ("///", "...", "\\\\\\", "xx", "++", "", "--"), strict=True))
NEEDED = ("n", "P", "density", "seconds")  # columns without which there is no figure
NUMBERS = (*NEEDED, *PARTS, "bytes_received")


def rows_of(path: str | Path) -> list[Row]:
    """Return the rows in a file that `bench --json` or `simulate --json` wrote.

    Raises:
        ValueError: The file cannot be read, or contains something else.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (ValueError, OSError) as error:  # of JSON or of UTF-8
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: expected the JSON rows of bench or simulate ({why})") from None
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) and "algo" in r for r in rows):
        raise ValueError(f"{path}: expected the JSON rows of bench or simulate, got something else")
    for row in rows:
        wrong = [name for name in NUMBERS if name in row and not isinstance(row[name], (int, float, type(None)))]
        wrong += [name for name in NEEDED if row.get(name) is None]
        if wrong:
            raise ValueError(f"{path}: expected a number for {', '.join(wrong)} in each row, got {row}")
    return rows


def chosen(rows: Sequence[Row], names: Sequence[str]) -> Sequence[Row]:
    """Return the rows of the named lines, and of dense sums if none of these is named; all rows if no line is named.

    Raises:
        ValueError: A name is that of no line.
    """
    known = dict.fromkeys(map(label, rows))
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"--algo: expected some of {', '.join(known)}, got {', '.join(wrong)}")
    dense = _dense(rows)
    wanted = {*names, *(() if dense.intersection(names) else dense)}
    return [row for row in rows if not names or label(row) in wanted]


def _dense(rows: Sequence[Row]) -> set[str]:
    """Return the lines of dense sums: those that have no density but 1."""
    return {*map(label, rows)} - {label(row) for row in rows if row["density"] != 1.0}


def label(row: Row) -> str:
    """Return the row's name, or its algorithm with format and dtype if these are not the defaults."""
    if "name" in row:
        return str(row["name"])
    extra = [row["format"]] if row.get("format", "auto") != "auto" else []
    extra += [row["value_dtype"]] if row.get("value_dtype", "float32") != "float32" else []
    return " ".join([row["algo"], *extra])


def stacked(rows: Sequence[Row], path: str | Path, title: str = "") -> None:
    """Draw a bar for each row: milliseconds by kind of work (mean over the ranks)."""
    figure, axes = axes_of(1.2 + 0.32 * len(rows))
    names = [label(r) + ("" if r["density"] in (None, 1.0) else f", {100 * r['density']:.3g} %") for r in rows]
    positions = range(len(rows))  # rows may have the same name
    left = [0.0] * len(rows)
    for part in PARTS:
        widths = [1e3 * r.get(part, 0.0) for r in rows]
        if any(widths):
            fill = {"hatch": HATCHES[part], "edgecolor": "black", "linewidth": 0.4, "height": 0.7}
            axes.barh(positions, widths, left=left, label=part, **fill)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(positions, names)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(title, fontsize="medium", loc="left")
    figure.legend(fontsize="small", ncols=len(PARTS), loc="outside lower center", frameon=False)
    save(figure, path)


def lines(rows: Sequence[Row], x: str, y: str, path: str | Path, title: str = "", scale: float = 1.0) -> None:
    """Draw a line for each label: column y times `scale` against column x, both logarithmic.

    Raises:
        ValueError: There are more lines than can be told apart.
    """
    dense = _dense(rows) if x == "density" else set()
    ticks = sorted({r[x] for r in rows if label(r) not in dense})
    series: dict[str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys(map(label, rows)):
        points = sorted((r[x], scale * r[y]) for r in rows if label(r) == name and r.get(y))
        if points and name in dense:  # the same at every density
            points = [(tick, points[0][1]) for tick in ticks]
        if points:
            series[name] = points
    if len(series) > len(STYLES):
        most, known = len(STYLES), ", ".join(series)
        raise ValueError(f"--algo: expected at most {most} lines in a figure, got {len(series)}: choose among {known}")
    figure, axes = axes_of()
    draw(axes, series)
    axes.set_xscale("log", base=2 if x == "P" else 10)
    axes.set_yscale("log")
    _number_ticks(axes.yaxis)
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel({"P": "ranks", "density": "density k / n"}.get(x, x))
    axes.set_ylabel(AXES.get(y, y))
    axes.set_title(title, fontsize="medium", loc="left")
    save(figure, path)


def _number_ticks(axis: Any) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5 times powers of ten, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


AXES = {"seconds": "milliseconds", "bytes_received": "MB received by the busiest rank"}
SCALES = {"seconds": 1e3, "bytes_received": 1e-6}


def figures(rows: Sequence[Row], folder: str | Path, stem: str) -> list[Path]:
    """Draw every figure that the rows have points for, as SVG files in a folder, and return their paths.

    Raises:
        ValueError: There is no such folder, and none can be made.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: expected a folder for the figures ({error.strerror})") from None
    made, of_all = [], _dense(rows)

    def group(key: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            groups.setdefault(tuple(row.get(name) for name in key), []).append(row)
        return groups

    for (n, P), some in group(("n", "P")).items():
        if any(row.get(part) for row in some for part in PARTS):
            made.append(Path(folder, f"{stem}_phases_n{n}_P{P}.svg"))
            stacked(some, made[-1], f"n = {n:,}, {P} ranks")
        if len({row["density"] for row in some if label(row) not in of_all}) > 1:
            made.append(Path(folder, f"{stem}_density_n{n}_P{P}.svg"))
            lines(some, "density", "seconds", made[-1], f"n = {n:,}, {P} ranks", SCALES["seconds"])
    for (n, density), chosen in group(("n", "density")).items():
        sparse = [row for row in chosen if label(row) not in of_all]
        some = [*(row for row in rows if row["n"] == n and label(row) in of_all), *sparse]
        if not sparse and any(row["n"] == n and label(row) not in of_all for row in rows):
            continue  # they are a line in the figures of the other densities
        if len({row["P"] for row in some}) > 1:
            for y, what in (("seconds", "time"), ("bytes_received", "volume")):
                made.append(Path(folder, f"{stem}_{what}_n{n}_d{density:g}.svg"))
                lines(some, "P", y, made[-1], f"n = {n:,}, density {100 * density:.3g} %", SCALES[y])
    return made
