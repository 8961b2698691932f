"""alltoall: every rank has what every rank has for it, in P - 1 messages."""

import numpy as np
import pytest
from cases import case, same_bits

import sparsecoll
from sparsecoll import RowSparse, SparseVector, simulate
from sparsecoll.errors import CommunicationError
from sparsecoll.transport.base import Transport


@pytest.mark.parametrize("name", ["random", "empty_ranks"])
@pytest.mark.parametrize("P", [1, 2, 3, 6, 7])
def test_every_pair_exchanges_its_vector(P, name):
    inputs = [[case(name, P * rank + to, P) for to in range(P)] for rank in range(P)]
    run = simulate(P, lambda comm: sparsecoll.alltoall(comm, inputs[comm.rank], format="coo"))
    for rank, y in enumerate(run.results):
        assert all(same_bits(y[source], inputs[source][rank]) for source in range(P))
        counts = run.traffic[rank].phases["exchange"]
        assert counts.messages_received == counts.messages_sent == P - 1
        entries = sum(16 + 8 * inputs[source][rank].nnz for source in range(P) if source != rank)
        assert 0 <= counts.bytes_received - entries <= 100 * (P - 1)


def test_types_differ_from_pair_to_pair_and_values_are_rounded():
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.coo_array(np.full((2, 3), 1 / 3))

    def program(comm):
        return sparsecoll.alltoall(comm, (matrix, {comm.rank: 0.5}), value_dtype="float32")

    a, b = simulate(2, program).results
    for y in a:
        assert type(y) is type(matrix) and y.dtype == np.float64
        np.testing.assert_array_equal(y.toarray(), matrix.toarray().astype(np.float32))
    assert b == [{0: 0.5}, {1: 0.5}]


def test_rows_of_tables_are_exchanged():
    def program(comm):
        x = [
            RowSparse([comm.rank, 7], np.full((2, 3), 10.0 * comm.rank + to, np.float32), 9) for to in range(comm.size)
        ]
        with pytest.raises(ValueError, match="rank 0: format: expected 'auto' for rows"):
            sparsecoll.alltoall(comm, x, format="coo")
        return sparsecoll.alltoall(comm, x)

    for to, parts in enumerate(simulate(3, program).results):
        assert [part.rows.tolist() for part in parts] == [[0, 7], [1, 7], [2, 7]]
        assert [part.shape for part in parts] == [(9, 3)] * 3
        assert [set(part.values.ravel().tolist()) for part in parts] == [{10.0 * source + to} for source in range(3)]


@pytest.mark.parametrize("damage", [lambda m: m[:-1], lambda m: m[:0], lambda m: m[8:], lambda m: 255 - m])
def test_a_damaged_message_is_refused_on_all_ranks(monkeypatch, damage):
    isend = Transport.isend

    def program(comm):
        x = SparseVector([1], np.ones(1), 9)
        with pytest.raises(CommunicationError, match="rank 1: message: ") as caught:
            sparsecoll.alltoall(comm, [x] * 3)
            sparsecoll.allreduce(comm, x)  # ranks that have finished raise in their next call
        return str(caught.value)

    def damaged(self, destination, buffer):
        inside = self.rank == 0 and destination == 1 and self._phase is self.traffic.phases.get("exchange")
        isend(self, destination, damage(buffer).copy() if inside else buffer)

    monkeypatch.setattr(Transport, "isend", damaged)
    assert len(set(simulate(3, program).results)) == 1
