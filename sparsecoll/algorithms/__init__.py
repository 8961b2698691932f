"""Algorithms. To add one, write a file with an Algorithm dataclass, a line in ALGORITHMS, and a test of the same name.

The contract tests (any P, any distribution, same bits, conservation, simulator = MPI) run over ALGORITHMS.
"""

from __future__ import annotations

from sparsecoll.algorithms.allgather import Allgather
from sparsecoll.algorithms.arctopk import ARCTopK
from sparsecoll.algorithms.auto import Auto
from sparsecoll.algorithms.base import Algorithm, Reduction
from sparsecoll.algorithms.cltk import CLTk
from sparsecoll.algorithms.dense import Dense
from sparsecoll.algorithms.densestream import DenseStream
from sparsecoll.algorithms.exdyna import ExDyna
from sparsecoll.algorithms.gtopk import GTopk
from sparsecoll.algorithms.hierarchical import Hierarchical
from sparsecoll.algorithms.hitopk import HiTopK
from sparsecoll.algorithms.lowbit import LowBit
from sparsecoll.algorithms.oktopk import OkTopk
from sparsecoll.algorithms.sparcml import SparCML
from sparsecoll.algorithms.spardl import SparDL
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
    "exdyna": ExDyna,
    "arctopk": ARCTopK,
    "hierarchical": Hierarchical,
}

__all__ = [
    "ALGORITHMS",
    "ARCTopK",
    "Algorithm",
    "Allgather",
    "Auto",
    "CLTk",
    "Dense",
    "DenseStream",
    "ExDyna",
    "GTopk",
    "HiTopK",
    "Hierarchical",
    "LowBit",
    "OkTopk",
    "Reduction",
    "SparCML",
    "SparDL",
    "resolve",
]


def resolve(algo: str | Algorithm) -> Algorithm:
    """Return a new algorithm with default options for a name, and an object as it is, with its state.

    Raises:
        ValueError: No algorithm has the name.
        TypeError: `algo` is neither a name nor an Algorithm.
    """
    if isinstance(algo, Algorithm):
        return algo
    if isinstance(algo, type) and issubclass(algo, Algorithm):
        raise TypeError(f"algo: expected a name or an Algorithm object, got the class: use {algo.__name__}()")
    if not isinstance(algo, str):
        cure = ", an operation of mpi4py: use op=" if type(algo).__module__ == "mpi4py.MPI" else ""
        raise TypeError(f"algo: expected a name or an Algorithm object, got {type(algo).__name__}{cure}")
    if algo not in ALGORITHMS:
        check_choice("algo", algo, ALGORITHMS)
    return ALGORITHMS[algo]()
