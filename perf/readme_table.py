"""The table of the README: sums of 24 million values on four hosts, of the rows of perf/allreduce.py."""

from __future__ import annotations

from report import Row, markdown

BEGIN, END = "<!-- rows: begin (perf/benchmarks.py) -->", "<!-- rows: end -->"
DENSITIES = (0.01, 0.05, 0.1)
Keyed = dict[tuple[str, float], Row]  # rows by name and density


def seconds(row: Row) -> str:
    """Return the seconds of a row, with the digits that a reader needs."""
    return f"{row['seconds']:.2f} s" if row["seconds"] >= 1 else f"{row['seconds']:.3f} s"


def factor(row: Row) -> str:
    """Return how many times as fast as the dense sum a row is."""
    return f"{row['x dense']:.0f}x" if row["x dense"] >= 9.95 else f"{row['x dense']:.1f}x"


def table(avx512: list[Row], avx2: list[Row]) -> str:
    """Return the table of the rows that were measured with the kernels of AVX-512 and of AVX2."""
    first, second = ({(row["name"], row["density"]): row for row in rows} for rows in (avx512, avx2))
    lines: list[Row] = []

    def add(text: str, *cells: str) -> None:
        lines.append(
            {"": text} | {f"{d * 100:g} %": cell for d, cell in zip(DENSITIES, (*cells, "", ""), strict=False)}
        )

    def add_sparse(text: str, name: str, rows: Keyed = first, factors: bool = True) -> None:
        found = [rows[name, density] for density in DENSITIES]
        add(text, *(seconds(row) + f" ({factor(row)})" * factors for row in found))

    few = [first[f"dense, {bits} bits", 1.0] for bits in (8, 4, 2)]
    add("`MPI_Allreduce`, dense (MPICH)", seconds(first["MPI_Allreduce", 1.0]))
    add("PyTorch's gloo, dense", seconds(first["gloo, dense", 1.0]))
    both = f"{', '.join(map(seconds, few))} ({', '.join(map(factor, few))})"
    add("**sparsecoll, dense in 8, 4, 2 bits a value**", both)
    add_sparse("PyTorch's gloo, sparse (entries given)", "gloo, sparse", factors=False)
    add_sparse("TopkA: exact top-k, COO, allgather", "TopkA", factors=False)
    add_sparse("Ok-Topk with COO", "Ok-Topk", factors=False)
    add_sparse("**sparsecoll, exact sum**", "exact sum")
    add_sparse("the same, kernels of AVX2", "exact sum", second)
    add_sparse("**sparsecoll, top k of the sum**", "top k of sum")
    add_sparse("the same, kernels of AVX2", "top k of sum", second)
    add_sparse("the same, float16 on the wire, AVX-512", "top k of sum, float16")
    return markdown(lines)


def written(page: str, avx512: list[Row], avx2: list[Row], commits: list[str]) -> str:
    """Return the README with a new table.

    Args:
        page: the README.
        avx512: rows that were measured with the kernels of AVX-512.
        avx2: rows that were measured with those of AVX2.
        commits: the commits of both.
    """
    before, rest = page.split(BEGIN)
    dense = next(row for row in avx2 if row["name"] == "MPI_Allreduce")
    source = (
        f"`perf/benchmarks.py`, commit {', '.join(dict.fromkeys(commits))}. In the run with the kernels of AVX2,"
        f" `MPI_Allreduce` took {seconds(dense)}."
    )
    return "\n\n".join([before + BEGIN, table(avx512, avx2), source, END + rest.split(END)[1]])
