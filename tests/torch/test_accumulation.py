"""Gradients that are accumulated over several backward passes are those of one large batch."""

import contextlib

import pytest
import torch
from nets import batch, bits, close, loss_of, net, parameters, residuals

from sparsecoll import NonFiniteError, simulate
from sparsecoll.torch import DistributedOptimizer, OneBitAdam
from sparsecoll.torch.compressors import COVAP, ChunkedTopK, TopKCompressor


def test_accumulation_with_no_sync_is_one_large_batch():
    def program(comm):
        models = []
        for accumulate in (True, False):
            model = net()
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), comm, "none", bucket_bytes=2000
            )
            for step in range(3):
                optimizer.zero_grad()
                parts = [batch(comm.rank, 10 * step + part) for part in range(3)]
                if accumulate:
                    with optimizer.no_sync():
                        for data in parts[:-1]:
                            (loss_of(model, data) / 3).backward()
                    (loss_of(model, parts[-1]) / 3).backward()
                else:
                    sum(loss_of(model, data) / 3 for data in parts).backward()
                optimizer.step()
            models.append(parameters(model))
        return models

    for accumulated, whole in simulate(2, program).results:
        close(accumulated, whole)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("compressor", ["none", TopKCompressor(0.1, algo="allgather")], ids=["none", "topk"])
def test_accumulation_without_no_sync_is_one_large_batch_too(compressor, overlap):
    """Nothing is lost: the sum of all gradients is what moved the parameters and what residuals hold."""

    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(
            inner, model.named_parameters(), comm, compressor, bucket_bytes=2000, overlap=overlap
        )
        start, given = parameters(model), [torch.zeros_like(p) for p in model.parameters()]
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                loss = loss_of(model, batch(comm.rank, 10 * step + part))
                for total, g in zip(
                    given, torch.autograd.grad(loss, list(model.parameters()), retain_graph=True), strict=True
                ):
                    total += g
                loss.backward()
            optimizer.step()
        held = optimizer.state_dict()["sparsecoll"]["tensors"].get("residual", {})
        kept = [held.get(name, torch.zeros_like(p)) for name, p in model.named_parameters()]
        moved = [(a - b) / 0.1 for a, b in zip(start, parameters(model), strict=True)]
        return given, kept, moved, bits(model)

    results = simulate(2, program).results
    assert len({b for *_, b in results}) == 1
    for i, moved in enumerate(results[0][2]):
        torch.testing.assert_close(2 * moved + sum(r[1][i] for r in results), sum(r[0][i] for r in results))


@pytest.mark.parametrize(("overlap", "reduced"), [(True, True), (False, True), (False, False)])
def test_gradients_that_were_discarded_are_not_reduced_again(overlap, reduced):
    """In a loop that sets gradients to zero at its end, or not at all."""

    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(
            inner, model, comm, TopKCompressor(0.1, algo="allgather"), bucket_bytes=2000, overlap=overlap, dense_below=0
        )
        start, given = parameters(model), [torch.zeros_like(p) for p in model.parameters()]
        for step in range(6):
            loss = loss_of(model, batch(comm.rank, step))
            gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            loss.backward()
            if reduced:
                optimizer.synchronize()
            if step % 2:
                optimizer.discard()
                assert all(p.grad is None for p in model.parameters())
                continue
            for total, g in zip(given, gradients, strict=True):
                total += g
            optimizer.step()
            optimizer.zero_grad()
        held = residuals(optimizer)
        kept = [held.get(name, torch.zeros_like(p)) for name, p in model.named_parameters()]
        return given, kept, [(a - b) / 0.1 for a, b in zip(start, parameters(model), strict=True)]

    results = simulate(2, program).results
    for i, moved in enumerate(results[0][2]):
        torch.testing.assert_close(2 * moved + sum(r[1][i] for r in results), sum(r[0][i] for r in results))


def test_a_loop_that_sets_gradients_to_zero_at_its_end_goes_on_after_a_nan():
    def program(comm):
        model = net()
        optimizer = OneBitAdam(model.parameters(), 1e-3, warm_up=4, comm=comm)
        for step in range(12):
            loss = loss_of(model, batch(comm.rank, step))
            (loss * float("nan") if step == 8 and comm.rank else loss).backward()
            try:
                optimizer.step()
            except NonFiniteError:
                optimizer.discard()
                continue
            optimizer.zero_grad()
        assert not optimizer.warming_up
        return bits(model)

    one, other = simulate(2, program).results
    assert one == other


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("thrown_away", [False, True])
@pytest.mark.parametrize("way", ["create_graph", "rows"])
def test_accumulation_into_another_tensor_is_told_from_a_gradient_thrown_away(way, thrown_away):
    """Autograd makes the sum of a mean and a gradient a new tensor with create_graph, and of rows and a dense one."""

    def program(comm):
        p = torch.nn.Parameter(torch.zeros(40, 8))
        compressor = TopKCompressor(0.1, algo="allgather", row_density=0.1)
        optimizer = DistributedOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], comm, compressor, dense_below=0)
        first, second = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(comm.rank))
        used = torch.nn.functional.embedding(torch.arange(40), p, sparse=True) if way == "rows" else p
        (used * first).sum().backward(create_graph=way == "create_graph")
        if thrown_away:
            p.grad = None
        (p * second).sum().backward(create_graph=way == "create_graph")
        optimizer.step()
        return p.detach(), second + (not thrown_away) * first - residuals(optimizer)["p"]

    results = simulate(2, program).results
    torch.testing.assert_close(-2 * results[0][0], sum(moved for _, moved in results))


@pytest.mark.parametrize("compressor", [None, "dgc", "nesterovtopk"])
def test_momentum_that_would_count_twice_in_a_step_is_refused_on_all_ranks(compressor):
    """Two losses without no_sync(); the loop goes on after zero_grad()."""

    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.0 if compressor else 0.9)
        optimizer = DistributedOptimizer(inner, model, comm, compressor)
        for step in range(2):
            with optimizer.no_sync():
                loss_of(model, batch(comm.rank, step)).backward()
            loss_of(model, batch(comm.rank, 10 + step)).backward()
            if step == 0:
                with pytest.raises(ValueError, match=r"momentum: .* accumulate within no_sync\(\)"):
                    loss_of(model, batch(comm.rank, step)).backward()
            else:
                optimizer.step()
            optimizer.zero_grad()
        return bits(model)

    assert len(set(simulate(3, program).results)) == 1


def test_momentum_is_refused_twice_in_a_step_whose_buckets_were_made_again():
    """As where a parameter was frozen between two back-propagations."""

    def program(comm):
        p, q = (torch.nn.Parameter(torch.zeros(2000)) for _ in range(2))
        optimizer = DistributedOptimizer(torch.optim.SGD([p, q], 1.0), {"p": p, "q": q}.items(), comm, "dgc")
        (p + q).sum().backward()
        q.requires_grad_(False)
        q.grad = None
        with pytest.raises(ValueError, match="momentum: gradients were reduced twice"):
            p.sum().backward()
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()

    simulate(2, program)


@pytest.mark.parametrize("compressor", [COVAP(3, start=0.5), ChunkedTopK(4, 16, decay=0.5, algo="allgather")])
def test_residuals_decay_once_a_step(compressor):
    def program(comm, no_sync):
        p, q = (torch.nn.Parameter(torch.zeros(40)) for _ in range(2))
        optimizer = DistributedOptimizer(
            torch.optim.SGD([p, q], 1.0), {"p": p, "q": q}.items(), comm, compressor, dense_below=0
        )
        for _ in range(4):
            for part in range(2):
                with optimizer.no_sync() if no_sync and part == 0 else contextlib.nullcontext():
                    ((p + q) * torch.arange(40.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach(), q.detach(), *residuals(optimizer).values()])

    once, twice = (simulate(2, lambda comm, way=way: program(comm, way)).results for way in (True, False))
    torch.testing.assert_close(once, twice)
