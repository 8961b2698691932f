"""A rank that takes fewer steps is given up after the timeout, whoever else uses the communicator."""

import time
from types import SimpleNamespace

import pytest
import torch
from runs import HOOK, LOCAL, OVERLAP, SPARSE, Run, net, train

from sparsecoll import CommunicationError
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer
from sparsecoll.transport import waiting

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("process_group")]
MEANS = "LocalOptimizer"


@pytest.mark.parametrize(("way", "taken"), [(OVERLAP, 0), (OVERLAP, 3), (LOCAL, 0), (HOOK, 3), (SPARSE, 0), (MEANS, 3)])
def test_a_rank_that_takes_fewer_steps_is_given_up(comm, way, taken, monkeypatch):
    """In the first step or later. Waiting ranks have a fast clock: no test depends on the speed of the machine."""
    if comm.size == 1:
        pytest.skip("one rank waits for none")
    own = comm.Dup()
    other = net()
    alive = DistributedOptimizer(torch.optim.SGD(other.parameters(), 0.1), other, own)  # without a timeout
    run = Run(OVERLAP if way == MEANS else way, own)
    if way == MEANS:
        run.optimizer.close()
        run.optimizer = LocalOptimizer(run.inner, run.module, own, every=1, timeout=60)
    train(run, range(taken))
    comm.Barrier()
    if comm.rank < run.last:
        with monkeypatch.context() as patch:
            patch.setattr(waiting, "WATCHDOG_SECONDS", 0.1)
            patch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: 100 * time.monotonic()))
            with pytest.raises(CommunicationError, match=r"for 60.* s: no answer within the timeout"):
                train(run, [3])
    comm.Barrier()
    assert alive.param_groups
