"""What becomes of the residuals of sharded models: steps that are taken, skipped and fail, and checkpoints."""

import pytest
import torch
from sharded_models import (
    HYBRID,
    LAYOUTS,
    MIDDLE,
    TORCHRUN,
    Chain,
    Linear,
    W,
    attached,
    batch,
    conserved,
    mean_gradients,
    train,
    whole,
)
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import sparsecoll.torch.fsdp
from sparsecoll import NonFiniteError

pytestmark = [pytest.mark.mpi, TORCHRUN, pytest.mark.usefixtures("process_group")]


@LAYOUTS
def test_nothing_is_lost(comm, nodes):
    """Also if gradients are accumulated with and without reductions, and steps are skipped."""
    model, reductions = attached(nodes, sparsecoll.torch.compressors.TopKCompressor(0.1), Linear())
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before, taken = whole(model.parameters()), []

    def back(step):
        model(batch(comm.rank, step)[0]).backward()
        taken.append(step)

    for step in range(3):
        back(step)
        optimizer.step()
        optimizer.zero_grad()
    conserved(model, reductions, taken, before)
    model.set_requires_gradient_sync(False)
    back(3)
    model.set_requires_gradient_sync(True)
    back(4)
    model.set_is_last_backward(False)
    back(5)  # reduced, and added to what is there
    model.set_is_last_backward(True)
    optimizer.step()
    conserved(model, reductions, taken, before)
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch(comm.rank, 6)[0]).backward()
        optimizer.zero_grad(set_to_none=set_to_none)  # in place of step
    back(7)
    optimizer.step()
    optimizer.zero_grad()
    back(8)
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad)  # by hand
    model.zero_grad()
    conserved(model, reductions, taken, before)


@LAYOUTS
def test_the_step_that_torchs_checkpoints_take_is_no_step(comm, nodes):
    """After a step that is skipped, and after one by hand."""
    model, reductions = attached(nodes, sparsecoll.torch.compressors.TopKCompressor(0.1), Linear())
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = whole(model.parameters())
    for step in range(6):
        model(batch(comm.rank, step)[0]).backward()
        if step % 3 == 0:
            optimizer.step()
        elif step % 3 == 1:
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad)
        optimizer.zero_grad()
        get_optimizer_state_dict(model, optimizer)
    conserved(model, reductions, [0, 1, 3, 4], before)


@LAYOUTS
def test_gradients_are_accumulated_also_where_a_part_of_the_mean_is_zero(comm, nodes):
    """The first outputs have all the large gradients, so that nothing is sent of what other ranks have."""

    class Uneven(Linear):
        def forward(self, x):
            return super().forward(x) * 1e-3 + self.a(x)[:, 0].sum()

    model, reductions = attached(nodes, sparsecoll.torch.compressors.TopKCompressor(0.02), Uneven())
    optimizer = torch.optim.SGD(model.parameters(), 1.0, foreach=True)
    before = whole(model.parameters())
    for step in range(4):
        model(batch(comm.rank, step)[0]).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    model(batch(comm.rank, 4)[0]).backward()
    optimizer.zero_grad(set_to_none=False)  # in place of step
    model(batch(comm.rank, 5)[0]).backward()
    optimizer.step()
    conserved(model, reductions, [0, 1, 2, 3, 5], before, Uneven())


@LAYOUTS
def test_layers_that_are_frozen_or_unused(comm, nodes):
    """Also right after a step that was skipped. A layer whose gradient is zero is sent what waits in its residual."""
    model, reductions = attached(nodes, sparsecoll.torch.compressors.TopKCompressor(0.1), Linear())
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = whole(model.parameters())
    model(batch(comm.rank, 0)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(batch(comm.rank, 2)[0]).backward()
    optimizer.zero_grad()  # in place of step
    for p in model.b.parameters():
        p.requires_grad_(False)
    for _ in range(3):
        (model(batch(comm.rank, 0)[0]) * 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    for p in model.b.parameters():
        p.requires_grad_(True)
    model(batch(comm.rank, 1)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    conserved(model, reductions, [0, 1], before)


class Idle(torch.nn.Module):
    """Two parameters in one group, and in one bucket of codes, one of which is not used."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = (torch.nn.Parameter(torch.ones(8, 6)) for _ in range(2))

    def forward(self, x):
        return x @ self.used.T


@pytest.mark.parametrize("nodes", HYBRID)
def test_noise_of_codes_without_a_zero_moves_no_unused_parameter(comm, nodes):
    model, reductions = attached(nodes, sparsecoll.torch.compressors.efsignsgd(), Idle())
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.0)
    for step in range(4):
        model(batch(comm.rank, step)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    used, idle = whole(model.parameters())
    assert (idle == 1).all() and (used != 1).any()
    assert not reductions.state_dict()["tensors"]["residual"]["idle"].full_tensor().any()


@LAYOUTS
def test_an_exception_within_back_propagation(comm, nodes):
    """If it is caught on all ranks, training continues after two calls, and residuals are as they were."""
    model, reductions = attached(nodes, sparsecoll.torch.compressors.TopKCompressor(0.1), Chain())
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = reductions.state_dict()

    def fail(gradient):
        raise ArithmeticError("no memory")

    hidden = []
    handle = model.a.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    loss = model(batch(comm.rank, 0)[0])
    handle.remove()
    hidden[0].register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss.backward()
    assert model.b.weight.grad is not None  # reduced before
    model.reset_iter_state()
    reductions.discard()
    optimizer.zero_grad()
    for name, t in reductions.state_dict()["tensors"]["residual"].items():
        assert torch.equal(t.to_local(), before["tensors"]["residual"][name].to_local())
    for step in range(2):
        model(batch(comm.rank, step)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert reductions.state_dict()["step"] == 2


@LAYOUTS
def test_what_is_not_finite_is_raised_on_all_ranks(comm, nodes):
    model, reductions = attached(nodes, "topk", Linear())
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = whole(model.parameters())
    data = batch(comm.rank, 0)[0]
    bad = float("nan") if comm.rank == W - 1 else 1.0
    handle = model.b.register_forward_pre_hook(lambda module, inputs: (inputs[0] * bad,))
    with pytest.raises(NonFiniteError, match=r"gradient of 'b\.weight.*expected finite values, got NaN or infinity"):
        model(data).backward()
    handle.remove()
    assert all(torch.isnan(p.grad.to_local()).all() for p in model.parameters())
    optimizer.zero_grad()
    model(data).backward()
    optimizer.step()
    optimizer.zero_grad()
    conserved(model, reductions, [0], before)


@LAYOUTS
def test_a_grad_scaler_skips_the_step_on_all_ranks(comm, nodes):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    model, reductions = attached(nodes, "topk", Linear(), grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = whole(model.parameters())
    for step in range(3):
        loss = model(batch(comm.rank, step)[0])
        bad = float("inf") if step == 1 and comm.rank == 0 else 1.0
        scaler.scale(loss * bad).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 32
    conserved(model, reductions, [0, 2], before)


@LAYOUTS
@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float16, None), (torch.float64, None), (torch.float32, 3.0), (torch.float64, 3.0)]
)
def test_residuals_do_not_have_the_factors_of_torch(comm, nodes, dtype, factor):
    """It divides float16 and float64 before a sum and after it, and by another factor if that is set."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=dtype)}
    model, reductions = attached(nodes, sparsecoll.torch.compressors.TopKCompressor(0.1), Linear(), options=options)
    net, shards = Linear(), W // (nodes or 1)
    if factor is not None and shards > 1:  # torch divides twice if there is nothing to sum
        model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(True)
        net.register_forward_hook(lambda module, inputs, output: output * W / factor)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = whole(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(batch(comm.rank, step)[0]).backward()
        optimizer.step()
    rounding = 1e-2 if dtype == torch.float16 else 1e-5
    conserved(model, reductions, range(3), before, net, rtol=rounding, atol=rounding)


@LAYOUTS
def test_a_grad_scaler_keeps_small_gradients_in_float16(comm, nodes):
    """The mean is scaled before it is rounded."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}
    model, _ = attached(
        nodes, sparsecoll.torch.compressors.TopKCompressor(1.0), Linear(), options=options, grad_scaler=scaler
    )
    scaler.scale(model(batch(comm.rank, 0)[0]) * 1e-7).backward()
    for own, expected in zip(whole(p.grad for p in model.parameters()), mean_gradients([0], Linear()), strict=True):
        torch.testing.assert_close(own / scaler.get_scale() * 1e7, expected, rtol=1e-2, atol=1e-2)


class Wide(torch.nn.Module):
    """Layers of which few values enter a sum; the bias of the last one is on one rank, the others' parts are empty."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = torch.nn.Linear(6, 700), torch.nn.Linear(6, 1)

    def forward(self, x):
        return (self.a(x) * torch.arange(700) / 100).sum() + self.b(x).sum()


def through_data(params):
    for p in params:
        p.data.add_(p.grad, alpha=-1.0)


def through_local(params):
    for p in params:
        p.detach().to_local().numpy()[...] -= p.grad.to_local().numpy()


@torch.no_grad()
def in_place(params):
    for p in params:
        p.sub_(p.grad)


@torch.no_grad()
def foreach(params):
    torch._foreach_add_(list(params), [p.grad for p in params], alpha=-1.0)


@torch.no_grad()
def copied(params):
    for p in params:
        p.copy_(p - p.grad)


def only_the_last(params):
    """Nothing changes where its part is empty."""
    through_local(params[-1:])


@LAYOUTS
@pytest.mark.parametrize("update", [through_data, through_local, in_place, foreach, copied], ids=lambda f: f.__name__)
def test_a_loop_that_updates_parameters_by_itself_loses_nothing(comm, nodes, update, caplog):
    """Nor does it if it skips steps, or reduces twice before one."""
    for how in ("model", "none", "in place"):
        model, reductions = attached(nodes, sparsecoll.torch.compressors.TopKCompressor(0.02), Wide())
        before = whole(model.parameters())
        for step in range(9):
            model(batch(comm.rank, step)[0]).backward()
            if step % 3 == 0:
                continue  # gradients add up
            if step != 5:  # which is skipped
                update(list(model.parameters()))
            for p in model.parameters():
                if how == "none":
                    p.grad = None
            if how != "none":
                model.zero_grad(set_to_none=how == "model")
        conserved(model, reductions, [*range(5), *range(6, 9)], before, Wide(), rtol=1e-4, atol=1e-4)
    assert not caplog.records


@LAYOUTS
def test_a_change_that_one_rank_alone_sees_is_a_step_on_all(comm, nodes):
    model, reductions = attached(nodes, sparsecoll.torch.compressors.TopKCompressor(1.0), Wide())
    for step in range(3):
        model(batch(comm.rank, step)[0]).backward()
        only_the_last(list(model.parameters()))
        model.zero_grad()
    assert reductions.state_dict()["step"] == 3


@LAYOUTS
def test_optimizers_of_some_parameters_in_turn_lose_nothing(comm, nodes):
    """The gradients of the other's parameters are thrown away."""
    model, reductions = attached(nodes, sparsecoll.torch.compressors.TopKCompressor(0.02), Wide())
    both = [torch.optim.SGD(layer.parameters(), 1.0) for layer in (model.a, model.b)]
    before = whole(model.parameters())
    for step in range(6):
        model(batch(comm.rank, step)[0]).backward()
        both[step % 2].step()
        model.zero_grad(set_to_none=step % 3 == 0)
    after, waits = whole(model.parameters()), reductions.state_dict()["tensors"]["residual"]
    for i, (name, _) in enumerate(model.named_parameters()):
        gradient = mean_gradients(range(i // 2, 6, 2), Wide())[i]
        moved = before[i] - after[i] + waits[name].full_tensor().mean(0)
        torch.testing.assert_close(moved, gradient, rtol=1e-4, atol=1e-4)


@LAYOUTS
@pytest.mark.parametrize("discards", [True, False])
def test_a_change_that_is_no_step_is_told_unless_it_is_discarded(comm, nodes, discards):
    """SAM: a step up, a second back-propagation, a step down."""
    model, reductions = attached(nodes, sparsecoll.torch.compressors.TopKCompressor(0.02), Wide())
    optimizer, before = torch.optim.SGD(model.parameters(), 1.0), whole(model.parameters())

    def step(i):
        for sign in (1.0, -1.0):
            model(batch(comm.rank, i)[0]).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(sign)
            if sign > 0:
                if discards:
                    reductions.discard()
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()

    if discards:
        step(0)
        step(1)
        conserved(model, reductions, [0, 1], before, Wide(), rtol=1e-4, atol=1e-4)
    else:
        with pytest.raises(RuntimeError, match=r"call discard\(\) of what attach\(\) returned"):
            step(0)


def test_mistakes_with_momentum_and_adam_are_told(comm, caplog):
    for make, compressor, text in [
        (
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
            "nesterovtopk",
            "nesterovtopk has a momentum of 0.7, and SGD",
        ),
        (torch.optim.AdamW, "oktopk", "oktopk with AdamW: gradients"),
    ]:
        model, _ = attached(MIDDLE, compressor)
        train(model, make(model.parameters()), comm.rank, range(2))
        assert caplog.text.count(text) == (comm.rank == 0)
