"""torch.amp.GradScaler as an argument: the loops of one process with the global batch, and refusals on all ranks."""

from functools import partial

import pytest
import torch
from cases import pairwise
from nets import batch, bits, close, loss_of, mean_loss, net, parameters, residuals

import sparsecoll
from sparsecoll import simulate
from sparsecoll.torch import DistributedOptimizer, HookState, SparseSGD
from sparsecoll.torch.compressors import TopKCompressor

P = 3
OPTIONS = [{}, {"overlap": False}]


def made(comm, model, scaler, compressor="none", **options):
    inner = torch.optim.SGD(model.parameters(), 0.1)
    return DistributedOptimizer(inner, model, comm, compressor, grad_scaler=scaler, bucket_bytes=6000, **options)


def sgd(comm, model, scaler):
    return SparseSGD(model.parameters(), 0.1, comm=comm, grad_scaler=scaler)


class Logger(torch.amp.GradScaler):
    """A scaler that also logs learning rates, as a training framework's may do."""

    def rates(self, optimizer):
        return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("given", [False, True])
def test_reading_groups_sends_nothing(given):
    """Rank 0 alone reads the learning rates, in a method of a GradScaler, before gradients are reduced."""

    def program(comm):
        model, scaler = net(), Logger("cpu")
        optimizer = made(comm, model, scaler if given else None, overlap=False)
        loss_of(model, batch(comm.rank, 0)).backward()
        local = model[0].weight.grad.clone()
        rates = scaler.rates(optimizer) if comm.rank == 0 else None
        assert torch.equal(model[0].weight.grad, local)
        optimizer.zero_grad()  # skips the step
        return rates

    assert simulate(2, program).results == [[0.1], None]


def scaled(model, optimizer, scaler, ranks, *, no_sync=False, unscale=False, clip=lambda: None, hit=()):
    """Seven steps; the loss of ranks in `hit` overflows in steps 0 and 4. Returns the scales."""
    scales = []
    for step in range(7):
        optimizer.zero_grad()
        loss = mean_loss(model, ranks, step)
        loss = loss * float("inf") if step in (0, 4) and set(hit) & set(ranks) else loss
        with optimizer.no_sync() if no_sync else torch.enable_grad():
            scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        clip()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


TOPK = TopKCompressor(0.1, "allgather")
LOOPS = [
    (TOPK, unscale, how, (1,))
    for unscale in (False, True)
    for how in ("overlap", "overlap=False", "no_sync", "synchronize")
]
LOOPS += [("none", False, "overlap=False", (1,)), ("none", True, "synchronize", (1,))]
LOOPS += [(TOPK, True, "overlap", ()), ("none", False, "no_sync", ())]


@pytest.mark.parametrize(("compressor", "unscale", "how", "hit"), LOOPS, ids=str)
def test_all_ranks_skip_the_same_steps(compressor, unscale, how, hit):
    """Those of one process, with its scales; also where gradients are still local when they are unscaled."""

    def scaler_of():
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    alone, scaler = net(), scaler_of()
    expected = scaled(alone, torch.optim.SGD(alone.parameters(), 0.1), scaler, range(P), hit=hit)

    def program(comm):
        model, scaler = net(), scaler_of()
        optimizer = made(comm, model, scaler, compressor, overlap=how not in ("overlap=False", "synchronize"))
        clip = optimizer.synchronize if how == "synchronize" else lambda: None
        options = {"no_sync": how == "no_sync", "unscale": unscale, "clip": clip, "hit": hit}
        assert scaled(model, optimizer, scaler, [comm.rank], **options) == expected
        if compressor == "none":
            close(parameters(model), parameters(alone))
        plain = net()
        other = made(comm, plain, None, compressor)
        for step in range(7):
            if not (hit and step in (0, 4)):
                other.zero_grad()
                loss_of(plain, batch(comm.rank, step)).backward()
                other.step()
        close(parameters(model), parameters(plain))
        waiting = residuals(other)
        close(residuals(optimizer).values(), waiting.values())
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1


@pytest.mark.parametrize(("make", "overlap", "hit"), pairwise([made, sgd], [True, False], [(), (1,)]))
def test_a_scaler_that_was_not_passed_is_refused_on_all_ranks(make, overlap, hit):
    """Whatever it has found; the optimizer goes on without it."""

    def program(comm):
        model, scaler = net(), torch.amp.GradScaler("cpu")
        optimizer = make(comm, model, None, **({} if make is sgd else {"overlap": overlap}))
        start = bits(model)
        loss = loss_of(model, batch(comm.rank, 0)) * (float("inf") if comm.rank in hit else 1.0)
        scaler.scale(loss).backward()
        for unscale in (False, True):
            if unscale:
                scaler.unscale_(optimizer)
            with pytest.raises(RuntimeError, match=r"pass grad_scaler=scaler to (DistributedOptimizer|SparseSGD)"):
                scaler.step(optimizer)
        assert bits(model) == start
        optimizer.zero_grad()
        disabled = torch.amp.GradScaler("cpu", enabled=False)
        disabled.scale(loss_of(model, batch(comm.rank, 1))).backward()
        disabled.step(optimizer)
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1


@pytest.mark.parametrize(
    "make", [partial(made, compressor=TopKCompressor(0.1, "allgather")), sgd], ids=["topk", "SparseSGD"]
)
@pytest.mark.parametrize("later", ["another", "none", "disabled"])
def test_a_step_without_the_scaler_that_was_passed_is_refused(make, later):
    """Residuals got gradients that were divided by its scale: it is as if the step had been skipped."""

    def program(comm):
        model, plain = net(), net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        other = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=later == "another")
        optimizer, sound = make(comm, model, scaler), make(comm, plain, None)
        for step in range(5):
            optimizer.zero_grad()
            used = other if step == 3 else scaler
            used.scale(loss_of(model, batch(comm.rank, step))).backward()
            if step == 3:
                with pytest.raises(RuntimeError, match=r"was given a grad_scaler.* does not take this step"):
                    optimizer.step() if later == "none" else used.step(optimizer)
                continue
            used.step(optimizer)
            used.update()
            sound.zero_grad()
            loss_of(plain, batch(comm.rank, step)).backward()
            sound.step()
        optimizer.zero_grad()
        close(parameters(model), parameters(plain))
        close(residuals(optimizer).values(), residuals(sound).values())

    simulate(2, program)


def test_what_is_no_scaler_is_refused_on_all_ranks():
    def program(comm):
        model, scaler = net(), torch.amp.GradScaler("cpu")
        for make in (made, sgd):
            with pytest.raises(TypeError, match=r"grad_scaler: expected a torch\.amp\.GradScaler or None, got 3"):
                make(comm, model, 3)
            with pytest.raises(sparsecoll.CommunicationError, match="grad_scaler"):
                make(comm, model, scaler if comm.rank else None)
        with pytest.raises(TypeError, match="grad_scaler"):
            HookState(comm, named_parameters=model, grad_scaler="scaler")
        disabled = torch.amp.GradScaler("cpu", enabled=False)
        made(comm, model, disabled if comm.rank else None).close()
        for make in (made, sgd):
            asks = [make(comm, net(), given)._step_supports_amp_scaling for given in (None, disabled, scaler)]
            assert asks == [True, False, True]  # with means, the last one changes

    simulate(2, program)


def test_a_closed_optimizer_leaves_the_scaler_to_each_rank():
    def program(comm):
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=4.0)
        for given in (None, scaler):
            optimizer = made(comm, model, given)
            optimizer.close()
            before = bits(model)
            scaler.scale(loss_of(model, batch(comm.rank, 0))).backward()
            scaler.step(optimizer)
            scaler.update()
            assert bits(model) != before

    simulate(2, program)


def test_ranks_have_one_scale_after_join():
    """Who leaves early makes fewer updates."""

    def program(comm):
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        optimizer = made(comm, model, scaler)
        for epoch in range(2):
            with optimizer.join():
                for step in range(2 + (comm.rank == 0)):
                    optimizer.zero_grad()
                    scaler.scale(loss_of(model, batch(comm.rank, 10 * epoch + step))).backward()
                    scaler.step(optimizer)
                    scaler.update()
        state = scaler.state_dict()
        return state["scale"], state["_growth_tracker"], bits(model)

    results = simulate(2, program).results
    assert results[0] == results[1] and results[0][0] == 256.0


@pytest.mark.parametrize("compressor", ["none", "qsgd"])
@pytest.mark.parametrize("how", ["scales", "unscale_"])
def test_gradients_of_different_scales_are_refused_on_all_ranks(compressor, how):
    """Their sum would be divided by another scale on each rank."""

    def program(comm):
        model = net(dtype=torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10 if how == "scales" and comm.rank else 2.0**12)
        optimizer = made(comm, model, scaler, compressor, overlap=False)
        scaler.scale(loss_of(model, batch(comm.rank, 0, torch.float32))).backward()
        if how == "unscale_" and comm.rank == 0:
            scaler.unscale_(optimizer)
        with pytest.raises(sparsecoll.CommunicationError, match="scale of gradients: expected the same value"):
            scaler.step(optimizer)

    simulate(2, program)
