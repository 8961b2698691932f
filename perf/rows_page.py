"""Makes docs/rows.md of perf/rows.in.md and the rows of perf/rows.py.

python perf/rows_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from report import Row, markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "perf/results"
TIMED, COUNTED, GROWN = (RESULTS / f"{name}.json" for name in ("rows", "rows_volume", "rows_memory"))
PAGE, TEXT = ROOT / "docs/rows.md", ROOT / "perf/rows.in.md"


def load(path: Path) -> tuple[Row, list[Row]]:
    """Return what a file says about its measurement, and its rows."""
    saved: dict[str, Any] = json.loads(path.read_text())
    return saved["about"], saved["rows"]


def timed(rows: list[Row], table: str) -> str:
    """Return a table of times, bytes and memory at one exponent after the other."""
    shown = []
    for row in rows:
        if row["table"] != table:
            continue
        gloo = next(r for r in rows if r["name"] == "gloo, sparse" and alike(r, row))
        times = gloo["seconds"] / row["seconds"]
        shown.append(
            {
                "Zipf": str(row["exponent"]),
                "": row["name"],
                "ms": row["seconds"] * 1e3,
                "times faster than gloo, sparse": f"{times:.2f}" if times > 0.1 else f"1/{1 / times:.0f}",
                "MB of the busiest rank": row["bytes"] / 1e6 if "bytes" in row else None,
                "busiest / mean": f"{row['bytes'] / row['mean']:.2f}" if "bytes" in row else None,
            }
        )
    return markdown(shown)


def alike(a: Row, b: Row) -> bool:
    """Return whether two rows are of the same input."""
    return all(a[key] == b[key] for key in ("table", "P", "exponent"))


def counted(rows: list[Row], exponent: float) -> str:
    """Return a table of the rows that a rank receives, beside the formulas, in rows of the batch's size."""
    shown = []
    for row in sorted(rows, key=lambda row: row["P"]):
        if row["exponent"] != exponent or row["table"] != "5M x 64":
            continue
        own = row["rows"] * row["d"] * 4
        busiest = max(row["bytes"] / row["mean"], row["sent"] / row["sent, mean"]) if "mean" in row else None
        shown.append(
            {
                "P": row["P"],
                "": row["name"],
                "rows of a rank": round(row["rows"]),
                "rows of the sum": row["union"],
                "received, in r": row["bytes"] / own,
                "formula": row["formula"] / own if "formula" in row else None,
                "busiest / mean": None if busiest is None else f"{busiest:.3f}",
                "reduce_scatter, in r": row["scatter"] / own if "scatter" in row else None,
                "its busiest / mean": f"{row['scatter'] / row['scatter, mean']:.3f}" if "scatter" in row else None,
            }
        )
    return markdown(shown)


def main() -> None:
    """Write the page."""
    about, rows = load(TIMED)
    of_counts, volumes = load(COUNTED)
    of_memory, memory = load(GROWN)
    text = TEXT.read_text()
    grown = ", ".join(f"{row['name']} {row['memory'] / 1e6:,.0f} MB" for row in memory)
    for place, value in {
        "{machine}": about["machine"],
        "{versions}": ", ".join(f"{name} {version}" for name, version in about["versions"].items() if name != "MPI"),
        "{commit}": about["commit"][:9],
        "{memory}": grown,
        "{memory commit}": of_memory["commit"][:9],
        "{counted commit}": of_counts["commit"][:9],
        "{wide}": timed(rows, "5M x 64"),
        "{long}": timed(rows, "300k x 512"),
        "{1.05}": counted(volumes, 1.05),
        "{1.2}": counted(volumes, 1.2),
    }.items():
        text = text.replace(place, value)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
