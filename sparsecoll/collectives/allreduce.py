"""Allreduce: the sum of sparse vectors on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np

from sparsecoll import formats
from sparsecoll.algorithms import Algorithm, LowBit, Reduction, SparCML, as_algorithm
from sparsecoll.algorithms.base import reduced
from sparsecoll.collectives import convert, keyed
from sparsecoll.collectives.convert.back import Back
from sparsecoll.collectives.options import NOTHING, CallOptions, blocking, index_of_nan
from sparsecoll.collectives.signature import (
    Algo,
    AllreduceOptions,
    AnyComm,
    Dense,
    Given,
    ReduceOptions,
    T,
    Triple,
    Unpack,
    X,
    takes,
)
from sparsecoll.formats import Buffer
from sparsecoll.select import Vector
from sparsecoll.select.base import check_order
from sparsecoll.telemetry.trace import span
from sparsecoll.transport import Transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import DenseVector, RowSparse, SparseVector

UNCHANGED = Back()
MAX_KNOWN = 256  # validated arguments kept for a communicator
MANY, HIGH = 1 << 16, 16  # from a larger k, at a density above 1 / HIGH, the number of entries is worth a message


@overload
def allreduce(
    comm: AnyComm,
    x: RowSparse,
    algo: Algo = "auto",
    *,
    return_reduction: Literal[True],
    **options: Unpack[ReduceOptions],
) -> Reduction[RowSparse]: ...
@overload
def allreduce(
    comm: AnyComm, x: Any, algo: Algo = "auto", *, return_reduction: Literal[True], **options: Unpack[ReduceOptions]
) -> Reduction[SparseVector]: ...
@overload
def allreduce(comm: AnyComm, x: T, algo: LowBit, **options: Unpack[ReduceOptions]) -> T: ...  # type: ignore[overload-overlap]
@overload
def allreduce(comm: AnyComm, x: X, algo: Algo = "auto", **options: Unpack[ReduceOptions]) -> SparseVector | X: ...
@overload
def allreduce(comm: AnyComm, x: Dense, algo: Algo = "auto", **options: Unpack[ReduceOptions]) -> SparseVector: ...
@overload
def allreduce(comm: AnyComm, x: Given, algo: Algo = "auto", **options: Unpack[ReduceOptions]) -> Triple: ...
@overload
def allreduce(comm: AnyComm, x: T, algo: Algo = "auto", **options: Unpack[ReduceOptions]) -> T: ...
@takes(AllreduceOptions)
def allreduce(comm: AnyComm, x: Any, algo: Algo = "auto", **options: Unpack[AllreduceOptions]) -> Any:
    """Combine the sparse vectors of all ranks, by default their sum; every rank receives the same bits. Collective.

    Args:
        comm: communicator: an mpi4py intracommunicator, which the first call duplicates; a ProcessGroup or
            one-dimensional DeviceMesh of torch.distributed, whose ranks the first call connects by sockets; None for
            the default process group if torch.distributed is initialized, otherwise for MPI.COMM_WORLD, or for one rank
            without MPI; or what `sparsecoll.simulate` passes to its function. The first call is collective.
        x: SparseVector, RowSparse, tuple (indices, values, length), SciPy or pydata sparse matrix, torch tensor (dense
            or sparse_coo), dict or Counter with keys of int, str, bytes or tuples of int and str, or dense NumPy, CuPy
            or DLPack array of any shape, of bool, integers, floats or complex numbers (see `sparsecoll.as_vector`).
            Dtype, length and shape must be the same on all ranks (except of keyed types), and x must be on the GPU on
            all ranks or on none. It is not changed.
        algo: name in `sparsecoll.ALGORITHMS`, which creates a new algorithm object, or an Algorithm object, which keeps
            thresholds and boundaries between calls. "auto" (the default), "dense", "allgather", "sparcml",
            "densestream" and "hierarchical" compute the exact sum of the selected entries, "oktopk" its top k,
            "gtopk" and "spardl" approximate that, and "cltk" sums all ranks' values at the k largest entries of one
            rank. For a RowSparse: "auto", "allgather" or "owners", or a RowAuto, RowGather or RowOwners object.
        k: number of entries that each rank selects, and for "oktopk" also of the result. None, the default, stands for
            the algorithm's own k, or else the largest nnz of all ranks. A dense x requires `k` or `density`, except
            with algo="dense". For a RowSparse, the k rows of largest norm are selected; None selects all rows.
        **options: density, format, value_dtype, missing, timeout, check and nonfinite: see help(sparsecoll.allreduce).
        op: "sum" (the default), "mean" (the sum divided by P), "min", "max", "prod", "logical_and", "logical_or",
            "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", or "replace" (the value of the highest rank that
            has one); or MPI.SUM, MPI.MAX, MPI.LAND and so on of mpi4py. The result has an entry wherever at least one
            rank has one. Operations other than the sum and the mean need an algorithm that computes exact sums. Sums of
            bool are the logical or; logical operations return 1 and 0 and count NaN as true; "min" and "max" keep NaN.
        return_reduction: return a Reduction with value, contributed and traffic, whose vectors are SparseVectors
            (default: False); for sums and means only.

    Returns:
        The result, of the same type as x, on the host or on the GPU like x; a SparseVector if x is dense, or with
        `LowBit` a dense array or tensor. float16 values are combined in float32 and rounded once.

    Raises:
        ValueError: On every rank, if an argument is invalid on some rank, or a value is not finite.
        TypeError: On every rank, if an argument has a wrong type on some rank.
        CommunicationError: On every rank, if ranks pass different arguments or one of them fails during the call (a
            rank that has already returned raises in its next call); the communicator stays usable. Also if a rank does
            not answer within `timeout`.

    Volume: that of the algorithm (see its class), plus 4(P-1) words, or 8 ceil(log2 P) with more than 64 ranks, in
    calls whose arguments are new on the communicator, in calls without `k` and `density`, and in exact sums with a k
    above 65,536 and a sixteenth of the length. Later calls are compared by the tags of their messages. A dict takes
    8(P-1) more words, by which the ranks agree on the length and the dtype; with few keys, up to 8,192 on all ranks
    together, "auto" sends all entries to all ranks in the ceil(log2 P) messages that compare the arguments.

    See Also:
        `sparsecoll.iallreduce`, `sparsecoll.reduce`, `sparsecoll.reduce_scatter`, `sparsecoll.allgather`,
        `sparsecoll.Residual`.

    >>> def program(comm):
    ...     x = sparsecoll.SparseVector([comm.rank, 5], np.array([1.0, 2.0]), 8)
    ...     return sparsecoll.allreduce(comm, x).to_dense()
    >>> sparsecoll.simulate(2, program).results[0]
    array([1., 1., 0., 0., 0., 4., 0., 0.])

    The largest values, of the ranks that have one:

    >>> def largest(comm):
    ...     x = sparsecoll.SparseVector([comm.rank, 5], np.array([-1.0, comm.rank]), 8)
    ...     return sparsecoll.allreduce(comm, x, op="max").values
    >>> sparsecoll.simulate(2, largest).results[0]
    array([-1., -1.,  1.])
    """
    return_reduction = options.pop("return_reduction", False)
    given = CallOptions(**options)  # type: ignore[misc]  # the option that was taken out
    return blocking(comm, "allreduce", given, lambda call: _allreduce(call, x, algo, given, return_reduction))


@dataclass(frozen=True)
class Arguments:
    """Validated arguments of a call on vectors of one kind.

    Attributes:
        options: of the call, the same object for equal ones, whose format and operation are known.
        k: number of entries that each rank selects; None for all.
        signature: what the ranks compare.
        checksum: of the signature.
    """

    options: CallOptions
    k: int | None
    signature: dict[str, Any]
    checksum: int


def _allreduce(call: CollectiveCall, x: Any, algo: Any, options: CallOptions, return_reduction: bool) -> Any:
    """Convert x, agree on the arguments, sum, and convert the result."""
    transport, vector, back, shape = call.transport, x, UNCHANGED, ()
    before = transport.traffic.copy() if return_reduction else transport.traffic
    if isinstance(x, (SparseVector, DenseVector)):
        pass  # nothing to convert
    elif convert.has_keys(x):
        at_once = {"algo": "auto"} if isinstance(algo, str) and algo == "auto" and not return_reduction else None
        vector, back, combined = keyed.to_vector(call, x, options, at_once)
        if combined:
            return back(options.result(vector, transport))
    else:
        vector, back = options.as_rows(x, algo, return_reduction) or convert.to_vector(x)
        shape = tuple(getattr(x, "shape", ()))
    given, (vector, back) = vector, options.widened(vector, back)
    dtype = None if given is vector else given.dtype
    algorithm = as_algorithm(algo, vector.width > 0)
    arguments = arguments_of(call, vector, algorithm, options, shape)
    options = arguments.options
    if return_reduction and not options.operation.sums:
        raise ValueError(f"return_reduction: expected False unless op is 'sum' or 'mean', got op={options.op!r}")
    reduction = _reduce(call, vector, algorithm, arguments, arguments.k)
    if not return_reduction:
        return returned(algorithm, reduction.value, x, vector, back, transport, options, dtype)
    value = result_of(reduction.value, vector, transport, options)
    contributed = reduction.contributed.to_sparse()._copy_if_overlapping(vector)
    if dtype is not None:
        value, contributed = value.astype(dtype), contributed.astype(dtype)
    scaled = Reduction(value, contributed)
    scaled.traffic = transport.traffic.since(before)
    return scaled


def allreduce_vectors(
    transport: Transport,
    vector: Vector,
    algorithm: Algorithm,
    options: CallOptions,
    preselected: bool = False,
    compared: Mapping[str, Any] = NOTHING,
    deferred: bool = False,
) -> Reduction:
    """`allreduce` of vectors, as the torch adapter uses it; may be called inside another CollectiveCall.

    Args:
        preselected: whether the vector consists of selected entries, all of which are sent (default: False).
        compared: more values that must be the same on all ranks, by their names in errors: JSON values that can be
            hashed (default: none).
        deferred: whether the result may be a sum that is not formed yet, see `Reduction.parts` (default: False).

    Returns:
        The algorithm's Reduction; its value may be a DenseVector, and is a sum whatever `options.op` says.
    """
    with CollectiveCall(transport, "allreduce", options.timeout) as call:
        arguments = arguments_of(call, vector, algorithm, options, compared=compared)
        return _reduce(call, vector, algorithm, arguments, None if preselected else arguments.k, deferred)


def _reduce(
    call: CollectiveCall,
    vector: Vector,
    algorithm: Algorithm,
    arguments: Arguments,
    selected: int | None,
    deferred: bool = False,
) -> Reduction:
    """Select entries, compare the arguments of all ranks, and run the algorithm."""
    transport, options = call.transport, arguments.options
    algorithm.sync_epoch(transport.epoch)
    channel, rows = options.channel(transport, vector), vector.width > 0
    entries = contribution(vector, algorithm, selected, channel, options)
    counted = rows or counts_entries(algorithm, arguments.k, vector.length)
    message = early_message(algorithm, channel, entries) if counted and arguments.k is None else None
    call.state = algorithm.replicated_state()
    held = call.agree(entries.nnz if counted else None, options.check, message, arguments.checksum, every=rows)
    channel.gathered, channel.deferred, channel.held = call.gathered, deferred, held
    reduction = run(algorithm, channel, entries, max(held) if counted else arguments.k or 0)
    call.leaves(algorithm.replicated_state())
    return reduction


def counts_entries(algorithm: Algorithm, k: int | None, length: int) -> bool:
    """Return whether the ranks count their entries: without k, or where it is a limit that may be far above them."""
    if algorithm.takes_dense:  # it does not use k
        return False
    return k is None or (algorithm.semantics == "exact_sum" and k > max(length // HIGH, MANY))


def early_message(algorithm: Algorithm, channel: Channel, entries: Vector) -> Buffer | None:
    """Return the message that is sent together with the arguments of a call without k; see `Algorithm.early`."""
    if channel.size == 1 or entries.on_gpu or entries.width or channel.op.name == "replace":
        return None
    return algorithm.early(channel, entries)  # type: ignore[arg-type]


def arguments_of(
    call: CollectiveCall,
    vector: Vector,
    algorithm: Algorithm,
    options: CallOptions,
    shape: tuple[int, ...] = (),
    compared: Mapping[str, Any] = NOTHING,
) -> Arguments:
    """Return the validated arguments of a call, which become its signature; validated once on a communicator."""
    known = call.transport.validated
    of_vector = type(vector), vector.length, vector.width, vector.dtype, vector.on_gpu, shape
    of_options = options, type(options.k), type(options.density)  # True equals 1
    key = call.name, *of_vector, *of_options, type(algorithm), algorithm.k, algorithm.describe(), *compared.items()
    try:
        found: Arguments = known[key]
        call.signature = found.signature
        return found
    except (KeyError, TypeError):  # new ones, or one that cannot be hashed
        pass
    call.signature |= compared if len(shape) < 2 else {**compared, "shape": list(map(int, shape))}
    options.check_operation(vector)
    k = options.resolve_k(vector.length, algorithm.k)
    dense = k is None and isinstance(vector, DenseVector)
    if dense and not algorithm.takes_dense:
        raise ValueError(f"k, density: expected one of them for a dense x with algo={algorithm.name!r}, got neither")
    if k is not None and algorithm.takes_dense and algorithm.returns_dense:
        what = f"algo={algorithm.name!r}, which sums all values"
        raise ValueError(f"k, density: expected neither with {what}, got k={options.k} and density={options.density}")
    if not options.operation.sums and not algorithm.takes_ops:
        raise ValueError(
            f"op: expected 'sum' or 'mean' with algo={algorithm.describe()}, got {options.operation.name!r}:"
            ' use algo="auto" or another one that forms exact sums'
        )
    options.check_dtype(vector.dtype, f"algo={algorithm.name!r}" if algorithm.sends_sums else None)
    call.signature |= {"x": "dense" if dense else "sparse", **options.signature(vector, call.transport)}
    call.signature |= {"k": k, "algo": algorithm.describe()}
    found = Arguments(options, k, call.signature, call.checksum())
    if len(known) >= MAX_KNOWN:
        known.clear()
    with contextlib.suppress(TypeError):
        known[key] = found
    return found


def contribution(vector: Vector, algorithm: Algorithm, k: int | None, channel: Channel, options: CallOptions) -> Vector:
    """Return what this rank contributes, as the receivers get it: finite, and k selected entries unless k is None."""
    transport = channel.transport
    with transport.phase("select"), span("select", vector.nnz):
        x = vector
        if k is not None or algorithm.semantics != "exact_sum":
            with index_of_nan(x):
                if k is not None:
                    x = options.with_zeros(algorithm.select(x, k, channel.size), x, k)
                elif isinstance(x, SparseVector):
                    check_order(x)
        options.check_finite(x)  # before an operation makes other values of it
        x = options.prepared(x, transport)
        return formats.rounded(x, channel.value_dtype) if isinstance(x, DenseVector) else channel.roundtrip(x)


def run(algorithm: Algorithm, channel: Channel, entries: Vector, k: int) -> Reduction:
    """Combine the entries of all ranks and wait for the messages that this takes."""
    channel.limit(entries.dtype)
    if channel.op.name == "replace" and not channel.width:  # partial results of trees are not of successive ranks
        entries, algorithm = entries.to_sparse(keep_zeros=True), SparCML(variant="split_allgather")
    reduction = reduced(algorithm, channel, entries, k)
    channel.transport.waitall()
    return reduction


def returned(
    algorithm: Algorithm,
    y: Vector,
    x: Any,
    given: Vector,
    back: Back,
    transport: Transport,
    options: CallOptions,
    dtype: np.dtype[Any] | None,
) -> Any:
    """Return a result as the caller gets it: of the type of x, or `dtype`; for a dense x as the algorithm says."""
    if algorithm.returns_dense and isinstance(given, DenseVector) and isinstance(y, DenseVector):
        if options.operation.name == "mean":
            np.divide(y.values, transport.size, out=y.values)
        return convert.to_array(x)(y if dtype is None else y.astype(dtype))
    return back(result_of(y, given, transport, options))


def result_of(y: Vector, given: Vector, transport: Transport, options: CallOptions) -> SparseVector:
    """Return a result for the caller: sparse, divided for a mean, and without memory of the caller's arrays."""
    return options.result(y.to_sparse(), transport)._copy_if_overlapping(given)
