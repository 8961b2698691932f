"""How figures look: each line has a colour, a dash and a marker of its own.

Needs matplotlib. A figure is as wide as a column of text, has letters of its size, and is legible in black and white.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#0b5cad", "#b3420a", "#1b7a3d", "#a3195b", "#6a3fb5", "#00727a", "#7a5c00", "#444444")
DASHES = ("-", *((0, on) for on in ((5, 1.5), (1, 1), (6, 1.5, 1, 1.5), (9, 2), (3, 1, 1, 1, 1, 1), (2, 2), (1, 2.5))))
# of a line; the colours are legible as text on white, and inverted on black
STYLES = [*zip(COLOURS, DASHES, "osD^vP*X", strict=True)]
WIDTH = 7.0  # inches; a text column


def axes_of(height: float = 3.6) -> Any:
    """Return a figure of a column's width and this height in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", linewidth=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def save(figure: Any, path: str | Path) -> None:
    """Save a figure; the same rows give the same file."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "sparsecoll"}):
        figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def draw(axes: Any, series: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw a line of points for each of at most eight names, which stand beside the axes."""
    for (name, points), (colour, dash, marker) in zip(series.items(), STYLES, strict=False):
        line = {"color": colour, "linestyle": dash, "marker": marker, "markevery": max(1, len(points) // 6)}
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.4, markersize=5, **line)
    axes.figure.legend(loc="outside right center", fontsize="small", frameon=False, handlelength=3.5)
