"""Blocking calls: the ranks agree on the arguments, then the data is sent.

A collective consists of a function `prepare_NAME(call, x, options, ...)`, which validates the arguments, agrees on them
with the other ranks, and returns a function that sends the data and returns the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sparsecoll.collectives.options import CallOptions
from sparsecoll.transport import as_transport
from sparsecoll.transport.call import CollectiveCall

T = TypeVar("T")


def blocking(comm: Any, name: str, options: CallOptions, prepare: Callable[[CollectiveCall], Callable[[], T]]) -> T:
    """Make a blocking call after the calls that were started before it.

    Args:
        comm: the caller's communicator.
        name: of the collective.
        options: of the call.
        prepare: agrees on the arguments; returns what sends the data.
    """
    transport = as_transport(comm, options.timeout)

    def perform() -> T:
        with CollectiveCall(transport, name, options.timeout) as call:
            return prepare(call)()

    return transport.in_order(perform)
