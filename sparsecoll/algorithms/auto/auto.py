"""Auto: the algorithm that is predicted to be the fastest on this communicator."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sparsecoll import formats
from sparsecoll.algorithms.allgather import Allgather
from sparsecoll.algorithms.auto import costmodel, overlap
from sparsecoll.algorithms.auto.costmodel import CHOICES, Shape
from sparsecoll.algorithms.auto.tune import tuning_of
from sparsecoll.algorithms.base import Algorithm, Reduction, check_order
from sparsecoll.algorithms.dense import sums_natively
from sparsecoll.errors import check_choice
from sparsecoll.formats import FORMATS, Buffer
from sparsecoll.formats.auto import choosing
from sparsecoll.select import Vector
from sparsecoll.transport import network
from sparsecoll.transport.base import Transport
from sparsecoll.transport.call import AGREEMENT_BYTES
from sparsecoll.transport.channel import Channel
from sparsecoll.transport.collectives import FEW_RANKS
from sparsecoll.transport.network import Tuning, given_tuning
from sparsecoll.vector import SparseVector

SEMANTICS = ("exact_sum", "top_k_of_sum")
MIN_SECONDS = 1e-3  # predicted length of a call from which on the communicator is measured
SAMPLING_RATIO = 10  # supports are sampled if the call takes at least so many times as long
UNIFORM = 0.9  # an estimate from which uniform supports differ by less is taken for uniform: it has an error of 5 %
K_STEPS = 32  # choices depend on k rounded to one of so many steps per factor of e
MAX_CHOICES = 4096  # number of choices that an object stores

ALLGATHER = Allgather()  # without state in calls that are sent early

Class = tuple[int, int, int, int, bool]  # n, k rounded, P, bytes of a value on the wire, `Shape.native`


@dataclass
class Auto(Algorithm):
    """Runs the algorithm that a cost model predicts to be the fastest, with the fastest format.

    1. Predict dense, dense by MPI's own allreduce (`Dense(native=True)`), allgather, recursive doubling, split and
       dynamic gather (`sparcml`), and recursive halving (`densestream` with even regions); for "top_k_of_sum" also
       `oktopk`, while the sums of the others are truncated to k entries. For a call that takes less than 1 ms by the
       usual costs of a single machine or of 1 Gb/s Ethernet, these costs decide; the first longer call measures the
       communicator briefly (`tune.tuning_of`).
    2. If the call is predicted to take at least ten times as long as sampling the supports, sample the indices to find
       out how much supports overlap and how unevenly entries are distributed (`overlap.estimate`), and predict again.
       Otherwise assume uniform supports.
    3. Run the fastest. If the caller did not set the format, messages use the one that takes the least time to encode
       and send.

    In a short call without k and density on up to 64 ranks, those for whose number of entries `allgather` is predicted
    to be the fastest, with the messages that compare arguments saved, send their entries with them; if all do, the rest
    is `allgather`'s.

    The same input gives the same bits in every repetition on a communicator: a choice depends on n, k (or the ranks'
    numbers of entries), P, the bytes of a value, the indices, and costs that are fixed before the first choice that
    uses them. An object keeps the choice of the first call of each class (n, k to within 3 %, P, bytes of a value)
    until a call fails. All ranks have the same numbers, so all make the same choice.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: as in `sparsecoll.Algorithm`.
        want: "exact_sum" (the default), or "top_k_of_sum" for the top k of the sum of the ranks' top k.
        tuning: the costs to predict with, from `sparsecoll.tune`; None, the default, for the file that
            SPARSECOLL_TUNING names, or for those of step 1.

    Raises:
        ValueError: `want` is neither of these; or the file of SPARSECOLL_TUNING cannot be read.

    See Also:
        `sparsecoll.tune`.
    """

    name = "auto"

    want: str = "exact_sum"
    tuning: Tuning | None = None
    _algorithms: dict[str, Algorithm] = field(default_factory=dict, init=False, repr=False, compare=False)
    _chosen: dict[Class, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("want", self.want, SEMANTICS)

    @property
    def semantics(self) -> str:
        """The option `want`."""
        return self.want

    @property
    def takes_ops(self) -> bool:  # type: ignore[override]
        """Whether the result is not a top k."""
        return self.want == "exact_sum"

    @property
    def reads_tuning(self) -> bool:  # type: ignore[override]
        """Whether there are no costs of its own, or `oktopk` may be chosen, which does not know them."""
        return self.tuning is None or self.want == "top_k_of_sum"

    def predictions(self, shape: Shape, tuning: Tuning) -> dict[str, float]:
        """Return the predicted seconds of each choice."""
        return _exact(shape, tuning) if self.want == "exact_sum" else dict(costmodel.seconds(shape, tuning))

    def costs(self, transport: Transport, shape: Shape) -> Tuning:
        """Return the costs with which a call of this shape is predicted."""
        given = self.tuning or given_tuning(transport)
        if given is not None:
            return given
        usual = self._usual(transport)
        if shape.P == 1 or min(self.predictions(shape, usual).values()) < MIN_SECONDS:
            return usual
        return tuning_of(transport)

    def _choose(self, channel: Channel, x: SparseVector, shape: Shape, tuning: Tuning) -> str:
        seconds = self.predictions(shape, tuning)
        if shape.P > 1 and min(seconds.values()) > SAMPLING_RATIO * overlap.seconds(shape.P, shape.k, tuning):
            length, skew = overlap.estimate(channel.transport, x, shape.k)
            if length < UNIFORM * shape.n or skew > 1 / UNIFORM:
                seconds = self.predictions(replace(shape, effective_length=max(length, shape.k), skew=skew), tuning)
        if channel.gathered and Allgather.in_one_message(channel, x.dtype, shape.k):  # later calls send it early
            seconds["allgather"] -= _saved(shape.P, tuning)
        return min(seconds, key=lambda name: seconds[name])

    @staticmethod
    def _class(channel: Channel, x: SparseVector, k: int) -> Class:
        n, width = x.length, formats.wire_dtype(x.dtype, channel.value_dtype).stored.itemsize
        return n, min(_rounded(k), n), channel.size, width, sums_natively(channel, x)

    def early(self, channel: Channel, x: SparseVector) -> Buffer | None:
        if self.want != "exact_sum" or channel.size > FEW_RANKS:  # then every rank would receive a row of each
            return None
        known = self.tuning or given_tuning(channel.transport) or channel.transport.tuning
        tuning = known or self._usual(channel.transport)
        key = self._class(channel, x, x.nnz)
        chosen = self._chosen.get(key) or self._chosen_beside(key) if self._chosen else None
        if chosen is None and _sends_early(key, channel.transport.one_node, tuning, known is not None):
            chosen = "allgather"
        if chosen != "allgather":
            return np.empty(AGREEMENT_BYTES, np.uint8)
        return ALLGATHER.early(self._with_format(channel, tuning), x)

    def _chosen_beside(self, key: Class) -> str | None:
        """Return what was chosen for a little more or fewer entries, such as another rank has."""
        n, k, *rest = key
        beside = (self._chosen.get((n, _rounded(k, step), *rest)) for step in (1, -1))  # type: ignore[arg-type]
        return next(filter(None, beside), None)

    @staticmethod
    def _usual(transport: Transport) -> Tuning:
        return network.IN_ONE_NODE if transport.one_node else network.BETWEEN_NODES

    @staticmethod
    def _with_format(channel: Channel, tuning: Tuning) -> Channel:
        if channel.format is not FORMATS["auto"]:
            return channel
        return channel.with_format(choosing(tuning.beta if tuning.code else None))

    def alike(self) -> tuple[int, int]:
        oktopk = self._algorithms.get("oktopk")
        return super().alike() if oktopk is None else oktopk.alike()

    def __call__(self, channel: Channel, x: SparseVector, k: int) -> Reduction:
        if channel.gathered and all(map(len, channel.gathered)):
            return ALLGATHER(channel, x, k)
        chosen, channel = self._chosen_for(channel, x, k)
        reduction = self._algorithm(chosen)(channel, x, k)
        return reduction if chosen == "oktopk" or self.want == "exact_sum" else self._topk_of(reduction, k)

    def settled(self, channel: Channel, x: Vector, k: int, early: bool) -> tuple[Algorithm, Channel]:
        if self.want != "exact_sum":
            return self, channel
        entries = x if isinstance(x, SparseVector) and x.nnz <= k else self.select(x, k)  # NaN cannot be selected
        chosen, channel = self._chosen_for(channel, channel.roundtrip(entries), k)
        return self._algorithm("allgather" if early else chosen), channel

    def _chosen_for(self, channel: Channel, x: SparseVector, k: int) -> tuple[str, Channel]:
        """Return the name of the algorithm for a call, and the channel with the format for it."""
        key = self._class(channel, x, k)
        shape = _shape(key, channel.transport.one_node)
        tuning = self.costs(channel.transport, shape)
        chosen = self._chosen.get(key) or self._choose(channel, x, shape, tuning)
        if len(self._chosen) < MAX_CHOICES:
            self._chosen[key] = chosen
        return chosen, self._with_format(channel, tuning)

    def _algorithm(self, name: str) -> Algorithm:
        if name not in self._algorithms:
            self._algorithms[name] = CHOICES[name]()
        return self._algorithms[name]

    @staticmethod
    def _topk_of(reduction: Reduction, k: int) -> Reduction:
        """Return the top k of an exact sum."""
        top = check_order(reduction.value.to_sparse()).topk(k)
        return Reduction(top, lambda: reduction.contributed.to_sparse().intersect(top))

    def state_dict(self) -> dict[str, Any]:
        chosen = [[*key, name] for key, name in self._chosen.items()]
        return super().state_dict() | {"chosen": chosen, "oktopk": self._algorithm("oktopk").state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._chosen = {tuple(key): name for *key, name in state["chosen"]}
        self._algorithm("oktopk").load_state_dict(state["oktopk"])


@functools.lru_cache(maxsize=1024)
def _rounded(k: int, beside: int = 0) -> int:
    """Return k rounded to one of K_STEPS steps per factor of e, or so many steps above."""
    return max(1, round(math.exp((round(math.log(k) * K_STEPS) + beside) / K_STEPS))) if k else 0


def _saved(P: int, tuning: Tuning) -> float:
    """Return what sending entries together with the arguments saves; others may gain by overlap of the supports."""
    return costmodel.agreement(P, tuning) / 2


def _shape(key: Class, one_node: bool) -> Shape:
    n, k, P, width, native = key
    return Shape(n, k, P, width, n, one_node=one_node, native=native)


@functools.lru_cache(maxsize=1024)
def _sends_early(key: Class, one_node: bool, tuning: Tuning, known: bool) -> bool:
    """Return whether entries go together with the arguments that are compared, by an allgather.

    That saves agreeing on the number of entries and, in longer calls, sampling how much supports overlap, but not even
    complete overlap is then of use. Costs that are not known yet are measured before a call that is worth it.
    """
    shape = _shape(key, one_node)
    seconds = _exact(shape, tuning)
    shortest, saved = min(seconds.values()), _saved(shape.P, tuning)
    if not known and shortest >= MIN_SECONDS:
        return False
    sampling = overlap.seconds(shape.P, shape.k, tuning)
    if shortest > SAMPLING_RATIO * sampling:
        shortest = min(_exact(replace(shape, effective_length=max(shape.k, 1)), tuning).values())
        saved += sampling
    return seconds["allgather"] <= shortest + saved


def _exact(shape: Shape, tuning: Tuning) -> dict[str, float]:
    """Return the predicted seconds of the choices for an exact sum."""
    return {name: s for name, s in costmodel.seconds(shape, tuning).items() if name != "oktopk"}
