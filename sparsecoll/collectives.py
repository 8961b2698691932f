"""The rest of the family: reduce, reduce_scatter, allgather and bcast of sparse vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from sparsecoll import api, convert, formats
from sparsecoll.algorithms.primitives.halving import reduce_scatter as halved
from sparsecoll.formats import Format
from sparsecoll.select import topk
from sparsecoll.transport import Transport, as_transport
from sparsecoll.transport.call import Conversation, together
from sparsecoll.transport.collectives import allgatherv, broadcast, spread
from sparsecoll.vector import VALUE_DTYPES, DenseVector, SparseVector, accumulator_dtype

T = TypeVar("T")


def reduce(
    comm: Any,
    x: Any,
    root: int = 0,
    *,
    k: int | None = None,
    density: float | None = None,
    format: str | Format = "auto",
    value_dtype: Any = None,
    timeout: float | None = None,
    check: bool = True,
    nonfinite: str = "raise",
) -> Any:
    """Sum sparse vectors on one rank. Collective.

    1. Reduce-scatter by recursive halving: rank j gets the sum of the j-th of P equal parts of the coordinates.
    2. Everybody's part goes to the root.

    Args:
        x, k, density, format, value_dtype, timeout, check, nonfinite: as in `sparsecoll.allreduce`; dense x needs k or
            density. `format` must lose nothing.
        root: the rank that receives the sum.

    Returns:
        On the root the sum, of x's own kind (see `sparsecoll.as_vector`); None elsewhere.

    Volume: into each rank 2k(P-1)/P words (identical supports) to k log2 P (disjoint ones) if entries are spread evenly
    over the P parts, at most 2k(P-1) if they are not; then the sum into the root.

    Raises:
        ValueError, TypeError, CommunicationError: as `sparsecoll.allreduce`.

    >>> def program(comm):
    ...     y = sparsecoll.reduce(comm, sparsecoll.SparseVector([comm.rank, 4], np.ones(2), 6), root=1)
    ...     return None if y is None else y.to_dense()
    >>> sparsecoll.simulate(2, program).results
    [None, array([1., 1., 0., 0., 2., 0.])]
    """
    options = _Options(k, density, format, value_dtype, check, nonfinite)

    def body(transport: Transport, given: SparseVector) -> SparseVector | None:
        edges = [given.length * j // transport.size for j in range(transport.size + 1)]
        mine = _part(transport, given, edges)
        with transport.phase("gather"):
            if transport.rank != root:
                transport.send(root, transport.encode(mine))
                return None
            parts = []
            for rank in range(transport.size):
                parts.append(mine if rank == root else formats.decode(transport.receive(rank), given.length))
        return SparseVector.concatenate([part.astype(given.dtype) for part in parts])

    return _sum(comm, "reduce", x, options, {"root": root}, body, timeout)


def reduce_scatter(
    comm: Any,
    x: Any,
    boundaries: Sequence[int] | None = None,
    *,
    k: int | None = None,
    density: float | None = None,
    format: str | Format = "auto",
    value_dtype: Any = None,
    timeout: float | None = None,
    check: bool = True,
    nonfinite: str = "raise",
) -> Any:
    """Sum sparse vectors; rank j receives the sum between boundaries[j] and boundaries[j + 1]. Collective.

    Recursive halving (for any P): ceil(log2 P) messages.

    Args:
        x, k, density, format, value_dtype, timeout, check, nonfinite: as in `sparsecoll.reduce`.
        boundaries: P + 1 ascending coordinates from 0 to length, the same on all ranks; None: P equal parts.

    Returns:
        This rank's part, of x's own kind; its coordinates and length are those of the whole.

    Volume: 2k(P-1)/P words (identical supports) to k log2 P (disjoint ones) if entries are spread evenly over the
    parts, at most 2k(P-1) if they are not.

    Raises:
        ValueError: boundaries are not P + 1 ascending coordinates from 0 to length.
        ValueError, TypeError, CommunicationError: as `sparsecoll.allreduce`.

    >>> def program(comm):
    ...     return sparsecoll.reduce_scatter(comm, sparsecoll.SparseVector([0, 5], np.ones(2), 6)).indices.tolist()
    >>> sparsecoll.simulate(3, program).results
    [[0], [], [5]]
    """
    options = _Options(k, density, format, value_dtype, check, nonfinite)
    given_edges = None if boundaries is None else [int(edge) for edge in boundaries]

    def body(transport: Transport, given: SparseVector) -> SparseVector:
        edges = given_edges or [given.length * j // transport.size for j in range(transport.size + 1)]
        if len(edges) != transport.size + 1 or edges[0] != 0 or edges[-1] != given.length or edges != sorted(edges):
            raise ValueError(
                f"boundaries: expected {transport.size + 1} ascending ones from 0 to {given.length}, got {edges}"
            )
        return _part(transport, given, edges).astype(given.dtype)

    return _sum(comm, "reduce_scatter", x, options, {"boundaries": given_edges}, body, timeout)


def allgather(
    comm: Any,
    x: Any,
    *,
    format: str | Format = "auto",
    value_dtype: Any = None,
    timeout: float | None = None,
    check: bool = True,
) -> list[Any]:
    """Every rank's sparse vector on every rank. Collective.

    Bruck's algorithm: ceil(log2 P) messages.

    Args:
        x: as in `sparsecoll.allreduce`, sparse; of one length and dtype on all ranks.
        format, value_dtype, timeout, check: as there.

    Returns:
        P vectors of x's own kind, in rank order; values are as they travelled, on this rank too.

    Volume: the entries of the others, 2k(P-1) words of COO.

    Raises:
        ValueError: x is dense.
        ValueError, TypeError, CommunicationError: as `sparsecoll.allreduce`.

    >>> def program(comm):
    ...     parts = sparsecoll.allgather(comm, sparsecoll.SparseVector([comm.rank], np.ones(1), 3))
    ...     return [int(part.indices[0]) for part in parts]
    >>> sparsecoll.simulate(3, program).results[2]
    [0, 1, 2]
    """
    transport = as_transport(comm, timeout)
    options = _Options(None, None, format, value_dtype, check, "pass")

    def call() -> list[Any]:
        with together(transport, "allgather", timeout) as conversation:
            given, back = options.prepare(transport, conversation, x, {}, sums=False)
            with transport.phase("gather"):
                blocks = allgatherv(transport, transport.encode(given))
                transport.flush()
            return [back(formats.decode(block, given.length).astype(given.dtype)) for block in blocks]

    return _in_order(transport, call)


def bcast(
    comm: Any,
    x: Any,
    root: int = 0,
    *,
    format: str | Format = "auto",
    value_dtype: Any = None,
    timeout: float | None = None,
    check: bool = True,
) -> Any:
    """One rank's sparse vector on all ranks. Collective.

    A binomial tree: ceil(log2 P) messages one after the other.

    Args:
        x: on the root as in `sparsecoll.allreduce`, sparse; ignored elsewhere.
        root: the rank that has it.
        format, value_dtype, timeout, check: as there.

    Returns:
        The vector, with values as they travelled: of x's kind on the root, a SparseVector elsewhere.

    Volume: 2k words into each rank.

    Raises:
        ValueError: the root's x is dense.
        ValueError, TypeError, CommunicationError: as `sparsecoll.allreduce`.

    >>> def program(comm):
    ...     x = sparsecoll.SparseVector([2], np.ones(1), 5) if comm.rank == 1 else None
    ...     return int(sparsecoll.bcast(comm, x, root=1).indices[0])
    >>> sparsecoll.simulate(3, program).results
    [2, 2, 2]
    """
    transport = as_transport(comm, timeout)
    options = _Options(None, None, format, value_dtype, check, "pass")

    def call() -> Any:
        with together(transport, "bcast", timeout) as conversation:
            conversation.call |= {
                "root": _checked_root(transport, root),
                "format": repr(options.form),
                "value_dtype": options.narrow,
            }
            given: SparseVector = SparseVector.empty(0, np.float64)
            back: convert.Back = convert.as_is
            if transport.rank == root:
                given, back = options.vector(x, sums=False)
            conversation.agree(check=check)
            transport.format, transport.value_dtype = options.form, options.narrow
            with transport.phase("broadcast"):
                about = np.array([given.length, VALUE_DTYPES.index(given.dtype)], np.int64)
                length, dtype = broadcast(transport, about, root).tolist()
                message = spread(transport, transport.encode(given), root)
            return back(formats.decode(message, length).astype(VALUE_DTYPES[dtype]))

    return _in_order(transport, call)


@dataclass
class _Options:
    """What all of them take."""

    k: int | None
    density: float | None
    format: str | Format
    value_dtype: Any
    check: bool
    nonfinite: str

    @property
    def form(self) -> Format:
        return formats.resolve(self.format)

    @property
    def narrow(self) -> str | None:
        """The dtype of values on the wire, by its name."""
        return api.wire_name(self.value_dtype)

    def vector(self, x: Any, sums: bool) -> tuple[SparseVector, convert.Back]:
        """x as the entries to send, checked."""
        vector, back = convert.to_vector(x)
        api.check_wire(vector.dtype, self.form, self.narrow, "partial sums" if sums else None)
        k = api.wanted(vector, self.k, self.density)
        if k is None and isinstance(vector, DenseVector):
            expected = "a sparse one, or k or density" if sums else "a sparse one, such as SparseVector.from_dense(x)"
            raise ValueError(f"x: expected {expected}, got a dense one{' and neither' if sums else ''}")
        given = vector if k is None else topk(vector, k)
        assert isinstance(given, SparseVector)
        api.check_finite(given, self.nonfinite)
        return given, back

    def prepare(
        self, transport: Transport, conversation: Conversation, x: Any, call: dict[str, Any], sums: bool
    ) -> tuple[SparseVector, convert.Back]:
        """`vector`, with arguments compared over the ranks."""
        given, back = self.vector(x, sums)
        conversation.call |= {
            "length": given.length,
            **convert.shape_of(x),
            "dtype": given.dtype.name,
            "memory": api.memory_of(given, transport),
            "k": api.wanted(given, self.k, self.density),
            "format": repr(self.form),
            "value_dtype": self.narrow,
            **call,
        }
        conversation.agree(check=self.check)
        transport.format, transport.value_dtype = self.form, self.narrow
        return self.form.arriving(given, self.narrow), back


def _checked_root(transport: Transport, root: Any) -> int:
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < transport.size:
        raise ValueError(f"root: expected a rank from 0 to {transport.size - 1}, got {root!r}")
    return int(root)


def _part(transport: Transport, given: SparseVector, edges: Sequence[int]) -> SparseVector:
    """This rank's region of the sum, in the accumulator's dtype."""
    with transport.phase("split"):
        whole = SparseVector.sum([given], accumulator_dtype(given.dtype))
        return halved(transport, whole, edges, transport.rounded, pairs=True)


def _sum(
    comm: Any,
    name: str,
    x: Any,
    options: _Options,
    call: dict[str, Any],
    body: Callable[[Transport, SparseVector], SparseVector | None],
    timeout: float | None,
) -> Any:
    """A collective that sums: what it has in common with the others."""
    transport = as_transport(comm, timeout)

    def run() -> Any:
        with together(transport, name, timeout) as conversation:
            if "root" in call:
                call["root"] = _checked_root(transport, call["root"])
            given, back = options.prepare(transport, conversation, x, call, sums=True)
            result = body(transport, given)
            transport.flush()
            return None if result is None else back(result)

    return _in_order(transport, run)


def _in_order(transport: Transport, call: Callable[[], T]) -> T:
    return call() if transport.worker is None else transport.worker.in_order(call)  # type: ignore[no-any-return]
