"""Plans: persistent collectives, prepared once and called many times, as those of MPI-4."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sparsecoll.errors import CommunicationError
from sparsecoll.transport import Transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.progress import Request, in_background

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class Plan(Generic[T]):
    """A persistent collective, as `sparsecoll.allreduce_init`, `sparsecoll.reduce_init` and the others return it.

    `plan(x)` returns the result of the blocking call. `plan.start(x)` starts the call in the background, and
    `plan.wait()` returns its result. After `plan.free()`, or the end of a `with` statement, the plan cannot be called.

    Args:
        transport: the communicator.
        name: of the function that made the plan.
        timeout: seconds to wait for a message in each call; None for no limit.
        perform: does the work of one call on x, within a CollectiveCall.

    >>> def program(comm):
    ...     x = sparsecoll.SparseVector([comm.rank], np.ones(1), 4)
    ...     with sparsecoll.reduce_init(comm, x, root=1) as plan:
    ...         plan.start(x)
    ...         y = plan.wait()
    ...     return None if y is None else y.toarray()
    >>> sparsecoll.simulate(2, program).results
    [None, array([1., 1., 0., 0.])]
    """

    def __init__(
        self, transport: Transport, name: str, timeout: float | None, perform: Callable[[CollectiveCall, Any], T]
    ) -> None:
        self._transport, self._name, self._timeout = transport, name, timeout
        self._perform: Callable[[CollectiveCall, Any], T] | None = perform
        self._request: Request[T] | None = None

    def __call__(self, x: Any = None) -> T:
        """Return what the blocking call returns for x with the plan's arguments. Collective.

        Args:
            x: as the blocking call takes it: of the length, dtype and shape of the example, if all ranks' must be the
                same there. It is not altered. None, the default, where x is ignored.

        Raises:
            ValueError: On every rank, if x differs from the example on some rank, or a value is not finite. In a
                gather, scan, exscan or alltoallv, ranks that wait for no message of that rank raise in a later one.
            CommunicationError: As in the blocking call; or the plan has been freed.
        """
        return self._transport.in_order(self._prepared(x))

    def start(self, x: Any = None) -> Request[T]:
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

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the started call; return its result or raise its exception.

        Args:
            timeout: seconds to wait; None, the default, for no limit.

        Raises:
            CommunicationError: The call has not finished within `timeout`, and `wait` may be called again; or none was
                started.
        """
        if self._request is None:
            raise CommunicationError("wait: expected a call started by start(x), got none")
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

    def _check_waited_for(self, what: str) -> None:
        if self._request is not None and not self._request.waited_for:
            raise CommunicationError(f"{what}: expected wait() for the call started before")

    def _prepared(self, x: Any) -> Callable[[], T]:
        """Return the call for x as the plan is now: what was started before `free` or the end of `with` is finished."""
        perform = self._perform

        def call() -> T:
            with CollectiveCall(self._transport, self._name, self._timeout) as call:
                if perform is None:
                    raise CommunicationError(f"plan: expected one that is in use, got one of {self._name} after free()")
                return perform(call, x)

        return call
