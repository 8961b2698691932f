"""Optimizers that go on with a new rank, which was made on a communicator of its own, as docs/reliability.md says."""

import pytest

torch = pytest.importorskip("torch")

import sparsecoll  # noqa: E402
from sparsecoll import simulate  # noqa: E402
from sparsecoll.torch import DiLoCo, DistributedOptimizer, LocalOptimizer, OneBitAdam, SparseSGD  # noqa: E402


def alone():
    return sparsecoll.connect(torch.distributed.HashStore(), 0, 1)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, model.in_features)).square().mean().backward()
        optimizer.step()


def adam(model, comm, old):
    betas = (0.9, 0.99) if old else (0.5, 0.999)  # as OneCycleLR sets them
    return DistributedOptimizer(torch.optim.AdamW(model.parameters(), betas=betas), model, comm, "none")


def adam_of_tensors(model, comm, old):
    inner = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1 if old else 0.2))
    return LocalOptimizer(inner, model, comm, every=1)


def sgd_of_tensors(model, comm, old):
    return SparseSGD(model.parameters(), torch.tensor(0.1 if old else 0.2), comm=comm)


@pytest.mark.parametrize("made", [adam, adam_of_tensors, sgd_of_tensors])
def test_options_in_tuples_and_tensors_are_those_of_rank_0(made):
    def moved(comm):
        torch.manual_seed(comm.rank)
        model = torch.nn.Linear(40, 40)
        optimizer = made(model, alone(), comm.rank == 0)
        given = optimizer.param_groups[0]
        lr = given["lr"]
        optimizer.move(comm)
        assert given["lr"] is lr or not torch.is_tensor(lr)  # a schedule may hold it
        train(model, optimizer, 2)
        return model.weight.detach().tolist(), given.get("betas"), float(given["lr"])

    first, second = simulate(2, moved).results
    assert first == second


def test_buckets_are_those_of_the_new_number_of_ranks():
    """The best ones of a chunked top-k depend on it."""

    def made(comm):
        torch.manual_seed(0)
        model = torch.nn.Linear(2100, 2100)  # 17.6 MB, more than a bucket of two ranks
        return model, DiLoCo(torch.optim.SGD(model.parameters(), 0.1), model, comm, preset="sparseloco", every=1)

    def program(comm):
        model, optimizer = made(comm)
        if comm.rank:
            model, optimizer = made(alone())
        optimizer.move(comm)
        model(torch.ones(1, 2100)).sum().backward()
        optimizer.step()
        return model.weight.detach().numpy().tobytes()

    assert len(set(simulate(2, program).results)) == 1


def test_a_table_that_was_dense_once_is_dense_on_a_new_rank():
    def program(comm):
        torch.manual_seed(0)
        table = torch.nn.Embedding(50, 40, sparse=True)
        optimizer = DistributedOptimizer(torch.optim.SGD(table.parameters(), 0.1), table, alone(), "none")
        if comm.rank == 0:
            table(torch.tensor([1, 2])).sum().backward()
            table.weight.grad = table.weight.grad.to_dense()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.move(comm)
        table(torch.tensor([comm.rank])).sum().backward()
        optimizer.step()
        return table.weight.detach().tolist()

    first, second = simulate(2, program).results
    assert first == second


@pytest.mark.parametrize("wrap", [LocalOptimizer, DistributedOptimizer])
def test_factors_that_a_new_rank_lacks_begin_anew(wrap):
    """ACP-SGD multiplies by the factors of the step before, which must be the same on all ranks."""

    def program(comm):
        torch.manual_seed(comm.rank)
        model = torch.nn.Linear(64, 64)
        options = {"compressor": "acpsgd", "dense_below": 0} | ({"every": 1} if wrap is LocalOptimizer else {})
        optimizer = wrap(torch.optim.SGD(model.parameters(), 0.1), model, alone(), **options)

        train(model, optimizer, 3 if comm.rank == 0 else 0)
        optimizer.move(comm)
        train(model, optimizer, 2)
        return model.weight.detach().numpy().tobytes()

    assert len(set(simulate(2, program).results)) == 1


def test_parameters_that_the_optimizer_lacks_are_those_of_rank_0():
    def program(comm):
        torch.manual_seed(comm.rank)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        model[0].requires_grad_(False)
        optimizer = LocalOptimizer(torch.optim.SGD(model[1].parameters(), 0.1), model, alone(), every=1)
        optimizer.move(comm)
        return model[0].weight.tolist()

    first, second = simulate(2, program).results
    assert first == second


def test_a_new_rank_has_the_scale_of_rank_0():
    def program(comm):
        torch.manual_seed(comm.rank)
        model, scaler = torch.nn.Linear(8, 8), torch.amp.GradScaler("cpu", init_scale=64.0 * 2**comm.rank)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model, alone(), "none", grad_scaler=scaler)
        optimizer.move(comm)
        scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        return model.weight.tolist(), scaler.get_scale()

    first, second = simulate(2, program).results
    assert first == second


def test_divisors_of_one_bit_adam_are_those_of_rank_0():
    """They are formed again rarely, so that ranks that were apart for a while differ for long."""

    def program(comm):
        torch.manual_seed(comm.rank)
        model = torch.nn.Linear(64, 64)
        optimizer = OneBitAdam(model.parameters(), 0.01, warm_up=4, comm=alone())

        train(model, optimizer, 6)
        optimizer.move(comm)
        train(model, optimizer, 2)
        return model.weight.detach().numpy().tobytes()

    assert len(set(simulate(2, program).results)) == 1


def test_fragments_are_those_of_rank_0():
    """They depend on when parameters were added."""

    def program(comm):
        sizes = (60, 50, 100)
        params = [torch.nn.Parameter(torch.zeros(n)) for n in sizes]
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        inner, names = torch.optim.SGD(groups[: 1 + comm.rank], 0.1), [(f"{i}", p) for i, p in enumerate(params)]
        optimizer = LocalOptimizer(inner, names, alone(), every=2, fragments=2)
        if comm.rank == 0:
            optimizer.add_param_group(groups[1])
        optimizer.move(comm)
        for _ in range(4):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        return [p.tolist() for p in params]

    first, second = simulate(2, program).results
    assert first == second
