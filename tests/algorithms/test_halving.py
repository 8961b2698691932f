"""Reduce-scatter by halving: the order of addition, one message a step, one block a message."""

import numpy as np
import pytest

from sparsecoll import DenseStream, SparseVector, allreduce, simulate
from sparsecoll.algorithms.primitives.halving import reduce_scatter
from sparsecoll.formats import FORMATS
from sparsecoll.transport.channel import Channel

N = 3000
HEADER, ENTRY = 16, 8  # bytes of a COO message


def entries(rank, share=0.3):
    rng = np.random.default_rng(rank)
    indices = np.flatnonzero(rng.random(N) < share)
    return SparseVector(indices, rng.standard_normal(indices.size).astype(np.float32), N)


def in_order(P, pairs):
    """The sum of each region as the published schedules form it, on dense vectors of float32."""
    edges = [N * j // P for j in range(P + 1)]
    held = [entries(rank).to_dense() for rank in range(P)]
    distance = 1 << max((P - 1).bit_length() - 1, 0)
    while distance and P > 1:
        before = [x.copy() for x in held]
        for rank in range(P):
            if pairs and P & (P - 1) == 0:
                source, regions = rank ^ distance, [j for j in range(P) if j // distance == rank // distance]
            else:
                source = (rank - distance) % P
                regions = [(rank + offset) % P for offset in range(min(distance, P - distance))]
            for j in regions:
                held[rank][edges[j] : edges[j + 1]] += before[source][edges[j] : edges[j + 1]]
        distance //= 2
    return [held[j][edges[j] : edges[j + 1]] for j in range(P)]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("P", [1, 2, 3, 5, 7, 8, 16])
def test_the_published_order_in_log_P_messages(P, pairs):
    edges = [N * j // P for j in range(P + 1)]

    def program(comm):
        x = reduce_scatter(Channel(comm.transport, N), entries(comm.rank), edges, lambda part: part, pairs=pairs)
        return x.to_dense()[edges[comm.rank] : edges[comm.rank + 1]]

    simulation = simulate(P, program)
    for mine, expected in zip(simulation.results, in_order(P, pairs), strict=True):
        assert (mine + 0.0).tobytes() == (expected + 0.0).tobytes()
    assert all(t.total.messages_sent == t.total.messages_received == (P - 1).bit_length() for t in simulation.traffic)


@pytest.mark.parametrize("P", [2, 8, 16])
def test_pairs_send_one_block_a_message(P):
    """The bytes are those of the entries and of one header a step, to the byte."""
    edges = [N * j // P for j in range(P + 1)]

    def program(comm):
        whole = SparseVector(np.arange(N), np.ones(N, np.float32), N)
        reduce_scatter(Channel(comm.transport, N, FORMATS["coo"]), whole, edges, lambda part: part, pairs=True)

    steps = (P - 1).bit_length()
    for rank, t in enumerate(simulate(P, program).traffic):
        own = edges[rank + 1] - edges[rank]
        moved = sum(edges[(rank & -d) + d] - edges[rank & -d] for d in (2**t for t in range(steps)))
        assert own <= moved <= N - own + steps
        assert t.total.bytes_received == ENTRY * moved + HEADER * steps


@pytest.mark.parametrize("P", [2, 3, 6, 7, 8, 16, 33])
def test_densestream_takes_at_most_4_log_P_messages_with_its_boundaries(P):
    def program(comm):
        algorithm = DenseStream()
        for _ in range(2):
            y = allreduce(comm, entries(comm.rank, 0.05), algorithm, k=N, return_reduction=True)
        return y.traffic.total.messages_sent

    most = 4 * (P - 1).bit_length()
    assert max(simulate(P, program).results) == (most if P & (P - 1) == 0 else most - 1)
