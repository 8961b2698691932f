"""Persistent allreduce: arguments are validated and compared once, for many calls on vectors of one kind."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from sparsecoll.algorithms import Algorithm, LowBit, as_algorithm
from sparsecoll.collectives import convert
from sparsecoll.collectives.allreduce import arguments_of, contribution, counts_entries, early_message, returned, run
from sparsecoll.collectives.convert.back import Back
from sparsecoll.collectives.options import CallOptions, blocking
from sparsecoll.collectives.signature import Algo, AnyComm, Dense, Given, ReduceOptions, T, Triple, Unpack, X, takes
from sparsecoll.errors import CommunicationError
from sparsecoll.select import Vector
from sparsecoll.transport import Transport
from sparsecoll.transport.call import AGREEMENT_BYTES, CollectiveCall
from sparsecoll.transport.progress import Request, in_background
from sparsecoll.vector import SparseVector

if TYPE_CHECKING:
    from typing import Self

NAME = "allreduce_init"
R = TypeVar("R")


class _Allreduce:
    """What the calls of a plan have in common, found out with an example x."""

    def __init__(self, call: CollectiveCall, x: Any, algo: str | Algorithm, options: CallOptions) -> None:
        transport, self._options = call.transport, options
        vector, _ = _to_vector(x)
        self._kind = _kind_of(x, vector)
        self._selecting = as_algorithm(algo)
        self._selecting.sync_epoch(transport.epoch)
        arguments = arguments_of(call, vector, self._selecting, options, tuple(getattr(x, "shape", ())))
        self._k = k = arguments.k
        channel, counted = options.channel(transport, vector), counts_entries(self._selecting, k, vector.length)
        if k is None and counted and self._selecting.semantics != "exact_sum":
            raise ValueError(f"k, density: expected one of them for algo={self._selecting.name!r}, got neither")
        self._size, early = k or 0, False
        call.state = self._selecting.replicated_state()
        if counted:
            entries = contribution(vector, self._selecting, k, channel, options)
            message = early_message(self._selecting, channel, entries) if k is None else None
            self._size = max(call.agree(entries.nnz, options.check, every=False))
            sends = int(message is not None and message.size > AGREEMENT_BYTES)
            early = all(call.agree(sends, options.check, every=False))
        else:
            call.agree(check=options.check)
        self._algorithm, self._channel = self._selecting.persistent(channel, vector, self._size, early)
        transport.waitall()
        self._signature, self._checksum = arguments.signature, arguments.checksum

    def __call__(self, call: CollectiveCall, x: Any) -> Any:
        """Return the result for x."""
        transport, options = call.transport, self._options
        call.signature = self._signature
        vector, back = _to_vector(x)
        kind = _kind_of(x, vector)
        if kind != self._kind:
            raise ValueError(f"x: expected {_described(self._kind)} as in allreduce_init, got {_described(kind)}")
        for algorithm in (self._selecting, self._algorithm):
            algorithm.sync_epoch(transport.epoch)
        entries = contribution(vector, self._selecting, self._k, self._channel, options)
        call.state = self._algorithm.replicated_state()
        call.agree(check=options.check, checksum=self._checksum)
        value = run(self._algorithm, self._channel, entries, self._size).value
        call.leaves(self._algorithm.replicated_state())
        return returned(self._algorithm, value, x, vector, back, transport, options)


def _to_vector(x: Any) -> tuple[Vector, Back]:
    """Return `convert.to_vector(x)`; raise TypeError if x has keys, on which the calls of a plan do not agree."""
    if convert.has_keys(x):
        raise TypeError(f"x: expected a type with a length, got {type(x).__name__}: use allreduce")
    return convert.to_vector(x)


def _kind_of(x: Any, vector: Vector) -> tuple[Any, ...]:
    """Return the properties that all vectors of a plan share."""
    shape = tuple(getattr(x, "shape", ()))
    return type(vector).__name__, vector.length, vector.dtype, vector.on_gpu, shape if len(shape) > 1 else None


def _described(kind: tuple[Any, ...]) -> str:
    name, length, dtype, on_gpu, shape = kind
    size = f"length {length}{f' and shape {list(shape)}' if shape else ''}"
    return f"a {name} of {size} of {dtype}{' on the GPU' * on_gpu}"


@overload
def allreduce_init(comm: AnyComm, x: T, algo: LowBit, **options: Unpack[ReduceOptions]) -> Plan[T]: ...  # type: ignore[overload-overlap]
@overload
def allreduce_init(
    comm: AnyComm, x: X, algo: Algo = "auto", **options: Unpack[ReduceOptions]
) -> Plan[SparseVector | X]: ...
@overload
def allreduce_init(
    comm: AnyComm, x: Dense, algo: Algo = "auto", **options: Unpack[ReduceOptions]
) -> Plan[SparseVector]: ...
@overload
def allreduce_init(comm: AnyComm, x: Given, algo: Algo = "auto", **options: Unpack[ReduceOptions]) -> Plan[Triple]: ...
@overload
def allreduce_init(comm: AnyComm, x: T, algo: Algo = "auto", **options: Unpack[ReduceOptions]) -> Plan[T]: ...
@takes(ReduceOptions)
def allreduce_init(comm: AnyComm, x: Any, algo: Algo = "auto", **options: Unpack[ReduceOptions]) -> Plan[Any]:
    """Prepare an `allreduce` that is repeated; return a plan, whose calls give the same bits. Collective.

    As a persistent collective of MPI-4, it validates the options, compares the arguments of all ranks, and lets "auto"
    choose the algorithm once. Later calls send nothing but data, also without `k` (except for the first call after one
    that failed).

    Args:
        comm: communicator, as in `sparsecoll.allreduce`.
        x: example of the vectors: any type that `sparsecoll.allreduce` takes, except RowSparse and those with keys
            instead of a length. Hybrid tensors are summed as vectors. It is not summed itself.
        algo: name or Algorithm object, as in `sparsecoll.allreduce` (default: "auto"). The plan keeps one object, so
            that thresholds and boundaries are kept between its calls. "auto" chooses for the example's entries.
        k: number of entries that each rank selects; None, the default, for the algorithm's own k, or else for all
            entries. Algorithms of the top k need `k` or `density`.
        **options: density, op, missing, format, value_dtype, timeout, check, nonfinite, as in `sparsecoll.allreduce`.

    Returns:
        Plan: `plan(x)` returns the sum, `plan.start(x)` and `plan.wait()` form it in the background.

    Volume: as of the first `sparsecoll.allreduce` with these arguments, without the data.

    See Also:
        `sparsecoll.allreduce`, `sparsecoll.iallreduce`, `sparsecoll.Plan`.

    >>> def program(comm):
    ...     x = sparsecoll.SparseVector([comm.rank, 5], np.array([1.0, 2.0]), 8)
    ...     plan = sparsecoll.allreduce_init(comm, x)
    ...     return [plan(step * x)[5].item() for step in range(3)]
    >>> sparsecoll.simulate(2, program).results[0]
    [0.0, 4.0, 8.0]
    """
    given = CallOptions(**options)
    return blocking(
        comm, NAME, given, lambda call: Plan(call.transport, given.timeout, _Allreduce(call, x, algo, given))
    )


class Plan(Generic[R]):
    """A persistent allreduce, as `sparsecoll.allreduce_init` returns it.

    `plan(x)` returns the result of the blocking call. `plan.start(x)` starts the call in the background, and
    `plan.wait()` returns its result. After `plan.free()`, or the end of a `with` statement, the plan cannot be called.

    Args:
        transport: the communicator.
        timeout: seconds to wait for a message in each call; None for no limit.
        perform: does the work of one call on x, within a CollectiveCall.

    >>> def program(comm):
    ...     x = sparsecoll.SparseVector([comm.rank], np.ones(1), 4)
    ...     with sparsecoll.allreduce_init(comm, x) as plan:
    ...         plan.start(x)
    ...         return plan.wait().toarray()
    >>> sparsecoll.simulate(2, program).results[0]
    array([1., 1., 0., 0.])
    """

    def __init__(
        self, transport: Transport, timeout: float | None, perform: Callable[[CollectiveCall, Any], R]
    ) -> None:
        self._transport, self._timeout = transport, timeout
        self._perform: Callable[[CollectiveCall, Any], R] | None = perform
        self._request: Request[R] | None = None

    def __call__(self, x: Any) -> R:
        """Return what `allreduce` returns for x with the plan's arguments. Collective.

        Args:
            x: vector of the length, dtype and shape of the example. It is not altered.

        Raises:
            ValueError: On every rank, if x differs from the example on some rank, or a value is not finite.
            CommunicationError: As in `sparsecoll.allreduce`; or the plan has been freed.
        """
        return self._transport.in_order(self._prepared(x))

    def start(self, x: Any) -> Request[R]:
        """Start the call for x in the background; return its Request, for which `wait` waits, too. Collective.

        Args:
            x: as for the plan itself; do not change it until the call has finished.

        Raises:
            CommunicationError: The call started before has not been waited for.
        """
        self._check_waited_for("start")
        self._request = Request(in_background(self._transport, self._prepared(x)))
        return self._request

    def test(self) -> bool:
        """Return whether the started call has finished; True if none was started, as in MPI."""
        return self._request is None or self._request.test()

    def wait(self, timeout: float | None = None) -> R:
        """Wait for the started call; return its result or raise its exception.

        Args:
            timeout: seconds to wait; None, the default, for no limit.

        Raises:
            CommunicationError: The call has not finished within `timeout`, and `wait` may be called again; or none was
                started.
        """
        if self._request is None:
            raise CommunicationError("No call has been started: call start(x) before wait().")
        try:
            return self._request.wait(timeout)
        finally:
            if self._request.test():
                self._request = None

    def free(self) -> None:
        """Release what the plan keeps between calls; later calls raise CommunicationError on all ranks.

        Raises:
            CommunicationError: The call started before has not been waited for.
        """
        self._check_waited_for("free")
        self._perform = self._request = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._request is not None and not self._request.waited_for:
            self.wait()
        self._perform = self._request = None

    def __repr__(self) -> str:
        state = "freed" if self._perform is None else self._request if self._request is not None else "not started"
        return f"Plan({self._transport.size} ranks, {state})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("Plan cannot be pickled or copied: call allreduce_init again")

    def _check_waited_for(self, what: str) -> None:
        if self._request is not None and not self._request.waited_for:
            raise CommunicationError(f"A started call is under way: call wait() before {what}().")

    def _prepared(self, x: Any) -> Callable[[], R]:
        """Return the call for x as the plan is now: a call started before `free` or the end of `with` is finished."""
        perform = self._perform

        def call() -> R:
            with CollectiveCall(self._transport, NAME, self._timeout) as call:
                if perform is None:
                    raise CommunicationError("This plan has been freed: call allreduce_init again.")
                return perform(call, x)

        return call
