"""Models of special kinds: lazy modules, models on the meta device, ScriptModules, compiled models and teachers."""

import pytest
import torch
from nets import batch, bits, loss_of, net, train

from sparsecoll import simulate
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer, OneBitAdam, SparseSGD, broadcast


def wrapped(model, comm):
    return DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm, "topk", dense_below=10)


def sparse(model, comm):
    return SparseSGD(model.parameters(), 0.1, comm=comm)


def default(model, comm):
    return DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9), model, comm)


def local(model, comm):
    return LocalOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm, every=2)


def one_bit(model, comm):
    return OneBitAdam(model.parameters(), 0.01, warm_up=2, every=1, comm=comm)


def lazy(rank=0):
    torch.manual_seed(rank)
    layers = torch.nn.LazyLinear(24), torch.nn.LazyBatchNorm1d(), torch.nn.LazyLinear(3)
    return torch.nn.Sequential(*layers).double()


@pytest.mark.parametrize("make", [wrapped, sparse, broadcast])
def test_models_without_values_are_refused_with_the_cure(make):
    def program(comm):
        with pytest.raises(TypeError, match=r"rank 0: params: .*lazy module: .*call it once on a batch"):
            make(lazy(), comm)
        with pytest.raises(TypeError, match=r"rank 0: params: .*on meta: .*to_empty"):
            make(net().to("meta"), comm)
        model = lazy(comm.rank)
        model(batch(comm.rank, 0)[0])
        optimizer = make(model, comm)
        if make is not broadcast:
            train(comm, model, optimizer, range(3))
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1


@pytest.mark.parametrize("make", [wrapped, sparse])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize("kind", ["script", "trace", "compile"])
def test_scripted_traced_and_compiled_models_train_as_plain_ones(make, kind):
    makers = {
        "script": torch.jit.script,
        "trace": lambda model: torch.jit.trace(model, batch(0, 0)[0]),
        "compile": lambda model: torch.compile(model, backend="eager"),
    }

    def program(comm):
        torch.set_num_threads(1)
        models = [net(), makers[kind](net())]
        for model in models:
            optimizer = make(model, comm)
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, batch(comm.rank, step)).backward()
                optimizer.step()
        return [bits(model) for model in models]

    for plain, other in simulate(1 if kind == "compile" else 2, program).results:
        assert plain == other


@pytest.mark.parametrize(
    ("make", "inside"), [*((m, False) for m in (wrapped, sparse, local, one_bit)), (default, True)]
)
def test_a_compiled_step_is_a_plain_step(make, inside):
    def program(comm, compile_):
        model = net()
        optimizer = make(model, comm)
        step = optimizer.step if inside else compile_(lambda: optimizer.step())
        if inside:
            optimizer.optimizer.step = compile_(optimizer.optimizer.step)
        for number in range(4):
            optimizer.zero_grad()
            loss_of(model, batch(0, number)).backward()
            step()
        return bits(model)

    compiled = simulate(1, lambda comm: program(comm, lambda step: torch.compile(step, backend="eager"))).results
    assert compiled == simulate(1, lambda comm: program(comm, lambda step: step)).results


def test_a_frozen_teacher_that_the_loop_moves_stays_where_it_is_after_the_warm_up():
    def program(comm):
        model, teacher = net(seed=comm.rank), net(seed=9).requires_grad_(False)
        optimizer = OneBitAdam(
            model.parameters(), warm_up=6, every=2, model=torch.nn.ModuleList([model, teacher]), comm=comm
        )
        for step in range(12):
            train(comm, model, optimizer, range(step, step + 1))
            teacher[0].weight.lerp_(model[0].weight.detach(), 0.1)
        return bits(model), bits(teacher)

    (student, own), (same, other) = simulate(2, program).results
    assert student == same and own != other
