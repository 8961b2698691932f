"""The real transports on sockets, or over an MPI, that are hostile by a seed: never a wrong sum, and no endless wait.

SPARSECOLL_HOSTILE is the number of seeds, and SPARSECOLL_HOSTILE_FIRST the first one: to replay a failure, 1 and its
seed.
"""

import contextlib
import itertools
import math
import os
import random
from dataclasses import dataclass

import hostile
import hostile_sockets
import numpy as np
import pytest

import sparsecoll
from sparsecoll import CommunicationError, SparseVector

NETWORKS = [hostile_sockets]
with contextlib.suppress(ImportError, RuntimeError):  # RuntimeError: mpi4py finds no library
    import hostile_mpi

    NETWORKS.append(hostile_mpi)
SEEDS = int(os.environ.get("SPARSECOLL_HOSTILE", "200"))
FIRST = int(os.environ.get("SPARSECOLL_HOSTILE_FIRST", "0"))
BLOCKS = 8
CALLS = 8
ALGORITHMS = ("dense", "allgather", "sparcml", "oktopk")


@dataclass
class Outcome:
    """Of one call on one rank: what it returned, decoded (None for an exception), and what it raised."""

    calls: tuple | None
    error: BaseException | None
    broken: str
    faults: int  # that had happened when it began
    seconds: float


def faults_of(network, seed, size):
    chance = random.Random(-seed - 1)
    faults = []
    for _ in range(chance.choice([0, 1, 1, 1, 2])):
        kind = chance.choice(list(network.PLACES))
        place = chance.choice(network.PLACES[kind])
        most = {"line": 1500, "allocate": 30}.get(place, 60)
        nth = int(math.exp(chance.random() * math.log(most)))
        times = chance.choice([1, 1, 2, 5]) if place == "allocate" else 1
        faults.append(hostile.Fault(kind, place, chance.randrange(size), nth, chance.choice(network.NUMBERS), times))
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


def play(network, seed):
    """Return the world and the outcomes of each rank."""
    size, algo = 2 + seed % 3, ALGORITHMS[seed // 3 % len(ALGORITHMS)]
    world = hostile.World(seed, size, faults_of(network, seed, size))
    entries = max(1, world.random.randrange(1, 200) * min(world.room, 5000) // 5000)
    outcomes = [[] for _ in range(size)]

    def program(rank):
        transport = make(rank)
        world.arm()
        for call in range(1, CALLS + 1):
            faults, began, calls, caught = world.happened, world.seconds, None, None
            try:
                x = vector(algo, rank, call, size, entries)
                y = sparsecoll.allreduce(
                    transport, x, algo, k=entries if algo == "oktopk" else None, timeout=network.TIMEOUT
                )
                calls = decoded(y, size, entries) or ("nonsense", *y.values[:3])
            except (KeyboardInterrupt, Exception) as error:
                caught = error
            (x.values if isinstance(x, SparseVector) else x)[:] = -1  # whoever catches an exception may change it
            if rank in world.dead:
                raise hostile.Stopped
            outcomes[rank].append(Outcome(calls, caught, transport.broken, faults, world.seconds - began))

    with network.under(world):
        make = network.transports(world)
        world.run(program)
    return world, outcomes


def complaints(world, outcomes, timeout):
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
            if o.seconds > 3 * timeout + 2:  # a wait, the exchange of reports, the sends that are left
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


def check(network, seed):
    world, outcomes = play(network, seed)
    found = list(itertools.islice(complaints(world, outcomes, network.TIMEOUT), 8))
    assert not found, f"seed {seed}, {world.faults}: " + "; ".join(found)
    return world.happened


def blocks():
    """Yield the network and the number of each block of seeds; one of each network is quick."""
    for network in NETWORKS:
        for block in range(BLOCKS):
            name = f"{network.__name__}-{block}"
            yield pytest.param(network, block, id=name, marks=[pytest.mark.slow] if block else [])


@pytest.mark.parametrize(("network", "block"), list(blocks()))
def test_sums_are_right_or_all_live_ranks_raise(network, block):
    happened = [check(network, seed) for seed in range(FIRST + block, FIRST + SEEDS, BLOCKS)]
    print(f"{len(happened)} seeds, {sum(happened)} faults")
    assert sum(happened) or len(happened) < 20


@pytest.mark.parametrize("network", NETWORKS)
def test_a_seed_replays(network):
    for seed in range(12):
        (a, first), (b, second) = play(network, seed), play(network, seed)
        assert a.seconds == b.seconds
        assert [[(o.calls, str(o.error)) for o in made] for made in first] == [
            [(o.calls, str(o.error)) for o in made] for made in second
        ]


@pytest.mark.parametrize("network", NETWORKS)
def test_a_rank_that_is_interrupted_says_so_and_its_communicator_is_out_of_use(network):
    """Wherever that happens; also if it waits for nothing and has sent everything."""
    for nth in range(1, 9):
        world = hostile.World(1, 3, [hostile.Fault("interrupt", "sent", 1, nth)])
        with network.under(world):
            make = network.transports(world)

            def program(rank, make=make):
                transport, texts = make(rank), []
                for _ in range(3):
                    try:
                        texts.append(
                            sparsecoll.allreduce(transport, np.ones(50), "dense", timeout=network.TIMEOUT).values[0]
                        )
                    except (KeyboardInterrupt, CommunicationError) as error:
                        texts.append(repr(error))
                return texts

            for texts in world.run(program):
                assert all(isinstance(text, str) or text == 3.0 for text in texts)
                assert "communicator is out of use since " in texts[-1]
                causes = ("allreduce was interrupted on rank 1", "KeyboardInterrupt on rank 1", "lost rank ")
                assert any(cause in texts[-1] for cause in causes), texts
