"""What becomes of a process group's transport when the group is gone."""

import threading
import time

from sparsecoll.transport import process_groups
from sparsecoll.transport.progress import in_background
from sparsecoll.transport.tcp import TcpTransport

WHY = "its process group was destroyed"


class Group:
    """Stands for a process group."""


def alone():
    """A transport of one rank."""
    return TcpTransport(0, {}, [0])


def test_it_is_closed_at_once_without_nonblocking_calls():
    group, transport = Group(), alone()
    process_groups._close_with(group, transport)
    del group
    assert transport.broken == WHY


def test_whoever_collects_the_group_does_not_wait_for_nonblocking_calls():
    group, transport, finish = Group(), alone(), threading.Event()
    process_groups._close_with(group, transport)
    call = in_background(transport, lambda: finish.wait(20))
    del group
    assert not call.done() and not transport.broken
    finish.set()
    assert call.result(20)
    deadline = time.monotonic() + 20
    while not transport.broken and time.monotonic() < deadline:
        time.sleep(0.01)
    assert transport.broken == WHY
