"""Failures on one rank within back-propagation are raised on all ranks at its end."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, TypeVar

from sparsecoll.errors import is_known
from sparsecoll.torch.replica.calls import collective
from sparsecoll.transport import Transport
from sparsecoll.transport.all_ranks import barrier
from sparsecoll.transport.call import KNOWN, CollectiveCall

T = TypeVar("T")
logger = logging.getLogger(__name__)
RANK = re.compile(r"^rank \d+: ")  # with which a call begins the text of an exception


class Failures:
    """The calls of the ranks of a sharded model on both of their communicators, and what fails between them.

    An exception must not leave back-propagation on one rank before its end, since the others wait for that rank in
    FSDP's own collectives. So it is recorded, and raised in this rank's next call on each communicator, whose ranks
    record it, too. Those that know of it make no more calls there, until all raise it at the end.

    Args:
        transport: of the ranks that reduce this rank's shard, which are on all nodes.
        node: of the ranks over which parameters are sharded; may be the same.
        timeout: of calls.

    Attributes:
        error: the exception to be raised, or None.
    """

    def __init__(self, transport: Transport, node: Transport, timeout: float | None) -> None:
        self._transport, self._node, self._timeout = transport, node, timeout
        self.forget()

    def forget(self) -> None:
        """Forget the failure, so that the next reduction begins anew."""
        self.error: Exception | None = None
        self._told: set[Transport] = set()  # those whose ranks know of that

    def hook(self, *functions: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls these, and records their exceptions; its result is the last one's, or None."""

        def call(*args: Any) -> Any:
            for function in functions:
                result = None
                try:
                    result = function(*args)
                except Exception as error:
                    known = getattr(error, "known_on", None)
                    if known is None and is_known(error, self._transport):  # a call of the buckets
                        known = self._transport
                    if known is not None or self.error is None:
                        self.error = error
                    if known is not None:
                        self._told.add(known)
            return result

        return call

    def end(
        self,
        name: str,
        wait: Callable[[], None],
        last: Callable[[Transport], Any],
        finish: Callable[[Exception | None], Exception | None],
    ) -> None:
        """End a back-propagation on all ranks.

        Args:
            name, last: see `all_told`.
            wait: waits for the jobs under way.
            finish: called with the exception of any rank, or None; returns the exception to be raised. Its own
                exceptions are not raised if a second call succeeds.
        """
        self.hook(wait)()
        if self.error is not None:  # perhaps raised before the jobs under way had ended, whose calls tell it to others
            self.hook(wait)()
        failed = self.all_told(name, last)
        try:
            raised = finish(failed)
        except Exception:
            logger.warning("end of back-propagation: it is repeated after an exception", exc_info=True)
            raised = finish(failed)
        if raised is not None:
            raise raised

    def call(self, transport: Transport, name: str, function: Callable[[CollectiveCall], T], phase: str = "") -> T:
        """See `collective`; in this call, its ranks learn of a failure on one of them."""
        if transport in self._told and self.error is not None:
            raise self.error
        failed, kind = self.error, KNOWN.get(type(self.error).__name__)
        failed = failed if kind is None else kind(RANK.sub("", str(failed)))  # which no rank knows here
        try:
            return collective(transport, name, self._timeout, function, phase, failed)
        except Exception as error:
            error.known_on = transport  # type: ignore[attr-defined]
            raise

    def all_told(self, name: str, last: Callable[[Transport], Any] = barrier) -> Exception | None:
        """Return the exception of a rank of any node, None if there is none, and forget it. Collective over all nodes.

        A failure goes first to the ranks with the same shard, one on each node, then to the others of each node. The
        ranks with the same shard call `last` if nothing has failed.
        """
        self.hook(self.call)(self._transport, name, lambda _: last(self._transport), "agree")
        if self._node is not self._transport:
            self.hook(self.call)(self._node, name, lambda _: barrier(self._node), "agree")
        failed = self.error
        self.forget()
        return failed

    def together(self, name: str, function: Callable[[], T]) -> T:
        """Return the result of a function; an exception on one rank is raised on all ranks of all nodes."""
        result: T = self.hook(function)()
        if (failed := self.all_told(name)) is not None:
            raise failed
        return result
