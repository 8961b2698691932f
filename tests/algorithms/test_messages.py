"""Messages that the busiest rank receives: formulas of docs/algorithms.md that the other tests do not count."""

from math import log2

import formulas
import numpy as np
import pytest

import sparsecoll

MESSAGES = {  # of P, a power of two
    "oktopk": lambda P: P - 1 + 2 * log2(P),
    "cltk": lambda P: 1 + 2 * log2(P),
}


def counted(name, P, apart, n=128_000, k=640):
    """(words, messages) of two calls, for supports that are even, and identical or disjoint."""

    def program(comm):
        index = np.arange(k) * (n // k) + apart * comm.rank
        x = sparsecoll.SparseVector(index, np.random.default_rng(comm.rank).standard_normal(k).astype(np.float32), n)
        algo, traffic, rows = sparsecoll.ALGORITHMS[name](), sparsecoll.traffic(comm), []
        for _ in range(2):
            before = traffic.copy()
            sparsecoll.allreduce(comm, x, algo, k=k, format="coo")
            moved = traffic.since(before).total
            rows.append((moved.words_received, moved.messages_received))
        return rows

    return np.max(sparsecoll.simulate(P, program).results, axis=0).tolist()


@pytest.mark.parametrize("P", [8, 32])
@pytest.mark.parametrize("name", MESSAGES)
def test_a_steady_call_takes_the_messages_of_the_formula(name, P):
    for apart in (False, True):
        assert counted(name, P, apart)[1][1] == MESSAGES[name](P)


@pytest.mark.parametrize("P", [8, 32])
@pytest.mark.parametrize("name", ["allgather", "gtopk", "cltk"])
def test_the_first_call_also_compares_arguments(name, P):
    first, second = counted(name, P, apart=False)
    assert first == [second[0] + 4 * (P - 1), second[1] + log2(P)]


def test_long_vectors_are_gathered_in_chunks():
    n, k = 6_400_000, 128_000
    words, messages = counted("allgather", 8, False, n, k)[1]
    assert messages % 7 == 0 and 1 < messages // 7 <= 16
    assert 0 <= words - formulas.allgather_words(k, 8) <= 20 * 7
