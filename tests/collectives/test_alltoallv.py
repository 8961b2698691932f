"""alltoallv: vectors reach partners that did not know of them, in ceil(log2 P) messages and one for each partner."""

import numpy as np
import pytest
from cases import case, same_bits

import sparsecoll
from sparsecoll import SparseVector, simulate

PATTERNS = {
    "nobody": lambda rank, P: [],
    "neighbours": lambda rank, P: sorted({(rank + 1) % P, (rank - 1) % P}),
    "to rank 0": lambda rank, P: [0],
    "from the last": lambda rank, P: list(range(P)) if rank == P - 1 else [],
    "random": lambda rank, P: np.flatnonzero(np.random.default_rng(rank).random(P) < 0.4).tolist(),
    "everybody, in any order": lambda rank, P: list(range(P))[::-1],
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("P", [1, 2, 3, 7, 8])
def test_every_partner_receives_its_vector(P, pattern):
    to = [PATTERNS[pattern](rank, P) for rank in range(P)]
    given = [{j: case("empty_ranks", P * rank + j, P) for j in to[rank]} for rank in range(P)]
    run = simulate(P, lambda comm: sparsecoll.alltoallv(comm, given[comm.rank], format="coo"))
    for rank, got in enumerate(run.results):
        assert list(got) == [source for source in range(P) if rank in to[source]]  # ascending
        assert all(same_bits(y, given[source][rank]) for source, y in got.items())
        phases, others = run.traffic[rank].phases, [source for source in got if source != rank]
        assert phases["partners"].messages_received == (P - 1).bit_length()
        assert phases["exchange"].messages_received == len(others)
        entries = sum(16 + 8 * got[source].nnz for source in others)
        assert 0 <= phases["exchange"].bytes_received - entries <= 100 * len(others)


def test_bytes_that_find_the_partners():
    """Pairs of neighbours on P = 2^t ranks: 16 bytes a message, and 8 for each of the pairs on its way to the rank."""
    P = 16
    to = [PATTERNS["neighbours"](rank, P) for rank in range(P)]
    x = SparseVector([1], np.ones(1), 9)
    run = simulate(P, lambda comm: sparsecoll.alltoallv(comm, dict.fromkeys(to[comm.rank], x)))
    for rank, traffic in enumerate(run.traffic):
        pairs = 0  # in the step of distance d: those of ranks that agree with the partner in the bits above d
        for d in (8, 4, 2, 1):
            senders = [s for s in range(P) if s % d == rank % d and (s ^ rank) & d]
            pairs += sum(j // d == rank // d for s in senders for j in to[s])
        assert traffic.phases["partners"].bytes_received == 4 * 16 + 8 * pairs


def test_types_are_the_senders():
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.csc_array(np.diag([1.0, 2.0]))

    def program(comm):
        return sparsecoll.alltoallv(comm, {} if comm.rank == 0 else {0: matrix if comm.rank == 1 else {"word": 3}})

    got, *others = simulate(3, program).results
    assert others == [{}, {}] and got[2] == {"word": 3}
    assert type(got[1]) is type(matrix) and (got[1] != matrix).nnz == 0
