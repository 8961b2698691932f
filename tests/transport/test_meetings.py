"""Where the ranks of a process group meet again and again, among them processes that were not there before."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

dist = pytest.importorskip("torch.distributed")

from sparsecoll import CommunicationError  # noqa: E402
from sparsecoll.transport import process_groups  # noqa: E402
from sparsecoll.transport.process_groups import StoreMeeting  # noqa: E402
from sparsecoll.transport.tcp import connect  # noqa: E402


def come(store, rank, size=2):
    """A meeting as a process has it that knows nothing of earlier ones."""
    return StoreMeeting(store, rank, size, "sparsecoll/0", counted=True)


def met(store, size=2):
    """Connect all ranks, rank 0 first; the transports, or exceptions."""
    begun = threading.Event()

    class First(StoreMeeting):
        def put(self, entry):
            super().put(entry)
            begun.set()

    def one(rank):
        if rank == 0:
            return tried(First(store, 0, size, "sparsecoll/0", counted=True))
        assert begun.wait(20)
        return tried(come(store, rank, size))

    def tried(meeting):
        try:
            return connect(meeting, 20)
        except CommunicationError as error:
            return str(error)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def all_met(outcomes):
    sizes = [getattr(outcome, "size", outcome) for outcome in outcomes]
    for outcome in outcomes:
        getattr(outcome, "close", str)()
    return sizes == [len(outcomes)] * len(outcomes), sizes


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_meet_again_in_the_same_place(size):
    store = dist.HashStore()
    for _ in range(3):
        assert all_met(met(store, size))[0]


@pytest.mark.parametrize("times", [1, 3])
def test_a_rank_that_has_waited_in_vain_meets_one_that_comes_for_the_first_time(times):
    store = dist.HashStore()
    for _ in range(times):
        with pytest.raises(CommunicationError, match="rank 0 waits for all ranks to make their first call"):
            connect(come(store, 0), 0.1)
    good, sizes = all_met(met(store))
    assert good, sizes


def test_a_rank_that_waits_meets_the_one_that_replaces_a_process_which_never_came():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(connect, come(store, 0), 20)
        lost = come(store, 1)  # it is killed before it leaves an entry
        del lost
        new = pool.submit(connect, come(store, 1), 20)
        assert all_met([waits.result(), new.result()])[0]


@pytest.mark.parametrize("order", [(2, 0, 1), (2, 1, 0), (0, 2, 1), (1, 2, 0)])
def test_a_rank_that_finds_the_entries_of_killed_processes_waits_for_living_ones(order):
    """They were waiting for the last rank, which died before its first call; then all are started again."""
    store, left = dist.HashStore(), []
    for rank in range(2):
        meeting = come(store, rank, 3)
        with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
            patch.setattr(meeting, "entries", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
            patch.setattr(meeting, "fail", lambda why: None)
            connect(meeting, 20)
        left.append(meeting)
    begun = [threading.Event() for _ in order]

    class Next(StoreMeeting):
        def entries(self):
            begun[order.index(self.rank)].set()
            return super().entries()

    def one(turn):
        if turn:
            assert begun[turn - 1].wait(20)
        return connect(Next(store, order[turn], 3, "sparsecoll/0", counted=True), 20)

    with ThreadPoolExecutor(3) as pool:
        good, sizes = all_met(list(pool.map(one, range(3))))
    assert good, sizes


def test_ranks_whose_entries_are_those_of_killed_processes_are_named():
    store = dist.HashStore()
    for rank in range(2):
        come(store, rank, 3).put(f"entry {rank}")
    with pytest.raises(CommunicationError, match=r"absent: 0, 1\)"):
        connect(come(store, 2, 3), 0.5)


def test_ranks_that_move_on_to_the_next_meeting_confirm_its_entries_again():
    """Even if they are the same, since only a stray process has come and gone between."""
    store = dist.HashStore()
    meetings = [come(store, rank) for rank in range(2)]
    for meeting in meetings:
        meeting.put(f"entry {meeting.rank}")
    assert meetings[0].entries() is None and meetings[1].entries() is not None
    come(store, 1).put("another")
    for _ in range(6):
        found = [meeting.entries() for meeting in meetings]
    assert found == [["entry 0", "entry 1"]] * 2


def test_what_has_failed_before_does_not_fail_the_next_meeting():
    store = dist.HashStore()
    for rank in range(2):
        come(store, rank).fail("rank 1: a bug")
    assert all_met(met(store))[0]


def test_a_rank_that_comes_after_a_failure_hears_of_it():
    store = dist.HashStore()
    come(store, 0).fail("rank 0: a bug")
    with pytest.raises(CommunicationError, match="rank 0: a bug"):
        connect(come(store, 1), 20)


def test_all_ranks_hear_of_a_failure():
    store, told = dist.HashStore(), threading.Event()

    def fails():
        meeting = come(store, 1)
        assert told.wait(20)
        meeting.fail("rank 1: a bug")

    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(fails)
        waits = pool.submit(connect, come(store, 0), 20)
        told.set()
        with pytest.raises(CommunicationError, match="rank 1: a bug"):
            waits.result()
        failing.result()


def test_a_rank_whose_store_is_lost_raises_an_error_of_communication():
    class Lost(StoreMeeting):
        def entries(self):
            raise ConnectionError("the store is gone")

        fail = entries

    with pytest.raises(CommunicationError, match="rank 0: the store is gone"):
        connect(Lost(dist.HashStore(), 0, 2, "sparsecoll/0", counted=True), 20)


@pytest.mark.parametrize("interrupted", [0, 1])
def test_the_others_hear_of_a_rank_that_is_interrupted(interrupted):
    """A rank waits for the ranks below it to call."""
    store = dist.HashStore()

    class Interrupted(StoreMeeting):
        def entries(self):
            if super().entries() is not None:
                raise KeyboardInterrupt

    def stops():
        with pytest.raises(KeyboardInterrupt):
            connect(Interrupted(store, interrupted, 2, "sparsecoll/0", counted=True), 20)

    with ThreadPoolExecutor(2) as pool:
        stopped = pool.submit(stops)
        with pytest.raises(CommunicationError, match=f"rank {interrupted}: KeyboardInterrupt"):
            connect(come(store, 1 - interrupted), 20)
        stopped.result()


def test_two_threads_that_make_the_first_call_of_a_group(monkeypatch):
    """Each would meet the other ranks."""

    class Group:
        group_name = "group"

        def rank(self):
            return 0

    group, made, begun, goes_on = Group(), [], threading.Event(), threading.Event()

    def connected(group, name, timeout):
        begun.set()
        assert goes_on.wait(20)
        made.append(object())
        process_groups._transports[group] = made[-1]
        return made[-1]

    monkeypatch.setattr(process_groups, "connect_group", connected)
    monkeypatch.setattr(process_groups, "_group_of", lambda group: group)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(process_groups.group_transport, group)
        assert begun.wait(20)
        with pytest.raises(CommunicationError, match="two threads made calls at the same time"):
            process_groups.group_transport(group)
        goes_on.set()
        assert [first.result(), process_groups.group_transport(group)] == made * 2
