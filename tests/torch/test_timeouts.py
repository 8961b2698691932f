"""The timeout of an optimizer holds in each of its calls, whoever else uses the communicator."""

import re
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cases import pairwise
from nets import batch, loss_of, net, train
from socket_ranks import run, together

from sparsecoll import CommunicationError
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer, SparseSGD
from sparsecoll.transport import waiting

P = 3
GIVEN_UP = r"rank \d waits for .* for 200 s: no answer within the timeout"


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


KINDS = {
    "overlap": lambda comm, model, **given: DistributedOptimizer(sgd(model), model, comm, **given),
    "no overlap": lambda comm, model, **given: DistributedOptimizer(sgd(model), model, comm, overlap=False, **given),
    "local": lambda comm, model, **given: LocalOptimizer(sgd(model), model, comm, "topk", every=1, **given),
    "sparse": lambda comm, model, **given: SparseSGD(model.parameters(), 0.1, comm=comm, **given),
}


@pytest.fixture
def given_up(monkeypatch):
    """given_up(program): what every rank raises but the last one, which waits once it has run its own program(comm).

    From then on the clock of those who wait for messages runs fast: no test depends on the speed of the machine.
    """
    wait, done = together(P), threading.Event()
    monkeypatch.setattr(waiting, "WATCHDOG_SECONDS", 0.1)  # real seconds between looks at the clock
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: time.monotonic() * 1000 ** done.is_set()))

    def one(program, comm):
        try:
            program(comm)
        except CommunicationError as error:
            return str(error)
        finally:
            if comm.rank == P - 1:
                done.set()
            wait()
        return None

    def ranks(program):
        *texts, last = run(P, partial(one, program))
        assert last is None, last
        return texts

    return ranks


def own_steps(comm, steps):
    return steps if comm.rank == P - 1 else steps + 1


@pytest.mark.parametrize(("kind", "others", "steps"), pairwise(KINDS, ["none", "before", "after"], [0, 2]))
def test_a_rank_that_takes_fewer_steps_is_given_up(kind, others, steps, given_up):
    """Also in the first step; and with other optimizers on the communicator that have no timeout or a longer one."""

    def program(comm):
        alive = [KINDS["overlap"](comm, net()) for _ in range(others == "before")]
        model = net()
        optimizer = KINDS[kind](comm, model, timeout=200)
        alive += [KINDS[name](comm, net(), timeout=500) for name in ("local", "no overlap") if others == "after"]
        train(comm, model, optimizer, range(own_steps(comm, steps)))
        assert len(alive) == {"none": 0, "before": 1, "after": 2}[others]

    texts = given_up(program)
    assert all(texts), texts
    assert any(re.search(GIVEN_UP, text) for text in texts), texts


@pytest.mark.parametrize("timeouts", [(200, None), (None, 200), (200, 500), (None, None)], ids=str)
def test_two_optimizers_whose_gradients_one_backward_computes(timeouts, given_up):
    """As of a generator and its critic: the ranks wait for as long as the more impatient of them."""

    def program(comm):
        models = [torch.nn.Linear(12, 12, dtype=torch.float64), net()]
        optimizers = [
            KINDS["overlap"](comm, model, timeout=t, dense_below=10) for model, t in zip(models, timeouts, strict=True)
        ]
        both = torch.nn.Sequential(*models)
        for step in range(2 if timeouts == (None, None) else own_steps(comm, 2)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(both, batch(comm.rank, step)).backward()
            for optimizer in optimizers:
                optimizer.step()

    texts = given_up(program)
    assert all(text is None if timeouts == (None, None) else text for text in texts), texts


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_makes_no_optimizer_is_given_up(kind, given_up):
    def program(comm):
        if comm.rank < P - 1:
            KINDS[kind](comm, net(), timeout=200)

    assert all(given_up(program))
