"""Messages, and words of later calls, that the busiest rank receives: formulas of docs/algorithms.md."""

from functools import partial
from math import log2

import formulas
import numpy as np
import pytest
from cases import SUPPORTS, support

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


WORDS = {  # of (n, k, P), at most
    "dense": lambda n, k, P: formulas.dense_words(n, P),
    "allgather": lambda n, k, P: formulas.allgather_words(k, P),
    "sparcml": lambda n, k, P: formulas.sparcml_words(n, k, P)[1],
    "densestream": lambda n, k, P: formulas.densestream_words(k, P)[1],
    "gtopk": lambda n, k, P: formulas.gtopk_words(k, P) / 2,
    "spardl": lambda n, k, P: formulas.spardl_words(k, P),
    "cltk": lambda n, k, P: formulas.cltk_words(k, P),
    "oktopk": lambda n, k, P: formulas.oktopk_words(k, P)[1],
}
ROUND = 24  # words per rank of a round of counting, where Ok-Topk's threshold no longer fits


@pytest.mark.parametrize("k", [100, 1000])
@pytest.mark.parametrize("name", WORDS)
def test_later_calls_of_one_object_keep_to_the_formula(name, k, P=16, n=100_000):
    """With new entries in each; in Ok-Topk, few of which make thresholds uncertain, up to two rounds come on top."""

    def program(comm, where):
        algo, rng, traffic = sparsecoll.ALGORITHMS[name](), np.random.default_rng([comm.rank, 1]), []
        for _ in range(6):
            index = support(where, comm.rank, P, k, rng, n)
            x = sparsecoll.SparseVector(index, rng.standard_normal(index.size).astype(np.float32), n)
            reduction = sparsecoll.allreduce(comm, x, algo, k=k, format="coo", return_reduction=True)
            traffic.append(reduction.traffic.total.words_received)
        return traffic[1:]

    rounds = 2 * (name == "oktopk")
    for where in SUPPORTS:
        words = np.max(sparsecoll.simulate(P, partial(program, where=where)).results)
        assert words <= WORDS[name](n, k, P) + (20 + rounds * ROUND) * (P - 1), where


def test_long_vectors_are_gathered_in_chunks():
    n, k = 6_400_000, 128_000
    words, messages = counted("allgather", 8, False, n, k)[1]
    assert messages % 7 == 0 and 1 < messages // 7 <= 16
    assert 0 <= words - formulas.allgather_words(k, 8) <= 20 * 7
