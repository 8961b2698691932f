"""How figures look: each line has a colour, a dash and a marker of its own, and its name at its end.

Needs matplotlib. A figure is as wide as a column of text, has letters of the size of text, and is legible in black and
white.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STYLES = (  # colour, dash and marker of a line; the colours are legible as text on white, and inverted on black
    ("#0b5cad", "-", "o"),
    ("#b3420a", (0, (5, 1.5)), "s"),
    ("#1b7a3d", (0, (1, 1)), "D"),
    ("#a3195b", (0, (6, 1.5, 1, 1.5)), "^"),
    ("#6a3fb5", (0, (9, 2)), "v"),
    ("#00727a", (0, (3, 1, 1, 1, 1, 1)), "P"),
    ("#7a5c00", (0, (2, 2)), "*"),
    ("#444444", (0, (1, 2.5)), "X"),
)
LABEL_POINTS = 11.0  # least distance of two names at the ends of lines
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


def draw(axes: Any, series: Mapping[str, Sequence[tuple[float, float]]]) -> list[Any]:
    """Draw a line of points for each of at most eight names; return the names, at the ends of lines, for `spread`."""
    names, ground = [], {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the lines of others
    for (name, points), (colour, dash, marker) in zip(series.items(), STYLES, strict=False):
        line = {"color": colour, "linestyle": dash, "marker": marker, "markevery": max(1, len(points) // 6)}
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.4, markersize=5, **line)
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3}
        where = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        text = {"color": colour, "fontsize": 9, "bbox": ground, "arrowprops": leader}
        names.append(axes.annotate(name, points[-1], **text, **where))
    return names


def spread(axes: Any, names: Sequence[Any]) -> None:
    """Move the names at the ends of lines up or down until none covers another; the axes are complete."""
    axes.figure.draw_without_rendering()  # fixes the layout
    points = 72 / axes.figure.dpi
    ends: list[float] = [axes.transData.transform(name.xy)[1] * points for name in names]
    groups: list[list[int]] = []  # of names that stand close together, from the lowest on

    def lowest(group: Sequence[int]) -> float:
        return sum(ends[i] for i in group) / len(group) - LABEL_POINTS * (len(group) - 1) / 2

    for i in sorted(range(len(names)), key=lambda i: ends[i]):
        groups.append([i])
        while len(groups) > 1 and lowest(groups[-1]) < lowest(groups[-2]) + LABEL_POINTS * len(groups[-2]):
            groups[-2:] = [groups[-2] + groups[-1]]
    for group in groups:
        for place, i in enumerate(group):
            names[i].set_position((8, lowest(group) + LABEL_POINTS * place - ends[i]))
