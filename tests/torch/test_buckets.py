"""Gradients that are not copied: views of the flat vector, and those that are alone in their bucket."""

import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from nets import batch, bits, loss_of, net, residuals
from one_bucket import step

from sparsecoll import simulate
from sparsecoll.torch import COMPRESSORS, DistributedOptimizer
from sparsecoll.torch.compressors import StepContext, TopKCompressor, as_compressor, dgc
from sparsecoll.torch.reduction.bucket import Bucket
from sparsecoll.torch.tensors.layout import Layout, cut

P = 3
WAYS = [(as_view, size) for as_view in (False, True) for size in (1, None)]  # bucket_bytes


@pytest.mark.parametrize("name", [*(n for n in COMPRESSORS if n != "free"), "nesterov", "clipped"])
def test_a_gradient_that_lies_elsewhere_gives_the_same_bits(name):
    method = {"nesterov": dgc(0.1, nesterov=True), "clipped": dgc(0.1, clip=0.5)}.get(name, name)

    def program(comm):
        context = StepContext(momenta=lambda names: [0.9] * len(names))
        given, elsewhere = as_compressor(method), as_compressor(method)
        for own in (given, elsewhere):
            own.bind(Layout(0, (600,), ("p",), ((20, 30),), np.dtype(np.float32)), comm.transport, context)
        rng = np.random.default_rng(comm.rank)
        for _ in range(3):
            gradient = rng.standard_normal(600).astype(np.float32)
            expected, source = step(given, comm.transport, gradient.copy()), gradient.copy()
            memory = np.full(600, np.nan, np.float32)
            out = np.empty(600, np.float32) if elsewhere.keeps_gradient else memory
            elsewhere.allreduce_mean(comm.transport, memory, out, source)
            elsewhere.versions.accept()
            elsewhere.versions.commit()
            np.testing.assert_array_equal(out, expected)
            np.testing.assert_array_equal(source, gradient)
            context.step += 1

    simulate(P, program)


def test_a_parameter_that_does_not_fit_opens_the_next_bucket():
    """Buckets are in the order in which they fill."""

    def sizes(*counts, **options):
        params = {str(i): torch.zeros(count) for i, count in enumerate(counts)}
        layouts = cut(params, list(params), **options)
        assert [layout.index for layout in layouts] == list(range(len(layouts)))
        return [[counts[int(name)] for name in layout.names] for layout in layouts]

    of_100 = {"bucket_bytes": 400}
    assert sizes(2, 90, 1, 120, 30, 50, 60, **of_100) == [[2, 90, 1], [120], [30, 50], [60]]
    assert sizes(2, 99, 1, 120, 1, **of_100) == [[2], [99, 1], [120], [1]]
    assert sizes(1, 120, 2, 30, small={"0", "2"}, **of_100) == [[120], [30], [1, 2]]
    assert sizes(2, 99, 120) == [[2, 99, 120]]
    assert sizes(2, 3, bucket_bytes=1) == [[2], [3]]


def made(comm, as_view, bucket_bytes, compressor="topk", **options):
    model = net()
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    options = {"bucket_bytes": bucket_bytes, "gradient_as_bucket_view": as_view, "dense_below": 0, **options}
    return model, DistributedOptimizer(inner, model, comm, compressor, **options)


def backward(comm, model, number):
    loss_of(model, batch(comm.rank, number)).backward()


@pytest.mark.parametrize("compressor", [dgc(0.1), "fp16"], ids=["dgc", "fp16"])
def test_views_give_the_same_bits(compressor):
    """Accumulation with and without no_sync, both kinds of zero_grad, clipping, a skipped step, frozen parameters."""

    def program(comm):
        found = []
        for as_view, size in WAYS:
            model, optimizer = made(comm, as_view, size, compressor)
            for number in range(6):
                optimizer.zero_grad(set_to_none=number % 2 == 0)
                model[2].requires_grad_(number != 5)
                if number in (2, 5):
                    with optimizer.no_sync():
                        backward(comm, model, 50 + number)
                if number == 3 and compressor == "fp16":  # momentum would count twice
                    backward(comm, model, 60)
                backward(comm, model, number)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                if number != 4:
                    optimizer.step()
            found.append((size, bits(model)))
        for size in (1, None):
            assert len({text for other, text in found if other == size}) == 1
        return found

    results = simulate(P, program).results
    assert all(found == results[0] for found in results)


def test_a_mean_that_moves_to_another_buffer_counts():
    """A parameter that had no gradient before comes first and opens a buffer, to which the means of others move."""

    def program(comm):
        a, b, c = params = [torch.nn.Parameter(torch.zeros(400)) for _ in range(3)]
        named, inner = list(zip("abc", params, strict=True)), torch.optim.SGD(params, 1.0)
        options = {"gradient_as_bucket_view": True, "dense_below": 0}
        optimizer = DistributedOptimizer(inner, named, comm, TopKCompressor(0.05, "allgather"), **options)
        total, generator = torch.zeros(400), torch.Generator().manual_seed(comm.rank)
        for _ in range(2):
            optimizer.zero_grad()
            for other in (c, b):
                gradient = torch.randn(400, generator=generator)
                total += gradient
                ((a * gradient).sum() + (other * gradient).sum()).backward()
            optimizer.step()
        return a.detach(), total - residuals(optimizer)["a"]

    results = simulate(2, program).results
    torch.testing.assert_close(-2 * results[0][0], sum(moved for _, moved in results))


def test_what_is_copied(monkeypatch):
    """Nothing of gradients that are alone in their buckets, nor of views to which autograd adds."""
    copied = []
    copy_in = Bucket._copy_in
    monkeypatch.setattr(Bucket, "_copy_in", lambda self, *a: (copied.append(1), copy_in(self, *a)))

    def count(as_view, bucket_bytes, set_to_none):
        def program(comm):
            model, optimizer = made(comm, as_view, bucket_bytes)
            counts = []
            for number in range(4):
                optimizer.zero_grad(set_to_none)
                copied.clear()
                backward(comm, model, number)
                counts.append(len(copied))
                if as_view:
                    first, second = (p.grad for p in (model[0].weight, model[0].bias))
                    alike = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
                    assert alike == (bucket_bytes is None)
                    del first, second  # gradients that somebody holds stay where they are
                optimizer.step()
            return counts

        return simulate(1, program).results[0]

    assert count(False, 1, True) == count(True, 1, False) == [0] * 4
    assert count(True, None, False) == [6, 0, 0, 0]
    assert count(True, None, True) == count(False, None, True) == [6] * 4


@dataclass
class Fails(TopKCompressor):
    """Raises in the bucket of the first layer, once."""

    name = "fails"
    times = [1]  # noqa: RUF012 - of all copies

    def communicate(self, transport, message):
        if transport.rank == 1 and "0.weight" in self.layout.names and self.context.step == 2 and self.times.pop():
            self.times.append(0)
            raise RuntimeError("on purpose")
        return super().communicate(transport, message)


@pytest.mark.parametrize(("as_view", "size"), WAYS)
def test_a_reduction_that_fails_loses_no_gradient(as_view, size):
    """The gradients are those of a plain back-propagation afterwards, and the step can be taken after all."""
    Fails.times, failed = [1], []

    def program(comm):
        twin, sound = made(comm, False, size, TopKCompressor(0.1))
        model, optimizer = made(comm, as_view, size, Fails(0.1))
        for number in range(4):
            plain = net()
            plain.load_state_dict(model.state_dict())
            backward(comm, plain, number)
            for m, own in ((twin, sound), (model, optimizer)):
                own.zero_grad()
                try:
                    backward(comm, m, number)
                except RuntimeError as error:
                    failed.append(comm.rank)
                    assert "on purpose" in str(error) and number == 2
                    for p, q in zip(m.parameters(), plain.parameters(), strict=True):
                        assert torch.equal(p.grad, q.grad)
                own.step()
            assert bits(twin) == bits(model)

    simulate(P, program)
    assert sorted(failed) == [0, 1, 2]


@pytest.mark.parametrize(("as_view", "size"), WAYS)
def test_a_gradient_that_a_later_hook_changes_is_sent_again(as_view, size):
    def program(comm):
        model, optimizer = made(comm, as_view, size, "none")
        model[0].weight.register_post_accumulate_grad_hook(lambda p: [p.grad.mul_(2)].clear())
        plain = net()
        plain.load_state_dict(model.state_dict())
        for number in range(2):
            optimizer.zero_grad()
            plain.zero_grad()
            backward(comm, model, number)
            (sum(loss_of(plain, batch(rank, number)) for rank in range(P)) / P).backward()
            torch.testing.assert_close(model[0].weight.grad, 2 * plain[0].weight.grad, rtol=1e-9, atol=1e-12)

    simulate(P, program)


def test_option_is_checked():
    with pytest.raises(TypeError, match="gradient_as_bucket_view: expected True or False, got 1"):
        simulate(2, lambda comm: made(comm, 1, None))


def test_a_gradient_that_is_the_mean_is_freed_by_zero_grad():
    """Nothing holds it until the next reduction: a step would take the memory of two gradients."""

    def program(comm):
        p = torch.nn.Parameter(torch.ones(4000))
        optimizer = DistributedOptimizer(torch.optim.SGD([p], 0.1), [("p", p)], comm, "free", dense_below=0)
        for _ in range(2):
            p.backward(torch.ones(4000))
            memory = weakref.ref(p.grad.untyped_storage())
            optimizer.step()
            optimizer.zero_grad()
            assert memory() is None

    simulate(2, program)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("size", [1, None])
def test_memory_is_used_again_once_no_gradient_holds_it(size, keep):
    def program(comm):
        params = [torch.nn.Parameter(torch.zeros(100_000 * n)) for n in (1, 2)]
        named = list(zip("ab", params, strict=True))
        optimizer = DistributedOptimizer(
            torch.optim.SGD(params, 0.1), named, comm, TopKCompressor(0.1), bucket_bytes=size
        )
        held, where = [], set()
        for number in range(8):
            optimizer.zero_grad()
            sum((p * (p.detach() + number)).sum() for p in params).backward()
            where.add(params[0].grad.data_ptr())
            optimizer.step()
            held += [(p.grad, p.grad.clone()) for p in params if keep]
        assert all(torch.equal(gradient, then) for gradient, then in held)
        assert len(where) == 8 if keep else len(where) <= 3

    simulate(1, program)
