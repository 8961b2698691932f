"""What is raised on one rank is raised on all, whatever was under way, and the communicator stays usable."""

import importlib
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from cases import case
from failing import EXACT, K, algorithm, fail_at, unpatch
from oracles import oracle

import sparsecoll
from sparsecoll import ALGORITHMS, CommunicationError, SparseVector, simulate
from sparsecoll.algorithms import as_algorithm
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.call import CollectiveCall, number_of_name
from sparsecoll.transport.tags import FIRST_TAG, KEPT, NUMBERS, PHASES, TAGS, parts_of, tag_of
from sparsecoll.transport.waiting import check_environment

CALL = importlib.import_module("sparsecoll.transport.call")


@pytest.mark.parametrize("parts", [2, 4])
def test_what_ranks_of_another_communicator_raise_is_not_known_here(parts):
    """Its ranks are halves of these, or one by itself."""

    def program(comm):
        part = comm.Split(comm.rank * parts // comm.size)
        text = r"^rank 0: rank 0: x: expected finite values, got NaN"
        with pytest.raises(ValueError, match=text) as raised, CollectiveCall(comm.transport, "whole"):
            sparsecoll.allreduce(part, {0: np.nan if comm.rank == 0 else 1.0})
            allgather(comm.transport, np.array([comm.rank]))
        return str(raised.value), sparsecoll.allreduce(comm, {0: 1.0})

    results = simulate(4, program).results
    assert len({text for text, _ in results}) == 1 and [y for _, y in results] == [{0: 4.0}] * 4


@pytest.mark.parametrize("P", [2, 5])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_rank_that_fails_between_messages_is_heard_by_all(name, P):
    """At its first, second, ... send and receive, in a call that is new and in one that all have agreed on before."""

    def program(comm, culprit, method, number, known):
        x, algo = case("random", comm.rank, P), as_algorithm(algorithm(name))
        if known:
            sparsecoll.allreduce(comm, x, algo, k=K)
        if comm.rank == culprit:
            fail_at(comm.transport, method, number)
        text = None
        try:
            sparsecoll.allreduce(comm, x, algo, k=K)
            if comm.rank == culprit and method in vars(comm.transport):
                unpatch(comm.transport, method)  # it has fewer messages
            sparsecoll.allreduce(comm, x, algo, k=K)  # who had finished hears of it here
        except CommunicationError as error:
            text = str(error)
        unpatch(comm.transport, method)
        if text is None:  # otherwise the failure has discarded the algorithm's state
            algo.reset()
        y = sparsecoll.allreduce(comm, x, algo, k=K)
        return text, y.to_dense()

    inputs = [case("random", rank, P) for rank in range(P)]
    expected = oracle(inputs, "oktopk" if name == "hierarchical" else name, K)
    heard = 0
    cases = itertools.product((0, P - 1), ("isend", "recv", "irecv"), (1, 2, 4))
    for turn, (culprit, method, number) in enumerate(cases):  # each method and number is in a new call and a known one
        results = simulate(P, lambda comm, c=(culprit, method, number, turn % 2): program(comm, *c)).results
        texts = {text for text, _ in results}
        assert texts in ({None}, {f"rank {culprit} failed: Fault: {method} {number}"})
        heard += texts != {None}
        for _, y in results:
            np.testing.assert_array_equal(y, expected)
    assert heard >= 3


@pytest.mark.parametrize("P", [2, 5])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_truncated_and_overlong_messages_raise_on_all(name, P):
    """Each message that a rank receives in turn is cut, emptied, or gets a tail."""
    damages = {
        "cut": lambda buffer: buffer[:-1],
        "empty": lambda buffer: buffer[:0],
        "tail": lambda buffer: np.concatenate([buffer, np.ones(9, np.uint8)]),
    }

    def program(comm, damage, number):
        x, algo = case("random", comm.rank, P), as_algorithm(algorithm(name))
        transport, original, seen, hit = comm.transport, comm.transport._take, [0], [False]

        def damaged(source, tag):
            buffer = original(source, tag)
            seen[0] += 1
            if seen[0] == number and buffer.size:
                hit[0] = True
                return damages[damage](buffer)
            return buffer

        if comm.rank == P - 1:
            transport._take = damaged
        text = None
        try:
            sparsecoll.allreduce(comm, x, algo, k=K)
            unpatch(transport, "_take")
            sparsecoll.allreduce(comm, x, algo, k=K)
        except (CommunicationError, ValueError) as error:
            text = str(error)
        unpatch(transport, "_take")
        return text, hit[0], sparsecoll.allreduce(comm, x, algo, k=K).to_dense()

    inputs = [case("random", rank, P) for rank in range(P)]
    expected = oracle(inputs, "oktopk" if name == "hierarchical" else name, K)
    for damage in damages:
        for number in (1, 2, 3):
            results = simulate(P, lambda comm, c=(damage, number): program(comm, *c)).results
            texts = {text for text, _, _ in results}
            assert len(texts) == 1
            assert (texts != {None}) == any(hit for _, hit, _ in results), (damage, number, texts)
            for _, _, y in results:
                np.testing.assert_array_equal(y, expected)


def test_ranks_in_different_calls_are_told_so():
    """One is in an allreduce that all know, the others in another one that all know: nothing but tags differs."""

    def program(comm):
        x, y = SparseVector([1], np.ones(1), 10), SparseVector([1], np.ones(1), 11)
        for vector in (x, y):
            sparsecoll.allreduce(comm, vector, "allgather", k=1)
        with pytest.raises(CommunicationError) as caught:
            sparsecoll.allreduce(comm, y if comm.rank == 1 else x, "allgather", k=1)
        return str(caught.value), int(sparsecoll.allreduce(comm, x, "allgather", k=1).values[0])

    text = "length: expected the same value on all ranks, got 10 on ranks 0, 2, 3, 11 on rank 1"
    assert simulate(4, program).results == [(text, 4)] * 4


def test_different_arguments_and_states_never_have_the_same_tag():
    """Of one call or of calls that follow each other, whatever their checksums."""

    def program(comm):
        transport, tags = comm.transport, []
        for turn in range(2 * KEPT):
            with CollectiveCall(transport, "allreduce") as call:
                call.signature["k"] = turn % KEPT
                call.agree()
                tags.append(transport.tag)
                if turn < KEPT // 2:
                    call.leaves((turn + 1, 0))
            assert len(set(transport.agreed.values())) == len(transport.agreed)
        return tags, len(transport.agreed)

    tags, kept = simulate(1, program).results[0]
    assert kept == KEPT
    assert all(tag_of(*parts_of(tag)) == tag and parts_of(tag)[0] == call for call, tag in enumerate(tags, 1))
    tags = [FIRST_TAG + (tag - FIRST_TAG) % (PHASES * NUMBERS) for tag in tags]  # as over MPI
    assert max(tags) < TAGS and min(tags) >= FIRST_TAG
    for call in range(0, KEPT, 97):  # what any two arguments would have in this call, and in the next ones
        number = [(tag - FIRST_TAG) % NUMBERS for tag in tags[call + KEPT // 2 : call + KEPT]]
        assert len(set(number)) == len(number)
        assert len({(tag - FIRST_TAG) // NUMBERS for tag in tags[call : call + 4]}) == 4


def test_arguments_in_use_keep_their_number():
    """However many other ones come and go."""

    def program(comm):
        counts = []
        for turn in range(2 * KEPT):
            for k in (-1, turn):
                with CollectiveCall(comm.transport, "allreduce") as call:
                    call.signature["k"] = k
                    before = comm.transport.traffic.total.messages_sent
                    call.agree()
                    counts.append(comm.transport.traffic.total.messages_sent - before)
        return counts[0::2], counts[1::2]

    assert simulate(2, program).results == [([1] + [0] * (2 * KEPT - 1), [1] * 2 * KEPT)] * 2


def test_two_calls_that_are_known_are_told_apart_in_every_call():
    """A sum on one rank and a mean on the other, both agreed on before."""

    def program(comm):
        x, wrong = SparseVector([1], np.ones(1), 10), 0
        for turn in range(40):
            for op in ("sum", "mean"):
                sparsecoll.allreduce(comm, x, "allgather", k=turn, op=op)
            try:
                sparsecoll.allreduce(comm, x, "allgather", k=turn, op="sum" if comm.rank else "mean")
                wrong += 1
            except CommunicationError as error:
                assert str(error) == "op: expected the same value on all ranks, got 'mean' on rank 0, 'sum' on rank 1"
        return wrong

    assert simulate(2, program).results == [0, 0]


def test_names_of_calls_have_numbers_of_their_own():
    source = "".join(path.read_text() for path in Path(sparsecoll.__file__).parent.rglob("*.py"))
    names = {*re.findall(r'CollectiveCall\([\w.]+, "([^"]+)"', source)}
    assert len(names) > 8 and len({number_of_name(name) for name in names}) == len(names)


def test_a_report_of_differences_fits_a_screen():
    def program(comm):
        with pytest.raises(CommunicationError) as caught, CollectiveCall(comm.transport, "long") as call:
            call.signature |= {"length": 10 + comm.rank, "names": [*range(comm.rank, 3000), *[3000] * 2]}
            call.agree(entries=0)
        return str(caught.value)

    text = simulate(6, program).results[0]
    assert len(text) < 2000 and "and 2 other values" in text and "length: expected the same value" in text


@pytest.mark.parametrize("value", ["abrt", "Abort"])
def test_what_a_timeout_does_is_refused_if_it_is_misspelt(value, monkeypatch):
    monkeypatch.setenv("SPARSECOLL_ON_TIMEOUT", value)
    check_environment.cache_clear()
    x, texts = SparseVector([1], np.ones(1), 9), []
    with pytest.raises(ValueError, match=f"SPARSECOLL_ON_TIMEOUT: expected one of raise, abort, got '{value}'"):
        sparsecoll.allreduce(sparsecoll.transport.LocalTransport(), x)

    def program(comm):
        with pytest.raises(ValueError, match="rank 0: SPARSECOLL_ON_TIMEOUT"):
            sparsecoll.allreduce(comm, x)
        texts.append(comm.rank)

    simulate(3, program)
    assert sorted(texts) == [0, 1, 2]
    monkeypatch.setenv("SPARSECOLL_ON_TIMEOUT", "")
    assert simulate(2, lambda comm: sparsecoll.allreduce(comm, x).values[0]).results == [2, 2]


@pytest.mark.parametrize(
    ("timeout", "kind"), [(0, ValueError), (-1, ValueError), (float("nan"), ValueError), ("a", TypeError)]
)
def test_a_timeout_that_is_none_is_refused_on_all_ranks(timeout, kind):
    def program(comm):
        x, texts = SparseVector([1], np.ones(1), 9), []
        for call in (sparsecoll.allreduce, sparsecoll.reduce, sparsecoll.allgather):
            with pytest.raises(kind) as caught:
                call(comm, x, timeout=timeout if comm.rank == 1 else None)
            texts.append(str(caught.value))
        return texts, sparsecoll.allreduce(comm, x, timeout=0.5).values[0]

    text = f"rank 1: timeout: expected seconds above 0, or None to wait for ever, got {timeout!r}"
    assert simulate(3, program).results == [([text] * 3, 3.0)] * 3


def test_a_rank_that_left_a_call_out_is_told_so():
    def program(comm):
        x = SparseVector([1], np.ones(1), 10)
        with pytest.raises(CommunicationError) as caught:
            for step in range(3):
                if (comm.rank, step) != (1, 1):
                    with CollectiveCall(comm.transport, "other"):
                        allgather(comm.transport, np.array([step]))
            sparsecoll.allreduce(comm, x, "allgather", k=1)
        return str(caught.value), int(sparsecoll.allreduce(comm, x, "allgather", k=1).values[0])

    results = simulate(3, program).results
    assert len(set(results)) == 1
    assert results[0][0].startswith(
        "call: expected the same value on all ranks, got 'other' on ranks 0, 2, 'allreduce'"
    )
    assert results[0][1] == 3


def test_known_calls_cost_no_message_and_unchecked_ones_never_do():
    def program(comm, check):
        x = SparseVector([comm.rank], np.ones(1), 10)
        counts = []
        for _ in range(3):
            reduction = sparsecoll.allreduce(comm, x, "allgather", k=1, check=check, return_reduction=True)
            phases = reduction.traffic.phases
            counts.append(phases["agree"].words_received if "agree" in phases else 0)
        return counts

    assert simulate(4, lambda comm: program(comm, True)).results == [[4 * 3, 0, 0]] * 4
    assert simulate(4, lambda comm: program(comm, False)).results == [[0, 0, 0]] * 4


@pytest.mark.parametrize("algo", ["auto", "sparcml", "densestream"])
def test_with_many_ranks_nobody_receives_a_row_of_each(algo):
    """Without k, when arguments are new and in every later call; all know the largest number of entries."""

    def program(comm):
        x = SparseVector(np.arange(comm.rank % 5), np.ones(comm.rank % 5), 50)
        received = []
        for _ in range(2):
            y = sparsecoll.allreduce(comm, x, algo, return_reduction=True)
            received.append(y.traffic.phases["agree"].bytes_received)
        return y.value.values.tolist(), received

    assert simulate(70, program).results == [([56.0, 42.0, 28.0, 14.0], [32 * 7] * 2)] * 70


@pytest.mark.parametrize("P", [3, 5, 8, 13])
def test_calls_that_differ_meet_where_agreements_are_reduced(P, monkeypatch):
    """One rank is in a call of its own, whose messages are of another kind, or has other arguments, or reports."""
    monkeypatch.setattr(CALL, "FEW_RANKS", 2)  # as with many ranks

    def attempt(comm, call):
        with pytest.raises((CommunicationError, ValueError)) as caught:
            call()
        assert sparsecoll.allreduce(comm, SparseVector([1], np.ones(1), 10), "sparcml").values[0] == P
        return str(caught.value)

    def program(comm, culprit):
        x, one = SparseVector([1], np.ones(1), 10), comm.rank == culprit
        texts = [attempt(comm, lambda: sparsecoll.allreduce(comm, x, "sparcml", op="mean" if one else "sum"))]
        texts.append(attempt(comm, lambda: sparsecoll.allreduce(comm, x, "sparcml", k=1 if one else None)))
        texts.append(attempt(comm, lambda: sparsecoll.allreduce(comm, x, "sparcml", timeout=-1 if one else None)))
        texts.append(attempt(comm, lambda: (sparsecoll.allgather if one else sparsecoll.allreduce)(comm, x)))
        return texts

    for culprit in (0, 1, P - 1):
        results = simulate(P, lambda comm, culprit=culprit: program(comm, culprit)).results
        assert results == [results[0]] * P
        for text, name in zip(results[0], ("op", "k", f"rank {culprit}: timeout", "call"), strict=True):
            assert text.startswith(f"{name}: expected"), text


@pytest.mark.parametrize("k", [1, None])
def test_check_itself_is_compared(k):
    def program(comm):
        x = SparseVector([comm.rank], np.ones(1), 10)
        with pytest.raises(CommunicationError) as caught:
            sparsecoll.allreduce(comm, x, "allgather", k=k, check=comm.rank == 1)
        return str(caught.value), int(sparsecoll.allreduce(comm, x, "allgather", k=1).nnz)

    text = "check: expected the same value on all ranks, got False on ranks 0, 2, True on rank 1"
    assert simulate(3, program).results == [(text, 3)] * 3


def test_algorithms_forget_what_a_failed_call_may_have_left_different():
    """Thresholds and boundaries are found anew on all ranks, so that all hold the same again."""

    def program(comm):
        x, algo = case("random", comm.rank, 4), as_algorithm("oktopk")
        sparsecoll.allreduce(comm, x, algo, k=K)
        if comm.rank == 2:
            fail_at(comm.transport, "isend", 2)
        with pytest.raises(CommunicationError):
            sparsecoll.allreduce(comm, x, algo, k=K)
            sparsecoll.allreduce(comm, x, algo, k=K)
        unpatch(comm.transport, "isend")
        reduction = sparsecoll.allreduce(comm, x, algo, k=K, return_reduction=True)
        assert "repartition" in reduction.traffic.phases and algo.state_dict()["calls"] == 1
        return algo.state_dict()["boundaries"]

    results = simulate(4, program).results
    assert results == [results[0]] * 4 and results[0]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_raise_on_all(name, value):
    def program(comm):
        values = np.array([1, value if comm.rank == 1 else 2, 3], np.float32)
        sparse, dense = SparseVector([2, 4, 7], values, 9), np.concatenate([np.zeros(6), values])
        for x, options, index in ((sparse, {}, 4), (dense, {"k": 3}, 7)):
            with pytest.raises(ValueError, match=r"^rank 1: x: expected .* at index " + str(index)):
                sparsecoll.allreduce(comm, x, algorithm(name), **options)

    simulate(3, program)


def test_values_that_are_not_finite_pass_if_asked():
    x = SparseVector([1, 2], np.array([np.nan, np.inf]), 5)
    for algo in EXACT:
        values = simulate(
            2, lambda comm, algo=algo: sparsecoll.allreduce(comm, x, algorithm(algo), nonfinite="pass").values
        ).results[1]
        assert np.isnan(values[0]) and values[1] == np.inf


def test_sums_of_float16_do_not_overflow_on_the_way():
    """40,000 + 40,000 - 40,000: formed in float32; what stays too large is infinite in the end only."""

    def program(comm):
        sign = -1 if comm.rank == 2 else 1
        x = SparseVector([3], np.array([sign * 40_000], np.float16), 9)
        return [float(sparsecoll.allreduce(comm, x, algorithm(a)).values[0]) for a in EXACT]

    assert simulate(3, program).results == [[40_000.0] * len(EXACT)] * 3
