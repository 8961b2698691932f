"""torch.distributed.checkpoint: to save changes nothing in training, and what it leaves out is told when it loads."""

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from nets import batch, bits, loss_of, net, sparse, train, wrapped
from torch.distributed.checkpoint.state_dict import (
    _init_optim_state,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import sparsecoll.torch
from sparsecoll import simulate
from sparsecoll.torch import DistributedOptimizer, SparseSGD, WarmUp
from sparsecoll.torch.compressors import TopKCompressor


def local(comm, model):
    return sparsecoll.torch.LocalOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, comm, every=2, compressor=TopKCompressor(0.1)
    )


def diloco(comm, model):
    """Without residuals, but with an outer momentum."""
    inner = torch.optim.SGD(model.parameters(), 0.1)
    return sparsecoll.torch.LocalOptimizer(inner, model, comm, every=2, outer_momentum=0.9)


def between_means(comm, model):
    """Without residuals and outer momentum, but with parameters of each rank."""
    return sparsecoll.torch.LocalOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm, every=2)


def scheduled(comm, model):
    return SparseSGD(model.parameters(), 0.1, comm=comm, density=WarmUp(0.05, steps=8))


def views(comm, model):
    inner = torch.optim.SGD(model.parameters(), 0.1)
    return DistributedOptimizer(
        inner, model.named_parameters(), comm, TopKCompressor(0.1), gradient_as_bucket_view=True
    )


@pytest.mark.parametrize("make", [sparse, scheduled, wrapped, views, local])
def test_the_step_that_torchs_checkpoints_take_changes_nothing(make):
    """They take one with lr = 0 and gradients of zero if the optimizer has no state: residuals were sent and lost."""

    def program(comm, saves):
        model = net()
        optimizer = make(comm, model)
        found = []
        for step in range(6):
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if saves:
                _init_optim_state(optimizer)
            found.append((bits(model), str(optimizer.state_dict()["sparsecoll"])))
        return found

    assert (
        simulate(3, lambda comm: program(comm, True)).results == simulate(3, lambda comm: program(comm, False)).results
    )


@pytest.mark.parametrize("make", [sparse, wrapped, local, diloco, between_means])
def test_tensors_that_a_new_optimizer_gave_no_place_to_are_not_lost_silently(make, tmp_path):
    """`dcp.load` fills the tensors of the state that it gets, and a new optimizer has none."""

    def program(comm):
        def made():
            model = net()
            return model, make(comm, model)

        options = {"checkpoint_id": tmp_path / str(comm.rank), "no_dist": True}
        model, optimizer = made()
        train(comm, model, optimizer, range(5 if make is between_means else 4))
        dcp.save(optimizer.state_dict(), **options)
        model, optimizer = made()
        filled = optimizer.state_dict()
        dcp.load(filled, **options)
        with pytest.raises(ValueError, match=r"state_dict: expected the .* saved, got none: dcp.load"):
            optimizer.load_state_dict(filled)

    simulate(2, program)


def test_the_step_that_torchs_checkpoints_take_leaves_tables_sparse_and_makes_state():
    def program(comm):
        table = torch.nn.Embedding(50, 4, sparse=True)
        inner = torch.optim.SGD(table.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, table.named_parameters(), comm, "none")
        sparse = []
        for _ in range(3):
            table(torch.tensor([comm.rank, 5])).sum().backward()
            optimizer.step()
            sparse.append(table.weight.grad.is_sparse)
            optimizer.zero_grad()
            _init_optim_state(optimizer)
        model = net()
        adam = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model.named_parameters(), comm, "none")
        _init_optim_state(adam)
        return sparse, len(adam.state), optimizer.state_dict()["sparsecoll"]["step"]

    assert simulate(2, program).results == [([True] * 3, len(list(net().parameters())), 3)] * 2


class WithoutRate(torch.optim.Optimizer):
    """An optimizer whose groups have no learning rate."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


def without_rate(comm, model):
    return DistributedOptimizer(WithoutRate(model.parameters()), model.named_parameters(), comm, TopKCompressor(0.1))


@pytest.mark.parametrize("make", [wrapped, without_rate, sparse, local])
def test_get_optimizer_state_dict_changes_nothing(make):
    def program(comm, saves):
        model = net()
        optimizer = make(comm, model)
        for step in range(4):
            train(comm, model, optimizer, [step])
            optimizer.zero_grad()
            if saves:
                get_optimizer_state_dict(model, optimizer)
        return bits(model), str(optimizer.state_dict()["sparsecoll"])

    assert simulate(2, lambda c: program(c, True)).results == simulate(2, lambda c: program(c, False)).results


def test_torchs_checkpoints_find_sparse_sgds_momentum_in_a_new_optimizer():
    """dcp.load fills only what the state of the new one has."""

    def program(comm):
        old, new = net(), net()
        first = SparseSGD(old.parameters(), 0.1, 0.9, comm=comm, algo="oktopk", density=0.1)
        train(comm, old, first, range(3))
        second = SparseSGD(new.parameters(), 0.1, 0.9, comm=comm, algo="oktopk", density=0.1)
        saved, found = get_optimizer_state_dict(old, first), get_optimizer_state_dict(new, second)
        keys = {name: list(entries) for name, entries in saved["state"].items()}
        assert {name: list(entries) for name, entries in found["state"].items()} == keys
        set_optimizer_state_dict(new, second, saved)
        pairs = zip(old.parameters(), new.parameters(), strict=True)
        return all(first.state[p]["momentum_buffer"].equal(second.state[q]["momentum_buffer"]) for p, q in pairs)

    assert all(simulate(2, program).results)


@pytest.mark.parametrize("make", [wrapped, sparse, local])
def test_a_state_that_takes_residuals_away_is_told_once(make, caplog):
    def program(comm):
        model = net()
        optimizer = make(comm, model)
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), 0.1).state_dict())  # nothing is lost
        for step in range(2):
            train(comm, model, optimizer, [2 * step, 2 * step + 1])
            optimizer.zero_grad()
            set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))

    with caplog.at_level(logging.WARNING, "sparsecoll"):
        simulate(2, program)
    assert ["the values in the residuals are lost" in r.getMessage() for r in caplog.records] == [True]
