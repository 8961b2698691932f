"""The interface of algorithms: options, a local `select`, and a `__call__` that communicates."""

from __future__ import annotations

import functools
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic

import numpy as np

from sparsecoll.errors import check_integer
from sparsecoll.formats import Buffer
from sparsecoll.select import Selector, Vector, topk
from sparsecoll.select.base import Stateful, check_selector
from sparsecoll.telemetry.traffic import Traffic
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import DenseVector, RowSparse, SparseVector, accumulator_dtype

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    V = TypeVar("V", bound=Vector | RowSparse, default=Vector, covariant=True)
else:
    from typing import TypeVar

    V = TypeVar("V")

# the sum of all entries sent; the same up to rounding; its k largest entries; about these
SEMANTICS = ("exact_sum", "rounded_sum", "top_k_of_sum", "approximate_top_k")


class Reduction(Generic[V]):
    """The result of an allreduce with `return_reduction=True`.

    Attributes:
        value: the result, with the same bits on every rank.
        contributed: this rank's entries that entered the result, with the values that entered. Their sum over the ranks
            (their mean, if `op` is "mean") is `value`, up to rounding; residual = acc - contributed. For bool, whose
            sum is the logical or, the entries at the indices of `value`.
        traffic: Traffic of this rank in this call.
        parts: the vectors whose sum is `value`, as `DenseVector.copy_sum` takes them, until `value` is first read; None
            afterwards, or if the sum is formed at once.

    Args:
        value: the result, or a function that returns it.
        contributed: this rank's share, or a function that returns it.
        parts: see above; their values may have the dtype of the wire (default: None).
    """

    def __init__(
        self,
        value: V | Callable[[], V],
        contributed: V | Callable[[], V],
        parts: Sequence[Sequence[SparseVector]] | None = None,
    ) -> None:
        self._value, self._contributed, self.parts = value, contributed, parts
        self.traffic = Traffic()

    @property
    def value(self) -> V:
        """The result, with the same bits on every rank."""
        if callable(self._value):
            self._value, self.parts = self._value(), None
        return self._value

    @value.setter
    def value(self, value: V) -> None:  # type: ignore[misc]  # only algorithms set it
        self._value, self.parts = value, None

    def __repr__(self) -> str:
        return f"Reduction(value={self.value!r}, received {self.traffic.total.bytes_received:,} bytes)"

    @property
    def contributed(self) -> V:
        """The part of this rank's entries that entered `value`; computed when it is first read."""
        if callable(self._contributed):
            self._contributed = self._contributed()
        return self._contributed


def reduced(algorithm: Algorithm, channel: Channel, x: Any, k: int) -> Reduction:
    """Return the algorithm's Reduction of x; for bool, the entries of x at the result's indices have contributed."""
    reduction = algorithm(channel, x, k)
    if not isinstance(reduction, Reduction):
        got = type(reduction).__name__
        raise TypeError(f"algo: expected {algorithm.name!r} to return Reduction(value, contributed), got {got}")
    if x.dtype.kind == "b":  # from the logical or of several ranks, that of one cannot be taken away
        reduction._contributed = lambda: x.to_sparse().intersect(reduction.value.to_sparse())
    return reduction


@dataclass
class Algorithm(Stateful, ABC):
    """A sparse allreduce algorithm: derive a dataclass of its options, and define `__call__`.

    State is in fields with init=False, of which those with compare=False are not saved. An object keeps its state
    between calls, so use one object per sequence of vectors and communicator, in the same calls on all ranks.

    Args:
        k: number of entries to select if the call has neither `k` nor `density`.
        selector: the selector (see `sparsecoll.select`) by which each rank selects its entries; None, the default, for
            the algorithm's own selection, which is exact top-k unless its documentation says otherwise.

    Raises:
        ValueError: `k` is negative, or another option is out of range.
        TypeError: An option has a wrong type.
    """

    name: ClassVar[str]
    semantics: ClassVar[str]  # the kind of result, one of SEMANTICS
    takes_dense: ClassVar[bool] = False  # whether __call__ takes a DenseVector, without a selection
    returns_dense: ClassVar[bool] = False  # whether the result of a dense array is one, too, instead of a SparseVector
    sends_sums: ClassVar[bool] = True  # whether partial sums are encoded, so that lossy formats are not possible
    takes_rows: ClassVar[bool] = False  # whether x may be a RowSparse, on a channel of rows
    takes_vectors: ClassVar[bool] = True  # whether x may be a vector
    takes_ops = False  # whether all values are combined by `Channel.merge`, so that `op` may be any operation

    k: int | None = None
    selector: Selector | None = None
    _epoch: int | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.k is not None:
            check_integer("k", self.k, 0)
        check_selector(self.selector)

    def select(self, x: Vector, k: int, ranks: int = 1) -> SparseVector:
        """Select this rank's entries to send; local, may use state of earlier calls.

        Args:
            x: SparseVector or DenseVector.
            k: number of entries.
            ranks: number of ranks of the communicator.
        """
        return topk(x, k) if self.selector is None else self.selector.select(x, k)

    def early(self, channel: Channel, x: SparseVector) -> Buffer | None:
        """Return a message of x that is sent together with the arguments of a call without k, see `Channel.gathered`.

        It ends with AGREEMENT_BYTES of room, and consists of nothing else if x is sent later. None, the default, on all
        ranks if the algorithm does not send x in one message to all.
        """
        return None

    @abstractmethod
    def __call__(self, channel: Channel, x: SparseVector, k: int) -> Reduction:
        """Reduce x over the ranks.

        Args:
            channel: Channel that sends and receives vectors in the format and value dtype of the call.
            x: this rank's entries, rounded as on the wire.
            k: number of entries of the call, the same on every rank; of an exact sum the largest nnz, if the caller's k
                may be far above it.
        """

    def persistent(self, channel: Channel, x: Vector, k: int, early: bool) -> tuple[Algorithm, Channel]:
        """Return the algorithm and the channel of persistent calls, as `allreduce_init` prepares them; collective.

        Args:
            channel: as in `__call__`.
            x: this rank's vector, before its entries are selected.
            k: number of entries of all calls.
            early: whether all ranks would send x together with the arguments of a single call, see `early`.
        """
        return self, channel

    def describe(self) -> str:
        """Return name and options as a string, by which ranks compare their algorithms."""
        options = ", ".join([f"{name}={getattr(self, name)!r}" for name in _options(type(self))])
        return f"{self.name}({options})"

    def replicated_state(self) -> tuple[int, int]:
        """Return the number of calls made and a `digest` of other state that must be the same on all ranks.

        Ranks compare it in each call, without a message if an earlier call ended in that state. (0, 0), the default, if
        nothing must be the same, or in a new object.
        """
        return 0, 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._epoch = None  # an earlier failure does not discard it

    def sync_epoch(self, epoch: int) -> None:
        """Discard the state if the transport's epoch has changed: after a failure, ranks may have different states."""
        if self._epoch not in (None, epoch):
            self.reset()
        self._epoch = epoch


def digest(numbers: Sequence[int]) -> int:
    """Return a checksum of integers for `Algorithm.replicated_state`; 0 without integers."""
    return zlib.crc32(array("q", numbers))


@functools.cache
def _options(algorithm: type[Algorithm]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(algorithm) if f.init)


class Loss:
    """Sum of what rounding and truncation remove from partial sums on this rank, which `contributed` must not include.

    Args:
        channel: channel of the call, by which values are rounded.
        parts: what was removed already.
    """

    def __init__(self, channel: Channel, *parts: SparseVector) -> None:
        self._channel, self._parts = channel, list(parts)

    def add(self, part: SparseVector) -> None:
        """Record what was removed from a sum."""
        if part.nnz:
            self._parts.append(part)

    def round(self, part: SparseVector, dtype: np.dtype[Any] | None = None, own: bool = True) -> SparseVector:
        """Return a partial sum rounded as on the wire, and record the rounding error.

        Args:
            part: the partial sum.
            dtype: dtype to which it is converted first; None, the default, for its own.
            own: whether this rank records the error (default: True); of the ranks that have the same sum, one does.
        """
        rounded = self._channel.round(part if dtype is None else part.astype(dtype))
        if own:
            self.add(part.rounding_error(rounded))
        return rounded

    def truncate(self, part: SparseVector, kept: SparseVector) -> SparseVector:
        """Return `kept`, some entries of `part`, and record the others."""
        if kept.nnz < part.nnz:
            self.add(part.difference(kept))
        return kept

    def restrict_to(self, entries: SparseVector) -> None:
        """Discard what was recorded at other indices than those of `entries`."""
        self._parts = [part.intersect(entries) for part in self._parts]

    def subtract_from(self, x: Vector) -> Vector:
        """Return x minus the sum of what was recorded, without zeros if x is sparse."""
        parts, dtype = [part for part in self._parts if part.nnz], accumulator_dtype(x.dtype)
        if not parts:
            return x
        if not isinstance(x, DenseVector):
            return type(x).merge([x.astype(dtype), *(-part for part in parts)], dtype).drop_zeros()
        rest = DenseVector(x.values.astype(dtype))
        for part in parts:
            rest.subtract_at(part)
        return rest
