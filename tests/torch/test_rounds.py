"""The end of a reduction: what ranks tell each other in messages whose size does not depend on their number."""

import pytest
import torch

import sparsecoll
from sparsecoll import CommunicationError, simulate
from sparsecoll.torch.replica.calls import CHANGED, JOINED, NO_OUTCOME, SUSPECT, Row
from sparsecoll.transport.all_ranks import NEAR_RANKS
from sparsecoll.transport.call import CollectiveCall

RANKS = [1, 2, 3, 5, 6, 7, 12]


def params(*with_gradient):
    found = {name: torch.nn.Parameter(torch.zeros(2)) for name in "abc"}
    for name in with_gradient:
        found[name].grad = torch.ones(2)
    return found


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("one_node", [False, True])
def test_all_ranks_learn_what_any_rank_has(P, one_node):
    """Gradients, flags and changed buffers of the first, the middle and the last rank."""

    def program(comm):
        rank, middle, last = comm.rank, P // 2, P - 1
        own = params(*["a"] * (rank == 0), *["c"] * (rank == last))
        row = Row(4, CHANGED * (rank == middle) | SUSPECT * (rank == last), own, [rank == middle, False], checksum=7)
        outcome = row.exchange(comm.transport)
        return outcome, sparsecoll.traffic(comm).total.messages_received

    results = simulate(P, program, ranks_per_node=P if one_node else 1).results
    for outcome, messages in results:
        assert outcome.flags == CHANGED | SUSPECT and outcome.step == outcome.most == 4 and outcome.same_options
        assert outcome.used == outcome.dense == {"a", "c"} and not outcome.rows and outcome.trainable == set("abc")
        assert outcome.modules == [True, False] and outcome.root == outcome.furthest == 0
        assert not outcome.joined and not outcome.over
        assert messages == ((P - 1).bit_length() if one_node or P > NEAR_RANKS else P - 1)


def test_messages_do_not_grow_with_the_number_of_ranks():
    for P in (2, 100):
        traffic = simulate(P, lambda comm: Row(0, 0, params()).exchange(comm.transport)).traffic
        assert {t.total.bytes_received for t in traffic} == {(6 * 8 + 1 + 2) * (P - 1).bit_length()}


@pytest.mark.parametrize("P", RANKS[1:])
def test_gradients_of_ranks_without_data_do_not_count(P):
    """The first one has taken the most steps before, and its gradients do not count; the last one has data."""

    def program(comm):
        last = comm.rank == P - 1
        steps = 9 if comm.rank == 0 else 3 if last else 5
        return Row(steps, 0 if last else JOINED, params("b"), checksum=comm.rank).exchange(comm.transport)

    for outcome in simulate(P, program).results:
        assert outcome.joined and not outcome.over and outcome.same_options
        assert (outcome.step, outcome.most, outcome.root, outcome.furthest) == (3, 9, P - 1, 0)
        assert outcome.used == {"b"}


@pytest.mark.parametrize("P", RANKS)
def test_training_is_over_when_no_rank_has_data(P):
    def program(comm):
        return Row(comm.rank % 3, JOINED, params("b"), [True]).exchange(comm.transport)

    for outcome in simulate(P, program).results:
        assert outcome.joined and outcome.over and outcome.step is None and outcome.same_options
        assert (outcome.most, outcome.furthest) == (min(P - 1, 2), min(P - 1, 2)) and outcome.root == 0
        assert not outcome.used and outcome.modules == [False]
    assert not NO_OUTCOME.over and not NO_OUTCOME.joined


def test_other_numbers_of_steps_raise_and_name_the_ranks():
    def program(comm):
        flags = JOINED if comm.rank == 2 else 0
        with pytest.raises(CommunicationError) as raised:
            Row([5, 5, 1, 5, 6][comm.rank], flags, params()).exchange(comm.transport)
        return str(raised.value)

    [text] = set(simulate(5, program).results)
    assert "got 5 on rank 0, 5 on rank 1, 5 on rank 3, 6 on rank 4 so far" in text


@pytest.mark.parametrize("P", [2, 3, 5, 8])
def test_a_rank_in_another_call_is_told_so(P):
    """Its messages are gathered, those of the others combined."""

    def program(comm):
        with pytest.raises(CommunicationError) as raised:
            if comm.rank == 1:
                sparsecoll.allreduce(comm, sparsecoll.SparseVector([1], [1.0], 10))
            else:
                with CollectiveCall(comm.transport, "end"):
                    Row(0, 0, params("a")).exchange(comm.transport)
        return str(raised.value)

    [text] = set(simulate(P, program).results)
    assert text.startswith("call: expected the same value on all ranks, got 'end' on rank")


def test_other_options_on_one_rank():
    results = simulate(6, lambda comm: Row(0, 0, {}, checksum=(comm.rank == 4) + 2**32 - 2).exchange(comm.transport))
    assert not any(outcome.same_options for outcome in results.results)
