"""SparseSGD: what is the same on all ranks, and options that must be."""

import copy
import logging
from functools import partial

import pytest
import torch
from nets import P, batch, bits, loss_of, net, residuals, train

from sparsecoll import CommunicationError, simulate
from sparsecoll.torch import LocalOptimizer, SparseSGD
from sparsecoll.transport import LocalTransport


@pytest.mark.parametrize("given", ["parameters", "model"])
def test_buffers_are_rank_0s(given):
    def program(comm):
        torch.manual_seed(comm.rank)
        model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)).double()
        model[1].running_mean.fill_(comm.rank)
        model[0].requires_grad_(False)
        params, known = (model.parameters(), None) if given == "parameters" else ([*model[1:].parameters()], model)
        optimizer = SparseSGD(params, 0.1, comm=comm, model=known, verify=1)
        first = float(model[1].running_mean[0])
        train(comm, model, optimizer, range(3))
        return first, bits(model), model[1].running_mean.tolist(), int(model[1].num_batches_tracked)

    results = simulate(P, program).results
    assert {first for first, *_ in results} == {0.0} and len({str(r) for r in results}) == 1
    assert results[0][3] == 3


@pytest.mark.parametrize("inside", [False, True])
def test_verify_names_what_differs(inside):
    """Also inside a LocalOptimizer of another communicator, as of nodes."""

    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, comm=comm, verify=2)
        if inside:
            optimizer = LocalOptimizer(optimizer, model, LocalTransport(), every=10)
        train(comm, model, optimizer, range(1))
        with torch.no_grad():
            model[2].bias += comm.rank == 1
        with pytest.raises(CommunicationError, match=r"after step 2, got others than rank 0's in '2.bias' on rank 1"):
            train(comm, model, optimizer, range(1, 2))

    simulate(P, program)


def test_learning_rates_that_differ_are_an_error_on_all_ranks():
    """ReduceLROnPlateau by each rank's own loss, say."""

    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm)
        train(comm, model, optimizer, range(2))
        before = bits(model)
        optimizer.param_groups[0]["lr"] = 0.01 if comm.rank == 1 else 0.1
        with pytest.raises(CommunicationError, match=r"param_groups.*'lr': 0.01.* on rank 1"):
            train(comm, model, optimizer, range(2, 3))
        assert bits(model) == before
        optimizer.param_groups[0]["lr"] = 0.1
        train(comm, model, optimizer, range(2, 3))
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1


def test_models_and_options_that_differ_are_an_error_on_all_ranks():
    def program(comm):
        with pytest.raises(CommunicationError, match=r"parameter 0: .*\(24, 12\).* on rank 0"):
            SparseSGD(net()[0].parameters() if comm.rank == 0 else net()[2].parameters(), comm=comm)
        with pytest.raises(CommunicationError, match="momentum"):
            SparseSGD(net().parameters(), 0.1, 0.9 * comm.rank, comm=comm)

    simulate(2, program)


BAD = [
    ({"lr": -1}, ValueError, r"lr: expected in \[0, inf\], got -1"),
    ({"lr": "0.1"}, TypeError, "lr: expected a number"),
    ({"momentum": True}, TypeError, "momentum: expected a number"),
    ({"weight_decay": float("nan")}, ValueError, "weight_decay"),
    ({"nesterov": True}, ValueError, "nesterov=True needs momentum > 0"),
    ({"nesterov": 1, "momentum": 0.9}, TypeError, "nesterov: expected True or False"),
    ({"density": 0}, ValueError, "density: expected in"),
    ({"density": "1%"}, TypeError, "density: expected a number"),
    ({"algo": "x"}, ValueError, "algo: expected one of"),
    ({"format": "x"}, ValueError, "format"),
    ({"value_dtype": "int8"}, ValueError, "value_dtype: expected one of"),
    ({"model": "net"}, TypeError, "model: expected a torch.nn.Module"),
    ({"verify": -1}, ValueError, "verify: expected at least 0"),
    ({"verify": 1.5}, TypeError, "verify: expected an integer"),
    ({"timeout": 0}, ValueError, "timeout: expected seconds above 0"),
    ({"timeout": "5"}, TypeError, "timeout: expected seconds"),
    ({"params": []}, ValueError, "empty parameter list"),
    ({"params": [1]}, TypeError, "can only optimize Tensors"),
    ({"params": [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": "x"}]}, TypeError, "lr: expected a number"),
]


@pytest.mark.parametrize(("options", "kind", "text"), BAD, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_a_bad_argument_on_one_rank_is_refused_on_all(options, kind, text):
    def program(comm):
        arguments = {"params": net().parameters(), "comm": comm, **(options if comm.rank == 1 else {})}
        with pytest.raises(kind, match=f"rank 1: .*{text}"):
            SparseSGD(**arguments)
        model = net()
        train(comm, model, SparseSGD(model.parameters(), comm=comm), range(1))

    simulate(2, program)


def test_arguments_that_are_accepted():
    for options in ({"verify": True}, {"verify": False}, {"lr": torch.tensor(0.1)}):
        SparseSGD(net().parameters(), **options)
    SparseSGD(net().named_parameters(), 0.1)
    with pytest.raises(TypeError, match="got a communicator: pass it by name, comm="):
        simulate(1, lambda comm: SparseSGD(net().parameters(), 0.1, comm))
    parallel = torch.nn.parallel.DistributedDataParallel
    with pytest.raises(TypeError, match="rank 0: params: expected a plain model"):
        SparseSGD(net().parameters(), model=parallel.__new__(parallel))
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copy.deepcopy(SparseSGD(net().parameters()))


def test_ranks_that_train_on_the_same_samples_are_warned(caplog):
    def program(comm, same):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, comm=comm)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(0 if same else comm.rank, step)).backward()
            optimizer.step()

    with caplog.at_level(logging.WARNING, "sparsecoll"):
        simulate(P, partial(program, same=False))
        assert not caplog.records
        simulate(P, partial(program, same=True))
    assert len(caplog.records) == 1 and "train on the same samples" in caplog.text


def test_another_communicator_keeps_residuals_and_levels_the_rest():
    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm, algo="oktopk", density=0.05)
        train(comm, model, optimizer, range(3))
        before = residuals(optimizer)
        if comm.rank == 1:  # one rank has taken a step that the others have not
            optimizer._replica.context.step += 1
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1)
                    optimizer.state[p]["momentum_buffer"].add_(1)
        optimizer.move(comm)
        kept = all(torch.equal(before[name], t) for name, t in residuals(optimizer).items())
        train(comm, model, optimizer, range(3, 6))
        return kept, bits(model)

    results = simulate(P, program).results
    assert all(kept for kept, _ in results) and len({after for _, after in results}) == 1
