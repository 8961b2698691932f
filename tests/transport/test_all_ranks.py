"""Collectives over point-to-point, for any P, with their volume."""

import numpy as np
import pytest

import sparsecoll
from sparsecoll import CommunicationError, simulate
from sparsecoll.transport import all_ranks
from sparsecoll.transport.all_ranks import allgather, allgatherv, broadcast, disseminate, separated, sum_counts

RANKS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16]


@pytest.mark.parametrize("P", RANKS)
def test_blocks_of_equal_size_are_gathered_in_log_P_messages(P):
    simulation = simulate(P, lambda c: allgather(c.transport, np.array([c.rank, 7.5])))
    for rows in simulation.results:
        np.testing.assert_array_equal(rows, [[r, 7.5] for r in range(P)])
    for traffic in simulation.traffic:
        assert traffic.total.bytes_received == 16 * (P - 1)
        assert traffic.total.messages_sent == (P - 1).bit_length()


@pytest.mark.parametrize("P", RANKS)
def test_blocks_are_gathered_by_direct_messages(P):
    def program(comm):
        blocks = allgatherv(comm.transport, np.full(5 * comm.rank, comm.rank, np.uint8), direct=True)
        return [block.tolist() for block in blocks], sparsecoll.traffic(comm).total.messages_received

    expected = [[rank] * 5 * rank for rank in range(P)]
    assert simulate(P, program).results == [(expected, P - 1)] * P


@pytest.mark.parametrize("P", RANKS)
def test_blocks_of_any_size_are_gathered(P):
    """Sizes 0, 5, 10, ... bytes: odd ones are padded, empty ones are kept."""

    def program(comm):
        return allgatherv(comm.transport, np.full(5 * comm.rank, comm.rank, np.uint8))

    simulation = simulate(P, program)
    for blocks in simulation.results:
        assert [b.tolist() for b in blocks] == [[r] * (5 * r) for r in range(P)]
    padded = [5 * r if P <= 3 else (5 * r + 7) // 8 * 8 + 8 for r in range(P)]
    for rank, traffic in enumerate(simulation.traffic):
        assert traffic.total.bytes_received == sum(padded) - padded[rank]


@pytest.mark.parametrize("size", [0, 1, 5, 64, 1000])
@pytest.mark.parametrize("P", RANKS)
def test_counts_are_summed_by_halving_and_doubling(P, size):
    for dtype in (np.int64, np.uint32):
        counts = [np.random.default_rng(r).integers(0, 1000, size).astype(dtype) for r in range(P)]
        simulation = simulate(P, lambda c, counts=counts: sum_counts(c.transport, counts[c.rank]))
        for total in simulation.results:
            np.testing.assert_array_equal(total, np.sum(counts, axis=0, dtype=dtype))
        for traffic in simulation.traffic:
            padded = size + P
            assert traffic.total.bytes_received <= 3 * padded * np.dtype(dtype).itemsize
            assert traffic.total.messages_sent <= 2 * np.log2(max(P, 1)) + 2


@pytest.mark.parametrize("P", RANKS)
def test_maxima_are_disseminated_in_log_P_messages(P):
    """Maxima, of which some items are the same on all ranks and some are one rank's alone."""

    def program(comm):
        own = np.array([comm.rank == 0, comm.rank, 7, comm.rank == P - 1, comm.rank == P // 2], np.uint8)
        found = disseminate(comm.transport, own, np.maximum)
        return found.tolist(), own.tolist()

    simulation = simulate(P, program)
    for rank, (found, own) in enumerate(simulation.results):
        assert found == [1, P - 1, 7, 1, 1] and own[1] == rank  # which is not written to
    for traffic in simulation.traffic:
        assert traffic.total.messages_sent == (P - 1).bit_length()
        assert traffic.total.bytes_received == 5 * (P - 1).bit_length()


def test_arrays_of_other_sizes_are_not_disseminated():
    def program(comm):
        disseminate(comm.transport, np.zeros(3 + comm.rank, np.uint8), np.maximum)

    with pytest.raises(CommunicationError, match=r"message from rank [01]: expected (at most )?[34] bytes"):
        simulate(2, program)


@pytest.mark.parametrize("P", RANKS)
def test_every_rank_receives_the_array_of_the_root(P):
    for root in {0, P - 1, P // 2}:
        results = simulate(
            P, lambda c, root=root: broadcast(c.transport, np.full((3, 2), c.rank, np.int32), root)
        ).results
        assert all((a == root).all() and a.shape == (3, 2) for a in results)


def test_damaged_concatenations_raise():
    for message in ([], [1] * 7, [255] * 16, [4, *[0] * 7, 1, 2, 3]):
        with pytest.raises(CommunicationError, match="do not hold"):
            separated(np.array(message, np.uint8), 1)


@pytest.mark.parametrize("P", [1, 3, 5, 8, 11])
def test_sums_and_maxima_by_either_way(P, monkeypatch):
    def program(comm):
        return all_ranks.sums_and_maxima(comm.transport, [comm.rank, 7, 2**40 * (comm.rank + 1)])[:2]

    expected = ([P * (P - 1) // 2, 7 * P, 2**40 * P * (P + 1) // 2], [P - 1, 7, 2**40 * P])
    for few in (0, 64):
        monkeypatch.setattr(all_ranks, "FEW_RANKS", few)
        assert simulate(P, program).results == [expected] * P
