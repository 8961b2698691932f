"""The real TcpTransport on sockets that are hostile by a seed: never a wrong sum, and no rank waits for ever.

SPARSECOLL_HOSTILE is the number of seeds, and SPARSECOLL_HOSTILE_FIRST the first one: to replay a failure, 1 and its
seed.
"""

import errno
import itertools
import math
import os
import random
from dataclasses import dataclass

import hostile
import numpy as np
import pytest

import sparsecoll
from sparsecoll import CommunicationError, SparseVector

SEEDS = int(os.environ.get("SPARSECOLL_HOSTILE", "1600"))
FIRST = int(os.environ.get("SPARSECOLL_HOSTILE_FIRST", "0"))
BLOCKS = 16
CALLS, TIMEOUT = 8, 5.0
LONGEST = 3 * TIMEOUT + 2  # of a call: a wait, the exchange of reports, the sends that are left
ALGORITHMS = ("dense", "allgather", "sparcml", "oktopk")
PLACES = {
    "interrupt": ("send", "sent", "receive", "received", "line"),
    "memory": ("sent", "received", "allocate", "allocate", "line"),
    "errno": ("send", "receive"),
    "stop": ("send", "receive"),
    "kill": ("send", "sent", "receive", "received"),
    "cut": ("send", "receive"),
}
NUMBERS = (errno.ENOMEM, errno.ENOBUFS, errno.ECONNRESET, errno.ETIMEDOUT)


@dataclass
class Outcome:
    """Of one call on one rank: what it returned, decoded (None for an exception), and what it raised."""

    calls: tuple | None
    error: BaseException | None
    broken: str
    faults: int  # that had happened when it began
    seconds: float


def faults_of(seed, size):
    chance = random.Random(-seed - 1)
    faults = []
    for _ in range(chance.choice([0, 1, 1, 1, 2])):
        kind = chance.choice(list(PLACES))
        place = chance.choice(PLACES[kind])
        most = {"line": 1500, "allocate": 30}.get(place, 60)
        nth = int(math.exp(chance.random() * math.log(most)))
        times = chance.choice([1, 1, 2, 5]) if place == "allocate" else 1
        faults.append(hostile.Fault(kind, place, chance.randrange(size), nth, chance.choice(NUMBERS), times))
    return faults


def vector(algo, rank, call, size, entries):
    """All sums are of one value, which tells from which call of each rank the parts come."""
    values = np.full(entries, float(call) * 1000.0**rank)
    return values if algo == "dense" else SparseVector(np.arange(entries) * 3, values, 3 * entries)


def decoded(y, size, entries):
    """The call of each rank that is in the sum; None if the sum has no sense."""
    values = y.values if isinstance(y, SparseVector) else y
    if values.size != entries or (values != values[0]).any() or not 0 < values[0] < 1000.0**size:
        return None
    return tuple(int(values[0]) // 1000**rank % 1000 for rank in range(size))


def play(seed):
    """Return the world and the outcomes of each rank."""
    size, algo = 2 + seed % 3, ALGORITHMS[seed // 3 % len(ALGORITHMS)]
    world = hostile.World(seed, size, faults_of(seed, size))
    entries = max(1, world.random.randrange(1, 200) * min(world.room, 5000) // 5000)
    outcomes = [[] for _ in range(size)]

    def program(rank):
        transport = make(rank)
        world.arm()
        for call in range(1, CALLS + 1):
            faults, began, calls, caught = world.happened, world.seconds, None, None
            try:
                x = vector(algo, rank, call, size, entries)
                y = sparsecoll.allreduce(transport, x, algo, k=entries if algo == "oktopk" else None, timeout=TIMEOUT)
                calls = decoded(y, size, entries) or ("nonsense", *y.values[:3])
            except (KeyboardInterrupt, Exception) as error:
                caught = error
            if rank in world.dead:
                raise hostile.Stopped
            outcomes[rank].append(Outcome(calls, caught, transport.broken, faults, world.seconds - began))

    with hostile.under(world):
        make = hostile.transports(world)
        world.run(program)
    return world, outcomes


def complaints(world, outcomes):
    """Yield what must not be."""
    if world.failure:
        yield world.failure
    alive = [rank for rank in range(world.size) if rank not in world.dead]
    failed = {rank: [i for i, o in enumerate(outcomes[rank]) if isinstance(o.error, Exception)] for rank in alive}
    for rank, made in enumerate(outcomes):
        for number, o in enumerate(made, 1):
            name = f"rank {rank}, call {number}"
            if o.calls is not None:
                if len(o.calls) != world.size or o.calls[rank] != number:
                    yield f"{name}: a wrong sum, {o.calls}"
                    continue
                for other, call in enumerate(o.calls):
                    theirs = outcomes[other][call - 1 : call]
                    if theirs and theirs[0].calls not in (None, o.calls):
                        yield f"{name}: a wrong sum, {o.calls}, where rank {other} has {theirs[0].calls}"
            elif not isinstance(o.error, (CommunicationError, KeyboardInterrupt)) and "injected" not in str(o.error):
                yield f"{name}: {o.error!r}"
            if o.seconds > LONGEST:
                yield f"{name}: took {o.seconds} s"
        after = [o for o in made if o.faults == world.happened][2:]
        for o in after:
            if o.error is not None and not o.broken:
                yield f"rank {rank}: neither usable nor out of use: {o.error!r}"
    for rank in alive:
        if len(outcomes[rank]) < CALLS:
            yield f"rank {rank}: made {len(outcomes[rank])} calls only"
        elif all(o.calls for o in outcomes[rank]):
            for other in alive:
                if any(i < CALLS - 2 for i in failed[other]):
                    yield f"rank {rank}: heard nothing of {outcomes[other][failed[other][0]].error!r}"
    harmless = [f for f in world.faults if f.place == "allocate" and f.times == 1]
    if not world.faults or len(harmless) == len(world.faults) == 1:
        for rank in alive:
            if any(o.broken for o in outcomes[rank][:-1]):  # after the last one, the others have gone
                yield f"rank {rank}: out of use after an exception that all ranks could hear of"


def check(seed):
    world, outcomes = play(seed)
    found = list(itertools.islice(complaints(world, outcomes), 8))
    assert not found, f"seed {seed}, {world.faults}: " + "; ".join(found)
    return world.happened


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, BLOCKS))])
def test_seeds(block):
    happened = [check(seed) for seed in range(FIRST + block, FIRST + SEEDS, BLOCKS)]
    print(f"{len(happened)} seeds, {sum(happened)} faults")


def test_a_seed_replays():
    for seed in range(12):
        (a, first), (b, second) = play(seed), play(seed)
        assert a.seconds == b.seconds
        assert [[(o.calls, str(o.error)) for o in made] for made in first] == [
            [(o.calls, str(o.error)) for o in made] for made in second
        ]


def test_a_rank_that_is_interrupted_says_so_and_its_communicator_is_out_of_use():
    """Wherever that happens; also if it waits for nothing and has sent everything."""
    for nth in range(1, 9):
        world = hostile.World(1, 3, [hostile.Fault("interrupt", "sent", 1, nth)])
        with hostile.under(world):
            make = hostile.transports(world)

            def program(rank, make=make):
                transport, texts = make(rank), []
                for _ in range(3):
                    try:
                        texts.append(sparsecoll.allreduce(transport, np.ones(50), "dense", timeout=TIMEOUT).values[0])
                    except (KeyboardInterrupt, CommunicationError) as error:
                        texts.append(repr(error))
                return texts

            for texts in world.run(program):
                assert all(isinstance(text, str) or text == 3.0 for text in texts)
                assert "communicator is out of use since " in texts[-1]
                assert "allreduce was interrupted on rank 1" in texts[-1] or "lost rank 1" in texts[-1]
