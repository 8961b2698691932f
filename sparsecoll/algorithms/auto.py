"""Auto: the algorithm that is predicted to be the fastest on this communicator."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sparsecoll import formats, model
from sparsecoll.algorithms.allgather import Allgather
from sparsecoll.algorithms.base import Algorithm, Reduction, check_order
from sparsecoll.algorithms.choices import EXACT
from sparsecoll.algorithms.oktopk import OkTopk
from sparsecoll.formats import FORMATS
from sparsecoll.model import Shape, Tuning
from sparsecoll.transport.base import Transport
from sparsecoll.tune import tuning_of
from sparsecoll.vector import SparseVector

WANTED = ("exact_sum", "top_k_of_sum")
STATELESS = {name: make() for name, make in EXACT.items() if name != "allgather"}
NEWS = 0.02  # how much larger or smaller a sum must be than the last one learned from to be learned from,
SIGMAS = 4  # and how many times the square root of its entries, which is chance
FINE, KEPT = 32, 64  # predictions are for k rounded to one of so many steps per factor of e; so many are kept


@dataclass
class Auto(Algorithm):
    """Chooses before every call, by `model`, among the algorithms with the semantics wanted, and the format with them.

    1. Once a communicator: measure alpha, beta and the kernels (`sparsecoll.tune`), or take a saved measurement.
    2. Predict dense, allgather, recursive doubling, split and dynamic gather (`sparcml`), and recursive halving
       (`densestream` with even regions); for "top_k_of_sum" also `oktopk`, whose competitors' sums are cut afterwards.
    3. Call the fastest. If the caller left the format open, messages take the one with the least time to code and send.

    Sizes of sums are predicted as if supports were uniform; an object learns from each result how much supports
    overlap and how unevenly entries lie. All ranks know the same numbers, so all choose alike. Dense is among the
    choices: where sparse cannot win it is not used.

    Args:
        want: "exact_sum", or "top_k_of_sum" for Topk(sum of Topk).
        tuning: what to predict with; None: measured on the first call, or the file that SPARSECOLL_TUNING names.
    """

    name = "auto"
    semantics = "exact_sum"

    want: str = "exact_sum"
    tuning: Tuning | None = None
    _reach: float = field(default=1.0, init=False, repr=False)  # as a share of n
    _skew: float = field(default=1.0, init=False, repr=False)
    _oktopk: OkTopk = field(default_factory=OkTopk, init=False, repr=False)
    _allgather: Allgather = field(default_factory=Allgather, init=False, repr=False)
    _predicted: dict[Shape, dict[str, float]] = field(default_factory=dict, init=False, repr=False)
    _tuning: Tuning | None = field(default=None, init=False, repr=False)  # that they were predicted with
    _learned: int = field(default=0, init=False, repr=False)  # entries of the sum that was learned from last

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.want not in WANTED:
            raise ValueError(f"want: expected one of {', '.join(WANTED)}, got {self.want!r}")
        vars(self)["semantics"] = self.want

    def predictions(self, n: int, k: int, transport: Transport, tuning: Tuning, value_bytes: int) -> dict[str, float]:
        """Seconds by name."""
        k = min(max(1, round(math.exp(round(math.log(k) * FINE) / FINE))), n) if k else 0
        shape = Shape(n, k, transport.size, value_bytes, max(self._reach * n, k), self._skew, transport.one_node)
        if tuning is not self._tuning or len(self._predicted) > KEPT:
            self._predicted.clear()
            self._tuning = tuning
        if shape not in self._predicted:
            seconds = self._predicted[shape] = model.exact_seconds(shape, tuning)
            if self.want == "top_k_of_sum":
                seconds["oktopk"] = model.oktopk_seconds(shape, tuning)
        return self._predicted[shape]

    def __call__(self, transport: Transport, x: SparseVector, k: int) -> Reduction:
        tuning = self.tuning or tuning_of(transport)
        width = formats.wire_dtype(x.dtype, transport.value_dtype).stored.itemsize
        seconds = self.predictions(x.length, k, transport, tuning, width)
        chosen = min(seconds, key=lambda name: seconds[name])
        if transport.format is FORMATS["auto"]:
            transport.format = formats.Auto(beta=tuning.beta) if tuning.code else formats.Auto()
        reduction = self._algorithm(chosen)(transport, x, k)
        if chosen == "oktopk":
            return reduction
        return self._finished(reduction, x, k, transport.size)

    def _algorithm(self, name: str) -> Algorithm:
        return {"oktopk": self._oktopk, "allgather": self._allgather}.get(name) or STATELESS[name]

    def _finished(self, reduction: Reduction, x: SparseVector, k: int, P: int) -> Reduction:
        """Learn from the sum; cut it to its top k if that is wanted."""
        value = reduction.value if isinstance(reduction.value, SparseVector) else reduction.value.to_sparse()
        chance = NEWS * value.nnz + SIGMAS * math.sqrt(value.nnz)
        if value.nnz and k and P > 1 and (not self._learned or abs(value.nnz - self._learned) > chance):
            self._learned = value.nnz
            self._reach = model.reach(x.length, k, P, value.nnz) / x.length
            edges = [x.length * j // P for j in range(P + 1)]
            fullest = max(b - a for a, b in pairwise(value.count_below(edges).tolist()))
            self._skew = fullest * P / value.nnz
        if self.want == "exact_sum":
            return reduction
        top = check_order(value).top(k)

        def contributed() -> SparseVector:
            share = reduction.contributed
            return (share if isinstance(share, SparseVector) else share.to_sparse()).intersect(top)

        return Reduction(top, contributed)

    def state_dict(self) -> dict[str, Any]:
        own = {"reach": self._reach, "skew": self._skew, "learned": self._learned}
        return super().state_dict() | own | {"oktopk": self._oktopk.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._reach, self._skew, self._learned = state["reach"], state["skew"], state["learned"]
        self._oktopk.load_state_dict(state["oktopk"])
