"""The algorithms among which `auto` chooses, by the names under which `costmodel` predicts them."""

from __future__ import annotations

from collections.abc import Callable

from sparsecoll.algorithms.allgather import Allgather
from sparsecoll.algorithms.base import Algorithm
from sparsecoll.algorithms.dense import Dense
from sparsecoll.algorithms.densestream import DenseStream
from sparsecoll.algorithms.oktopk import OkTopk
from sparsecoll.algorithms.sparcml import SparCML

EXACT: dict[str, Callable[[], Algorithm]] = {
    "dense": Dense,
    "allgather": Allgather,
    "recursive_double": lambda: SparCML(variant="recursive_double"),
    "dynamic": lambda: SparCML(variant="dynamic"),
    "halving": lambda: DenseStream(repartition="even"),
}
TOP_K_OF_SUM: dict[str, Callable[[], Algorithm]] = {"oktopk": OkTopk}
