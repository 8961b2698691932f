"""Allreduce: the sum of sparse vectors on every rank, from the caller's data to an algorithm and back."""

from __future__ import annotations

from typing import Any

from sparsecoll import formats
from sparsecoll.algorithms import Algorithm, Reduction, resolve
from sparsecoll.collectives import convert
from sparsecoll.collectives.options import CallOptions, signature_of
from sparsecoll.formats import Format
from sparsecoll.select import Vector
from sparsecoll.telemetry.trace import doing
from sparsecoll.transport import Transport, as_transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.vector import DenseVector, SparseVector


def allreduce(
    comm: Any,
    x: Any,
    algo: str | Algorithm = "auto",
    *,
    k: int | None = None,
    density: float | None = None,
    format: str | Format = "auto",
    value_dtype: Any = None,
    op: str = "sum",
    timeout: float | None = None,
    check: bool = True,
    nonfinite: str = "raise",
    return_reduction: bool = False,
) -> Any:
    """Sum a long sparse vector over all ranks; every rank receives the same bits. Collective.

    Args:
        comm: an mpi4py intracommunicator, or the comm that `sparsecoll.simulate` passes. The first call on it
            duplicates it.
        x: SparseVector, (indices, values, length), or a dense 1-D NumPy or CuPy array or torch tensor of n values;
            float16/32/64 or int32/64, the same dtype and length on all ranks, and on the GPU on all of them or none.
            Never altered.
        algo: a name of `sparsecoll.ALGORITHMS` (a fresh one), or an Algorithm object, which keeps thresholds and
            boundaries between calls. "dense", "allgather", "auto": the exact sum of what was selected; "oktopk": the
            top k of it.
        k: entries that each rank selects (and, for "oktopk", entries of the result). Defaults to the algorithm's own k,
            else to the largest nnz over the ranks; needed for dense x, except with algo="dense".
        density: k as a share of n, in (0, 1]; at least one entry.
        format: wire format, a name of `sparsecoll.formats.FORMATS` or a Format object with options; "auto" takes the
            smallest for each message. Entries that a lossy one ("slots") drops are not part of what contributed.
        value_dtype: "float16" or "bfloat16" halves the values on the wire; "float32" does for float64. Rounding is
            part of what did not contribute.
        op: "sum" or "mean" (floats only).
        timeout: seconds to wait for a peer; then CommunicationError, and the communicator is out of use. None: wait
            for ever, with a warning once a minute.
        check: compare the arguments over the ranks; False on all of them does without.
        nonfinite: what if a value to be sent is NaN or infinite: "raise", on every rank, or "pass": sums are NaN or
            infinite then, and algorithms that order sums by magnitude raise on NaN all the same.
        return_reduction: return the whole Reduction (value, contributed, traffic); its vectors are library vectors.

    Returns:
        The sum, of x's own kind and where x is; a SparseVector for dense x. float16 is summed in float32 and rounded
        once.

    Raises:
        ValueError, TypeError: an argument is invalid on some rank; the same on every rank.
        CommunicationError: ranks disagree on an argument, or one failed in the call (whoever had finished it by then
            raises in its next call); the same on every rank. The communicator stays usable. A peer did not answer.

    Volume: the algorithm's (see its class), plus 4(P-1) words in calls whose arguments are new on this communicator,
    and in those without k: later ones are compared by the stamps of messages.

    >>> def program(comm):
    ...     x = sparsecoll.SparseVector([comm.rank, 5], np.array([1.0, 2.0]), 8)
    ...     return sparsecoll.allreduce(comm, x).to_dense()
    >>> sparsecoll.simulate(2, program).results[0]
    array([1., 1., 0., 0., 0., 4., 0., 0.])
    """
    options = CallOptions(k, density, format, value_dtype, op, timeout, check, nonfinite)
    transport = as_transport(comm, timeout)
    return transport.in_order(lambda: _allreduce(transport, x, algo, options, return_reduction))


def _allreduce(transport: Transport, x: Any, algo: Any, options: CallOptions, return_reduction: bool) -> Any:
    with CollectiveCall(transport, "allreduce", options.timeout) as call:
        vector, back = convert.to_vector(x)
        call.signature |= convert.shape_of(x)
        reduction = _reduce(call, vector, resolve(algo), options)
    ranks = transport.size if options.op == "mean" else 1
    value = _result(reduction.value, vector, ranks)
    if not return_reduction:
        return back(value)
    returned = Reduction(value, _result(reduction.contributed, vector, ranks))
    returned.traffic = reduction.traffic
    return returned


def allreduce_vectors(
    transport: Transport, vector: Vector, algorithm: Algorithm, options: CallOptions, preselected: bool = False
) -> Reduction:
    """`allreduce` between vectors, as the torch adapter uses it; may stand inside another CollectiveCall.

    Args:
        preselected: the vector is what this rank sends, of k entries or so; none of it is left out.

    Returns:
        The algorithm's Reduction; its value may be a DenseVector, and is a sum whatever `options.op` says.
    """
    with CollectiveCall(transport, "allreduce", options.timeout) as call:
        return _reduce(call, vector, algorithm, options, preselected)


def _reduce(
    call: CollectiveCall, vector: Vector, algorithm: Algorithm, options: CallOptions, preselected: bool = False
) -> Reduction:
    """Select, agree, communicate."""
    transport = call.transport
    before, start = transport.traffic.copy(), transport.now()
    algorithm.keep_up(transport.generation)
    k = options.resolve_k(vector.length, algorithm.k)
    dense = k is None and isinstance(vector, DenseVector)
    if dense and not algorithm.takes_dense:
        raise ValueError(f"k, density: expected one of them for a dense x with algo={algorithm.name!r}, got neither")
    options.check_dtype(vector.dtype, f"algo={algorithm.name!r}" if algorithm.sends_sums else None)
    call.signature |= {
        **signature_of(vector, transport),
        **options.signature(),
        "x": "dense" if dense else "sparse",
        "k": k,
        "algo": algorithm.describe(),
    }
    with transport.phase("select"), doing("select", vector.nnz):
        entries = _selected(vector, algorithm, None if preselected else k, transport.size, options)
    options.check_finite(entries)
    counted = k is None and not algorithm.takes_dense  # which has no use for k
    held = call.agree(entries.nnz if counted else None, options.check)
    transport.format, transport.value_dtype = options.wire_format, options.wire_dtype
    reduction = algorithm(transport, entries, max(held) if counted else k or 0)  # type: ignore[arg-type]
    transport.flush()
    transport.traffic.total.seconds += transport.now() - start
    reduction.traffic = transport.traffic.since(before)
    return reduction


def _selected(x: Vector, algorithm: Algorithm, k: int | None, ranks: int, options: CallOptions) -> Vector:
    """What this rank puts into the reduction, as it will arrive."""
    chosen = x if k is None else algorithm.select(x, k, ranks)
    if k is None and isinstance(x, SparseVector) and algorithm.semantics != "exact_sum" and x.has_nan():
        raise ValueError("x: expected values that can be ordered by magnitude, got NaN")
    if isinstance(chosen, DenseVector):
        return formats.rounded(chosen, options.wire_dtype)
    return options.wire_format.arriving(chosen, options.wire_dtype)


def _result(y: Vector, given: Vector, ranks: int) -> SparseVector:
    """A result as the caller gets it: sparse, divided by `ranks`, in memory that no array of the caller's has."""
    sparse = y if isinstance(y, SparseVector) else y.to_sparse()
    return (sparse.divide(ranks) if ranks > 1 else sparse).copy_if_overlapping(given)
