"""A layer of the model is replaced: its parameters leave, those of the others keep their residuals, new ones come."""

import copy
import gc
import itertools
import weakref

import pytest

torch = pytest.importorskip("torch")

from nets import batch, bits, close, loss_of, mean_loss, net, parameters, residuals, train  # noqa: E402

from sparsecoll import CommunicationError, simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer, SparseSGD  # noqa: E402
from sparsecoll.torch.compressors import TopKCompressor  # noqa: E402

WAYS = {
    "overlap": {"bucket_bytes": 6000},
    "local": {"overlap": False},
    "views": {"gradient_as_bucket_view": True},
    "LocalOptimizer": {"every": 1, "outer_momentum": 0.5},
    "SparseSGD": {},
}
HOWS = ("wrapper", "wrapped", "in place", "added first", "named")


def make(way, comm, model, density=0.1):
    options, params = WAYS[way], model.parameters()
    if way == "SparseSGD":
        return SparseSGD(params, 0.1, 0.9, comm=comm, algo="allgather", density=density, model=model)
    wrapper = LocalOptimizer if way == "LocalOptimizer" else DistributedOptimizer
    compressor = TopKCompressor(density, algo="allgather")
    return wrapper(torch.optim.SGD(params, 0.1, 0.9), model, comm, compressor, dense_below=0, **options)


def remove(optimizer, params):
    inner, params = getattr(optimizer, "optimizer", optimizer), list(params)
    ids = set(map(id, params))
    for group in inner.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in ids]
    for p in params:
        inner.state.pop(p, None)


def replace(model, optimizer, how="wrapper", seed=5):
    """A new last layer, as users put it there; returns the parameters of the old one."""
    inner, old = getattr(optimizer, "optimizer", optimizer), list(model[4].parameters())
    torch.manual_seed(seed)
    model[4] = torch.nn.Linear(64, 3).double()
    if how != "added first":
        remove(optimizer, old)
    if how == "in place":
        inner.param_groups[0]["params"] = list(model.parameters())
    elif how == "named" and inner is not optimizer:
        optimizer.add_param_group({"params": model[4].parameters()}, model.named_parameters())
    else:
        (inner if how == "wrapped" else optimizer).add_param_group({"params": model[4].parameters()})
    if how == "added first":
        remove(optimizer, old)
    return old


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("way", WAYS)
def test_residuals_of_other_layers_stay_and_a_resumed_run_is_the_same(way, how):
    """Whatever has the same name as before has none of the old layer's state."""

    def program(comm):
        model = net()
        optimizer = make(way, comm, model)
        train(comm, model, optimizer, range(3))
        before = {name: t.clone() for name, t in residuals(optimizer).items()}
        replace(model, optimizer, how)
        assert all(torch.equal(t, before[name]) for name, t in residuals(optimizer).items() if name[0] != "4")
        train(comm, model, optimizer, range(3, 6))
        state = copy.deepcopy(optimizer.state_dict())
        assert residuals(optimizer).keys() == dict(model.named_parameters()).keys()
        fresh = net(seed=9)
        fresh.load_state_dict(model.state_dict())
        again = make(way, comm, fresh)
        if how != "in place":
            remove(again, fresh[4].parameters())
            again.add_param_group({"params": fresh[4].parameters()})
        again.load_state_dict(state)
        train(comm, model, optimizer, range(6, 9))
        train(comm, fresh, again, range(6, 9))
        return bits(model), bits(fresh)

    results = simulate(2, program).results
    assert results[0] == results[1] and results[0][0] == results[0][1]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "LocalOptimizer"])
def test_without_compression_it_is_the_optimizer_on_the_mean_gradient(way, how):
    def run(make, ranks):
        model = net()
        optimizer = make(model)
        for step in range(6):
            if step == 3:
                replace(model, optimizer, "wrapped" if how == "named" and len(ranks) > 1 else how)
            optimizer.zero_grad()
            mean_loss(model, ranks, step).backward()
            optimizer.step()
        return parameters(model)

    expected = run(lambda model: torch.optim.SGD(model.parameters(), 0.1, 0.9), range(2))
    for result in simulate(2, lambda comm: run(lambda m: make(way, comm, m, 1.0), [comm.rank])).results:
        close(result, expected)


@pytest.mark.parametrize("options", [{}, {"overlap": False}], ids=str)
@pytest.mark.parametrize("how", ["wrapped", "wrapper", "gone"])
@pytest.mark.parametrize("taken", [True, False])
def test_no_gradient_of_other_layers_is_lost(how, options, taken):
    """The change comes between back-propagation and step, which is taken or skipped."""

    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 1.0)
        compressor = TopKCompressor(0.05, algo="allgather")
        optimizer = DistributedOptimizer(inner, model, comm, compressor, dense_below=0, **options)
        start, given = model[0].weight.detach().clone(), torch.zeros(24, 12, dtype=torch.float64)
        for step in range(6):
            optimizer.zero_grad()
            (mine,) = torch.autograd.grad(loss_of(model, batch(comm.rank, step)), [model[0].weight])
            loss_of(model, batch(comm.rank, step)).backward()
            if step == 3:
                if how == "gone":
                    remove(optimizer, model[4].parameters())
                    model[4] = torch.nn.Identity()
                else:
                    replace(model, optimizer, how)
            if step != 3 or taken:
                given += mine
                optimizer.step()
        optimizer.zero_grad()
        return given, residuals(optimizer)["0.weight"], start - model[0].weight.detach(), residuals(optimizer).keys()

    results = simulate(2, program).results
    assert all(("4.weight" in names) == (how != "gone") for *_, names in results)
    waiting = sum(residual for _, residual, _, _ in results)
    torch.testing.assert_close(2 * results[0][2] + waiting, sum(given for given, *_ in results))


def test_what_has_left_is_freed_and_what_is_frozen_stays_until_it_leaves_the_model():
    def program(comm):
        model = net()
        optimizer = make("overlap", comm, model)
        train(comm, model, optimizer, range(3))
        remove(optimizer, model[2].parameters())
        waiting = residuals(optimizer)["2.weight"]
        train(comm, model, optimizer, range(3, 4))
        assert "2.weight" in residuals(optimizer) and waiting.any()
        old = weakref.ref(model[2].weight)
        model[2] = torch.nn.Linear(24, 64).double().requires_grad_(False)  # the groups do not change any more
        train(comm, model, optimizer, range(4, 6))
        gc.collect()
        assert old() is None
        return set(residuals(optimizer)), optimizer.state_dict()["sparsecoll"]["order"]

    for names, order in simulate(2, program).results:
        assert names == set(order) == {"0.weight", "0.bias", "4.weight", "4.bias"}


def test_without_the_model_nothing_leaves():
    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(
            inner, list(model.named_parameters()), comm, TopKCompressor(0.1), dense_below=0
        )
        train(comm, model, optimizer, range(2))
        replace(model, optimizer)
        train(comm, model, optimizer, range(2, 4))
        return set(residuals(optimizer)) - {name for name, _ in model.named_parameters()}

    assert simulate(2, program).results == [{"group1.0", "group1.1"}] * 2


@pytest.mark.parametrize("how", ["wrapped", "gone"])
@pytest.mark.parametrize("way", WAYS)
def test_changes_that_differ_between_ranks_raise_on_all_with_the_cure(way, how):
    """Nothing else happens: when the other rank has made the change, too, training goes on."""

    def change(model, optimizer):
        if how == "wrapped":
            replace(model, optimizer, "in place" if way == "SparseSGD" else how)
        else:
            remove(optimizer, model[4].parameters())
            model[4] = torch.nn.Identity()

    def program(comm):
        model = net()
        optimizer = make(way, comm, model)
        train(comm, model, optimizer, range(3))
        before = {name: t.clone() for name, t in residuals(optimizer).items()}
        if comm.rank == 1:
            change(model, optimizer)
        with pytest.raises(CommunicationError) as raised:
            train(comm, model, optimizer, [3])
        optimizer.zero_grad()
        if comm.rank != 1:
            change(model, optimizer)
        if way != "LocalOptimizer":  # where ranks have stepped, and the mean is due
            assert all(torch.equal(t, before[name]) for name, t in residuals(optimizer).items() if name[0] != "4")
        train(comm, model, optimizer, range(4, 7))
        return str(raised.value), bits(model)

    results = simulate(2, program).results
    assert len(set(results)) == 1
    cure = "parameters removed (change the model and the optimizer on all ranks, between the same steps)"
    own = "change of parameters, to be made on all ranks between the same steps"  # in the name of the call
    assert (own if way == "LocalOptimizer" else cure) in results[0][0]


def test_a_table_with_sparse_gradients_makes_room_for_a_dense_one_of_its_name():
    def program(comm):
        model = torch.nn.Sequential(torch.nn.Embedding(50, 4, sparse=True), torch.nn.Linear(4, 2))
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model, comm, TopKCompressor(0.5, row_density=0.1), dense_below=0)

        def steps(kind):
            for step in range(3):
                optimizer.zero_grad()
                model(torch.tensor([comm.rank, step, 7])).square().sum().backward()
                optimizer.step()
            assert model[0].weight.grad.is_sparse == kind

        steps(True)
        for sparse in (False, True):
            remove(optimizer, [model[0].weight])
            model[0] = torch.nn.Embedding(50, 4, sparse=sparse)
            optimizer.add_param_group({"params": model[0].parameters()})
            steps(sparse)
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1


@pytest.mark.parametrize("way", [way for way in WAYS if way != "LocalOptimizer"])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_frozen_parameter_stays_whatever_zero_grad_leaves(way, to_none):
    """What waits to be sent does not move it, as no gradient does; unfrozen, it takes its residual up again."""

    def program(comm):
        model = net()
        optimizer = make(way, comm, model)
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
        seen = []
        for step in range(6):
            model[0].requires_grad_(step not in (2, 3))
            seen.append(model[0].weight.detach().clone())
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
        return torch.stack([*seen, model[0].weight.detach()])

    results = simulate(2, program).results
    assert torch.equal(*results)
    assert [bool(torch.equal(a, b)) for a, b in itertools.pairwise(results[0])] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
