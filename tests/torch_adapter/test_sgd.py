"""SparseSGD is torch.optim.SGD where nothing is compressed, and loses nothing where something is."""

import copy
import io

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sparsecoll  # noqa: E402
from sparsecoll import simulate  # noqa: E402
from sparsecoll.torch import SparseSGD  # noqa: E402


def net(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3)).to(dtype)


def batch(rank, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 12, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, 3, (16,), generator=generator)


def loss_of(model, data):
    return torch.nn.functional.cross_entropy(model(data[0]), data[1])


def bits(model):
    return b"".join(p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters())


SETTINGS = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.05},
    {"maximize": True},
]


@pytest.mark.parametrize("algo,density", [("dense", 0.01), ("allgather", 1.0), ("oktopk", 1.0)])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_uncompressed_steps_are_those_of_torch_sgd(algo, density, settings):
    """Three ranks, a learning rate that changes, two parameter groups: as SGD on the mean loss."""
    P, steps = 3, 6

    def groups(model):
        return [{"params": model[0].parameters(), "lr": 0.3}, {"params": model[2].parameters()}]

    def run(model, optimizer, losses):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        for step in range(steps):
            optimizer.zero_grad()
            losses(model, step).backward()
            optimizer.step()
            schedule.step()
        return [p.detach().clone() for p in model.parameters()]

    plain = net()
    expected = run(
        plain,
        torch.optim.SGD(groups(plain), lr=0.2, **settings),
        lambda m, s: sum(loss_of(m, batch(r, s)) for r in range(P)) / P,
    )

    def program(comm):
        model = net(seed=comm.rank)  # only rank 0's parameters count
        optimizer = SparseSGD(groups(model), 0.2, comm, algo, density, **settings)
        return run(model, optimizer, lambda m, s: loss_of(m, batch(comm.rank, s)))

    for parameters in simulate(P, program).results:
        for mine, theirs in zip(parameters, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algo", sparsecoll.ALGORITHMS)
def test_replicas_stay_the_same_bits_and_the_loss_falls(algo):
    def program(comm):
        model = net(seed=comm.rank, dtype=torch.float32)
        optimizer = SparseSGD(model.parameters(), 0.1, comm, algo, 0.05, momentum=0.9)
        data = batch(comm.rank, 0, torch.float32)
        first = loss_of(model, data).item()
        for _ in range(150):
            optimizer.zero_grad()
            loss_of(model, data).backward()
            optimizer.step()
        return bits(model), first, loss_of(model, data).item()

    results = simulate(4, program).results
    assert len({b for b, _, _ in results}) == 1
    assert np.mean([after for _, _, after in results]) < 0.5 * np.mean([before for _, before, _ in results])


@pytest.mark.parametrize("value_dtype", [None, "float16"])
@pytest.mark.parametrize("algo", sparsecoll.ALGORITHMS)
def test_gradient_mass_is_conserved(algo, value_dtype):
    """Without momentum: P * (w0 - w) + residuals of all ranks = lr * all gradients of all ranks."""
    P, lr = 4, 0.1

    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), lr, comm, algo, 0.03, value_dtype=value_dtype)
        start = [p.detach().clone() for p in model.parameters()]
        given = [torch.zeros_like(p) for p in model.parameters()]
        for step in range(10):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            for total, p in zip(given, model.parameters(), strict=True):
                total.add_(p.grad, alpha=lr)
            optimizer.step()
        moved = [a - b.detach() for a, b in zip(start, model.parameters(), strict=True)]
        kept = [optimizer.state[p]["residual"].clone() for p in model.parameters()]
        return given, kept, moved

    results = simulate(P, program).results
    for number in range(4):
        given = sum(r[0][number] for r in results)
        kept = sum(r[1][number] for r in results)
        torch.testing.assert_close(P * results[0][2][number] + kept, given, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(dtype):
    def program(comm):
        def fresh():
            model = net(dtype=dtype)
            options = {"density": 0.3, "momentum": 0.9, "algo": sparsecoll.OkTopk(tau=3, tau_prime=4)}
            return model, SparseSGD(model.parameters(), 0.1, comm, **options)

        def train(model, optimizer, steps):
            for step in steps:
                optimizer.zero_grad()
                loss_of(model, batch(comm.rank, step, dtype)).backward()
                optimizer.step()

        whole, optimizer = fresh()
        train(whole, optimizer, range(9))
        model, optimizer = fresh()
        train(model, optimizer, range(5))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model, optimizer = fresh()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        train(model, optimizer, range(5, 9))
        return bits(model) == bits(whole)

    assert all(simulate(3, program).results)


def test_state_of_another_rank_is_refused():
    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, comm)
        state = optimizer.state_dict()
        state["sparsecoll"]["rank"] = 7
        with pytest.raises(sparsecoll.CommunicationError, match="expected the one of rank"):
            optimizer.load_state_dict(state)

    simulate(2, program)


def test_closure_mixed_dtypes_unused_and_added_parameters():
    def program(comm):
        used = torch.nn.Parameter(torch.full((5, 4), 1.0 + comm.rank).t())  # not contiguous
        half = torch.nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
        double = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        unused = torch.nn.Parameter(torch.ones(4))
        optimizer = SparseSGD([used, half, double, unused], 0.5, comm, "allgather", 1.0)

        def closure():
            optimizer.zero_grad()
            loss = (used**2).sum() + (half.float() ** 2).sum() + (comm.rank * double**2).sum()
            loss.backward()
            return loss

        value = optimizer.step(closure)
        late = torch.nn.Parameter(torch.full((2,), float(comm.rank)))
        optimizer.add_param_group({"params": [late], "lr": 0.25})
        late.grad = torch.ones(2)
        used.grad = half.grad = double.grad = None
        optimizer.step()
        return [t.detach().clone() for t in (used, half, double, unused, late)], float(value.detach())

    for tensors, value in simulate(2, program).results:
        used, half, double, unused, late = tensors
        assert value > 0
        assert used.abs().max() == 0 and half.abs().max() == 0  # x - 0.5 * 2x
        torch.testing.assert_close(double, torch.full((3,), 0.5, dtype=torch.float64))  # mean of ranks 0 and 1
        assert (unused == 1).all() and (late == -0.25).all()


def test_sparse_embedding_gradients():
    def program(comm):
        embedding = torch.nn.Embedding(10, 3, sparse=True)
        torch.nn.init.ones_(embedding.weight)
        optimizer = SparseSGD(embedding.parameters(), 1.0, comm, "allgather", 1.0)
        embedding(torch.tensor([comm.rank, comm.rank, 5])).sum().backward()
        optimizer.step()
        return embedding.weight.detach().clone()

    for weight in simulate(2, program).results:
        expected = torch.ones(10, 3)
        expected[0] = expected[1] = expected[5] = 0
        torch.testing.assert_close(weight, expected)


def test_one_rank_without_mpirun():
    model = net()
    optimizer = SparseSGD(model.parameters(), 0.1, density=0.05)
    before = bits(model)
    loss_of(model, batch(0, 0)).backward()
    optimizer.step()
    assert bits(model) != before
    kept = sum(int((optimizer.state[p]["residual"] != 0).sum()) for p in model.parameters())
    assert 0 < kept < sum(p.numel() for p in model.parameters())


def test_nan_gradient_on_one_rank_raises_on_all():
    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, comm)
        loss_of(model, batch(comm.rank, 0)).backward()
        if comm.rank == 1:
            model[0].weight.grad[0, 0] = float("nan")
        with pytest.raises(ValueError, match="rank 1: x: expected values that can be ordered"):
            optimizer.step()

    simulate(3, program)


@pytest.mark.parametrize(
    "options,name",
    [
        ({"lr": -1}, "lr"),
        ({"density": 0}, "density"),
        ({"nesterov": True}, "nesterov"),
        ({"algo": "x"}, "algo"),
    ],
)
def test_bad_options_are_refused(options, name):
    with pytest.raises(ValueError, match=name):
        SparseSGD(net().parameters(), **{"lr": 0.1, **options})


def test_parameters_elsewhere_than_on_the_cpu_are_refused():
    with pytest.raises(TypeError, match="expected tensors on the CPU or a CUDA device"):
        SparseSGD([torch.nn.Parameter(torch.empty(3, device="meta"))], 0.1)


def test_torch_tensors_go_through_the_front_door():
    x = torch.tensor([0.0, 3.0, -4.0, 1.0])
    y = simulate(2, lambda comm: sparsecoll.allreduce(comm, x, "oktopk", k=2)).results[0]
    np.testing.assert_array_equal(y.to_dense(), np.array([0, 6, -8, 0], np.float32))
    with pytest.raises(TypeError, match="bfloat16"):
        simulate(1, lambda comm: sparsecoll.allreduce(comm, x.bfloat16(), "oktopk", k=2))
    z = simulate(1, lambda comm: sparsecoll.allreduce(comm, x.to_sparse(), "oktopk", k=2)).results[0]
    assert z.layout == torch.sparse_coo and z.to_dense().tolist() == [0, 3, -4, 0]
