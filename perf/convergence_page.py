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


def against_dense(rows: list[Row], name: str, line: str, P: int) -> tuple[float, float, float]:
    """Return mean and standard error (NaN of one) of the difference to dense runs of the same seeds; times fewer."""
    dense = {row["seed"]: row["curve"][-1] for row in together(rows, name, "dense", P)}
    pairs = [(row["curve"][-1], dense[row["seed"]]) for row in together(rows, name, line, P) if row["seed"] in dense]
    gaps = np.array([own[2] - other[2] for own, other in pairs])
    error = float(gaps.std(ddof=1) / len(gaps) ** 0.5) if len(gaps) > 1 else float("nan")
    return float(gaps.mean()), error, float(np.mean([other[1] / own[1] for own, other in pairs]))


def plus_minus(mean: float, error: float, sign: str = "") -> str:
    """Return both with two digits after the point, the error only if it is known."""
    return f"{mean:{sign}.2f}" + (f" +- {error:.2f}" if error == error else "")


def compared(rows: list[Row], name: str, line: str, P: int) -> Row:
    """Return a row of a table: final quality over the seeds (mean, deviation, difference to dense), bytes of a run."""
    last = np.array([row["curve"][-1] for row in together(rows, name, line, P)])
    gap, error, fewer = against_dense(rows, name, line, P)
    return {
        "seeds": len(last),
        f"quality, {TASKS[name].unit}": plus_minus(
            last[:, 2].mean(), last[:, 2].std(ddof=1) if len(last) > 1 else float("nan")
        ),
        "against dense": plus_minus(gap, error, "+") if line != "dense" else None,
        "MB received": last[:, 1].mean(),
        "times fewer": fewer,
    }


def table(rows: list[Row], name: str, lines: list[str]) -> str:
    """Return the table of a task."""
    ranks = sorted({row["P"] for row in rows if row["task"] == name})
    shown = [(P, line) for P in ranks for line in lines if together(rows, name, line, P)]
    return markdown([{"P": P, "": line, **compared(rows, name, line, P)} for P, line in shown])


def over_tasks(rows: list[Row], lines: list[str]) -> str:
    """Return the table of lines, for the nets that SGD trains."""
    ranks = sorted({row["P"] for row in rows})
    nets = [(name, P, line) for name in TASKS if not TASKS[name].adam for P in ranks for line in lines]
    shown = [(name, P, line) for name, P, line in nets if together(rows, name, line, P)]
    return markdown([{"net": name, "P": P, "line": line, **compared(rows, name, line, P)} for name, P, line in shown])


def gaps(rows: list[Row], line: str, P: int = 4) -> str:
    """Return the mean differences to dense of a line, in percentage points."""
    tasks = [name for name in TASKS if TASKS[name].unit == "%" and together(rows, name, line, P)]
    return ", ".join(f"{name} {against_dense(rows, name, line, P)[0]:+.2f}" for name in tasks)


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


def draw_against_bytes(rows: list[Row], lines: list[str]) -> None:
    """Draw the difference to dense against how many times fewer bytes, a panel for each net; bars: standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(TASKS), figsize=(3.4 * len(TASKS), 4), layout="constrained")
    colours, shown = plt.get_cmap("tab20"), {}
    for axis, name in zip(axes, TASKS, strict=True):
        found = {(row["line"], row["P"]) for row in rows if row["task"] == name and row["line"] != "dense"}
        for line, P in sorted(found):
            gap, error, fewer = against_dense(rows, name, line, P)
            style = {"color": colours(lines.index(line) % 20), "marker": "o" if P == 4 else "s", "ls": "none"}
            shown[line] = axis.errorbar(fewer, gap, error, mfc=None if P == 4 else "white", capsize=2, **style)
        axis.axhspan(-0.2, 0.2, color="tab:green", alpha=0.12)
        axis.axvline(50, color="grey", lw=0.8, ls=":")
        axis.set(
            title=name,
            xscale="log",
            xlim=(3, 300),
            xlabel="times fewer bytes",
            ylabel=f"against dense, {TASKS[name].unit}",
        )
        axis.grid(alpha=0.3)
        if TASKS[name].unit != "%":  # lower is better
            axis.invert_yaxis()
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(FIGURES / "convergence_bytes.png", dpi=130)
    plt.close(figure)


def render(lines: list[str], compared_nets: dict[str, list[str]]) -> None:
    """Write docs/convergence.md and its figures; `compared_nets` has the lines of its tables over all nets."""
    rows = load()
    for P in sorted({row["P"] for row in rows}):
        draw(rows, P, lines)
    draw_against_bytes(rows, lines)
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    tables = {name: table(rows, name, lines) for name in TASKS}
    tables |= {name: over_tasks(rows, shown) for name, shown in compared_nets.items()}
    ours = {line: gaps(rows, line) for line in lines}
    PAGE.write_text(TEXT.read_text().format(commits=commits, ours=ours, **tables))
