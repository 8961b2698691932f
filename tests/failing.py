"""Transports that fail at a given message, sums that wait, and processes that must make no calls."""

import gc
import os
import signal
import threading
from dataclasses import dataclass, field

from sparsecoll import ALGORITHMS, Algorithm, CommunicationError, SparCML
from sparsecoll.algorithms import Auto, Hierarchical
from sparsecoll.transport.network import Network

K = 60
EXACT = [name for name, kind in ALGORITHMS.items() if kind().semantics == "exact_sum" and name != "hierarchical"]


class Fault(Exception):
    """Raised on purpose."""


def algorithm(name):
    """With the same choices on all transports."""
    made = {"auto": lambda: Auto(network=Network()), "hierarchical": lambda: Hierarchical(inner="oktopk")}
    return made[name]() if name in made else name


def fail_at(transport, method, number):
    """Let the transport's method raise when it is called for the number-th time."""
    original, calls = getattr(transport, method), [0]

    def failing(*arguments):
        calls[0] += 1
        if calls[0] == number:
            raise Fault(f"{method} {number}")
        return original(*arguments)

    setattr(transport, method, failing)


def unpatch(transport, method):
    vars(transport).pop(method, None)


def refused_in_a_fork(*calls):
    """Whether a forked process is refused each of these calls, within 30 s."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    done = 0
    gc.disable()  # process groups of earlier tests would wait for threads that a forked process does not have
    try:
        signal.alarm(30)
        for call in calls:
            try:
                call()
            except CommunicationError as error:
                done += "out of use since this process was forked; make calls in" in str(error)
    finally:
        os._exit(done != len(calls))


@dataclass
class Held(Algorithm):
    """A sum that says when it has begun, and waits until it may go on."""

    name = "held"
    semantics = "exact_sum"
    begun: threading.Event = field(default_factory=threading.Event, init=False, compare=False)
    goes_on: threading.Event = field(default_factory=threading.Event, init=False, compare=False)

    def state_dict(self):
        return {}

    def __call__(self, channel, x, k):
        self.begun.set()
        assert self.goes_on.wait(60)
        return SparCML()(channel, x, k)
