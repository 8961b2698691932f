"""How a rank waits for messages over MPI."""

from types import SimpleNamespace

import pytest

from sparsecoll.transport.progress import in_background


def waiter(**options):
    try:
        from sparsecoll.transport.mpi.waiting import Waiter
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs MPI: {error}")
    return Waiter(SimpleNamespace(rank=0, Abort=print), str, None, **options)


@pytest.mark.parametrize("one_node", [False, True])
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_rank_that_computes_meanwhile_sleeps_at_once_between_machines(overlapped, one_node):
    slept = waiter(one_node=one_node, overlapped=overlapped).pause(lambda: False)
    assert slept == (overlapped and not one_node)


def test_nonblocking_calls_are_overlapped_and_blocking_ones_are_not():
    transport = SimpleNamespace(threads=True, worker=None, overlapped=False)

    def failing():
        assert transport.overlapped
        raise ValueError

    assert in_background(transport, lambda: transport.overlapped).result()
    assert not transport.worker.in_order(lambda: transport.overlapped)
    with pytest.raises(ValueError):
        in_background(transport, failing).result()
    assert not transport.worker.in_order(lambda: transport.overlapped)
    transport.worker.close()
