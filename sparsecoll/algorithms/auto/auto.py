"""Auto: the algorithm that is predicted to be the fastest on this communicator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsecoll import formats
from sparsecoll.algorithms.allgather import Allgather
from sparsecoll.algorithms.auto.costmodel import ALL, CHOICES, EXACT, fastest
from sparsecoll.algorithms.base import Algorithm, Reduction
from sparsecoll.algorithms.oktopk import OkTopk
from sparsecoll.errors import check_choice
from sparsecoll.formats import FORMATS, Buffer
from sparsecoll.formats.auto import choosing
from sparsecoll.select import Vector
from sparsecoll.select.base import check_order
from sparsecoll.transport.all_ranks import FEW_RANKS
from sparsecoll.transport.call import AGREEMENT_BYTES
from sparsecoll.transport.channel import Channel
from sparsecoll.transport.network import Network, check_model
from sparsecoll.vector import SparseVector

SEMANTICS = ("exact_sum", "top_k_of_sum")
BITS = 5  # of a number of entries, by which choices are made, so that few are predicted
ALLGATHER = Allgather()  # without state


@dataclass
class Auto(Algorithm):
    """Runs the algorithm that a cost model predicts to be the fastest, with the fastest format.

    1. Predict the times of dense, allgather, recursive doubling and dynamic gather (both of `sparcml`), and recursive
       halving (`densestream` with even regions), for uniform supports; for "top_k_of_sum" also of `oktopk`, while the
       sums of the others are truncated to k entries.
    2. Run the fastest. If the caller did not set the format, messages use the one that takes the least time to encode
       and send.

    In a call without k and density on up to 64 ranks, a rank sends its entries together with the arguments if
    `allgather` is predicted to be the fastest for so many entries. If all ranks do, that is the whole `allgather`.

    Nothing is measured: the choice depends on n, k (or the ranks' numbers of entries), P, the bytes of a value, whether
    all ranks are on one machine, and the network. So the same input gives the same bits in every run.

    Args:
        k: as in `sparsecoll.Algorithm`.
        selector: as in `sparsecoll.Algorithm`.
        want: "exact_sum" (the default), or "top_k_of_sum" for the top k of the sum of the ranks' top k.
        network: the costs of messages to predict with, as `sparsecoll doctor` prints them; None, the default, for 50
            us and 1 Gb/s, or 3.3 GB/s if all ranks are on one machine. Virtual ranks have those of their simulation.

    Raises:
        ValueError: `want` is neither of these.
        TypeError: `network` is not a Network.
    """

    name = "auto"

    want: str = "exact_sum"
    network: Network | None = None
    _oktopk: OkTopk | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("want", self.want, SEMANTICS)
        check_model("network", self.network)
        if self.want == "top_k_of_sum":
            self._oktopk = OkTopk()

    def check_state(self, state: dict[str, Any]) -> None:
        super().check_state(state)
        if self._oktopk is None and state["oktopk"] is not None:
            raise ValueError("state: expected that of Auto(want='exact_sum'), got that of Auto(want='top_k_of_sum')")

    @property
    def semantics(self) -> str:  # type: ignore[override]
        """The option `want`."""
        return self.want

    @property
    def takes_ops(self) -> bool:  # type: ignore[override]
        """Whether it takes operations other than the sum: only for the exact sum."""
        return self.want == "exact_sum"

    def replicated_state(self) -> tuple[int, int]:
        return (0, 0) if self._oktopk is None else self._oktopk.replicated_state()

    def early(self, channel: Channel, x: SparseVector) -> Buffer | None:
        if self.want != "exact_sum" or channel.size > FEW_RANKS:  # then every rank would receive a row of each
            return None
        if self._chosen(channel, x, x.nnz, early=True) != "allgather":
            return np.empty(AGREEMENT_BYTES, np.uint8)
        return ALLGATHER.early(self._with_format(channel), x)

    def persistent(self, channel: Channel, x: Vector, k: int, early: bool) -> tuple[Algorithm, Channel]:
        if self.want != "exact_sum":
            return self, channel
        return CHOICES["allgather" if early else self._chosen(channel, x, k)](), self._with_format(channel)

    def __call__(self, channel: Channel, x: SparseVector, k: int) -> Reduction:
        if channel.gathered and all(map(len, channel.gathered)):
            return ALLGATHER(channel, x, k)
        chosen = self._chosen(channel, x, k)
        algorithm = self._oktopk if chosen == "oktopk" and self._oktopk is not None else CHOICES[chosen]()
        reduction = algorithm(self._with_format(channel), x, k)
        if chosen == "oktopk" or self.want == "exact_sum":
            return reduction
        top = check_order(reduction.value.to_sparse()).topk(k)
        return Reduction(top, lambda: reduction.contributed.to_sparse().intersect(top))

    def _chosen(self, channel: Channel, x: Vector, k: int, early: bool = False) -> str:
        """Return the name of the algorithm for a call, the same on all ranks for the same k."""
        transport, rest = channel.transport, max(k.bit_length() - BITS, 0)
        k, n, network = k >> rest << rest, x.length, self.network or transport.network
        width = formats.wire_dtype(x.dtype, channel.value_dtype).stored.itemsize
        choices = EXACT if self.want == "exact_sum" else ALL
        return fastest(n, k if k < n else n, transport.size, width, transport.one_node, network, choices, early)

    def _with_format(self, channel: Channel) -> Channel:
        network = self.network or channel.transport.network
        return channel.with_format(choosing(network.beta)) if channel.format is FORMATS["auto"] else channel
