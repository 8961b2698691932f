"""Types of the public calls: communicators, names, and the options that calls share, each described once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal, Protocol, TypedDict, TypeVar, Unpack as Unpack

import numpy as np
from numpy.typing import NDArray

from sparsecoll.algorithms import Algorithm
from sparsecoll.collectives.options import CallOptions
from sparsecoll.formats import Format
from sparsecoll.vector import DenseVector

ExactName = Literal["auto", "dense", "allgather", "sparcml", "densestream", "hierarchical", "owners"]
AlgorithmName = Literal[ExactName, "oktopk", "gtopk", "spardl", "cltk"]
FormatName = Literal["auto", "coo", "dense", "bitmap", "packed", "densestream", "slots", "packed_codes"]
LogicalName = Literal["logical_and", "logical_or", "logical_xor"]
BitwiseName = Literal["bitwise_and", "bitwise_or", "bitwise_xor"]
OperationName = Literal["sum", "mean", "min", "max", "prod", LogicalName, BitwiseName, "replace"]
WireDtypeName = Literal["float16", "bfloat16", "float32"]
Missing = Literal["ignore", "zero"]
NonFinite = Literal["raise", "pass"]
Owner = Literal["hash", "range", "quantile"]


class Comm(Protocol):
    """What communicators have in common: mpi4py's, those of `sparsecoll.simulate`, and those of `sparsecoll.connect`.

    Attributes:
        rank: rank of this process, from 0 to size - 1.
        size: number of ranks.

    >>> def program(comm: sparsecoll.Comm) -> int:
    ...     return comm.rank * comm.size
    >>> sparsecoll.simulate(3, program).results
    [0, 3, 6]
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class Group(Protocol):
    """A ProcessGroup or a DeviceMesh of torch.distributed."""

    def size(self) -> int: ...


class Op(Protocol):
    """An operation of mpi4py, such as MPI.MAX."""

    def Is_commutative(self) -> bool: ...


class Array(Protocol):
    """A dense array of NumPy, CuPy or another library with DLPack."""

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class Tensor(Protocol):
    """A tensor of torch, whose type does not say whether it is sparse."""

    @property
    def is_sparse(self) -> bool: ...

    def coalesce(self) -> Any: ...


Algo = AlgorithmName | Algorithm
Operator = OperationName | Op
AnyComm = Comm | Group | None
Dense = Array | DenseVector
Given = tuple[Any, Any, int]
Triple = tuple[NDArray[Any], NDArray[Any], int]
Edges = Sequence[int] | None
T = TypeVar("T")
Many = list[T] | tuple[T, ...]
X = TypeVar("X", bound=Tensor)
F = TypeVar("F", bound=Callable[..., Any])


class MoveOptions(TypedDict, total=False):
    """Options of the calls that only move data."""

    format: FormatName | Format
    value_dtype: WireDtypeName | np.dtype[Any] | type[Any] | None
    timeout: float | None
    check: bool


class ReduceOptions(MoveOptions, total=False):
    """Options of the calls that combine vectors."""

    k: int | None
    density: float | None
    op: Operator
    missing: Missing
    nonfinite: NonFinite


class RegionOptions(ReduceOptions, total=False):
    """Options of `sparsecoll.reduce_scatter`."""

    owner: Owner | None


class AllreduceOptions(ReduceOptions, total=False):
    """Options of `sparsecoll.allreduce`."""

    return_reduction: bool


RAISES = """    Raises:
        ValueError: On every rank, if an argument is invalid on some rank{finite}.
        TypeError: On every rank, if an argument has a wrong type on some rank.
        CommunicationError: As in `sparsecoll.allreduce`.

"""
FINITE = ', or a value is not finite (with\n            nonfinite="raise")'  # in calls that have this option
OPTIONS = re.compile(r" {8}\*\*options: .*\n(?: {12}.*\n)*")
DESCRIPTIONS = {
    "k": """number of entries that each rank selects; None, the default, for all entries of x.""",
    "density": """k as a fraction of the length, in (0, 1], instead of `k`; at least one entry is selected.""",
    "owner": "",
    "return_reduction": "",
    "op": """operation, as in `sparsecoll.allreduce` (default: "sum").""",
    "missing": """what operations do where some ranks have no entry: "ignore" (the default) combines the entries of the
            other ranks, "zero" counts missing entries as zeros. Sums and means are the same in both cases.""",
    "format": """wire format: name in `sparsecoll.formats.FORMATS`, or a Format object; one that loses nothing where
            sums are sent. "auto", the default, uses the smallest format for each message.""",
    "value_dtype": """dtype of the values on the wire, "float16", "bfloat16" or "float32", not wider than that of x;
            None, the default, for the dtype of x.""",
    "timeout": """seconds to wait for a message. A rank that has waited longer raises CommunicationError, and the
            communicator cannot be used afterwards. None, the default, waits without limit and logs a warning once a
            minute.""",
    "check": """compare the arguments of all ranks (default: True). False must be passed on all ranks.""",
    "nonfinite": """"raise" (the default) raises on every rank if a value to be sent is NaN or infinite; with "pass",
            results become NaN or infinite.""",
}


def takes(options: type) -> Callable[[F], F]:
    """Decorator: show and describe the options of a function in place of `**options`, and what it raises."""
    types = {name: kind.__forward_arg__ for name, kind in options.__annotations__.items()}  # with those of its bases
    order = [name for name in DESCRIPTIONS if name in types]
    defaults = {"owner": None, "return_reduction": False} | {field.name: field.default for field in fields(CallOptions)}

    def complete(call: F) -> F:
        signature, text = inspect.signature(call), call.__doc__ or ""
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters += [inspect.Parameter(n, kind, default=defaults.get(n), annotation=types[n]) for n in order]
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        entries = "".join(f"        {n}: {DESCRIPTIONS[n]}\n" for n in order if f"        {n}: " not in text)
        raises = RAISES.format(finite=FINITE * ("nonfinite" in order))
        text = text if "    Raises:" in text else text.replace("    Volume:", f"{raises}    Volume:")
        call.__doc__ = OPTIONS.sub(lambda _: entries, text)
        return call

    return complete
