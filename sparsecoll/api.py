"""The front door: from the caller's communicator and data to an algorithm and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparsecoll import convert, formats
from sparsecoll.algorithms import Algorithm, Reduction, resolve
from sparsecoll.formats import Format
from sparsecoll.select import Vector
from sparsecoll.telemetry.trace import doing
from sparsecoll.telemetry.traffic import Traffic
from sparsecoll.transport import Transport, as_transport
from sparsecoll.transport.call import together
from sparsecoll.transport.progress import Request, in_background
from sparsecoll.vector import DenseVector, SparseVector

VALUE_DTYPES_ON_THE_WIRE = ("float16", "bfloat16", "float32")


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
    transport = as_transport(comm, timeout)
    back: convert.Back = convert.as_is
    given: Vector = SparseVector.empty(0, np.float32)
    about: dict[str, Any] = {}

    def prepare() -> tuple[Vector, Algorithm]:
        nonlocal back, given
        if op not in ("sum", "mean"):
            raise ValueError(f"op: expected 'sum' or 'mean', got {op!r}")
        given, back = convert.to_vector(x)
        about.update(convert.shape_of(x))
        if op == "mean" and given.dtype.kind != "f":
            raise TypeError(f"op: expected 'sum' for {given.dtype}, got 'mean'")
        return given, resolve(algo)

    reduction = allreduce_vectors(
        transport,
        prepare,
        k=k,
        density=density,
        format=format,
        value_dtype=value_dtype,
        op=op,
        timeout=timeout,
        check=check,
        nonfinite=nonfinite,
        about=about,
    )
    value = _for_the_caller(reduction.value, given, op, transport.size)
    if not return_reduction:
        return back(value)
    share = _for_the_caller(reduction.contributed, given, op, transport.size)
    returned = Reduction(value, share)
    returned.traffic = reduction.traffic
    return returned


def _for_the_caller(y: Vector, given: Vector, op: str, ranks: int) -> SparseVector:
    """A result as the caller gets it: sparse, divided for a mean, in memory that no array of the caller's has."""
    sparse = y if isinstance(y, SparseVector) else y.to_sparse()
    return (sparse.divide(ranks) if op == "mean" else sparse).copy_if_overlapping(given)


def allreduce_vectors(
    transport: Transport,
    prepare: Callable[[], tuple[Vector, Algorithm]],
    *,
    k: int | None = None,
    density: float | None = None,
    format: str | Format = "auto",
    value_dtype: Any = None,
    op: str = "sum",
    timeout: float | None = None,
    check: bool = True,
    nonfinite: str = "raise",
    selected: bool = False,
    about: dict[str, Any] | None = None,
) -> Reduction:
    """Select, agree, communicate: one allreduce between vectors, as the front door and the torch adapter use it.

    Args:
        prepare: returns this rank's vector and the algorithm. Whatever it raises is raised on every rank.
        selected: the vector is what this rank sends, of k entries or so; none of it is left out.
        about: further arguments that ranks compare, filled in by `prepare`.

    Returns:
        The algorithm's Reduction; its value may be a DenseVector.
    """

    def call() -> Reduction:
        extra = {} if about is None else about
        return _reduce(
            transport, prepare, k, density, format, value_dtype, op, timeout, check, nonfinite, selected, extra
        )

    return call() if transport.worker is None else transport.worker.in_order(call)  # type: ignore[no-any-return]


def _reduce(
    transport: Transport,
    prepare: Callable[[], tuple[Vector, Algorithm]],
    k: int | None,
    density: float | None,
    format: str | Format,
    value_dtype: Any,
    op: str,
    timeout: float | None,
    check: bool,
    nonfinite: str,
    chosen: bool,
    about: dict[str, Any],
) -> Reduction:
    before, start = transport.traffic.copy(), transport.now()
    with together(transport, "allreduce", timeout) as conversation:
        vector, algorithm = prepare()
        algorithm.keep_up(transport.generation)
        form, narrow = formats.resolve(format), wire_name(value_dtype)
        chosen_k = wanted(vector, algorithm.k if k is None and density is None else k, density)
        if chosen_k is None and isinstance(vector, DenseVector) and not algorithm.takes_dense:
            raise ValueError(
                f"k, density: expected one of them for a dense x with algo={algorithm.name!r}, got neither"
            )
        conversation.call |= {
            "length": vector.length,
            "dtype": vector.dtype.name,
            "memory": memory_of(vector, transport),
            "x": "dense" if isinstance(vector, DenseVector) and chosen_k is None else "sparse",
            "k": chosen_k,
            "algo": algorithm.describe(),
            "format": repr(form),
            "value_dtype": narrow,
            "op": op,
            **about,
        }
        check_wire(vector.dtype, form, narrow, f"algo={algorithm.name!r}" if algorithm.sends_sums else None)
        with transport.phase("select"), doing("select", vector.nnz):
            selected = _selected(vector, algorithm, None if chosen else chosen_k, transport.size, form, narrow)
        check_finite(selected, nonfinite)
        counted = chosen_k is None and not algorithm.takes_dense  # which has no use for k
        entries = conversation.agree(selected.nnz if counted else None, check)
        transport.format, transport.value_dtype = form, narrow
        reduction = algorithm(transport, selected, max(entries) if counted else chosen_k or 0)  # type: ignore[arg-type]
        transport.flush()
    transport.traffic.total.seconds += transport.now() - start
    reduction.traffic = transport.traffic.since(before)
    return reduction


def iallreduce(comm: Any, x: Any, *arguments: Any, **options: Any) -> Request[Any]:
    """`allreduce` in the background. Collective: every rank makes the same calls on a communicator in the same order.

    Takes what `allreduce` takes and returns a Request at once. Calls on one communicator, blocking ones too, are
    carried out one after the other by one thread, in the order in which they were made; those on different
    communicators side by side. Leave x and the algorithm object alone until `wait` returns.

    Needs MPI_THREAD_MULTIPLE (mpi4py asks for it). With less, and on the simulator, the call is carried out before
    iallreduce returns.

    >>> def program(comm):
    ...     requests = [iallreduce(comm, sparsecoll.SparseVector([i], np.ones(1), 5)) for i in range(3)]
    ...     return [int(request.wait().values[0]) for request in requests]
    >>> sparsecoll.simulate(4, program).results[0]
    [4, 4, 4]
    """
    transport = as_transport(comm, options.get("timeout"))

    def call() -> Any:
        return allreduce(transport, x, *arguments, **options)

    return Request(in_background(transport, call))


def wanted(x: Vector, k: int | None, density: float | None) -> int | None:
    """The k of a call, checked; None: all that each rank holds."""
    if k is not None and density is not None:
        raise ValueError(f"k, density: expected one of them, got k={k} and density={density}")
    if density is not None:
        if isinstance(density, bool) or not isinstance(density, (int, float, np.integer, np.floating)):
            raise TypeError(f"density: expected a number in (0, 1], got {density!r}")
        if not 0 < density <= 1:
            raise ValueError(f"density: expected in (0, 1], got {density}")
        return max(1, round(density * x.length))
    if k is None:
        return None
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)):
        raise TypeError(f"k: expected an integer, got {type(k).__name__}")
    if k < 0:
        raise ValueError(f"k: expected at least 0, got {k}")
    return int(k)


def wire_name(value_dtype: Any) -> str | None:
    """The name of a dtype for the wire that was given as a name, a NumPy type or a dtype."""
    if value_dtype is None or isinstance(value_dtype, str):
        return value_dtype
    try:
        return str(np.dtype(value_dtype).name)
    except TypeError:
        raise TypeError(f"value_dtype: expected a name or a NumPy dtype, got {value_dtype!r}") from None


def check_wire(dtype: np.dtype[Any], format: Format, value_dtype: str | None, sums: str | None) -> None:
    """Raise unless values of `dtype` may travel so; `sums`: what sends partial sums, if anything does."""
    if format.lossy and sums is not None:
        raise ValueError(f"format: expected one that loses nothing with {sums}, which sends sums, got {format!r}")
    if value_dtype is None:
        return
    if value_dtype not in VALUE_DTYPES_ON_THE_WIRE:
        raise ValueError(f"value_dtype: expected one of {', '.join(VALUE_DTYPES_ON_THE_WIRE)}, got {value_dtype!r}")
    if dtype.kind != "f" or np.dtype(formats.WIRE_DTYPES[value_dtype].stored).itemsize > dtype.itemsize:
        raise ValueError(f"value_dtype: expected no wider than x and x of floats, got {value_dtype} for {dtype}")


def check_finite(x: Vector, nonfinite: str) -> None:
    """Raise if x holds NaN or infinity and `nonfinite` does not let it pass."""
    if nonfinite not in ("raise", "pass"):
        raise ValueError(f"nonfinite: expected 'raise' or 'pass', got {nonfinite!r}")
    wrong = x.first_not_finite() if nonfinite == "raise" else None
    if wrong is not None:
        raise ValueError(f"x: expected finite values, got NaN or infinity, the first at index {wrong}")


def memory_of(x: Vector, transport: Transport) -> str:
    """Where a vector is and which way its messages go; the same on all ranks of a call."""
    return ("gpu, direct" if transport.gpu_direct else "gpu, staged") if x.on_gpu else "host"


def _selected(
    x: Vector, algorithm: Algorithm, k: int | None, ranks: int, format: Format, value_dtype: str | None
) -> Vector:
    """What this rank puts into the reduction, as it will arrive."""
    chosen = x if k is None else algorithm.select(x, k, ranks)
    if k is None and isinstance(x, SparseVector) and algorithm.semantics != "exact_sum" and x.has_nan():
        raise ValueError("x: expected values that can be ordered by magnitude, got NaN")
    if isinstance(chosen, DenseVector):
        return formats.rounded(chosen, value_dtype)
    return format.arriving(chosen, value_dtype)


def traffic(comm: Any) -> Traffic:
    """The counters of this rank on `comm`, live; `.reset()` sets them to zero, `print` shows a table.

    The first call on an mpi4py communicator is collective (it duplicates it).
    """
    return as_transport(comm).traffic
