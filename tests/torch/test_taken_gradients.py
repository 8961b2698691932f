"""Gradients whose memory becomes the residual (`sparse_step`): the same steps, and gradients given back."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from failing import fail_at, unpatch  # noqa: E402
from nets import batch, bits, close, loss_of, net, parameters, residuals, train  # noqa: E402

import sparsecoll  # noqa: E402
from sparsecoll import SparseVector, simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer  # noqa: E402
from sparsecoll.torch.bucket import Bucket  # noqa: E402
from sparsecoll.torch.compressors import DGC, NesterovTopK, OkTopk, StepContext, TopK  # noqa: E402
from sparsecoll.torch.layout import Layout  # noqa: E402
from sparsecoll.transport import as_transport  # noqa: E402

P = 3
COMPRESSORS = [
    TopK(0.1, algo="allgather"),
    TopK(0.1, algo="allgather", value_dtype="float32"),
    TopK(0.05, algo="exdyna"),
    TopK(0.1, algo="densestream", follow_lr=True),
    TopK({"a": 0.1, "*weight": 0.1, "*": 0.5}, algo="allgather"),
    OkTopk(0.1, algo=sparsecoll.OkTopk(tau=2, tau_prime=3)),
    DGC(0.1),
    NesterovTopK(0.1),
]


@pytest.fixture
def sizes(monkeypatch):
    """Return the list of the sizes of gradients that were taken."""
    found, take = [], Bucket._take_memory

    def counted(self, p):
        found.append(p.numel())
        take(self, p)

    monkeypatch.setattr(Bucket, "_take_memory", counted)
    return found


def optimizer_of(comm, model, compressor=COMPRESSORS[0], **options):
    """Every parameter is in a bucket of its own."""
    inner = torch.optim.SGD(model.parameters(), 0.1)
    options = {"bucket_bytes": 1, "dense_below": 10, "sparse_step": True, **options}
    return DistributedOptimizer(inner, model.named_parameters(), comm, compressor, **options)


def held(model):
    """Let hooks see all gradients, which are then not taken."""
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: None)


def state(model, optimizer):
    waits = residuals(optimizer)
    return parameters(model) + [waits[name].clone() for name in sorted(waits)]


def compared(run, ranks=P, compressor=COMPRESSORS[0], rtol=1e-9, atol=1e-12, **options):
    """Run a loop with gradients that are seen and with those whose memory is taken: the same results, on all ranks."""

    def program(comm):
        found = []
        for prepare in (held, lambda _: None):
            model = net()
            prepare(model)
            optimizer = optimizer_of(comm, model, compressor, **options)
            own = run(comm, model, optimizer) or []
            found.append([*state(model, optimizer), *own])
            optimizer.close()
        return found, bits(model)

    results = simulate(ranks, program).results
    for (seen, mine), _ in results:
        close(mine, seen, rtol=rtol, atol=atol)
    assert len({own for _, own in results}) == 1


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_steps_have_the_same_bits(sizes, compressor, overlap):
    """With accumulation, a skipped step and a scheduler."""

    def run(comm, model, optimizer):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            if step == 2:
                with optimizer.no_sync():
                    loss_of(model, batch(comm.rank, 50)).backward()
            loss_of(model, batch(comm.rank, step)).backward()
            if step != 4:
                optimizer.step()
                schedule.step()

    compared(run, compressor=compressor, rtol=0, atol=0, overlap=overlap, verify=1)
    reduced = 6 if overlap else 5  # without overlap, the skipped step is not reduced
    assert sizes.count(12 * 24) == (reduced - 1) * P  # not in the first one, which compares gradients


def test_memory_does_not_grow():
    """The residual is all that a bucket keeps, in memory that was a gradient's."""

    def program(comm):
        model = net()
        optimizer = optimizer_of(comm, model)
        train(comm, model, optimizer, range(5))
        large = [b for b, _ in optimizer._engine._reducer.buckets if not b.layout.small]
        return [(len(b._known), len(b._free)) for b in large]

    for kept in simulate(2, program).results:
        assert kept == [(1, 0)] * 5


@pytest.mark.parametrize("number", [1, 3, 6])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_a_failed_reduction_gives_gradients_back(sizes, compressor, number):
    def program(comm):
        model = net()
        optimizer = optimizer_of(comm, model, compressor)
        train(comm, model, optimizer, range(3))
        before, number_taken = state(model, optimizer), len(sizes)
        optimizer.zero_grad()
        loss = loss_of(model, batch(comm.rank, 3))
        expected = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        if comm.rank == 2:
            fail_at(comm.transport, "isend", number)
        with pytest.raises(sparsecoll.CommunicationError, match="rank 2 failed: Fault"):
            loss.backward()
        unpatch(comm.transport, "isend")
        assert len(sizes) > number_taken
        close([p.grad for p in model.parameters()], expected, rtol=1e-9, atol=1e-12)
        close(state(model, optimizer), before, rtol=0, atol=0)
        optimizer.zero_grad()
        train(comm, model, optimizer, range(3, 6))
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_leaves_residuals_as_they_were(sizes, value):
    def program(comm):
        model = net()
        optimizer = optimizer_of(comm, model)
        train(comm, model, optimizer, range(3))
        before = state(model, optimizer)
        optimizer.zero_grad()
        x, y = batch(comm.rank, 3)
        if comm.rank == 1:
            x[0] = value
        loss_of(model, (x, y)).backward()
        with pytest.raises(sparsecoll.NonFiniteError, match=r"rank 1.*'.*weight'"):
            optimizer.step()
        close(state(model, optimizer), before, rtol=0, atol=0)
        train(comm, model, optimizer, range(3, 6))
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1
    assert sizes


class Broken(torch.autograd.Function):
    """The identity; back-propagation raises."""

    @staticmethod
    def forward(ctx, x):
        return x + 0

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("broken off")


def broken_off(model, data, **options):
    """Back-propagate to the last layers only."""
    x, y = data
    with pytest.raises(KeyError, match="broken off"):
        torch.nn.functional.cross_entropy(model[2:](Broken.apply(model[:2](x))), y).backward(**options)


@pytest.mark.parametrize("then", ["optimizer.zero_grad", "zeros", "model.zero_grad", "accumulate"])
def test_back_propagation_that_is_broken_off(sizes, then):
    """What was taken is given back or thrown away, whatever the loop does next."""
    grown = []

    def run(comm, model, optimizer):
        train(comm, model, optimizer, range(3))
        optimizer.zero_grad()
        before = len(sizes)
        broken_off(model, batch(comm.rank, 3))
        grown.append(len(sizes) > before)
        if then == "optimizer.zero_grad":
            optimizer.zero_grad()
        elif then == "zeros":
            optimizer.zero_grad(set_to_none=False)
        elif then == "model.zero_grad":
            model.zero_grad()
        loss_of(model, batch(comm.rank, 4)).backward()
        optimizer.step()
        train(comm, model, optimizer, range(5, 7))

    compared(run)
    assert any(grown)


@pytest.mark.parametrize(
    ("then", "backward"),
    [("zeros", True), ("model zeros", True), ("model zeros", False), ("model.zero_grad", True), ("accumulate", True)],
)
@pytest.mark.parametrize("graph", [True, False])
def test_two_back_propagations_that_are_broken_off(sizes, then, graph, backward):
    """The second one adds to what the first one has found; a step without another one takes what there is."""

    def run(comm, model, optimizer):
        train(comm, model, optimizer, range(3))
        optimizer.zero_grad()
        for step in range(2):
            broken_off(model, batch(comm.rank, step), create_graph=graph and step == 1)
        if then == "zeros":
            optimizer.zero_grad(set_to_none=False)
        elif then == "model zeros":
            model.zero_grad(set_to_none=False)
        elif then == "model.zero_grad":
            model.zero_grad()
        if backward:
            loss_of(model, batch(comm.rank, 4)).backward()
        optimizer.step()
        train(comm, model, optimizer, range(5, 7))

    compared(run)
    assert sizes


@pytest.mark.parametrize("backward", [True, False])
def test_a_gradient_that_is_changed_while_a_part_of_it_is_taken(sizes, backward):
    def program(comm):
        model = net()
        optimizer = optimizer_of(comm, model)
        train(comm, model, optimizer, range(3))
        before = state(model, optimizer)
        optimizer.zero_grad()
        for step in range(2):
            broken_off(model, batch(comm.rank, step))
        if comm.rank == 1:
            model[-1].weight.grad.mul_(0.5)
        with pytest.raises(RuntimeError, match=r"rank 1.*changed in place"):
            if backward:
                loss_of(model, batch(comm.rank, 4)).backward()
            optimizer.step()
        close(state(model, optimizer), before, rtol=0, atol=0)
        train(comm, model, optimizer, range(3, 6))
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1
    assert sizes


def part_of(model):
    return lambda x: model[0](x)[:, :12].tanh()


def test_gradients_that_come_twice_in_a_back_propagation(sizes):
    """Reentrant checkpointing of two parts with one layer: the first gradient was taken when the second one comes."""

    def run(comm, model, optimizer):
        train(comm, model, optimizer, range(3))
        for step in range(3, 6):
            optimizer.zero_grad()
            x, y = batch(comm.rank, step)
            x.requires_grad_()
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(part_of(model), x, use_reentrant=True)
            torch.nn.functional.cross_entropy(model[2:](model[0](x)), y).backward()
            optimizer.step()

    compared(run, ranks=2)
    assert sizes


def test_a_parameter_that_is_frozen_or_new_while_gradients_are_taken(sizes):
    """The reduction is made again with other buckets, from gradients that were given back."""

    def run(comm, model, optimizer):
        train(comm, model, optimizer, range(3))
        model[0].weight.requires_grad_(False)
        train(comm, model, optimizer, range(3, 5))
        model[0].weight.requires_grad_(True)
        train(comm, model, optimizer, range(5, 7))
        extra = torch.nn.Parameter(torch.ones(3, 40, dtype=torch.float64))
        optimizer.zero_grad()
        optimizer.add_param_group({"params": [extra]})
        (loss_of(model, batch(comm.rank, 7)) + extra.square().sum()).backward()
        optimizer.step()
        train(comm, model, optimizer, range(8, 9))
        return [extra.detach().clone()]

    compared(run)
    assert sizes


def test_another_optimizer_takes_a_parameter_over_in_a_reduction(sizes):
    """After a back-propagation that was broken off: the gradients that were taken are those of before."""

    def program(comm):
        model = net()
        optimizer = optimizer_of(comm, model)
        train(comm, model, optimizer, range(3))
        optimizer.zero_grad()
        before = len(sizes)
        broken_off(model, batch(comm.rank, 3))
        assert len(sizes) > before
        x, y = batch(comm.rank, 3)
        expected = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), y), [*model[2:].parameters()])
        removed = model[0].weight
        optimizer.optimizer.param_groups[0]["params"].remove(removed)
        inner = torch.optim.SGD([removed], 0.1)
        DistributedOptimizer(inner, [("0.weight", removed)], comm, "none", dense_below=0)
        close([p.grad for p in model[2:].parameters()], expected)

    simulate(P, program)


@pytest.mark.parametrize(
    "keep", [lambda g: g, lambda g: g.detach(), lambda g: g.numpy()], ids=["tensor", "view", "array"]
)
def test_a_gradient_that_somebody_holds_is_not_taken(sizes, keep):
    def program(comm):
        model = net()
        optimizer = optimizer_of(comm, model)
        train(comm, model, optimizer, range(3))
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(model, batch(comm.rank, 3)).backward()
        before, mine = len(sizes), [keep(p.grad) for p in model.parameters()]
        loss_of(model, batch(comm.rank, 4)).backward()
        after = [torch.as_tensor(gradient).clone() for gradient in mine]
        optimizer.step()
        assert len(sizes) == before
        close([torch.as_tensor(gradient) for gradient in mine], after, rtol=0, atol=0)

    simulate(1, program)


def test_gradients_that_share_memory_are_not_taken(sizes):
    """Autograd gives both parameters parts of one array."""

    def program(comm):
        first, second = (torch.nn.Parameter(torch.full((40,), 1.0)) for _ in range(2))
        inner = torch.optim.SGD([first, second], 0.1)
        optimizer = DistributedOptimizer(
            inner, [("a", first), ("b", second)], comm, TopK(1.0), bucket_bytes=1, dense_below=0, sparse_step=True
        )
        factors = torch.arange(80.0)
        for _ in range(3):
            optimizer.zero_grad()
            (torch.cat([first, second]) * factors).sum().backward()
            optimizer.step()
        close([torch.cat([first, second]).detach()], [1 - 0.3 * factors], rtol=1e-5, atol=1e-6)

    simulate(2, program)
    assert not sizes


@pytest.mark.parametrize("stage", ["nothing", "compensated", "selected", "settled", "broken"])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_give_back(compressor, stage):
    """At every stage of a reduction; NaN where a pass has failed that may have added a part."""

    def program(comm):
        transport, own = as_transport(comm), copy.deepcopy(compressor)
        layout = Layout(0, (100,), ("a",), ((100,),), np.dtype(np.float64))
        own.bind(layout, transport, StepContext(rates=lambda names: [0.1] * len(names)))
        random = np.random.default_rng(comm.rank)
        for _ in range(3):
            own.allreduce_sum(transport, random.standard_normal(100))
            own.keep()
            own.commit()
        gradient = random.standard_normal(100)
        memory = gradient.copy()
        if stage == "settled":
            own.allreduce_sum(transport, memory)
        elif stage != "nothing":
            acc = own.compensate(memory)
            if stage != "compensated":
                own.compress(acc)
            if stage == "broken":
                acc.formed = None
        own.give_back()
        np.testing.assert_allclose(memory, np.full(100, np.nan) if stage == "broken" else gradient, rtol=1e-12)

    simulate(1 if stage == "broken" else 2, program)


def test_values_in_the_memory_of_the_residual_are_given_back():
    """Entries whose values are those of the residual itself, as a selector of the user's may return them."""
    compressor, layout = TopK(0.5), Layout(0, (8,), ("a",), ((8,),), np.dtype(np.float64))

    def program(comm):
        compressor.bind(layout, as_transport(comm), StepContext())
        memory = np.arange(8.0)
        acc = compressor.compensate(memory).flush()
        compressor.contributed(SparseVector(np.arange(4, dtype=np.uint32), acc.values[:4], 8))
        assert not memory[:4].any()
        compressor.give_back()
        np.testing.assert_array_equal(memory, np.arange(8.0))

    simulate(1, program)
