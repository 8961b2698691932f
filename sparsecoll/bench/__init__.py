"""Rows that compare algorithms, selectors and compressors, yours among them: for notebooks and for the command line.

>>> from sparsecoll import bench
>>> rows = bench.rows([4, 16], ["dense", "oktopk"], n=10_000, density=[0.01, 0.1])
>>> rows[0]["algo"], rows[0]["P"], rows[0]["bytes_received"] > rows[1]["bytes_received"]
('dense', 4, True)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparsecoll.bench.names import algorithm, compressor, selector
from sparsecoll.bench.timing import MPI_ALLREDUCE, Call, Row, calls, heavy_tailed, measure, simulated
from sparsecoll.errors import check_integer
from sparsecoll.transport import as_transport
from sparsecoll.transport.network import Network

__all__ = ["MPI_ALLREDUCE", "Call", "Row", "algorithm", "compressor", "rows", "selector"]


def rows(
    comm: Any,
    algos: Sequence[Any] | Mapping[str, Any],
    n: int | Iterable[int] = 1_000_000,
    density: float | Iterable[float] | None = None,
    *,
    format: str = "auto",
    value_dtype: str | None = None,
    repeat: int = 3,
    network: Network | None = None,
    ranks_per_node: int = 1,
) -> list[Row]:
    """Compare algorithms and compressors on heavy-tailed gradients that are different on every rank and in every call.

    Args:
        comm: a communicator, whose calls are timed (then it is collective); or the number of virtual ranks, or several
            such numbers, whose bytes and messages are counted and whose seconds are those of a modelled network.
        algos: texts as `--algo` of the command line takes them, Algorithm objects and Compressor objects, which are
            copied; or a dict of these by the name in the rows.
        n: length of the vectors, or several.
        density: k / n, or several, also of Compressor objects that have another one; None, the default, for that of a
            Compressor object, or at which its Schedule ends, and for 0.01 of anything else.
        format: as in `sparsecoll.allreduce` (default: "auto"); of algorithms that are not dense.
        value_dtype: likewise (default: that of the vectors, float32); of algorithms.
        repeat: calls per row (default: 3).
        network: of virtual ranks (default: 1 Gb/s).
        ranks_per_node: of virtual ranks (default: 1).

    Returns:
        A dict for each row, the same on all ranks: "algo", "P", "n", "density" (1 if all values are sent), "format",
        "value_dtype"; "seconds" (median over the calls, of the slowest rank), "least" and "most"; seconds by kind of
        work ("select", "encode", "decode", "merge", "dense", "wait", "other"); "bytes_sent", "bytes_received",
        "messages", "entries" of the last call on the busiest rank, and "memory" in bytes. `sparsecoll plot` draws a
        JSON file of {"rows": rows}.

    Raises:
        ValueError: A text names no algorithm, two rows would have the same name, or an option is out of range.
        TypeError: An item of `algos` is neither text nor an Algorithm nor a Compressor.
    """
    named = algos if isinstance(algos, Mapping) else {str(Call(algo, None)): algo for algo in algos}
    if len(named) < len(algos):
        raise ValueError(f"algos: expected different names, got {', '.join(named)} for {len(algos)}: pass a dict")
    lengths = [check_integer("n", length, 1) for length in _several(n)]
    check_integer("repeat", repeat, 1)
    some, density = [], list(density) if isinstance(density, Iterable) else density
    for name, algo in named.items():
        own = getattr(algo, "density", 0.01) if density is None else density
        if hasattr(own, "settles_at") and (own := own.settles_at()) is None:
            raise ValueError(f"density: expected a number for {name!r}, whose schedule has no end, got none")
        some += [replace(c, label=name) for c in calls([algo], _several(own), [format], [value_dtype])]
    if isinstance(comm, (int, list, tuple, range)):
        more = repeat, network, ranks_per_node
        return [simulated(P, length, c, *more) for P in _several(comm) for length in lengths for c in some]
    rank = as_transport(comm).rank
    gradients = (heavy_tailed(length, rank) for length in lengths)  # two at most in memory
    return [measure(comm, c, vectors, repeat) for vectors in gradients for c in some]


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Iterable) else [given]
