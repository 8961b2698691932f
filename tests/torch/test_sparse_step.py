"""DistributedOptimizer with sparse_step: the steps of dense means, and errors where somebody wants to see the means."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nets import batch, bits, close, loss_of, net, parameters, residuals, train  # noqa: E402

import sparsecoll  # noqa: E402
from sparsecoll import SparseVector, select, simulate  # noqa: E402
from sparsecoll.kernels import kernels_of  # noqa: E402
from sparsecoll.torch import DistributedOptimizer, updates  # noqa: E402
from sparsecoll.torch.compressors import DGC, NesterovTopK, OkTopk, TopK  # noqa: E402

P = 3
SETTINGS = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.05, "maximize": True},
]
COMPRESSORS = [
    (TopK(0.05), SETTINGS[2]),
    (TopK(0.05, algo="allgather"), SETTINGS[3]),
    (TopK({"*weight": 0.05, "*": 0.5}, algo="allgather", value_dtype="float32"), SETTINGS[4]),
    (OkTopk(0.05, algo=sparsecoll.OkTopk(tau=2, tau_prime=3)), SETTINGS[2]),
    (DGC(0.05), SETTINGS[1]),
    (NesterovTopK(0.05), SETTINGS[0]),
    (TopK(0.05, algo="densestream", follow_lr=True), SETTINGS[3]),
]


def optimizer_of(comm, model, compressor=None, sparse_step=True, settings=SETTINGS[2], **options):
    groups = [{"params": [model[0].weight], "lr": 0.03}, {"params": [*model.parameters()][1:]}]
    options = {"bucket_bytes": 6000, "dense_below": 10, **options}
    inner = torch.optim.SGD(groups, 0.1, **settings)
    compressor = compressor or TopK(0.1, algo="allgather")
    return DistributedOptimizer(inner, model.named_parameters(), comm, compressor, sparse_step=sparse_step, **options)


def outcome(model, optimizer):
    waits = residuals(optimizer)
    states = [optimizer.state.get(p, {}).get("momentum_buffer") for p in model.parameters()]
    momenta = [torch.zeros(()) if buffer is None else buffer.clone() for buffer in states]
    return parameters(model) + momenta + [waits[name].clone() for name in sorted(waits)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("compressor", "settings"), COMPRESSORS, ids=str)
def test_steps_are_those_of_dense_means(compressor, settings, overlap):
    """Two groups, a scheduler; skipped steps, accumulation and a parameter that some steps do not use."""

    def program(comm):
        found = []
        for sparse_step in (False, True):
            model = net(seed=comm.rank, dtype=torch.float64)
            optimizer = optimizer_of(comm, model, compressor, sparse_step, settings, overlap=overlap, verify=1)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            for step in range(8):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                if step == 3:
                    with optimizer.no_sync():
                        loss_of(model, batch(comm.rank, 50)).backward()
                loss = loss_of(model, batch(comm.rank, step))
                if step in (4, 6):
                    loss = model[:3](batch(comm.rank, step)[0]).square().sum()
                loss.backward()
                if step != 5:
                    optimizer.step()
                    schedule.step()
            found.append([*outcome(model, optimizer), bits(model)])
        return found

    results = simulate(P, program).results
    for (*dense, _), (*sparse, _) in results:
        assert len(dense) == len(sparse)
        close(sparse, dense, rtol=1e-5, atol=1e-8)
    assert len({own[-1] for _, own in results}) == 1


def test_large_parameters_are_stepped_where_they_are(monkeypatch):
    """A matrix alone in its bucket, in the kernel; the same bits on all ranks, and no memory for a mean."""
    taken = []
    monkeypatch.setattr(updates, "kernels_of", lambda array: taken.append(array.size) or kernels_of(array))

    def program(comm):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.ReLU(), torch.nn.Linear(300, 2))
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        compressor = TopK(0.05, algo="allgather")
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, compressor, sparse_step=True)
        memory = model[0].weight.data_ptr()
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(8, 100, generator=torch.Generator().manual_seed(10 * comm.rank + step))
            model(x).square().sum().backward()
            optimizer.step()
            assert model[0].weight.data_ptr() == memory
        assert all(bucket.mean is None and bucket.sum is None for bucket, _ in optimizer._engine._reducer.buckets)
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1
    assert taken.count(100 * 300) == 4 * P


@pytest.mark.parametrize("settings", [SETTINGS[1], SETTINGS[3]], ids=str)
def test_parameters_that_the_kernel_does_not_take(settings):
    """In half precision and in another memory format, torch takes the step."""

    def program(comm):
        found = []
        for sparse_step in (False, True):
            torch.manual_seed(0)
            conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
            linear = torch.nn.Linear(8, 40).bfloat16()
            params = [("conv", conv.weight), ("linear", linear.weight)]
            inner = torch.optim.SGD([p for _, p in params], 0.1, **settings)
            options = {"sparse_step": sparse_step, "dense_below": 10}
            optimizer = DistributedOptimizer(inner, params, comm, TopK(0.1, algo="allgather"), **options)
            for step in range(4):
                optimizer.zero_grad()
                x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * comm.rank + step))
                (conv(x).square().sum() + linear(x[:, 0, 0, :2].repeat(1, 4).bfloat16()).float().sum()).backward()
                optimizer.step()
            assert conv.weight.stride() == (27, 1, 9, 3)
            found.append([p.detach().float().clone() for _, p in params])
        return found

    results = simulate(P, program).results
    for dense, sparse in results:
        close(sparse[:1], dense[:1], rtol=1e-4, atol=1e-5)
        close(sparse[1:], dense[1:], rtol=2e-2, atol=1e-2)
    assert len({b"".join(t.numpy().tobytes() for t in sparse) for _, sparse in results}) == 1


def used(model, optimizer):
    yield lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    yield lambda: model[0].weight.grad.mul_(0.5)
    yield lambda: model[0].weight.grad + 1
    yield lambda: float(model[0].weight.grad.norm())
    yield lambda: model[0].weight.grad.numpy()
    yield lambda: model.zero_grad(set_to_none=False)
    yield lambda: torch.optim.Adam(model.parameters()).step()


def test_what_uses_a_mean_raises_before_and_after_the_step():
    def program(comm):
        model = net(dtype=torch.float64)
        optimizer = optimizer_of(comm, model)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            for stage in range(2):
                for use in used(model, optimizer):
                    with pytest.raises(RuntimeError, match="sparse_step=False"):
                        use()
                assert model[0].weight.grad.shape == model[0].weight.shape
                assert "SparseMean" in repr(model[0].weight.grad)
                if not stage:
                    optimizer.step()
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1


def test_gradients_are_not_added_to_sparse_means():
    """Without zero_grad, all ranks raise, also where a parameter is used on some of them; then training continues."""

    def program(comm):
        model = net(dtype=torch.float64)
        optimizer = optimizer_of(comm, model)
        train(comm, model, optimizer, range(2))
        before = outcome(model, optimizer)
        used = model if comm.rank else model[:3]
        with pytest.raises(Exception, match=r"call zero_grad\(\) in every step"):
            used(batch(comm.rank, 2)[0]).square().sum().backward()
        optimizer.zero_grad()
        close(outcome(model, optimizer), before, rtol=0, atol=0)
        loss_of(model, batch(comm.rank, 3)).backward()
        optimizer.step()
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1


def evaluate(comm, model, optimizer, step):
    optimizer.zero_grad()
    loss = loss_of(model, batch(comm.rank, step))
    loss.backward()
    return loss


@pytest.mark.parametrize("closures", [True, False])
def test_closures_and_a_rank_without_data(closures):
    """SGD evaluates a closure once, before its step."""

    def program(comm):
        found = []
        for sparse_step in (False, True):
            model = net(dtype=torch.float64)
            optimizer = optimizer_of(comm, model, None, sparse_step)
            losses, seen = [], []
            optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append(1))
            with optimizer.join():
                for step in range(5 if closures else 5 - 2 * (comm.rank == 1)):
                    again = partial(evaluate, comm, model, optimizer, step)
                    losses.append(optimizer.step(again) if closures else again())
                    if not closures:
                        optimizer.step()
            assert len(seen) == len(losses)  # once a step
            found.append([*outcome(model, optimizer), torch.stack(losses).detach()])
        return found

    for dense, sparse in simulate(P, program).results:
        close(sparse, dense, rtol=1e-5, atol=1e-8)


REFUSED = [
    (torch.optim.Adam, {}, "topk", "with Adam"),
    (torch.optim.SGD, {"differentiable": True}, "topk", "differentiable"),
    (torch.optim.SGD, {}, "qsgd", "with qsgd"),
    (torch.optim.SGD, {}, TopK(1.0, "dense"), "with topk"),
    (torch.optim.SGD, {}, "dragonn", "with dragonn"),
]


@pytest.mark.parametrize(("make", "settings", "compressor", "words"), REFUSED, ids=str)
def test_what_cannot_step_sparsely_is_refused(make, settings, compressor, words):
    def program(comm):
        model = net()
        inner = make(model.parameters(), 0.1, **settings)
        with pytest.raises((TypeError, ValueError), match=f"sparse_step: expected False.*{words}"):
            DistributedOptimizer(inner, model.named_parameters(), comm, compressor, sparse_step=True)

    simulate(2, program)


def test_scalers_and_hooks_that_want_means_are_refused():
    def program(comm):
        model = net(dtype=torch.float64)
        optimizer = optimizer_of(comm, model)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, batch(comm.rank, 0))).backward()
        for use in (scaler.unscale_, scaler.step):
            with pytest.raises(RuntimeError, match=r"GradScaler.*sparse_step=False"):
                use(optimizer)
        optimizer.zero_grad()
        optimizer.optimizer.register_step_pre_hook(lambda *_: None)
        loss_of(model, batch(comm.rank, 1)).backward()
        with pytest.raises(RuntimeError, match=r"register_step_pre_hook on SGD.*sparse_step=False"):
            optimizer.step()

    simulate(2, program)


def test_ranks_must_agree():
    def program(comm):
        model = net()
        with pytest.raises(sparsecoll.CommunicationError, match="sparse_step"):
            optimizer_of(comm, model, sparse_step=comm.rank == 0)

    simulate(2, program)


def test_means_of_rows_and_of_small_parameters_stay_tensors():
    def program(comm):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 300))
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, "topk", sparse_step=True)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.tensor([comm.rank, 7, step])).square().sum().backward()
            assert model[0].weight.grad.is_sparse and np.isfinite(model[1].bias.grad.numpy()).all()
            optimizer.step()
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1


@dataclass
class FirstHalf(select.Selector):
    """Selects a part of the vector, whose values stay in the memory of the vector."""

    name = "first half"

    def select(self, x, k):
        half = np.arange(x.length // 2, dtype=np.uint32)
        return SparseVector(half, x.to_dense()[: half.size], x.length)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("options", [{"selector": FirstHalf()}, {"algo": "auto"}], ids=["views", "auto"])
def test_sums_do_not_change_with_the_residual(options, ranks):
    """On one rank, or with entries in the memory of the residual, from which what was sent is subtracted."""

    def program(comm):
        found = []
        for sparse_step in (False, True):
            model = net()
            compressor = TopK(0.5, **{"algo": "allgather", **options})
            optimizer = optimizer_of(comm, model, compressor, sparse_step)
            train(comm, model, optimizer, range(3))
            found.append(outcome(model, optimizer))
        return found

    for dense, sparse in simulate(ranks, program).results:
        close(sparse, dense, rtol=1e-5, atol=1e-8)
