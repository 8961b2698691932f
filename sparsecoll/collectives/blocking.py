"""Blocking calls: the ranks agree on the arguments, then the data is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sparsecoll.collectives.options import CallOptions
from sparsecoll.transport import as_transport
from sparsecoll.transport.call import CollectiveCall

T = TypeVar("T")


def blocking(comm: Any, name: str, options: CallOptions, perform: Callable[[CollectiveCall], T]) -> T:
    """Make a blocking call after the calls that were started before it.

    Args:
        comm: the caller's communicator.
        name: of the collective.
        options: of the call.
        perform: agrees on the arguments, sends the data and returns the result.
    """
    transport = as_transport(comm, options.timeout)

    def make() -> T:
        with CollectiveCall(transport, name, options.timeout) as call:
            return perform(call)

    return transport.in_order(make)
