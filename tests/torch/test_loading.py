"""States that do not fit: loading fails on all ranks, and all go on as they were."""

import copy

import pytest

torch = pytest.importorskip("torch")

from nets import bits, net, train  # noqa: E402

from sparsecoll import CommunicationError, simulate  # noqa: E402
from sparsecoll.torch import DiLoCo, DistributedOptimizer, LocalOptimizer, OneBitAdam, SparseSGD  # noqa: E402
from sparsecoll.torch.compressors import ACPSGD, PowerSGD  # noqa: E402


def wrapping(inner, *arguments, **options):
    return lambda model, comm: DistributedOptimizer(inner(model), model, comm, *arguments, **options)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, 0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 0.01)


def plain(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def halves(model):
    one, other = ([p for p in model.parameters() if (p.ndim == 2) is kind] for kind in (True, False))
    return [torch.optim.AdamW(one, 0.01), torch.optim.SGD(other, 0.1, 0.9)]


GLOBAL = {  # whose state is the same on all ranks
    "SGD": wrapping(sgd, "none"),
    "AdamW": wrapping(adamw),
    "SparseSGD": lambda model, comm: SparseSGD(model.parameters(), 0.1, 0.9, algo="dense", comm=comm),
    "PowerSGD": wrapping(plain, PowerSGD(2), dense_below=10),
    "ACPSGD": wrapping(plain, ACPSGD(2), dense_below=10),
    "OneBitAdam": lambda model, comm: OneBitAdam(model.parameters(), 0.01, warm_up=2, every=1, comm=comm),
}
OWN = {
    "warm-up": lambda model, comm: OneBitAdam(model.parameters(), 0.01, warm_up=20, comm=comm),
    "LocalOptimizer": lambda model, comm: LocalOptimizer(adamw(model), model, comm, every=2, outer_momentum=0.9),
    "several": lambda model, comm: DiLoCo(halves(model), model, comm, every=2),
}


def going_on(make, change=None, error=Exception):
    """Return the parameters' bits after a run in which rank 1 tries to load what `change` makes of its state."""

    def program(comm):
        model = net()
        optimizer = make(model, comm)
        train(comm, model, optimizer, range(4))
        state = copy.deepcopy(optimizer.state_dict())
        train(comm, model, optimizer, range(4, 6))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # goes well: ranks have agreed on it once
        if change is not None:
            with pytest.raises(error, match=r"state_dict|load the same one|parameter group"):
                optimizer.load_state_dict(change(state) if comm.rank == 1 else state)
        train(comm, model, optimizer, range(6, 9))
        getattr(optimizer, "synchronize", lambda: None)()
        return bits(model)

    one, other = simulate(2, program).results
    assert one == other
    return one


def lacks_a_parameter(state):
    state["param_groups"][0]["params"].pop()
    return state


@pytest.mark.parametrize("make", [*GLOBAL.values(), *OWN.values()], ids=[*GLOBAL, *OWN])
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(make):
    assert going_on(make, lacks_a_parameter) == going_on(make)


@pytest.mark.parametrize("make", [*GLOBAL.values(), OWN["LocalOptimizer"]], ids=[*GLOBAL, "outer"])
def test_states_of_two_runs_are_refused_on_all_ranks(make):
    def other_run(comm):
        model = net()
        optimizer = make(model, comm)
        train(comm, model, optimizer, range(50, 54))
        return copy.deepcopy(optimizer.state_dict())

    others = simulate(2, other_run).results
    assert going_on(make, lambda _: others[1], CommunicationError) == going_on(make)


@pytest.mark.parametrize("make", [*GLOBAL.values()], ids=[*GLOBAL])
def test_ranks_that_have_loaded_different_models_are_told_in_the_next_step(make):
    """As where rank 0 alone has loaded a file, and the optimizer is expected to broadcast it."""

    def program(comm):
        model = net()
        optimizer = make(model, comm)
        train(comm, model, optimizer, range(4))
        saved = copy.deepcopy(optimizer.state_dict())
        if comm.rank == 0:
            model.load_state_dict(net(seed=1).state_dict())
        optimizer.load_state_dict(saved)
        with pytest.raises(CommunicationError, match=r"got others than rank 0's in '\d\.\w+' on rank 1"):
            train(comm, model, optimizer, range(4, 6))

    simulate(2, program)


def test_a_state_that_is_saved_as_a_step_ends_counts_it_once():
    """As a handler of a signal may do it."""

    def program(comm):
        model = net()
        optimizer = GLOBAL["SGD"](model, comm)
        after = optimizer._engine.after_step
        optimizer._engine.after_step = lambda: (optimizer.state_dict(), after())
        train(comm, model, optimizer, range(3))
        return optimizer.state_dict()["sparsecoll"]["step"]

    assert simulate(2, program).results == [3, 3]


def test_a_state_from_which_the_names_of_a_layer_were_deleted_is_loaded():
    """As docs/torch.md says of replaced layers: it may have been the only one."""

    def program(comm):
        model = net()
        optimizer = DistributedOptimizer(plain(model), model, comm, "topk", dense_below=0)
        train(comm, model, optimizer, range(2))
        state = copy.deepcopy(optimizer.state_dict())
        for entries in state["sparsecoll"]["tensors"].values():
            entries.clear()
        optimizer.load_state_dict(state)

    simulate(2, program)
