"""Gradients that somebody else has, too: tensors that a loop keeps, parts of a flat one, arrays, hooks of a user."""

import contextlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nets import batch, bits, close, loss_of, mean_loss, net, parameters  # noqa: E402

from sparsecoll import simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer  # noqa: E402
from sparsecoll.torch.bucket import Bucket  # noqa: E402
from sparsecoll.torch.compressors import TopK  # noqa: E402

P = 3
OPTIONS = [{}, {"bucket_bytes": 1}, {"overlap": False}, {"gradient_as_bucket_view": True}]


def cached(model):
    """Zero and scale gradients through tensors that were gradients in the first step."""
    held = []

    def zero():
        for gradient in held:
            gradient.zero_()

    def scale():
        held.extend([] if held else [p.grad for p in model.parameters()])
        for gradient in held:
            gradient.mul_(0.5)

    return zero, scale


def flat(model):
    """Zero and scale gradients through one tensor of which all of them are parts."""
    whole = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for p, part in zip(model.parameters(), whole.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad = part.view_as(p)
    return whole.zero_, lambda: whole.mul_(0.5)


@pytest.mark.parametrize(
    ("make", "options"),
    [*((cached, o) for o in OPTIONS), *((flat, o) for o in OPTIONS[:3])],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_means_are_where_the_loop_has_its_gradients(make, options):
    """As with torch on one process; only views of buckets leave a flat tensor, as is documented."""

    def run(ranks, wrap, synchronize):
        model = net()
        optimizer = wrap(torch.optim.SGD(model.parameters(), 0.1), model)
        zero, scale = make(model)
        for step in range(5):
            zero()
            mean_loss(model, ranks, step).backward()
            synchronize(optimizer)
            scale()
            optimizer.step()
        return parameters(model)

    expected = run(range(P), lambda inner, _: inner, lambda _: None)

    def program(comm):
        def wrap(inner, model):
            return DistributedOptimizer(inner, model.named_parameters(), comm, "none", **options)

        return run([comm.rank], wrap, lambda optimizer: optimizer.synchronize() if "overlap" in options else None)

    for result in simulate(P, program).results:
        close(result, expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loop", ["usual", "zeros", "clips", "twice"])
def test_gradients_that_nobody_else_has_are_not_copied(monkeypatch, loop, options):
    """The means become gradients as they are."""
    found, is_held = [], Bucket._is_held

    def noted(self, p, name):
        found.append(is_held(self, p, name))
        return found[-1]

    monkeypatch.setattr(Bucket, "_is_held", noted)

    def program(comm):
        model = net()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), comm, TopK(0.1), **options
        )
        for step in range(3):
            optimizer.zero_grad(set_to_none=loop != "zeros")
            if loop == "twice":
                with optimizer.no_sync():
                    loss_of(model, batch(comm.rank, step)).backward()
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.synchronize()
            if loop == "clips":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    simulate(2, program)
    assert len(found) == 2 * 3 * 6 and not any(found)


@pytest.mark.parametrize("sparse_step", [False, True])
@pytest.mark.parametrize("edit", ["data", "array", "set_data"])
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1}, {"bucket_bytes": None}], ids=str)
def test_hooks_that_come_after_wrapping_are_seen(edit, options, sparse_step):
    """Also what they change without a version that tells so; in the middle of training, too."""

    def halve(p):
        if edit == "data":
            p.grad.data.mul_(0.5)
        elif edit == "array":
            p.grad.numpy()[...] *= 0.5
        else:
            p.grad.data = p.grad.data * 0.5

    def program(comm, before):
        model = net()
        if before:
            hooks = [p.register_post_accumulate_grad_hook(halve) for p in model.parameters()]
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1),
            model.named_parameters(),
            comm,
            TopK(0.1),
            dense_below=0,
            sparse_step=sparse_step,
            **options,
        )
        for step in range(6):
            if not before and step in (0, 3):
                hooks = [p.register_post_accumulate_grad_hook(halve) for p in model.parameters()]
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
            if not before and step == 2:
                for hook in hooks:
                    hook.remove()
        return bits(model)

    expected, found = (simulate(P, lambda comm, b=b: program(comm, b)).results for b in (True, False))
    assert found == expected and len({*found}) == 1


class Scratch(torch.autograd.Function):
    """Multiplies; the gradient is in an array that is used again in the next step."""

    @staticmethod
    def forward(ctx, weight, factor, array):
        ctx.factor, ctx.array = factor, array
        return (weight * factor).sum()

    @staticmethod
    def backward(ctx, gradient):
        np.multiply(ctx.factor.numpy(), float(gradient), out=ctx.array)
        return torch.from_numpy(ctx.array), None, None


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("way", ["function", "from_numpy", "dlpack"])
def test_memory_that_an_array_has_does_not_become_the_residual(way, overlap):
    def program(comm, sparse_step):
        weight, array = torch.nn.Parameter(torch.ones(40, 50)), np.zeros((40, 50), np.float32)
        optimizer = DistributedOptimizer(
            torch.optim.SGD([weight], 0.1),
            [("weight", weight)],
            comm,
            TopK(0.1, "allgather"),
            sparse_step=sparse_step,
            overlap=overlap,
        )
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(6):
            optimizer.zero_grad()
            factor = torch.randn(40, 50, generator=generator)
            if way == "function":
                Scratch.apply(weight, factor, array).backward()
            else:
                array[...] = factor.numpy()
                weight.grad = torch.from_numpy(array) if way == "from_numpy" else torch.from_dlpack(array)
            optimizer.step()
        return weight.detach()

    dense, sparse = (simulate(P, lambda comm, s=s: program(comm, s)).results for s in (False, True))
    close(sparse, dense, rtol=1e-5, atol=1e-6)


class Broken(torch.autograd.Function):
    """The identity; its back-propagation raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("broken")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("raises", [False, True])
def test_autograd_grad_leaves_sparse_means_as_they_are(raises, overlap):
    """It adds nothing to gradients: on one rank between back-propagation and step, on all ranks after the step."""

    def program(comm, looks):
        model = net()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
            model.named_parameters(),
            comm,
            TopK(0.1, "allgather"),
            sparse_step=True,
            overlap=overlap,
        )

        def look():
            x, y = batch(comm.rank, 9)
            hidden = model[:4](x)
            loss = torch.nn.functional.cross_entropy(model[4](Broken.apply(hidden) if raises else hidden), y)
            with pytest.raises(KeyError, match="broken") if raises else contextlib.nullcontext():
                torch.autograd.grad(loss, list(model.parameters()))

        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.synchronize()
            if looks and comm.rank == 0:
                look()
            optimizer.step()
            if looks:
                look()
        return bits(model)

    expected, found = (simulate(P, lambda comm, s=s: program(comm, s)).results for s in (False, True))
    assert found == expected and len({*found}) == 1
