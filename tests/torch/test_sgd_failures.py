"""SparseSGD: a step that fails, fails on all ranks and changes nothing."""

from functools import partial

import pytest
import torch
from failing import fail_at, unpatch
from nets import P, batch, bits, loss_of, net, parameters, residuals, train

import sparsecoll
from sparsecoll import CommunicationError, simulate
from sparsecoll.errors import NonFiniteError
from sparsecoll.torch import DistributedOptimizer, SparseSGD
from sparsecoll.torch.optimizers import sgd


@pytest.mark.parametrize("number", [1, 3, 5, 8])
@pytest.mark.parametrize("algo", ["allgather", "oktopk", "dense"])
def test_a_failed_step_changes_nothing_and_can_be_made_again(algo, number):
    """A rank's n-th message fails: parameters, residuals, momentum and gradients stay on all ranks."""

    def program(comm, fails):
        model = net()
        model[2].float()
        model[0].float()  # two flat vectors: the first may have been summed when the second fails
        x, y = (t.float() if t.is_floating_point() else t for t in batch(comm.rank, 0))

        def backward(scale):
            optimizer.zero_grad()
            h = model[3](model[2](model[1](model[0](x * scale))))
            torch.nn.functional.cross_entropy(model[4](h.double()), y).backward()

        optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm, algo=algo, density=0.2)
        for step in range(2):
            backward(1 + step)
            optimizer.step()
        backward(3)
        failed = False

        def everything():
            state = optimizer.state_dict()
            tensors = [
                *parameters(model),
                *(p.grad.clone() for p in model.parameters()),
                *residuals(optimizer).values(),
            ]
            return tensors + [entry["momentum_buffer"].clone() for entry in state["state"].values()]

        before = everything()
        if fails and comm.rank == 1:
            fail_at(comm.transport, "isend", number)
        try:
            optimizer.step()
        except CommunicationError as error:
            failed = True
            assert str(error) == f"rank 1 failed: Fault: isend {number}"
            assert all(map(torch.equal, before, everything()))
            unpatch(comm.transport, "isend")
            optimizer.step()
        unpatch(comm.transport, "isend")
        return failed, bits(model), [t.clone() for t in residuals(optimizer).values()]

    results, whole = (simulate(P, partial(program, fails=fails)).results for fails in (True, False))
    assert len({failed for failed, *_ in results}) == 1 and len({b for _, b, _ in results}) == 1
    if number < 8:
        assert results[0][0]
    if algo != "oktopk":  # which finds its thresholds anew after a failure
        assert results[0][1] == whole[0][1]
        for (*_, mine), (*_, theirs) in zip(results, whole, strict=True):
            assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize(
    "options", [{}, {"algo": "dense"}, {"algo": "allgather", "density": 0.01}, {"algo": "random"}], ids=str
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks(value, options):
    if options.get("algo") == "random":
        options = {"algo": sparsecoll.algorithms.Allgather(selector=sparsecoll.select.RandomK(seed=1))}

    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm, **options)
        train(comm, model, optimizer, range(2))
        before = bits(model), residuals(optimizer)
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, 2)).backward()
        if comm.rank == 1:
            model[2].weight.grad[3, 4] = value
        with pytest.raises(NonFiniteError, match=r"^rank 1: gradient of '2\.weight': expected finite values, got NaN"):
            optimizer.step()
        after = residuals(optimizer)
        assert bits(model) == before[0] and all(torch.equal(after[n], t) for n, t in before[1].items())
        train(comm, model, optimizer, range(3, 5))
        return bits(model)

    results = simulate(P, program).results
    assert len(set(results)) == 1


@pytest.mark.parametrize("make", [SparseSGD, DistributedOptimizer])
def test_a_closure_returns_a_loss_on_all_ranks_or_on_none(make):
    def program(comm):
        model = net()
        if make is SparseSGD:
            optimizer = SparseSGD(model.parameters(), 0.1, comm=comm, algo="dense")
        else:
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm, "none")

        def step(lacking):
            def closure():
                optimizer.zero_grad()
                loss = loss_of(model, batch(comm.rank, 0))
                loss.backward()
                return None if comm.rank in lacking else loss

            return optimizer.step(closure)

        assert step(range(P)) is None
        before = bits(model)
        with pytest.raises(ValueError, match=r"closure: expected a loss .* got None from ranks \[1\]"):
            step([1])
        assert bits(model) == before
        return step([]).item(), bits(model)

    results = simulate(P, program).results
    assert len(set(results)) == 1


def test_a_closure_that_raises_on_one_rank_raises_on_all():
    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, comm=comm)

        def closure():
            if comm.rank == 1:
                raise RuntimeError("out of memory")
            return loss_of(model, batch(comm.rank, 0))

        with pytest.raises(CommunicationError, match="rank 1 failed: RuntimeError: out of memory"):
            optimizer.step(closure)
        train(comm, model, optimizer, range(1))
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1


def test_an_update_that_fails_on_one_rank_is_raised_on_all(monkeypatch):
    take_step, calls, broken = sgd.take_step, [], []  # the state of the optimizer whose third update fails

    def failing(p, update, states, *options):
        if any(states is state for state in broken):
            calls.append(1)
            if len(calls) == 3:
                raise MemoryError("no memory")
        take_step(p, update, states, *options)

    monkeypatch.setattr(sgd, "take_step", failing)

    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, comm=comm, algo="dense")
        train(comm, model, optimizer, range(2))
        if comm.rank == 1:
            broken.append(optimizer.state)
        with pytest.raises(CommunicationError, match="rank 1 failed: MemoryError: no memory"):
            train(comm, model, optimizer, range(2, 4))  # the others have taken the step, and raise in their next one
        broken.clear()
        with pytest.raises(CommunicationError, match="after step 3, got others than rank 0's"):
            train(comm, model, optimizer, range(3, 4))
        optimizer.move(comm)
        train(comm, model, optimizer, range(4, 6))
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1


def fail_once(buckets, number):
    """Let the n-th `bind` from now on run out of memory."""
    bind, calls = buckets.bind, []

    def fails(*arguments):
        calls.append(number)
        if len(calls) == number:
            buckets.bind = bind
            raise MemoryError
        return bind(*arguments)

    buckets.bind = fails


@pytest.mark.parametrize("wrap", ["SparseSGD", "DistributedOptimizer"])
@pytest.mark.parametrize("number", [1, 2])
def test_training_goes_on_after_memory_ran_out_while_buckets_were_made(wrap, number):
    """On one rank, whose others have made all of theirs."""

    def program(comm):
        model, raised = net(), []
        model[0].float()
        forward = torch.nn.Sequential(model[0], Double(), *model[1:])
        if wrap == "SparseSGD":
            optimizer = SparseSGD(model.parameters(), 0.1, comm=comm, algo="allgather")
            buckets = optimizer._flat._buckets
        else:
            inner = torch.optim.SGD(model.parameters(), 0.1)
            optimizer = DistributedOptimizer(inner, model, comm, "topk", bucket_bytes=6000, overlap=False)
            buckets = optimizer._engine.buckets
        if comm.rank == 1:
            fail_once(buckets, number)
        for i in range(4):
            x, y = batch(comm.rank, i)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(forward(x.float()), y).backward()
            try:
                optimizer.step()
            except CommunicationError as error:
                raised.append(str(error))
        return raised, bits(model)

    results = simulate(P, program).results
    assert all(len(raised) == 1 and "MemoryError" in raised[0] for raised, _ in results), results[0][0]
    assert len({values for _, values in results}) == 1


class Double(torch.nn.Module):
    def forward(self, x):
        return x.double()


def test_parameters_of_a_bucket_that_was_not_made_are_stepped_later():
    """A table whose gradient becomes dense changes the buckets, but not which parameters take part."""
    table, head = torch.nn.Embedding(50, 4, sparse=True), torch.nn.Linear(4, 2).double()
    optimizer = SparseSGD([*table.parameters(), *head.parameters()], 0.1)

    def backward(dense):
        optimizer.zero_grad()
        head(table(torch.tensor([1, 2])).double()).square().mean().backward()
        table.weight.grad = table.weight.grad.to_dense() if dense else table.weight.grad

    backward(False)
    optimizer.step()
    backward(True)
    fail_once(optimizer._flat._buckets, 2)
    with pytest.raises(Exception, match="MemoryError"):
        optimizer.step()
    before = [p.detach().clone() for p in (table.weight, head.weight)]
    backward(True)
    optimizer.step()
    assert not any(torch.equal(p, then) for p, then in zip((table.weight, head.weight), before, strict=True))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_sum_beyond_float16_is_no_infinite_step(sparse):
    def program(comm):
        p = torch.nn.Embedding(25, 4, sparse=sparse, dtype=torch.float16).weight
        before = p.detach().clone()
        optimizer = SparseSGD([p], 1e-5, comm=comm, algo="allgather", density=0.1, momentum=0.5)
        grad = torch.full_like(p, 2e4)
        p.grad = grad.to_sparse(1) if sparse else grad
        optimizer.step()
        return bool(p.isfinite().all()) and not torch.equal(p, before)

    assert all(simulate(4, program).results)
