"""Persistent allreduce: arguments are validated and compared once, for many calls on vectors of one kind."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

from sparsecoll.algorithms import Algorithm, LowBit, as_algorithm
from sparsecoll.collectives import convert
from sparsecoll.collectives.allreduce import arguments_of, contribution, counts_entries, early_message, returned, run
from sparsecoll.collectives.convert.back import Back
from sparsecoll.collectives.options import CallOptions, blocking
from sparsecoll.collectives.signature import Algo, AnyComm, Dense, Given, ReduceOptions, T, Triple, Unpack, X, takes
from sparsecoll.select import Vector
from sparsecoll.transport.call import AGREEMENT_BYTES, CollectiveCall
from sparsecoll.transport.progress import Request, in_turn, requests_of
from sparsecoll.vector import DenseVector, SparseVector

NAME = "allreduce_init"
R = TypeVar("R")


def _to_vector(x: Any) -> tuple[Vector, Back]:
    """Return `convert.to_vector(x)`; raise TypeError if x has keys, on which the calls of a plan do not agree."""
    if convert.has_keys(x):
        raise TypeError(f"x: expected a type with a length, got {type(x).__name__}: use allreduce")
    return convert.to_vector(x)


def _kind_of(x: Any, vector: Vector) -> tuple[Any, ...]:
    """Return the properties that all vectors of a plan share."""
    shape = tuple(getattr(x, "shape", ()))
    name = "DenseVector" if isinstance(vector, DenseVector) else "SparseVector"  # or a class derived from it
    return name, vector.length, vector.dtype, vector.on_gpu, shape if len(shape) > 1 else None


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
        Plan: `plan(x)` returns the sum, and `plan.start(x)` a Request of it, which is formed in the background.

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
    return blocking(comm, NAME, given, lambda call: Plan(call, x, algo, given))


class Plan(Generic[R]):
    """A persistent allreduce, as `sparsecoll.allreduce_init` returns it.

    `plan(x)` returns the result of the blocking call; `plan.start(x)` starts the call in the background and returns its
    Request. Nothing need be freed.

    Args:
        call: the call in which the ranks compare the arguments.
        x: example of the vectors.
        algo: as in `sparsecoll.allreduce_init`.
        options: of all calls.

    >>> def program(comm):
    ...     x = sparsecoll.SparseVector([comm.rank], np.ones(1), 4)
    ...     plan = sparsecoll.allreduce_init(comm, x)
    ...     return plan.start(x).wait().toarray()
    >>> sparsecoll.simulate(2, program).results[0]
    array([1., 1., 0., 0.])
    """

    def __init__(self, call: CollectiveCall, x: Any, algo: str | Algorithm, options: CallOptions) -> None:
        self._transport, self._options = call.transport, options
        vector, back = _to_vector(x)
        self._kind = _kind_of(x, vector)
        vector, _ = options.widened(vector, back)
        self._selecting = as_algorithm(algo)
        self._selecting.sync_epoch(call.transport.epoch)
        self._arguments = arguments_of(call, vector, self._selecting, options, tuple(getattr(x, "shape", ())))
        k = self._arguments.k
        channel, counted = options.channel(call.transport, vector), counts_entries(self._selecting, k, vector.length)
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
        plan = [self._algorithm.describe(), self._size, early]  # another plan may have the same arguments
        self._signature = call.signature = {**self._arguments.signature, "algorithm, entries of the plan": plan}
        self._checksum = call.checksum()
        if options.check:
            call.record(self._checksum, self._algorithm.replicated_state())

    def __call__(self, x: Any) -> R:
        """Return what `allreduce` returns for x with the plan's arguments. Collective.

        Args:
            x: vector of the length, dtype and shape of the example. It is not altered.

        Raises:
            ValueError: On every rank, if x differs from the example on some rank, or a value is not finite.
            CommunicationError: As in `sparsecoll.allreduce`.
        """
        return in_turn(self._transport, lambda: self._result(x))

    def start(self, x: Any) -> Request[R]:
        """Start the call for x in the background, after earlier ones; return its Request. Collective.

        Args:
            x: as for the plan itself; do not change it until the call has finished.
        """
        return requests_of(self._transport).start(lambda: self._result(x))

    def __repr__(self) -> str:
        return f"Plan({self._selecting.name}, {self._transport.size} ranks)"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("Plan cannot be pickled or copied: call allreduce_init again")

    def _result(self, x: Any) -> R:
        transport, options, algorithm = self._transport, self._options, self._algorithm
        with CollectiveCall(transport, NAME, options.timeout) as call:
            call.signature = self._signature
            vector, back = _to_vector(x)
            kind = _kind_of(x, vector)
            given, (vector, back) = vector, options.widened(vector, back)
            if kind != self._kind:
                raise ValueError(f"x: expected {_described(self._kind)} as in allreduce_init, got {_described(kind)}")
            for one in (self._selecting, algorithm):
                one.sync_epoch(transport.epoch)
            entries = contribution(vector, self._selecting, self._arguments.k, self._channel, options)
            call.state = algorithm.replicated_state()
            call.agree(check=options.check, checksum=self._checksum)
            value = run(algorithm, self._channel, entries, self._size).value
            call.leaves(algorithm.replicated_state())
            own = None if given is vector else given.dtype
            return returned(algorithm, value, x, vector, back, transport, options, own)  # type: ignore[no-any-return]
