"""Copies and pickles: what holds a communicator keeps its state or refuses; everything else is copied as it is."""

import copy
import pickle

import numpy as np
import pytest
import torch
from nets import batch, loss_of, net

import sparsecoll
from sparsecoll import ALGORITHMS, SparseVector, simulate
from sparsecoll.select import SELECTORS
from sparsecoll.torch import (
    COMPRESSORS,
    Constant,
    DistributedOptimizer,
    HookState,
    LocalOptimizer,
    SparseSGD,
    WarmUp,
)
from sparsecoll.torch.compressors import TopKCompressor, as_compressor

WAYS = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


def described(x):
    return {name: repr(value) for name, value in vars(x).items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_copies_of_compressors_have_their_options(name, way):
    compressor = as_compressor(name)
    again = WAYS[way](compressor)
    assert type(again) is type(compressor) and again.describe() == compressor.describe()


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_schedules_are_equal(way):
    for schedule in (Constant(0.1), WarmUp(0.01, 4)):
        again = WAYS[way](schedule)
        assert [again.at(step) for step in range(6)] == [schedule.at(step) for step in range(6)]
    nested = TopKCompressor(WarmUp(0.1, 3), momentum=0.9)
    assert WAYS[way](nested).describe() == nested.describe()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_go_on_from_a_copy_as_they_would_have(name, way):
    def program(comm, copied):
        algorithm, sums = ALGORITHMS[name](), []
        for step in range(4):
            values = np.random.default_rng([comm.rank, step]).standard_normal(40)
            x = SparseVector(np.arange(comm.rank, 200, 5), values, 200)
            sums.append(sparsecoll.allreduce(comm, x, algorithm, k=12))
            if copied:
                algorithm = WAYS[way](algorithm)
        return sums

    assert (
        simulate(3, lambda comm: program(comm, True)).results == simulate(3, lambda comm: program(comm, False)).results
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SELECTORS)
def test_copies_of_selectors_have_their_state(name, way):
    selector = SELECTORS[name]()
    assert described(WAYS[way](selector)) == described(selector)


def made(comm):
    """What holds a communicator, and its name."""
    x = SparseVector([1], np.ones(1), 4)
    model = net()
    yield "DistributedOptimizer", DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm)
    model = net()
    yield "LocalOptimizer", LocalOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm)
    yield "SparseSGD", SparseSGD(net().parameters(), 0.1, comm=comm)
    yield "Request", sparsecoll.iallreduce(comm, x)
    yield "Plan", sparsecoll.allreduce_init(comm, x)
    yield "communicator", sparsecoll.transport.as_transport(comm)


@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_be_copied_says_what_to_do(way):
    def program(comm):
        for name, x in made(comm):
            with pytest.raises(TypeError, match=rf"{name} cannot be pickled( or copied)?: (save|use|call)"):
                WAYS[way](x)

    simulate(2, program)


def test_sharded_reductions_refuse_before_torch_does():
    fsdp = pytest.importorskip("sparsecoll.torch.fsdp")
    with pytest.raises(TypeError, match=r"ShardedReductions cannot be pickled or copied: save their state_dict\(\)"):
        copy.deepcopy(object.__new__(fsdp.ShardedReductions))


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_hook_state_keeps_its_state_and_raises_when_it_is_used(way):
    def program(comm):
        state = HookState(comm, "topk", net())
        twice = WAYS[way](WAYS[way](state))
        assert twice.state_dict()["compressor"] == state.state_dict()["compressor"]
        assert twice.state_dict().keys() == state.state_dict().keys()
        for use in (twice.discard, twice.verify, twice.finish, lambda: twice.load_state_dict({})):
            with pytest.raises(RuntimeError, match=r"A copied or loaded HookState has no communicator: make a new one"):
                use()
        with pytest.raises(RuntimeError, match="has no communicator"):
            _ = twice.transport
        again = HookState(comm, "topk", net())
        again.load_state_dict(twice.state_dict())
        with pytest.raises(AttributeError, match="'HookState' object has no attribute 'steps'"):
            _ = again.steps

    simulate(2, program)


def test_models_of_wrapped_optimizers_are_copied_and_averaged():
    def program(comm):
        model = net()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm, compressor="topk")
        average = torch.optim.swa_utils.AveragedModel(model)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
            average.update_parameters(model)
        again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        loss_of(again, batch(comm.rank, 9)).backward()  # a reduction of nobody's
        return [p.detach().clone() for p in average.module.parameters()], list(
            map(torch.equal, again.parameters(), model.parameters())
        )

    (first, same), (second, _) = simulate(2, program).results
    assert all(same) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("make", [DistributedOptimizer, LocalOptimizer])
def test_rank_0_warns_if_an_optimizer_has_state_before_it_is_wrapped(make, caplog):
    def program(comm):
        model = net()
        plain = torch.optim.AdamW(model.parameters(), 0.1)
        wrapped = make(plain, model, comm, compressor="topk")
        wrapped.load_state_dict(wrapped.state_dict())
        assert "before it is wrapped" not in caplog.text
        loss_of(model, batch(comm.rank, 0)).backward()
        wrapped.step()
        state = wrapped.state_dict()
        wrapped.close()
        later = torch.optim.AdamW(model.parameters(), 0.1)
        later.load_state_dict({name: state[name] for name in ("state", "param_groups")})
        make(later, model, comm, compressor="topk").close()

    caplog.set_level("WARNING", "sparsecoll.torch.replica.guards")
    simulate(2, program)
    texts = [record.getMessage() for record in caplog.records if "before it is wrapped" in record.getMessage()]
    assert len(texts) == 1 and texts[0].startswith(
        "AdamW has state before it is wrapped. If it comes from a checkpoint,"
    )


def test_an_optimizer_that_begins_with_state_is_wrapped_without_a_warning(caplog):
    for kind in (torch.optim.Adagrad, torch.optim.SGD, torch.optim.AdamW):
        model = net()
        simulate(
            1, lambda comm, m=model, k=kind: DistributedOptimizer(k(m.parameters(), 0.1), m, comm, compressor="qsgd")
        )
    assert not any("before it is wrapped" in record.getMessage() for record in caplog.records)
