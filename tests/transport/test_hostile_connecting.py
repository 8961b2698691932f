"""Ranks connect in a world that is hostile by a seed: they are connected, or raise within their timeout.

SPARSECOLL_HOSTILE is the number of seeds, and SPARSECOLL_HOSTILE_FIRST the first one: to replay a failure, 1 and its
seed.
"""

import contextlib
import os

import hostile
import hostile_connecting
import numpy as np
import pytest
from socket_ranks import Meeting
from test_hostile import faults_of

import sparsecoll
from sparsecoll import CommunicationError
from sparsecoll.transport.tcp import connect

SEEDS = int(os.environ.get("SPARSECOLL_HOSTILE", "200"))
FIRST = int(os.environ.get("SPARSECOLL_HOSTILE_FIRST", "0"))
BLOCKS = 4


def play(seed):
    """Return the world, and for each rank the sum, or the exception, and the seconds that it took to connect."""
    size, timeout = 2 + seed % 3, hostile_connecting.TIMEOUT
    world = hostile.World(seed, size, faults_of(hostile_connecting, seed, size))
    entries, secret = {}, "0123456789abcdef" if seed % 2 else None

    def program(rank):
        world.arm()
        began = world.seconds
        try:
            transport = connect(Meeting(entries, rank, size), timeout, secret)
            took = world.seconds - began
            y = sparsecoll.allreduce(transport, np.full(3, 10.0**rank), "dense", timeout=timeout)
            outcome = float(y.values[0])
        except (KeyboardInterrupt, Exception) as error:
            took, outcome = world.seconds - began, error
        if rank in world.dead:
            raise hostile.Stopped
        return outcome, took

    with contextlib.ExitStack() as stack:
        hostile_connecting.under(world, stack)
        return world, world.run(program)


def complaints(world, results, faults):
    """Yield what must not be."""
    early = any(fault.place == "line" and fault.nth == 1 for fault in faults)
    if world.failure:
        yield world.failure
    for rank, result in enumerate(results):
        if rank in world.dead:
            continue
        if result is None:
            yield f"rank {rank} hangs"
            continue
        outcome, took = result
        if isinstance(outcome, float):
            if outcome != sum(10.0**other for other in range(world.size)):
                yield f"rank {rank}: a wrong sum, {outcome}"
        elif not world.happened:
            yield f"rank {rank}: {outcome!r}, but nothing has happened"
        elif isinstance(outcome, MemoryError) and early:  # before there is anything that could report it
            continue
        elif not isinstance(outcome, (CommunicationError, KeyboardInterrupt)):
            yield f"rank {rank}: {outcome!r}"
        if took > 3 * hostile_connecting.TIMEOUT + 2:
            yield f"rank {rank}: took {took} s"


@pytest.mark.parametrize("block", [pytest.param(b, marks=[pytest.mark.slow] if b else []) for b in range(BLOCKS)])
def test_ranks_are_connected_or_raise_within_the_timeout(block):
    happened = connected = 0
    seeds = range(FIRST + block, FIRST + SEEDS, BLOCKS)
    for seed in seeds:
        world, results = play(seed)
        found = list(complaints(world, results, faults_of(hostile_connecting, seed, world.size)))
        assert not found, f"seed {seed}, {world.faults}: " + "; ".join(found)
        happened += world.happened
        connected += all(result is not None and isinstance(result[0], float) for result in results)
    print(f"{len(seeds)} seeds, {happened} faults, all ranks connected and the sum right in {connected}")
    assert (connected and happened) or len(seeds) < 20
