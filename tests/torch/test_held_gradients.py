"""Gradients that somebody else has, too: tensors that a loop keeps, parts of a flat one, arrays, hooks of a user."""

from functools import partial

import pytest
import torch
from nets import batch, bits, close, loss_of, mean_loss, net, parameters

from sparsecoll import simulate
from sparsecoll.torch import DistributedOptimizer
from sparsecoll.torch.compressors import TopKCompressor
from sparsecoll.torch.reduction.bucket import Bucket

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


def memory(model):
    """Zero and scale gradients through their memory in the first step: views, tensors beside them and arrays."""
    held, kinds = [], [lambda g: g.view(-1), lambda g: g.data, lambda g: torch.from_numpy(g.numpy())]

    def zero():
        for part in held:
            part.zero_()

    def scale():
        held.extend([] if held else [kinds[i % 3](p.grad) for i, p in enumerate(model.parameters())])
        for part in held:
            part.mul_(0.5)

    return zero, scale


def flat(model):
    """Zero and scale gradients through one tensor of which all of them are parts."""
    whole = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for p, part in zip(model.parameters(), whole.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad = part.view_as(p)
    return whole.zero_, lambda: whole.mul_(0.5)


@pytest.mark.parametrize(
    ("make", "options"),
    [*((make, o) for make in (cached, memory) for o in OPTIONS), *((flat, o) for o in OPTIONS[:3])],
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
    found, assign = [], Bucket.assign_grads

    def noted(self, made):
        means = {name: self.part_of_mean(name).data_ptr() for name in made}
        assign(self, made)
        found.extend(self.params[name].grad.data_ptr() == means[name] for name in made)

    monkeypatch.setattr(Bucket, "assign_grads", noted)

    def program(comm):
        model = net()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), comm, TopKCompressor(0.1), **options
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
    assert len(found) == 2 * 3 * 6 and all(found)


@pytest.mark.parametrize("edit", ["data", "array", "set_data"])
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1}, {"bucket_bytes": None}], ids=str)
def test_hooks_that_come_after_wrapping_are_seen(edit, options):
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
            TopKCompressor(0.1),
            dense_below=0,
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


def test_gradients_in_a_flat_vector_of_another_order_are_not_mixed():
    def program(comm):
        params = {name: torch.nn.Parameter(torch.zeros(400)) for name in "abc"}
        flat = torch.zeros(1200)
        for i, name in enumerate("cab"):  # buckets have c, b, a
            params[name].grad = flat[400 * i : 400 * (i + 1)]
        options = {"dense_below": 0, "overlap": False, "gradient_as_bucket_view": True}
        inner = torch.optim.SGD([*params.values()], 1.0)
        optimizer = DistributedOptimizer(inner, params.items(), comm, "none", **options)
        for value, p in enumerate(params.values(), 1):
            p.grad.fill_(value)
        optimizer.step()
        return [sorted(set(p.tolist())) for p in params.values()]

    assert simulate(2, program).results == [[[-1.0], [-2.0], [-3.0]]] * 2


def test_gradients_of_layers_that_are_frozen_later_are_not_overwritten():
    """Those of an equal layer that trains instead would fit into their place."""

    def program(comm, as_view):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).double()
        model[1].requires_grad_(False)
        options = {"dense_below": 0, "gradient_as_bucket_view": as_view}
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm, "none", **options)
        for step in range(4):
            for layer, trains in ((model[0], step % 2 == 0), (model[1], step % 2 == 1)):
                layer.requires_grad_(trains)
            optimizer.zero_grad(set_to_none=False)
            model(torch.full((4, 8), comm.rank + 1.0).double()).square().sum().backward()
            optimizer.step()
        return parameters(model)

    (views, *_), (copies, *_) = (simulate(2, partial(program, as_view=kind)).results for kind in (True, False))
    close(views, copies)
