"""Algorithm objects whose state differs between ranks raise on all of them; before, they summed wrong or waited."""

import random

import numpy as np
import pytest
from cases import case, pairwise
from failing import K

import sparsecoll
from sparsecoll import CommunicationError, simulate
from sparsecoll.algorithms import as_algorithm
from sparsecoll.algorithms.base import digest
from sparsecoll.transport import LocalTransport
from sparsecoll.transport.call import stamped


def is_last(comm):
    return comm.rank == comm.size - 1


def used_alone(comm, x, algo, call):
    """The last rank has used the object once more, on another communicator."""
    for _ in range(1 + is_last(comm)):
        sparsecoll.allreduce(LocalTransport(), x, algo, k=K)


def other_checkpoint(comm, x, algo, call):
    states = [(call(), algo.state_dict())[1] for _ in range(3)]
    algo.load_state_dict(states[0 if is_last(comm) else 1])


def other_boundaries(comm, x, algo, call):
    call()
    if is_last(comm):
        algo._boundaries = [edge // 2 for edge in algo._boundaries[:-1]] + [x.length - 1]


def other_threshold(comm, x, algo, call):
    call()
    algo._global.age += is_last(comm)


def other_load(comm, x, algo, call):
    call()
    algo._overloaded ^= is_last(comm)


def new_object(comm, x, algo, call):
    call()
    if is_last(comm):
        algo.reset()


STATEFUL = ["cltk", "oktopk"]
WITHIN = {f"hierarchical with {name}": name for name in ("cltk", "oktopk")}
ALL = [*STATEFUL, *WITHIN]
DIFFERENT = [(name, make) for name in ALL for make in (used_alone, other_checkpoint, new_object)]
DIFFERENT += [("oktopk", other) for other in (other_boundaries, other_threshold, other_load)]


def made(name):
    return sparsecoll.Hierarchical(inner=WITHIN[name]) if name in WITHIN else as_algorithm(name)


@pytest.mark.parametrize(
    ("different", "way", "P"),
    pairwise(DIFFERENT, ["new arguments", "known arguments", "all entries", "plan"], [2, 3, 5, 8]),
    ids=lambda value: f"{value[0]}, {value[1].__name__}" if isinstance(value, tuple) else None,
)
def test_objects_whose_state_differs_are_refused_on_all_ranks(different, way, P):
    name, differ = different

    def program(comm):
        x, algo = case("random", comm.rank, P), made(name)
        plan = sparsecoll.allreduce_init(comm, x, algo, k=K) if way == "plan" else None
        if way == "known arguments":
            sparsecoll.allreduce(comm, x, made(name), k=K)

        def call():
            if plan is not None:
                return plan(x)
            return sparsecoll.allreduce(comm, x, algo, **({} if way == "all entries" else {"k": K}))

        differ(comm, x, algo, call)
        with pytest.raises(CommunicationError, match="use one object per communicator") as caught:
            call()
        return str(caught.value), call().to_dense().tobytes(), algo.replicated_state()

    results = simulate(P, program).results
    assert results == [results[0]] * P and results[0][2][0] == 1  # a new state on all
    others = "rank 0" if P == 2 else f"ranks {', '.join(map(str, range(P - 1)))}"
    counts = {"used_alone": (1, 2), "new_object": (1, 0), "other_checkpoint": (2, 1)}
    same = differ.__name__ not in counts
    expected = "differs between ranks; use" if same else "{} on {others}, {} on rank {last}"
    assert expected.format(*counts.get(differ.__name__, ()), others=others, last=P - 1) in results[0][0]


def test_states_that_differ_have_other_checksums():
    """Each of 100,000 from each of the others; the same calls with other boundaries, too."""
    rng = np.random.default_rng(0)
    states = {(int(calls), 0) for calls in rng.integers(1, 1 << 31, 50_000)} | {(calls, 0) for calls in range(50_000)}
    boundaries = np.sort(rng.integers(0, 1 << 40, (1000, 9)))
    states |= {(7, digest(row)) for row in boundaries.tolist()}
    assert len({stamped(-1234567890123456789, state) for state in states}) == len(states) > 100_000


@pytest.mark.parametrize("P", [2, 3, 5, 8])
@pytest.mark.parametrize("name", ALL)
def test_a_new_object_on_any_rank_is_refused_after_any_call(name, P):
    """In CLT-k, the rank that leads next, too: all ranks waited for each other."""

    def program(comm):
        x, algo = case("random", comm.rank, P), made(name)
        sparsecoll.allreduce(comm, x, made(name), k=K)
        for _ in range(calls):
            sparsecoll.allreduce(comm, x, algo, k=K)
        if comm.rank == new:
            algo.reset()
        with pytest.raises(CommunicationError, match=f"got {calls} on .*, 0 on|got 0 on .*, {calls} on"):
            sparsecoll.allreduce(comm, x, algo, k=K)

    for new, calls in zip(range(P), random.Random(P).sample(range(1, P + 1), P), strict=True):  # noqa: B007 - the program reads them
        simulate(P, program)


@pytest.mark.parametrize("name", STATEFUL)
def test_states_are_compared_without_a_message(name):
    def program(comm):
        algo, agreed = as_algorithm(name), []
        for kind in ("random", "random", "one_region", "ties"):
            reduction = sparsecoll.allreduce(comm, case(kind, comm.rank, 4), algo, k=K, return_reduction=True)
            agreed.append("agree" in reduction.traffic.phases)
        return agreed

    assert simulate(4, program).results == [[True, False, False, False]] * 4


def test_a_state_inside_auto_is_compared():
    def program(comm):
        x, algo = case("random", comm.rank, 3), sparsecoll.Auto(want="top_k_of_sum")
        sparsecoll.allreduce(comm, x, algo, k=K)
        if comm.rank == 1:
            sparsecoll.allreduce(LocalTransport(), x, algo._oktopk, k=K)
        with pytest.raises(CommunicationError, match="got 0 on ranks 0, 2, 1 on rank 1; use one object"):
            sparsecoll.allreduce(comm, x, algo, k=K)

    simulate(3, program)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_of_elsewhere_takes_messages_once(name):
    """Loaded, or of another communicator, the same on all ranks; one that a call has left is known."""

    def program(comm):
        x, algo, agreed = case("random", comm.rank, 5), as_algorithm(name), []
        sparsecoll.allreduce(comm, x, name, k=K)
        for turn in range(5):
            if turn == 2:
                state = algo.state_dict()
            if turn == 3:
                algo.load_state_dict(state | {"calls": 100})
            if turn == 4:
                algo.load_state_dict(state)
            reduction = sparsecoll.allreduce(comm, x, algo, k=K, return_reduction=True)
            count = reduction.traffic.phases.get("agree")
            agreed.append((count.messages_sent, count.bytes_sent) if count and count.bytes_sent else None)
        return agreed

    assert simulate(5, program).results == [[None, None, None, (3, 64), None]] * 5
