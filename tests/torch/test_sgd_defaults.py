"""The default of SparseSGD, and of DistributedOptimizer with torch.optim.SGD: SGD's own values, compressed."""

import logging
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nets import batch, bits, loss_of, net  # noqa: E402
from torch import nn  # noqa: E402

from sparsecoll import simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer, SparseSGD, WarmUp  # noqa: E402
from sparsecoll.torch.compressors import TopKCompressor, sgdtopk  # noqa: E402
from sparsecoll.torch.compressors.topk import shorter  # noqa: E402

DENSITY, STEPS = 0.1, 8
SETTINGS = {
    "momentum": {"momentum": 0.9},
    "weight decay": {"momentum": 0.95, "weight_decay": 0.05, "nesterov": True},
    "dampening": {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.05},
    "little momentum": {"momentum": 0.5, "maximize": True},
    "none": {"weight_decay": 0.1},
}


def groups_of(model, momenta):
    """Two groups, the second of which has another momentum if there are two."""
    first, *rest = model.parameters()
    parts = [[first], rest]
    return [
        {"params": part} | ({"momentum": m} if m is not None else {}) for part, m in zip(parts, momenta, strict=True)
    ]


def sparse_sgd(model, comm, momenta, **settings):
    return SparseSGD(groups_of(model, momenta), 0.2, comm=comm, density=DENSITY, format="coo", model=model, **settings)


def distributed(model, comm, momenta, density=DENSITY, **settings):
    inner = torch.optim.SGD(groups_of(model, momenta), 0.2, **settings)
    return DistributedOptimizer(inner, model, comm, sgdtopk(density, format="coo"))


def trained(comm, make, momenta, settings):
    model = net(seed=0)
    optimizer = make(model, comm, momenta, **settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1, 0.5, 0.1)[step % 3])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(comm.rank, step)).backward()
        optimizer.step()
        schedule.step()
    return [p.detach().numpy().copy() for p in model.parameters()]


def expected(ranks, momenta, settings, density=DENSITY):
    """The formula of SparseSGD's docstring, on flat vectors."""
    model = net(seed=0)
    params = list(model.parameters())
    sizes = [p.numel() for p in params]
    first, second = (settings.get("momentum", 0.0) if momentum is None else momentum for momentum in momenta)
    m = np.repeat([first] + [second] * (len(params) - 1), sizes)
    inside = np.array([shorter(one) for one in m])
    decay, damp = settings.get("weight_decay", 0.0), 1 - settings.get("dampening", 0.0)
    sign = -1 if settings.get("maximize") else 1
    residual, velocity = np.zeros((2, ranks, len(m)))
    k = round(density * len(m))
    for step in range(STEPS):
        total = np.zeros(len(m))
        for rank in range(ranks):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            gradient = np.concatenate([p.grad.numpy().ravel() for p in params])
            velocity[rank] = inside * (velocity[rank] + gradient)
            residual[rank] += gradient + velocity[rank]
            sent = np.argsort(-abs(residual[rank]), kind="stable")[:k]
            total[sent] += residual[rank, sent]
            residual[rank, sent] = 0
            if k < len(m):
                velocity[rank, sent] = 0
        lr = 0.2 * (1, 0.5, 0.1)[step % 3]
        rate = lr * np.where(m, damp, 1) * (1 - inside) / (1 - m) * (1 - m ** (step + 1)) / (1 - inside ** (step + 2))
        w = np.concatenate([p.detach().numpy().ravel() for p in params])
        w -= rate * (sign * total / ranks + decay / (1 - inside) * w)
        with torch.no_grad():
            for p, part in zip(params, np.split(w, np.cumsum(sizes)[:-1]), strict=True):
                p.copy_(torch.from_numpy(part).view(p.shape))
    return [p.detach().numpy() for p in params]


@pytest.mark.parametrize("make", [sparse_sgd, distributed])
@pytest.mark.parametrize("momenta", [(None, None), (0.9, 0.6), (0.0, 0.8)], ids=["one momentum", "two", "none and one"])
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_those_of_the_formula(name, momenta, make):
    settings = SETTINGS[name]
    if settings.get("nesterov") and 0.0 in momenta:
        pytest.skip("torch refuses Nesterov without momentum")
    results = simulate(3, lambda comm: trained(comm, make, momenta, settings)).results
    for got in results:
        for one, two in zip(got, expected(3, momenta, settings), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-9)


def test_momentum_stays_where_nothing_waits():
    """All entries are sent in every step."""
    make = partial(distributed, density=1.0)
    for got in simulate(3, lambda comm: trained(comm, make, (None, None), SETTINGS["momentum"])).results:
        for one, two in zip(got, expected(3, (None, None), SETTINGS["momentum"], 1.0), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("compressor", [None, "topk", "nesterovtopk"])
@pytest.mark.parametrize("overlap", [True, False])
def test_clipping_means_that_have_momentum_is_warned_of(overlap, compressor, caplog):
    """Once, with the cure; where gradients are local until the step, of what clips each rank's own ones."""

    def program(comm):
        model = net()
        momentum = 0.9 if compressor is None else 0.0
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum)
        optimizer = DistributedOptimizer(inner, model, comm, compressor, overlap=overlap)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()

    with caplog.at_level(logging.WARNING, "sparsecoll"):
        simulate(2, program)
    lines = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "as clipping does" in text]
    assert len(lines) == (not overlap or compressor != "topk")
    if lines:
        has_momentum = compressor != "topk"
        cures = ["Pass overlap=False", "Leave it so", "call synchronize() first"]
        assert cures[0 if overlap else 1 if has_momentum else 2] in lines[0]


def test_the_defaults_of_both_learn_alike():
    """4 bits and a density that warms up, over P = 1 and 4; the bits are the same on all ranks."""

    def program(comm, which):
        model = net(seed=comm.rank, dtype=torch.float32)
        if which is SparseSGD:
            optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm)
        else:
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9), model, comm)
        for step in range(70):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step, torch.float32)).backward()
            optimizer.step()
        own = optimizer.state_dict()["param_groups"]
        return bits(model), loss_of(model, batch(0, 0, torch.float32)).item(), own

    losses = []
    for ranks in (1, 4):
        for which in (SparseSGD, DistributedOptimizer):
            (first, loss, groups), *others = simulate(ranks, lambda comm, which=which: program(comm, which)).results
            assert all(one[0] == first for one in others)
            assert groups[0]["momentum"] == 0.9 and groups[0]["lr"] == 0.1
            losses.append(loss)
        assert losses[-1] == pytest.approx(losses[-2], rel=0.2)


@pytest.mark.parametrize("make", ["SparseSGD", "DistributedOptimizer"])
def test_sparse_gradients_take_the_steps_of_sgd(make):
    """A table's momentum, and no weight decay: torch refuses that."""

    def program(comm, dense):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2)).double()
        table = model[0].weight
        if dense:
            optimizer = torch.optim.SGD([table], 0.1, 0.9)
        elif make == "SparseSGD":
            optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm)
        else:
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9), model, comm)
        for param in model[2].parameters():
            param.requires_grad_(False)  # so that gradients of the table are those of one process
        ranks = range(comm.size) if dense else [comm.rank]
        for step in range(5):
            optimizer.zero_grad()
            for rank in ranks:
                rows = torch.randint(20, (4, 2), generator=torch.Generator().manual_seed(10 * step + rank))
                (model(rows).square().sum() / len(ranks)).backward()
            optimizer.step()
        return table.detach()

    want = simulate(2, lambda comm: program(comm, True)).results[0]
    for got in simulate(2, lambda comm: program(comm, False)).results:
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("make", ["SparseSGD", "DistributedOptimizer"])
def test_a_run_goes_on_with_the_same_bits(make):
    def optimizer_of(model, comm):
        if make == "SparseSGD":
            return SparseSGD(model.parameters(), 0.1, 0.9, comm=comm)
        return DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9), model, comm)

    def program(comm, split):
        model = net(seed=0, dtype=torch.float32)
        optimizer = optimizer_of(model, comm)
        for step in range(12):
            if step == split:
                saved, state = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
                model = net(seed=1, dtype=torch.float32)
                model.load_state_dict(saved)
                optimizer = optimizer_of(model, comm)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step, torch.float32)).backward()
            optimizer.step()
        return bits(model)

    assert simulate(3, lambda comm: program(comm, 6)).results == simulate(3, lambda comm: program(comm, None)).results


def test_density_1_is_dense():
    def program(comm, **options):
        model = net(seed=0)
        optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm, **options)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
        return bits(model)

    one, dense = (
        simulate(2, lambda comm, o=o: program(comm, **o)).results for o in ({"density": 1}, {"algo": "dense"})
    )
    assert one == dense


def test_one_line_says_what_stands_for_the_momentum(caplog):
    def program(comm):
        model = net()
        SparseSGD(model.parameters(), 0.1, 0.9, comm=comm)
        DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9), model, comm).close()
        SparseSGD(net().parameters(), 0.1, comm=comm)
        SparseSGD(net().parameters(), 0.1, 0.9, comm=comm, algo="dense")

    with caplog.at_level(logging.WARNING, "sparsecoll"):
        simulate(3, program)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == ["SparseSGD", "DistributedOptimizer"]
    assert all("Nesterov momentum=0.7 before the compression, at 3 times the learning rate" in line for line in lines)


@pytest.mark.parametrize(
    ("make", "cure"),
    [
        (
            lambda model, comm: DistributedOptimizer(torch.optim.Adam(model.parameters()), model, comm, sgdtopk()),
            "'qsgd'",
        ),
        (lambda model, comm: SparseSGD(model.parameters(), 0.1, 1.0, comm=comm), "expected below 1, got 1.0"),
        (
            lambda model, comm: DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, 1.0), model, comm),
            "expected in [0, 1), got 1.0",
        ),
    ],
    ids=["Adam", "SparseSGD", "DistributedOptimizer"],
)
def test_what_cannot_be_replaced_is_refused(make, cure):
    def program(comm):
        with pytest.raises(ValueError) as error:
            make(net(), comm)
        return str(error.value)

    assert all(cure in text for text in simulate(2, program).results)


def test_a_loop_that_does_not_know_the_momentum_is_refused_with_the_cure():
    def program(comm):
        model = net()
        optimizer = LocalOptimizer(
            torch.optim.SGD(model.parameters(), 0.1, 0.9), model, comm, every=1, compressor="sgdtopk"
        )
        loss_of(model, batch(comm.rank, 0)).backward()
        with pytest.raises(ValueError, match="momentum: expected a number in a loop that does not know"):
            optimizer.step()

    simulate(2, program)


def test_other_optimizers_send_low_bits():
    """The sum of a step is what `qsgd` sends."""

    def program(comm, compressor):
        model = net(seed=0)
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, comm, compressor)
        loss_of(model, batch(comm.rank, 0)).backward()
        optimizer.step()
        return bits(model), optimizer.traffic.total.bytes_received

    default, qsgd = (simulate(2, lambda comm, which=which: program(comm, which)).results for which in (None, "qsgd"))
    assert default == qsgd


def test_momentum_none_of_another_compressor():
    """A compressor of one's own choice takes the place of SGD's momentum, too."""
    compressor = TopKCompressor(WarmUp(0.05), algo="oktopk", momentum=None)

    def program(comm):
        model = net(seed=0, dtype=torch.float32)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9), model, comm, compressor)
        data = batch(comm.rank, 0, torch.float32)
        first = loss_of(model, data).item()
        for _ in range(60):
            optimizer.zero_grad()
            loss_of(model, data).backward()
            optimizer.step()
        assert not any(optimizer.state.values())  # no momentum buffer
        return loss_of(model, data).item() < 0.6 * first

    assert sum(simulate(4, program).results) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_tutorials_net_becomes_as_good_as_with_dense_sums(ranks):
    """Medians over five seeds of the share of right answers: within one point."""

    def program(comm, seed, algo):
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(1000 * seed + comm.rank)
        x = torch.randn(2000, 20, generator=generator)
        y = x[:, :3].argmax(1)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 3))
        optimizer = SparseSGD(model.parameters(), 0.05, 0.9, comm=comm, algo=algo)
        for _ in range(250):
            rows = torch.randint(2000, (32,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        others = torch.randn(5000, 20, generator=torch.Generator().manual_seed(99))
        right = 100 * float((model(others).argmax(1) == others[:, :3].argmax(1)).float().mean())
        return right

    def median(algo):
        return np.median([simulate(ranks, lambda comm, s=seed: program(comm, s, algo)).results[0] for seed in range(5)])

    assert median(None) > median("dense") - 1


@pytest.mark.parametrize("made", [sparse_sgd, distributed])
def test_a_closure_and_hooks_see_the_optimizers_own_groups(made):
    def program(comm, has_closure=False):
        model, rates = net(seed=0), []
        optimizer = made(model, comm, (None, 0.8), momentum=0.9)
        wrapped = getattr(optimizer, "optimizer", optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(wrapped, 1, 0.5)

        def after(*_):
            rates.append((wrapped.param_groups[0]["lr"], wrapped.param_groups[1]["momentum"]))
            schedule.step()

        wrapped.register_step_post_hook(after)
        for step in range(5):

            def evaluate(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, batch(comm.rank, step))
                loss.backward()
                return loss

            if has_closure:
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.step()
        assert rates == [(0.2 * 0.5**step, 0.8) for step in range(5)] and len(wrapped.param_groups) == 2
        return bits(model)

    assert simulate(3, partial(program, has_closure=True)).results == simulate(3, program).results


def test_what_an_optimizer_counts_in_its_groups_stays():
    class Counts(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1

    def program(comm):
        model = net()
        optimizer = DistributedOptimizer(Counts(model.parameters(), 0.1, momentum=0.9), model, comm)
        for step in range(3):
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
        (group,) = optimizer.param_groups
        assert (group["count"], group["lr"], group["momentum"]) == (3, 0.1, 0.9)

    simulate(2, program)
