"""The simulator: order, clock, deadlock report, failures."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import sparsecoll
from sparsecoll import CommunicationError, Costs, DeadlockError, Network, SparseVector, simulate

BYTES = np.zeros(1000, np.uint8)


def test_results_are_in_rank_order_and_ranks_know_themselves():
    simulation = simulate(5, lambda comm: (comm.rank, comm.Get_rank(), comm.size, comm.Get_size()))
    assert simulation.results == [(r, r, 5, 5) for r in range(5)]
    assert simulation.seconds == 0


def test_a_message_costs_alpha_plus_beta_per_byte():
    def program(comm):
        if comm.rank == 0:
            comm.transport.isend(1, BYTES)
        else:
            comm.transport.recv(0)

    simulation = simulate(2, program, Network(alpha=1e-3, beta=1e-6))
    assert simulation.seconds == pytest.approx(2e-3)
    sent, received = (t.total for t in simulation.traffic)
    assert (sent.bytes_sent, sent.messages_sent, received.bytes_received, received.words_received) == (
        1000,
        1,
        1000,
        250,
    )


def test_a_peer_that_is_no_rank_is_refused_before_anything_is_counted():
    def program(comm):
        for peer in (-1, 3):
            with pytest.raises(ValueError, match=f"destination: expected a rank from 0 to 2, got {peer}"):
                comm.transport.isend(peer, BYTES)
            with pytest.raises(ValueError, match=f"source: expected a rank from 0 to 2, got {peer}"):
                comm.transport.recv(peer)
        comm.transport.isend(comm.rank, BYTES)
        return comm.transport.recv(comm.rank).size, comm.transport.traffic.total.bytes_sent

    assert simulate(3, program).results == [(1000, 1000)] * 3


def test_many_senders_to_one_receiver_queue_at_its_port():
    def program(comm):
        if comm.rank:
            comm.transport.isend(0, BYTES)
        else:
            for source in range(1, comm.size):
                comm.transport.recv(source)

    network = Network(alpha=0, beta=1e-6)
    assert simulate(9, program, network).seconds == pytest.approx(8e-3)


def test_messages_between_two_ranks_keep_their_order():
    def program(comm):
        if comm.rank == 0:
            for value in range(10):
                comm.transport.isend(1, np.array([value], np.uint8))
            return None
        asked = [comm.transport.irecv(0) for _ in range(10)]
        return [int(pending.wait()[0]) for pending in asked]

    assert simulate(2, program).results[1] == list(range(10))


def test_deadlock_names_who_waits_for_whom():
    with pytest.raises(DeadlockError, match=r"rank 0 waits for rank 1, rank 1 waits for rank 0; ended: \[2\]"):
        simulate(3, lambda comm: comm.rank < 2 and comm.transport.recv(1 - comm.rank))


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_chooses_the_order_and_changes_no_result(seed):
    def program(comm):
        y = sparsecoll.allreduce(comm, np.arange(40.0) * (comm.rank + 1), "oktopk", k=7)
        return comm.allgather(y.values.tolist())

    def choose(steps):
        assert len({(step.rank, step.peer) for step in steps}) == len(steps)
        taken.append([step for step in steps if step.what != "stall"] == steps)
        return chance.randrange(len(steps))

    chance, taken = random.Random(seed), []
    assert simulate(5, program, schedule=choose).results == simulate(5, program).results
    assert len(taken) > 100 and not all(taken)


def test_what_a_schedule_raises_ends_the_run():
    with pytest.raises(IndexError):
        simulate(3, lambda comm: comm.Barrier(), schedule=lambda steps: len(steps))
    with pytest.raises(TypeError, match="schedule: expected a function of a list of steps, or None, got 3"):
        simulate(3, lambda comm: comm.Barrier(), schedule=3)


def test_a_timeout_is_over_when_all_ranks_wait():
    """After the modelled seconds, and on all ranks; no real time passes."""

    def program(comm):
        x, texts = SparseVector([1], np.ones(1), 9), []
        if comm.rank == 0:
            return None
        for _ in range(2):
            with pytest.raises(CommunicationError) as caught:
                sparsecoll.allreduce(comm, x, "allgather", timeout=1000)
            texts.append(str(caught.value))
        return texts

    simulation = simulate(3, program)
    for rank in (1, 2):
        cause = f"rank {rank} waits for a message of rank 0 for 1000 s: no answer within the timeout"
        later = f"communicator is out of use since {cause}; continue with a new one, such as comm.Dup()"
        assert simulation.results[rank] == [cause, later]
    assert 1000 <= simulation.seconds < 1001


def test_a_failing_rank_ends_the_run_with_its_own_error():
    def program(comm):
        if comm.rank == 2:
            raise KeyError("mine")
        comm.transport.recv(2)

    with pytest.raises(KeyError, match="mine"):
        simulate(4, program)


@pytest.mark.slow
def test_runs_are_repeatable_and_1024_ranks_fit():
    def program(comm):
        return sparsecoll.allreduce(comm, SparseVector([comm.rank], np.ones(1, np.float32), 2000)).values.sum()

    first, second = simulate(33, program), simulate(33, program)
    assert first.results == second.results == [33.0] * 33
    assert first.seconds == second.seconds
    assert simulate(1024, program).results == [1024.0] * 1024


def test_simulations_in_several_threads_leave_the_size_of_stacks_as_it_was():
    before, many = threading.stack_size(), 32
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda P: simulate(P, lambda comm: comm.transport.size).results[0], range(2, many)))
    assert sums == [*range(2, many)] and threading.stack_size() == before


def test_bad_arguments():
    with pytest.raises(ValueError, match="P: expected at least 1"):
        simulate(0, lambda comm: None)
    wrong = (
        ({"P": 2.0}, "P: expected an integer, got 2.0"),
        ({"P": "4"}, "P: expected an integer, got '4'"),
        ({"ranks_per_node": 1.5}, "ranks_per_node: expected an integer, got 1.5"),
        ({"fn": None}, "fn: expected a function of a communicator, got None"),
        ({"network": "10gbit"}, "network: expected a sparsecoll.Network or None, got '10gbit'"),
        ({"inside": (1e-6, 1e-9)}, r"inside: expected a sparsecoll.Network or None, got \(1e-06, 1e-09\)"),
        ({"costs": 5}, "costs: expected a sparsecoll.Costs or None, got 5"),
    )
    for argument, message in wrong:
        with pytest.raises(TypeError, match=message):
            simulate(**{"P": 2, "fn": lambda comm: comm.rank, **argument})
    assert simulate(np.int64(2), lambda comm: comm.rank, ranks_per_node=np.int32(2)).results == [0, 1]


@pytest.mark.parametrize("kind, name", [(Network, "alpha"), (Network, "beta"), (Costs, "select"), (Costs, "call")])
def test_costs_are_finite_numbers_of_at_least_zero(kind, name):
    for wrong in (-1, float("nan"), float("inf"), np.float32(-1e-6)):
        with pytest.raises(ValueError, match=f"{name}: expected in .0, inf., got"):
            kind(**{name: wrong})
    for wrong in ("1e-6", True, None):
        with pytest.raises(TypeError, match=f"{name}: expected a number in .0, inf., got {wrong!r}"):
            kind(**{name: wrong})
    kind(**{name: 0}), kind(**{name: np.float64(1e-6)})


def test_a_communicator_after_its_simulation_says_so():
    comms = simulate(2, lambda comm: comm).results
    for comm in comms:
        for use in (comm.Barrier, lambda c=comm: sparsecoll.allreduce(c, SparseVector([1], np.ones(1), 9), k=1)):
            with pytest.raises(RuntimeError, match="comm: its simulation has ended"):
                use()
    with pytest.raises(DeadlockError):
        simulate(2, lambda comm: comms.append(comm) or comm.transport.recv(1 - comm.rank))
    with pytest.raises(RuntimeError, match="comm: its simulation has ended"):
        comms[-1].Barrier()


def test_traffic_is_a_readable_table_and_a_dict():
    def program(comm):
        sparsecoll.allreduce(comm, SparseVector([comm.rank], np.ones(1), 9))
        traffic = sparsecoll.traffic(comm)
        text, numbers = str(traffic), traffic.as_dict()
        traffic.reset()
        return text, numbers, traffic.total.bytes_sent, traffic.total.bytes_received, traffic.total.messages_sent

    text, numbers, *zeros = simulate(2, program).results[0]
    assert "gather" in text and "total" in text
    assert numbers["total"]["bytes_sent"] == sum(p["bytes_sent"] for p in numbers["phases"].values())
    assert zeros == [0, 0, 0]


# What programs do with the communicator itself


def test_objects_of_a_program_travel_as_over_mpi4py():
    def program(comm):
        own = {"rank": comm.rank}
        gathered, everywhere = comm.gather(own, root=2), comm.allgather(own)
        told = comm.bcast([comm.rank], 1)
        own["rank"] = None
        comm.Barrier()
        return gathered, everywhere, told, sparsecoll.traffic(comm).total.bytes_sent

    ranks = [{"rank": rank} for rank in range(4)]
    for rank, (gathered, everywhere, told, counted) in enumerate(simulate(4, program).results):
        assert gathered == (ranks if rank == 2 else None) and everywhere == ranks and told == [1] and counted == 0
    with pytest.raises(ValueError, match="root: expected a rank from 0 to 1, got 2"):
        simulate(2, lambda comm: comm.bcast(1, 2))


def test_objects_and_messages_of_the_library_do_not_meet():
    """An object on its way does not end up in a sum, nor is it lost when a call fails."""

    def program(comm):
        if comm.rank == 0:
            comm.bcast("object")  # rank 0 goes on at once
        x = SparseVector([1], np.ones(1), 9)
        with pytest.raises(ValueError, match="finite"):
            sparsecoll.allreduce(comm, x * (np.inf if comm.rank == 1 else 1))
        total = sparsecoll.allreduce(comm, x)[1]
        return total if comm.rank == 0 else (total, comm.bcast(None))

    assert simulate(3, program).results == [3, (3, "object"), (3, "object")]


def test_a_barrier_joins_the_clocks():
    def program(comm):
        if comm.rank == 0:
            comm.transport.isend(1, BYTES)
        if comm.rank == 1:
            comm.transport.recv(0)
        comm.Barrier()
        return comm.transport.now()

    assert simulate(3, program, Network(alpha=1e-3, beta=1e-6)).results == pytest.approx([2e-3] * 3)


@pytest.mark.parametrize("algo", ["auto", "hierarchical", "oktopk"])
def test_communicators_of_some_ranks(algo):
    def program(comm):
        column = comm.Split(comm.rank % 3, key=-comm.rank)
        lonely = comm.Split(None if comm.rank else 0)
        twin = column.Dup().Split()
        x = SparseVector([comm.rank, 9], np.ones(2), 10)
        made = [sparsecoll.allreduce(c, x, algo, k=5) for c in (column, comm, twin)]
        assert made[0] == made[2] and (lonely is None) == (comm.rank > 0)
        assert sparsecoll.traffic(comm).total.bytes_sent > sparsecoll.traffic(lonely or column).total.bytes_sent
        return (column.rank, column.size), made[0].indices.tolist(), int(made[1][9])

    results = simulate(7, program, ranks_per_node=3).results
    for rank, (place, indices, count) in enumerate(results):
        mine = [r for r in range(7) if r % 3 == rank % 3]
        assert place == (mine[::-1].index(rank), len(mine)) and indices == [*mine, 9] and count == 7


def test_a_failure_on_some_ranks_stays_among_them():
    def program(comm):
        pair = comm.Split(comm.rank // 2)
        x = SparseVector([1], np.ones(1), 9)
        if comm.rank >= 2:
            with pytest.raises(ValueError, match="rank 1: x: expected finite"):
                sparsecoll.allreduce(pair, x * (np.nan if comm.rank == 3 else 1))
        return int(sparsecoll.allreduce(pair, x)[1]), int(sparsecoll.allreduce(comm, x)[1])

    assert simulate(4, program).results == [(2, 4)] * 4
