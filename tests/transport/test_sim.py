"""The simulator: order, clock, deadlock report, failures."""

import numpy as np
import pytest

import sparsecoll
from sparsecoll import DeadlockError, Network, SparseVector, simulate

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

    first, second = simulate(100, program), simulate(100, program)
    assert first.results == second.results == [100.0] * 100
    assert first.seconds == second.seconds
    assert simulate(1024, program).results == [1024.0] * 1024


def test_bad_arguments():
    with pytest.raises(ValueError, match="P: expected at least 1"):
        simulate(0, lambda comm: None)
    with pytest.raises(ValueError, match="Network"):
        Network(alpha=-1)


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
