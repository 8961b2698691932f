"""A search through all orders in which the messages of a program may arrive, on the simulator.

A run is a list of choices: at each point at which more than one thing may happen next (see `Step`), which one does.
Ranks are functions of what they receive, so a state of the world is given by the steps that each rank has taken. The
search runs the program again and again, each time with other choices, and leaves a run that comes to a state in which
it has been before. So it is complete, and its runs are as many as there are states and choices in them.

A send, and a receive that cannot end in another way, are no choices: they commute with all that other ranks do. A
message that was sent may still be on its way, so a send takes no possibility from its receiver, and adds one that stays
until the receiver decides. The order in which a rank reads reports of errors is no choice either, unless one of them
revokes the communicator: it needs them all. `every_step=True` does without this argument: all orders of all steps are
run.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections import Counter
from dataclasses import dataclass, field

from sparsecoll import simulate
from sparsecoll.errors import CommunicationError
from sparsecoll.transport import sim
from sparsecoll.transport.tags import FIRST_TAG, REVOKE_TAG, CallMismatch
from sparsecoll.transport.virtual_ranks import DeadlockError, SimTransport, Step


class Fault(Exception):
    """Raised on purpose."""


class Died(BaseException):
    """Ends a rank."""


class Visited(Exception):
    """Ends a run in a state in which the search has been before."""


class Rank(SimTransport):
    """A virtual rank that may fail, and that sees what ranks on sockets see of others.

    Attributes:
        fault: that of the search, if it is this rank's.
        operations: how many it has sent and received while faults are armed.
        armed: whether they are.
        limited: whether its waits have a timeout.
        posted: the sources of receives that have not been waited for.
        peeks: see `Search`.
        digest: checksum of all bytes sent.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.fault, self.operations, self.armed, self.limited = None, 0, False, False
        self.posted, self.digest, self.open = Counter(), 0, True

    def _operate(self):
        self.operations += self.armed
        if self.armed and self.fault is not None and self.operations == self.fault[2]:
            self.armed = False
            kind = self.fault[0]
            if kind in ("raise", "raise, late"):
                raise Fault("injected")
            if kind == "interrupt":
                raise KeyboardInterrupt
            me = self.members[self.rank]
            self._world.wait(me, (), lambda: [Step(me, kind)])
            self.open = kind == "stop"
            raise Died

    def _end(self, peer):
        return self._world.ends[self.context, self.members[peer]]

    def _isend(self, destination, buffer, tag):
        if tag < FIRST_TAG:
            super()._isend(destination, buffer, tag)
            return
        self._operate()
        self.digest = zlib.crc32(buffer, self.digest)
        me, peer, end = self.members[self.rank], self.members[destination], self._end(destination)

        def ways():
            return [Step(me, what, peer) for what in (("reach",) if end.open else ("lose", "gone"))]

        if end.fault is not None and end.fault[0] == "die":
            step = self._world.wait(me, (), ways)
            if step.what == "gone":
                raise CallMismatch(f"rank {destination} is gone: Broken pipe")
            if step.what == "lose":
                return
        super()._isend(destination, buffer, tag)

    def _irecv(self, source, into):
        self.posted[source] += 1
        return super()._irecv(source, into)

    def _take(self, source, tag):
        self._operate()
        content = super()._take(source, tag)
        self.posted[source] -= 1
        return content

    def _otherwise(self, me, sources, stalls):
        self._receive_notices()
        steps = super()._otherwise(me, sources, stalls)
        if self.limited and self.timeout is None:
            steps.append(Step(me, "timeout"))
        for source in sources:
            if not self._end(source).open and not self._world.mail.get(self._route(source, self.rank)):
                steps.append(Step(me, "lost", self.members[source]))
        if stalls:  # a message for another receive may be here, of another call
            for source in +self.posted - Counter(sources):
                queue = self._world.mail.get(self._route(source, self.rank))
                if queue and queue[0].tag != self.tag:
                    steps.append(Step(me, "mismatch", self.members[source]))
        return steps

    def _happens(self, step, sources, what):
        if step.what == "lost":
            self.broken = f"rank {self.rank} lost rank {step.peer}: it closed the connection, or it has ended"
            raise CommunicationError(self.broken)
        if step.what == "mismatch":
            raise CallMismatch(f"rank {step.peer} is in another call")
        self.timeout = self.timeout or 5.0
        super()._happens(step, sources, what)

    def _receive_notices(self):
        if self.peeks:
            for source in range(self.size):
                queue = self._world.mail.get(self._route(source, self.rank))
                if queue and queue[0].tag >= FIRST_TAG:
                    self.notices[source] = queue[0].tag

    def exchange_errors(self, report, error=None):
        self.posted.clear()
        return super().exchange_errors(report, error)


@dataclass
class Search:
    """All runs of a program.

    Args:
        P: number of ranks.
        program: function of a communicator, whose transport is a `Rank`; returns what the rank has seen.
        check: raises AssertionError if the list of what the ranks have returned, and the steps of a run, are wrong.
        fault: (kind, rank, n): the rank fails before the n-th message that it sends or receives while it is `armed`;
            None, the default, for no failure. It raises an exception ("raise", or "interrupt" for KeyboardInterrupt),
            or does nothing any more, with its connections closed ("die") or not ("stop").
        stalls: how often each rank may look in another call's tag before it must (when all ranks wait).
        timeouts: how many waits of a run may end by a timeout at any time.
        give_up: whether they also end so when all ranks wait, however many; if not, that is a failure.
        peeks: whether a rank that looks whether it waits for ever sees the tags of messages that it does not expect, as
            over sockets; False, the default, as over MPI.
        every_step: whether sends and receives without alternative are choices, too.
        limit: number of runs after which the search ends.

    Attributes:
        histories: the steps of each rank at the end of a run, with what it returned.
        states: the states in which there was a choice, with a checksum of all bytes sent before.
        runs: number of runs.
        complete: whether all orders have been run.
        first: the steps of the first run.
        last: what the ranks returned in the last run that was finished.
    """

    P: int
    program: object
    check: object
    fault: tuple | None = None
    stalls: int = 0
    timeouts: int = 0
    give_up: bool = False
    peeks: bool = False
    every_step: bool = False
    limit: int = 1_000_000
    histories: dict = field(default_factory=dict)
    states: dict = field(default_factory=dict)
    runs: int = 0
    complete: bool = True
    first: list = field(default_factory=list)
    last: list = field(default_factory=list)

    def run(self):
        """Run all orders; return this object."""
        prefixes, chance = [[]], random.Random(0)
        while prefixes:
            if self.runs == self.limit:
                self.complete = False
                break
            other = chance.randrange(len(prefixes))
            prefixes[other], prefixes[-1] = prefixes[-1], prefixes[other]
            self.replay(prefixes.pop(), prefixes)
        return self

    def replay(self, choices, prefixes=None):
        """Run the order that these choices begin; add the other ones that begin like it to `prefixes`."""
        order = Order(self, list(choices), prefixes)
        self.runs += 1
        try:
            with ranks_of(Rank, order):
                results = simulate(self.P, self._guarded, schedule=order.choose).results
            history, seen, self.last = tuple(order.local), repr(results), results
            self.check(results, order.steps)
            assert self.histories.setdefault(history, seen) == seen, "the same history, other bits"
        except Visited:
            return None
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            done = ", ".join(f"{step.rank} {step.what} {step.peer}" for step in order.steps[-12:])
            raise AssertionError(f"{error!r} with the choices {order.choices}; the last steps: {done}") from error
        self.first = self.first or order.steps
        return results

    def _guarded(self, comm):
        try:
            return self.program(comm)
        except Died:
            return None


@contextlib.contextmanager
def ranks_of(kind, order):
    """Let `simulate` use transports of this kind, and the order know them."""

    def made(*arguments, **options):
        transport = kind(*arguments, **options)
        order.ranks.append(transport)
        transport.peeks = order.search.peeks
        if order.search.fault is not None and order.search.fault[1] == transport.rank:
            transport.fault = order.search.fault
        return transport

    before, sim.SimTransport = sim.SimTransport, made
    try:
        yield
    finally:
        sim.SimTransport = before


class Order:
    """The choices of one run."""

    def __init__(self, search, choices, prefixes):
        self.search, self.choices, self.prefixes = search, choices, prefixes
        self.given = len(choices)  # those after it are made here
        self.made = 0
        self.ranks, self.steps = [], []
        self.local = [0] * search.P  # a checksum of the steps that each rank has taken
        self.stalls, self.timeouts = [0] * search.P, 0

    def choose(self, steps):
        """Return the position of the next step, for `simulate`."""
        possible = self._allowed(steps)
        step = None if self.search.every_step and len(possible) > 1 else self._without_choice(possible)
        if step is None:
            step = self._chosen(possible)
        self.steps.append(step)
        if step.what == "stall":
            self.stalls[step.rank] += 1
        else:
            self.timeouts += step.what == "timeout"
            self.local[step.rank] = hash((self.local[step.rank], step.what, step.peer))
        return steps.index(step)

    def _allowed(self, steps):
        """Those for which there are stalls and timeouts left. If nothing else is possible, all stalls; then all."""
        search = self.search
        left = [
            step
            for step in steps
            if not (step.what == "stall" and self.stalls[step.rank] >= search.stalls)
            and not (step.what == "timeout" and self.timeouts >= search.timeouts)
        ]
        left = left or [step for step in steps if step.what == "stall"]
        if not left and not search.give_up:
            raise DeadlockError("all ranks wait")
        return left or steps

    def _without_choice(self, steps):
        """A step that commutes with all others that are possible now and later; None if there is none."""
        if len(steps) == 1:
            return steps[0]
        for step in steps:
            own = [other for other in steps if other.rank == step.rank]
            if self._is_sure(own):
                return own[0]
        return None

    def _is_sure(self, own):
        """Whether the first of a rank's steps commutes with its other ones and with those that may still come."""
        step, search = own[0], self.search
        dying = search.fault is not None and search.fault[0] == "die"
        if step.what in ("start", "send") and len(own) == 1:
            return True
        if any(other.what != "receive" for other in own) or self.stalls[step.rank] < search.stalls:
            return False
        rank = self.ranks[step.rank]
        routes = rank._world.waiting[step.rank][0]
        if len(routes) == 1:
            return not any(n and rank.members[source] != step.peer for source, n in rank.posted.items())
        return not dying and all(
            rank._world.mail[route][0].tag != REVOKE_TAG for route in routes if rank._world.mail.get(route)
        )

    def _chosen(self, steps):
        position, self.made = self.made, self.made + 1
        if position >= self.given:
            if self.prefixes is not None:
                self._visit()
                self.prefixes.extend([*self.choices, other] for other in range(1, len(steps)))
            self.choices.append(0)
        return steps[self.choices[position]]

    def _visit(self):
        """Leave the run if the search has been in this state."""
        state = (
            tuple(self.local),
            tuple(self.stalls),
            self.timeouts,
            tuple((rank._notified, *sorted(rank.notices.items())) for rank in self.ranks),
        )
        digest = tuple(rank.digest for rank in self.ranks)
        known = self.search.states.setdefault(hash(state), digest)
        assert known == digest, "the same steps, other bytes"
        if known is not digest:
            raise Visited


def orders_of(steps, P):
    """The number of orders of all steps of a history in which each message is sent before it is received."""
    own = [[step for step in steps if step.rank == rank] for rank in range(P)]
    needed = []  # for each step of each rank: how many steps of the peer come before it
    for rank in range(P):
        received, needs = Counter(), []
        for step in own[rank]:
            need = None
            if step.what == "receive":
                received[step.peer] += 1
                sends = [i for i, s in enumerate(own[step.peer]) if s.what == "send" and s.peer == rank]
                need = step.peer, sends[received[step.peer] - 1] + 1
            needs.append(need)
        needed.append(needs)
    ways = {(0,) * P: 1}
    for _ in steps:
        following = Counter()
        for done, count in ways.items():
            for rank in range(P):
                if done[rank] < len(own[rank]):
                    need = needed[rank][done[rank]]
                    if need is None or done[need[0]] >= need[1]:
                        following[(*done[:rank], done[rank] + 1, *done[rank + 1 :])] += count
        ways = following
    return sum(ways.values())
