"""SparseSGD is torch.optim.SGD on the mean gradient where nothing is compressed, and loses nothing where something is.

Every test compares with one process that has the global batch, or with what the paper's residual does.
"""

from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nets import EXACT, P, batch, bits, close, compared, loss_of, mean_loss, net, parameters, residuals, train  # noqa: E402

import sparsecoll  # noqa: E402
from sparsecoll import Allgather, SparseVector, select, simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, SparseSGD  # noqa: E402
from sparsecoll.torch.compressors import TopKCompressor  # noqa: E402

SETTINGS = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.05},
    {"maximize": True, "momentum": 0.5, "weight_decay": 0.05},
]
SCHEDULES = {
    "decay": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7),
    "warm-up from 0": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 4),
    "restarts through 0": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: (1, 0.4, 0)[step % 3]),
}
CASES = [(EXACT[0], settings, "restarts through 0") for settings in SETTINGS]
CASES += [(options, SETTINGS[3], schedule) for options in EXACT for schedule in SCHEDULES]


@pytest.mark.parametrize(("options", "settings", "schedule"), CASES, ids=str)
def test_uncompressed_steps_are_those_of_torch_sgd(options, settings, schedule):
    """A learning rate that changes, two parameter groups."""

    def run(make, ranks, comm):
        model = net(seed=0 if comm is None else comm.rank)  # only rank 0's parameters count
        groups = [{"params": model[0].parameters(), "lr": 0.3}, {"params": [*model[2:].parameters()]}]
        optimizer = make(groups, 0.2, **settings)
        scheduler = SCHEDULES[schedule](optimizer)
        for step in range(7):
            optimizer.zero_grad()
            mean_loss(model, ranks, step).backward()
            optimizer.step()
            scheduler.step()
        return parameters(model)

    compared(run, **options)


@pytest.mark.parametrize("algo", sparsecoll.ALGORITHMS)
def test_replicas_stay_the_same_bits_and_the_loss_falls(algo):
    def program(comm):
        model = net(seed=comm.rank, dtype=torch.float32)
        optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm, algo=algo, density=0.05, verify=10)
        data = batch(comm.rank, 0, torch.float32)
        first = loss_of(model, data).item()
        for _ in range(80):
            optimizer.zero_grad()
            loss_of(model, data).backward()
            optimizer.step()
        return bits(model), first, loss_of(model, data).item()

    results = simulate(4, program).results
    assert len({b for b, _, _ in results}) == 1
    share = 0.9 if algo == "cltk" else 0.6  # ranks with other data have their largest entries elsewhere
    assert np.mean([after for _, _, after in results]) < share * np.mean([before for _, before, _ in results])


@pytest.mark.parametrize("momentum", [0, 0.5])
@pytest.mark.parametrize("algo", sparsecoll.ALGORITHMS)
def test_gradient_mass_is_conserved(algo, momentum):
    """P * what moved the parameters + residuals of all ranks = all gradients, at the learning rates of their steps.

    With momentum: P * what went into the velocity. Layers take turns; values are rounded on the wire.
    """

    def program(comm):
        model = net()
        heads = [torch.nn.Linear(64, 3).double() for _ in range(2)]
        params = [*model[:4].parameters(), *(p for head in heads for p in head.parameters())]
        optimizer = SparseSGD(params, 0.1, momentum, comm=comm, algo=algo, density=0.03, value_dtype="float16")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1, 0.1, 0.5, 0)[step % 4])
        start = [p.detach().clone() for p in params]
        given, into = ([torch.zeros_like(p) for p in params] for _ in range(2))
        for step in range(11):
            optimizer.zero_grad()
            x, y = batch(comm.rank, step)
            torch.nn.functional.cross_entropy(heads[step % 2](model[:4](x)), y).backward()
            before = [optimizer.state.get(p, {}).get("momentum_buffer", torch.zeros_like(p)).clone() for p in params]
            for total, p in zip(given, params, strict=True):
                if p.grad is not None:
                    total.add_(p.grad, alpha=1 if momentum else optimizer.param_groups[0]["lr"])
            optimizer.step()
            if momentum:
                for total, p, old in zip(into, params, before, strict=True):
                    now = optimizer.state[p].get("momentum_buffer", old)
                    total += 0 if torch.equal(now, old) else now - momentum * old
            schedule.step()
        moved = into if momentum else [a - b.detach() for a, b in zip(start, params, strict=True)]
        return given, list(residuals(optimizer).values()), moved

    results = simulate(P, program).results
    for n, moved in enumerate(results[0][2]):
        expected, kept = sum(r[0][n] for r in results), sum(r[1][n] for r in results)
        torch.testing.assert_close(P * moved + kept, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_restarts_do_not_blow_up_what_waits(momentum):
    """Cosine annealing ends near 0, at 1e-18 or so, and begins again."""

    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, momentum, comm=comm, density=0.03, value_dtype="float16")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1, 0.5, 0.1, 1e-5, 1e-17)[step % 5])
        first = loss_of(model, batch(comm.rank, 0)).item()
        for _ in range(60):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, 0)).backward()
            optimizer.step()
            schedule.step()
        return loss_of(model, batch(comm.rank, 0)).item() / first

    assert np.mean(simulate(P, program).results) < 1


def test_momentum_that_is_switched_on_and_off_keeps_what_waits():
    def program(comm):
        p = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        optimizer = SparseSGD([p], 0.1, comm=comm, algo="allgather", density=0.25)
        p.grad = torch.tensor([4.0, 3, 2, 1], dtype=torch.float64)
        optimizer.step()  # p[0] -= 0.1 * 4
        p.grad = None
        optimizer.param_groups[0]["momentum"] = 1e-12
        optimizer.step()  # p[1] -= 0.1 * 3
        optimizer.param_groups[0] |= {"momentum": 0, "lr": 0.2}
        optimizer.step()  # p[2] -= 0.2 * 2
        return p.detach(), residuals(optimizer)["0"]

    for p, left in simulate(1, program).results:
        close([p, left], [torch.tensor([-0.4, -0.3, -0.4, 0]).double(), torch.tensor([0, 0, 0, 0.2]).double()], 1e-6)


def test_one_rank_without_mpirun():
    model = net()
    optimizer = SparseSGD(model.parameters(), 0.1, algo="oktopk", density=0.05)
    before = bits(model)
    loss_of(model, batch(0, 0)).backward()
    optimizer.step()
    assert bits(model) != before
    kept = sum(int((t != 0).sum()) for t in residuals(optimizer).values())
    assert 0 < kept < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_autograd_notices_a_step_before_back_propagation(momentum):
    """As with torch.optim.SGD, weights that back-propagation still needs must not change unnoticed."""

    def program(comm):
        model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5))
        optimizer = SparseSGD(model.parameters(), 0.1, momentum, comm=comm, algo="allgather", density=0.2)
        first, second = (model(torch.ones(1, 5)).sum() for _ in range(2))
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()

    simulate(2, program)


@dataclass
class FirstHalf(select.Selector):
    """Selects a part of the vector, whose values stay in the memory of the vector."""

    name = "first half"

    def select(self, x, k):
        half = np.arange(x.length // 2, dtype=np.uint32)
        return SparseVector(half, x.to_dense()[: half.size], x.length)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("algo", [Allgather(selector=FirstHalf()), "auto"], ids=["views", "auto"])
def test_sums_do_not_change_with_the_residual(algo, ranks):
    """On one rank, or with entries in the memory of the residual, from which what was sent is subtracted."""

    def program(comm):
        model, other = net(), net()
        own = SparseSGD(model.parameters(), 0.5, comm=comm, algo=algo, density=0.5)
        inner, options = torch.optim.SGD(other.parameters(), 0.5), {"bucket_bytes": None, "dense_below": 0}
        # SparseSGD lays parameters out as they are registered
        named = list(other.named_parameters())
        wrapped = DistributedOptimizer(inner, named, comm, TopKCompressor(0.5, algo), overlap=False, **options)
        wrapped._engine.buckets.order = [name for name, _ in named]
        train(comm, model, own, range(3))
        train(comm, other, wrapped, range(3))
        close(parameters(model), parameters(other))

    simulate(ranks, program)
