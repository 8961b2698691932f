"""How a rank waits for messages over MPI."""

import pytest


@pytest.fixture
def waiting(monkeypatch):
    """The module, with a clock that only sleeps and yields move on, and what they took."""
    try:
        from sparsecoll.transport.mpi import waiting
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs MPI: {error}")
    clock, slept = [0.0], []

    def sleep(seconds):
        slept.append(round(1e6 * seconds))
        clock[0] += seconds

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr(waiting, "yield_core", lambda: sleep(20e-6))
    return waiting, slept


def waiter(module, timeout=None):
    return module.Waiter(0, lambda: "waits", timeout)


def test_a_rank_yields_and_then_sleeps_longer_and_longer(waiting):
    module, slept = waiting
    one = waiter(module)
    pauses = [one.pause() for _ in range(15)]
    assert slept == [20] * 5 + [50, 100, 200, 400, 700]
    assert pauses == [False] * 5 + [True, False] * 5  # two polls after a sleep


def test_a_timeout_ends_a_wait(waiting):
    from sparsecoll import CommunicationError

    one = waiter(waiting[0], 0.5)
    with pytest.raises(CommunicationError, match=r"^rank 0 waits for 0\.5 s: no answer within the timeout"):
        for _ in range(10_000):
            one.pause()
    assert 0.5e6 < sum(waiting[1]) < 0.502e6
