"""Algorithms. To add one, write a file with an Algorithm dataclass, a line in ALGORITHMS, and a test of the same name.

The contract tests (any P, any distribution, same bits, conservation, simulator = MPI) run over ALGORITHMS.
"""

from __future__ import annotations

from sparsecoll.algorithms.allgather import Allgather as Allgather
from sparsecoll.algorithms.auto import Auto as Auto
from sparsecoll.algorithms.base import Algorithm as Algorithm, Reduction as Reduction
from sparsecoll.algorithms.cltk import CLTk as CLTk
from sparsecoll.algorithms.dense import Dense as Dense
from sparsecoll.algorithms.densestream import DenseStream as DenseStream
from sparsecoll.algorithms.gtopk import GTopk as GTopk
from sparsecoll.algorithms.hierarchical import Hierarchical as Hierarchical
from sparsecoll.algorithms.lowbit import LowBit as LowBit
from sparsecoll.algorithms.oktopk import OkTopk as OkTopk
from sparsecoll.algorithms.owners import RowAuto as RowAuto, RowOwners as RowOwners
from sparsecoll.algorithms.sparcml import SparCML as SparCML
from sparsecoll.algorithms.spardl import SparDL as SparDL
from sparsecoll.errors import check_choice

ALGORITHMS: dict[str, type[Algorithm]] = {
    "auto": Auto,
    "dense": Dense,
    "allgather": Allgather,
    "sparcml": SparCML,
    "densestream": DenseStream,
    "oktopk": OkTopk,
    "gtopk": GTopk,
    "spardl": SparDL,
    "cltk": CLTk,
    "hierarchical": Hierarchical,
}
ROW_ALGORITHMS: dict[str, type[Algorithm]] = {"auto": RowAuto, "allgather": Allgather, "owners": RowOwners}


def as_algorithm(algo: str | Algorithm, rows: bool = False) -> Algorithm:
    """Return a new algorithm with default options for a name, and an object as it is, with its state.

    Args:
        algo: name or object.
        rows: whether it is for a RowSparse, and a name one of ROW_ALGORITHMS (default: False).

    Raises:
        ValueError: No algorithm has the name.
        TypeError: `algo` is neither a name nor an Algorithm, or one for rows alone, or for vectors alone.
    """
    names = ROW_ALGORITHMS if rows else ALGORITHMS
    if isinstance(algo, Algorithm):
        if not (algo.takes_rows if rows else algo.takes_vectors):
            kind, choices = "rows" if rows else "a vector", ", ".join(map(repr, names))
            raise TypeError(f"algo: expected {choices} or another one for {kind}, got {algo.describe()}")
        if rows and algo.selector is not None:
            raise ValueError(f"selector: expected None for rows, which are selected by norm, got {algo.selector!r}")
        return algo
    if isinstance(algo, type) and issubclass(algo, Algorithm):
        raise TypeError(f"algo: expected a name or an Algorithm object, got the class: use {algo.__name__}()")
    if not isinstance(algo, str):
        cure = ", an operation of mpi4py: use op=" if type(algo).__module__ == "mpi4py.MPI" else ""
        raise TypeError(f"algo: expected a name or an Algorithm object, got {type(algo).__name__}{cure}")
    check_choice("algo", algo, names)
    return names[algo]()
