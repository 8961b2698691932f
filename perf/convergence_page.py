"""The rows of perf/convergence.py, and the page and the figures made of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from nets import TASKS
from report import Row, markdown

ROOT = Path(__file__).parent.parent
ROWS, PAGE, TEXT = ROOT / "perf/results/convergence.json", ROOT / "docs/convergence.md", ROOT / "perf/convergence.in.md"
FIGURES = ROOT / "docs/figures"


def load() -> list[Row]:
    """Return the rows so far."""
    return json.loads(ROWS.read_text())["rows"] if ROWS.exists() else []


def key_of(row: Row) -> tuple[str, str, int, int]:
    """Return the values that identify a row."""
    return row["task"], row["line"], row["P"], row["seed"]


def together(rows: list[Row], name: str, line: str, P: int) -> list[Row]:
    """Return the rows that differ only in their seed."""
    return [row for row in rows if (row["task"], row["line"], row["P"]) == (name, line, P)]


def compared(rows: list[Row], name: str, line: str, P: int) -> Row:
    """Return a row of a table: final quality over the seeds (mean, deviation, difference to dense), bytes of a run."""
    found, dense = together(rows, name, line, P), together(rows, name, "dense", P)
    last = np.array([row["curve"][-1] for row in found])
    alike = {row["seed"]: row["curve"][-1][2] for row in dense}
    gaps = [row["curve"][-1][2] - alike[row["seed"]] for row in found if row["seed"] in alike]
    deviation = f" +- {last[:, 2].std():.2f}" if len(found) > 1 else ""
    return {
        "seeds": len(found),
        f"quality, {TASKS[name].unit}": f"{last[:, 2].mean():.2f}{deviation}",
        "against dense": f"{np.mean(gaps):+.2f}" if gaps and line != "dense" else None,
        "MB received": last[:, 1].mean(),
        "times fewer": np.mean([row["curve"][-1][1] for row in dense]) / last[:, 1].mean(),
    }


def table(rows: list[Row], name: str, lines: list[str]) -> str:
    """Return the table of a task."""
    ranks = sorted({row["P"] for row in rows if row["task"] == name})
    shown = [(P, line) for P in ranks for line in lines if together(rows, name, line, P)]
    return markdown([{"P": P, "": line, **compared(rows, name, line, P)} for P, line in shown])


def over_tasks(rows: list[Row], line: str) -> str:
    """Return the table of a line."""
    ranks = sorted({row["P"] for row in rows})
    shown = [(name, P) for name in TASKS for P in ranks if together(rows, name, line, P) and not TASKS[name].adam]
    return markdown([{"net": name, "P": P, **compared(rows, name, line, P)} for name, P in shown])


def draw(rows: list[Row], P: int, lines: list[str]) -> None:
    """Draw mean quality over seeds against steps and against bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(TASKS), figsize=(3.4 * len(TASKS), 6), layout="constrained", sharey="col")
    colours, shown = plt.get_cmap("tab20"), {}
    for (upper, lower), name in zip(axes.T, TASKS, strict=True):
        for line in lines:
            found = together(rows, name, line, P)
            if found:
                steps, received, reached = np.mean([row["curve"] for row in found], axis=0).T
                style = {"color": colours(lines.index(line)), "linewidth": 1.2}
                shown[line] = upper.plot(steps, reached, **style)[0]
                lower.semilogx(received, reached, **style)
        upper.set(title=name, xlabel="step", ylabel=f"quality, {TASKS[name].unit}")
        last = [row["curve"][-1][2] for row in rows if row["task"] == name]
        if last and TASKS[name].unit == "%":
            upper.set(ylim=(max(last) - (12 if name != "lstm" else 8), max(last) + 1))
        elif last:
            upper.set(ylim=(min(last) - 0.1, min(last) + 1.5))
        lower.set(xlabel="MB received by a rank")
        for axis in (upper, lower):
            axis.grid(alpha=0.3)
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(FIGURES / f"convergence_{P}.png", dpi=130)
    plt.close(figure)


def render(lines: list[str], best: str) -> None:
    """Write docs/convergence.md, which recommends the line `best`, and its figures."""
    rows = load()
    for P in sorted({row["P"] for row in rows}):
        draw(rows, P, lines)
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    tables = {name: table(rows, name, lines) for name in TASKS}
    PAGE.write_text(TEXT.read_text().format(commits=commits, best=over_tasks(rows, best), **tables))
