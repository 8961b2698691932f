"""The options that collectives share: how they are validated, and what the ranks compare."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from sparsecoll import formats
from sparsecoll.algorithms import ROW_ALGORITHMS, Algorithm
from sparsecoll.collectives import convert, keyed
from sparsecoll.collectives.convert.back import Back
from sparsecoll.collectives.convert.tensors import ToArray
from sparsecoll.errors import NonFiniteError, check_choice, check_integer, check_number
from sparsecoll.formats import Format
from sparsecoll.select import Vector, topk
from sparsecoll.transport import Transport, as_transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.channel import Channel
from sparsecoll.transport.progress import in_turn
from sparsecoll.vector import DenseVector, RowSparse, SparseVector
from sparsecoll.vector.operation import OPERATIONS, Operation

V = TypeVar("V", bound="SparseVector | DenseVector | RowSparse")
S = TypeVar("S", bound="SparseVector | RowSparse")
T = TypeVar("T")
PACKED = formats.FORMATS["packed"]
NOTHING: Mapping[str, Any] = MappingProxyType({})
MPI_NAMES = {name.upper(): name for name in ("sum", "max", "min", "prod", "replace")}
MPI_NAMES |= {f"L{name.upper()}": f"logical_{name}" for name in ("and", "or", "xor")}
MPI_NAMES |= {f"B{name.upper()}": f"bitwise_{name}" for name in ("and", "or", "xor")}
MISSING = ("ignore", "zero")
NONFINITE = ("raise", "pass")
VALUE_DTYPES_ON_THE_WIRE = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """The options of a collective call as its caller gave them; see `sparsecoll.allreduce` for their meaning.

    They are validated when they are used, inside the CollectiveCall, so that an error is raised on every rank. To add
    an option, add a field here, and its type and description to `signature.py`.
    """

    k: int | None = None
    density: float | None = None
    format: str | Format = "auto"
    value_dtype: Any = None
    op: Any = "sum"
    timeout: float | None = None
    check: bool = True
    nonfinite: str = "raise"
    missing: str = "ignore"

    @classmethod
    def moving(
        cls, format: str | Format = "auto", value_dtype: Any = None, timeout: float | None = None, check: bool = True
    ) -> CallOptions:
        """Return the options of a call that only moves data."""
        return cls(format=format, value_dtype=value_dtype, timeout=timeout, check=check, nonfinite="pass")

    @functools.cached_property
    def wire_format(self) -> Format:
        """`format` as an object."""
        return formats.as_format(self.format)

    @functools.cached_property
    def wire_dtype(self) -> str | None:
        """The name of `value_dtype`, which may be a name, a NumPy type or a dtype."""
        if self.value_dtype is None or isinstance(self.value_dtype, str):
            return self.value_dtype
        try:
            return str(np.dtype(self.value_dtype).name)
        except TypeError:
            raise TypeError(f"value_dtype: expected a name or a NumPy dtype, got {self.value_dtype!r}") from None

    @functools.cached_property
    def operation(self) -> Operation:
        """`op`, a name or an operation of mpi4py, which is not imported for it, and `missing` as an object."""
        op = name = self.op
        if self.missing not in MISSING:
            raise ValueError(f"missing: expected 'ignore' or 'zero', got {self.missing!r}")
        if type(op).__module__ == "mpi4py.MPI" and type(op).__name__ == "Op":
            mpi = sys.modules["mpi4py.MPI"]
            name = next((name for known, name in MPI_NAMES.items() if op == getattr(mpi, known)), None)
            if name is None:
                known = ", ".join(f"MPI.{known}" for known in MPI_NAMES)
                raise ValueError(f"op: expected one of {known}, got another operation of MPI")
        elif not isinstance(op, str):
            known = ", ".join(OPERATIONS)
            raise TypeError(f"op: expected a name or an operation of mpi4py, got {op!r}: use one of {known}")
        check_choice("op", name, OPERATIONS)
        return Operation(name, self.missing == "zero")

    def signature(self, x: Vector | RowSparse | None = None, transport: Transport | None = None) -> dict[str, Any]:
        """Return the arguments that ranks compare, except `k` and `density`, which are compared as a number.

        Args:
            x: vector or rows, whose length, dtype and memory are added; None, the default, if these may differ.
            transport: the communicator, for x.
        """
        of_x: dict[str, Any] = {}
        if x is not None:
            memory = ("gpu, direct" if transport and transport.gpu_direct else "gpu, staged") if x.on_gpu else "host"
            size = {"x": "rows", "n": x.length, "d": x.width} if x.width else {"length": x.length}
            of_x = {**size, "dtype": x.dtype.name, "memory": memory}
        own = {"check": self.check, "format": repr(self.wire_format), "value_dtype": self.wire_dtype}
        return of_x | own | {"op": self.operation.name, "missing": self.missing, "nonfinite": self.nonfinite}

    def resolve_k(self, length: int, default: int | None = None) -> int | None:
        """Return the number of entries that each rank selects from a vector; None for all entries."""
        k, density = self.k, self.density
        if k is not None and density is not None:
            raise ValueError(f"k, density: expected one of them, got k={k} and density={density}")
        if density is not None:
            return max(1, round(check_number("density", density, "(0, 1]") * length))
        k = default if k is None else k
        return None if k is None else check_integer("k", k, 0)

    def check_operation(self, x: Vector | RowSparse) -> None:
        """Raise unless the values of x can be combined by `op`."""
        name, dtype = self.operation.name, x.dtype
        if x.width and self.format != "auto":
            raise ValueError(f"format: expected 'auto' for rows and dense arrays, which have one, got {self.format!r}")
        if name == "mean" and dtype.kind in "biu":
            raise TypeError(f"op: expected 'sum' for {dtype}, got 'mean': use floats, or divide the sum by the ranks")
        self.operation.fold(dtype)  # refuses dtypes
        if name in ("min", "max") and dtype.kind == "c":
            raise TypeError(f"op: expected one that needs no order of the values for {dtype}, got {name!r}: use abs(x)")
        if not self.operation.sums and x.on_gpu:
            raise TypeError(f"op: expected 'sum' or 'mean' for values on the GPU, got {name!r}: use arrays of NumPy")
        if not self.operation.sums and self.wire_format.lossy:
            raise ValueError(f"format: expected one that loses nothing with op={name!r}, got {self.wire_format!r}")

    def check_dtype(self, dtype: np.dtype[Any], sums: str | None = None) -> None:
        """Raise unless values of this dtype can be sent in `format` as `value_dtype`.

        Args:
            sums: what sends partial sums, for the error message; None if only the ranks' own entries are sent.
        """
        form, narrow = self.wire_format, self.wire_dtype
        if form.lossy and sums is not None:
            raise ValueError(f"format: expected one that loses nothing with {sums}, which sends sums, got {form!r}")
        if narrow is None:
            return
        check_choice("value_dtype", narrow, VALUE_DTYPES_ON_THE_WIRE)
        wider = dtype.kind != "f" or formats.WIRE_DTYPES[narrow].stored.itemsize > dtype.itemsize
        if wider and narrow != dtype.name:
            raise ValueError(f"value_dtype: expected no wider than x and x of floats, got {narrow} for {dtype}")

    def check_finite(self, x: Vector | RowSparse, words: Any = ()) -> None:
        """Raise if x, whose indices may stand for `words`, contains NaN or infinity, unless `nonfinite` is "pass"."""
        if self.nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite: expected 'raise' or 'pass', got {self.nonfinite!r}")
        if (index := x.first_not_finite() if self.nonfinite == "raise" else None) is not None:
            where = f"in row {index}" if isinstance(x, RowSparse) else f"at index {index}"
            where = f"at key {words[index]!r}" if len(words) else where
            raise ValueError(f"x: expected finite values, got NaN or infinity, the first {where}")

    def as_rows(self, x: Any, algo: Any = "auto", return_reduction: bool = False) -> tuple[RowSparse, Back] | None:
        """Return x as rows, and the Back of its type; None if a call takes x for a vector.

        Types of other libraries are vectors in calls that select entries or ask for what only vectors have.
        """
        all_entries = self.k is None and self.density is None and self.format == "auto" and not return_reduction
        own = isinstance(algo, Algorithm) and algo.takes_rows and algo.k is None and algo.selector is None
        for_rows = all_entries and (own or (isinstance(algo, str) and algo in ROW_ALGORITHMS))
        return convert.to_rows(x) if for_rows or isinstance(x, RowSparse) else None

    def to_entries(self, x: Any, sums: bool, converted: tuple[Any, Back] | None = None) -> tuple[SparseVector, Back]:
        """Return the entries, or rows, that this rank sends, and a function that converts a result to the type of x.

        Args:
            x: the caller's argument, of any type that `convert.to_vector` takes.
            sums: whether the collective sends partial sums and first selects the top k of x.
            converted: x as a vector or rows, and the Back of results; None, the default, for `convert.to_vector(x)`.
        """
        vector, back = self.widened(*(converted or convert.to_vector(x)))
        self.check_operation(vector)
        self.check_dtype(vector.dtype, "partial sums" if sums and not vector.width else None)
        if (k := self.resolve_k(vector.length)) is None and isinstance(vector, DenseVector):
            split = "a sparse one to split, or a list such as np.array_split(x, P)"
            expected = "a sparse one, or k or density" if sums else split
            raise ValueError(f"x: expected {expected}, got a dense one{' and neither' if sums else ''}")
        with index_of_nan(vector):
            entries = vector if k is None else self.with_zeros(topk(vector, k), vector, k)
        assert not isinstance(entries, DenseVector)
        self.check_finite(entries)
        return entries, back

    def with_zeros(self, chosen: S, x: Vector | RowSparse, k: int) -> S:
        """Return what a selector has chosen; of operations but sums also stored zeros, if only these are left."""
        missing = min(k, x.nnz) - chosen.nnz
        if self.operation.sums or missing <= 0 or not isinstance(x, SparseVector):
            return chosen
        zeros = np.flatnonzero(x.values == 0)
        if len(zeros) + chosen.nnz < x.nnz:
            return chosen
        return SparseVector.join([chosen, x.take(zeros[:missing])])  # type: ignore[return-value, list-item]

    def channel(self, transport: Transport, x: Vector | RowSparse) -> Channel:
        """Return the channel of a call on vectors, or rows, of the length, width and dtype of x."""
        form = PACKED if x.width else self.wire_format
        return Channel(transport, x.length, form, self.wire_dtype, self.operation, x.width, x.dtype)

    def prepared(self, x: V, transport: Transport) -> V:
        """Return x with the values that it contributes to the operation; x itself if they are its own."""
        if self.op in ("sum", "mean"):
            return x
        values = self.operation.prepared(x.values, transport.rank == transport.size - 1)
        return x if values is x.values else x.with_values(values)  # type: ignore[return-value]

    def widened(self, x: V, back: Back) -> tuple[V, Back]:
        """Return x, and what converts results: means of float16 are formed in float32, which sums do not exceed."""
        if self.operation.name != "mean" or x.dtype != np.float16:
            return x, back
        return x.astype(np.float32), lambda y: back(y.astype(np.float16))  # type: ignore[return-value]

    def result(self, y: S, transport: Transport) -> S:
        """Return the result of `op` for combined entries: a mean is divided by the number of ranks."""
        mean = self.operation.name == "mean" and transport.size > 1
        return y.divide(transport.size) if mean else y  # type: ignore[return-value]

    def agree(
        self, call: CollectiveCall, x: Any, sums: bool, converted: tuple[Any, Back] | None = None
    ) -> tuple[Channel, SparseVector, Back]:
        """Agree on the arguments of the call; return its channel and `to_entries`, rounded as on the wire."""
        if converted is None and convert.has_keys(x):
            converted = keyed.to_vector(call, x, self)[:2]
        entries, back = self.to_entries(x, sums, converted)
        call.signature |= self.signature(entries, call.transport) | convert.shape_of(x)
        call.signature |= {"k": self.resolve_k(entries.length)}
        if isinstance(back, ToArray):
            call.signature |= {"x": "an array", "shape": list(back.shape)}
        channel = self.channel(call.transport, entries)
        channel.held = call.agree(entries.nnz if entries.width else None, self.check)
        channel.limit(entries.dtype)
        return channel, channel.roundtrip(self.prepared(entries, call.transport)), back


for made in (CallOptions.__init__, CallOptions.moving.__func__):  # type: ignore[attr-defined]
    made.__qualname__ = "the collective"  # what an error names that has no such option


def blocking(comm: Any, name: str, options: CallOptions, perform: Callable[[CollectiveCall], T]) -> T:
    """Make a blocking call after the calls that were started before it."""
    transport = as_transport(comm, options.timeout)

    def make() -> T:
        with CollectiveCall(transport, name, options.timeout) as call:
            result = perform(call)
            transport.waitall()  # also for what was sent beside the arguments
            return result

    return in_turn(transport, make)


@contextlib.contextmanager
def index_of_nan(x: Vector) -> Iterator[None]:
    """Context manager: name the index if the enclosed code cannot order x because of NaN."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{error}; the first value not finite is at index {x.first_not_finite()}") from error


def check_root(root: Any, transport: Transport) -> int:
    """Return `root` as an int; raise ValueError unless it is a rank of the communicator."""
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < transport.size:
        found = "an operation of MPI: use op=" if type(root).__name__ == "Op" else repr(root)
        raise ValueError(f"root: expected a rank from 0 to {transport.size - 1}, got {found}")
    return int(root)


def as_edges(boundaries: Any, parts: int) -> list[int] | None:
    """Return boundaries as integers, None as it is; raise an error unless they are parts + 1 integers."""
    try:
        edges = None if boundaries is None else [operator.index(edge) for edge in boundaries]
    except TypeError:
        raise TypeError(f"boundaries: expected a sequence of integers or None, got {boundaries!r}") from None
    if edges is not None and len(edges) != parts + 1:
        raise ValueError(f"boundaries: expected {parts + 1} ascending ones from 0 to the length, got {len(edges)}")
    return edges


def check_boundaries(boundaries: Any, length: int, parts: int) -> list[int]:
    """Return the boundaries as integers, those of equal parts for None; raise as `as_edges` or ValueError if wrong."""
    if (edges := as_edges(boundaries, parts)) is None:
        return [length * j // parts for j in range(parts + 1)]
    if edges[0] != 0 or edges[-1] != length or edges != sorted(edges):
        raise ValueError(f"boundaries: expected {parts + 1} ascending ones from 0 to {length}, got {edges}")
    return edges
