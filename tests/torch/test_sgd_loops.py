"""SparseSGD in training loops: GradScaler, clipping, skipped steps, two optimizers, different numbers of batches."""

import logging

import pytest
import torch
from nets import P, batch, bits, close, compared, loss_of, mean_loss, net, parameters, train

from sparsecoll import CommunicationError, simulate
from sparsecoll.torch import DistributedOptimizer, LocalOptimizer, SparseSGD


@pytest.mark.parametrize(("hit", "unscale"), [((), False), ((1,), False), ((1,), True), (range(P), False)], ids=str)
def test_all_ranks_skip_a_step_in_which_any_overflows(hit, unscale):
    """All ranks skip the step in which any has an overflow, all scales change alike, and updates have no scale."""

    def run(make, ranks, comm):
        model = net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
        optimizer = make(model.parameters(), 0.2, 0.9, **({"grad_scaler": scaler} if comm else {}))
        scales = []
        for step in range(7):
            optimizer.zero_grad()
            here = [rank for rank in ranks if (rank, step) != (2, 4)]  # that one has no data
            if here:
                loss = mean_loss(model, here, step) * len(here) / len(ranks)
                scaler.scale(loss * float("inf") if step == 3 and set(hit) & set(ranks) else loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(torch.tensor(scaler.get_scale()))
        assert not hasattr(optimizer, "found_inf")
        return [*scales, *parameters(model)]

    compared(run, algo="dense")
    compared(run, algo="oktopk", density=1.0)


def test_grad_scaler_after_a_failed_step():
    """What the scaler sets on the optimizer does not divide the next step's gradients twice."""

    def program(comm):
        model = net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = SparseSGD(model.parameters(), 0.2, comm=comm, algo="dense", grad_scaler=scaler)
        before = parameters(model)
        for fails in (True, False):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch(comm.rank, 0))).backward()
            optimizer.param_groups[0]["lr"] = 0.1 if fails and comm.rank else 0.2
            if fails:
                with pytest.raises(CommunicationError):
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
        return [(a - b) / 0.2 for a, b in zip(before, parameters(model), strict=True)]

    model = net()
    mean_loss(model, range(P), 0).backward()
    for moved in simulate(P, program).results:
        close(moved, [p.grad for p in model.parameters()])


def test_clipping_each_ranks_gradients_is_warned_of_once(caplog):
    def program(comm, clip):
        model = net()
        scaler = torch.amp.GradScaler("cpu", enabled=not clip)
        optimizer = SparseSGD(model.parameters(), 0.1, comm=comm, grad_scaler=scaler)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step != 1)
            for part in range(2):
                scaler.scale(loss_of(model, batch(comm.rank, 2 * step + part))).backward()
            scaler.unscale_(optimizer)
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        model[0].weight.grad = torch.ones_like(model[0].weight)
        scaler.step(optimizer)

    with caplog.at_level(logging.WARNING, "sparsecoll"):
        simulate(P, lambda comm: program(comm, clip=False))
        assert not caplog.records
        simulate(1, lambda comm: program(comm, clip=True))
        assert not caplog.records
        simulate(P, lambda comm: program(comm, clip=True))
    assert len(caplog.records) == 1 and "changed between backward() and step()" in caplog.text


def test_skipped_steps_hooks_and_groups():
    """Steps that all ranks skip, step hooks, a new list of groups."""

    def run(make, ranks, comm):
        model = net()
        optimizer = make(model.parameters(), 0.2, 0.9)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        for step in range(5):
            mean_loss(model, ranks, step).backward()
            if step != 2:
                optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
        assert seen == ["before", "after"] * 4
        return parameters(model)

    compared(run, algo="dense")


def test_two_optimizers_on_one_communicator():
    """A generator and a discriminator, of which one has its gradients off in turn."""

    def run(make, ranks, comm):
        first, second = net(), net(1)
        optimizers = [make(m.parameters(), 0.1, 0.9) for m in (first, second)]
        for step in range(5):
            for mine, other, optimizer in ((first, second, optimizers[0]), (second, first, optimizers[1])):
                other.requires_grad_(False)
                optimizer.zero_grad()
                both = [
                    loss_of(mine, batch(rank, step)) + (mine(batch(rank, step)[0]) * other(batch(rank, step)[0])).mean()
                    for rank in ranks
                ]
                (sum(both) / len(ranks)).backward()
                optimizer.step()
                other.requires_grad_(True)
        return parameters(first) + parameters(second)

    compared(run, algo="dense")


@pytest.mark.parametrize("algo", ["dense", "oktopk"])
def test_missing_batches_count_as_zero_in_join(algo):
    """Ranks with 2, 5 and 3 batches: as one process in which missing batches count as zero."""
    counts = (2, 5, 3)
    plain = net()
    inner = torch.optim.SGD(plain.parameters(), 0.2, 0.9)
    for step in range(5):
        inner.zero_grad()
        (sum(loss_of(plain, batch(r, step)) for r in range(P) if step < counts[r]) / P).backward()
        inner.step()

    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.2, 0.9, comm=comm, algo=algo, density=1.0)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        with optimizer.join():
            for step in range(counts[comm.rank]):
                train(comm, model, optimizer, [step])
                schedule.step()
        first = parameters(model)
        train(comm, model, optimizer, range(5, 7))
        return first, bits(model)

    results = simulate(P, program).results
    assert len({b for _, b in results}) == 1
    for first, _ in results:
        close(first, parameters(plain))


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("other", ["SparseSGD", "LocalOptimizer"])
def test_a_part_of_a_model_that_another_optimizer_steps_is_reduced_by_that_one_alone(other, order):
    """DistributedOptimizer is given the whole model, and steps the rest: as if it had been given the rest alone."""

    def run(comm, whole):
        model = net()
        part, rest = model[:2], model[2:]

        def make_other():
            if other == "SparseSGD":
                return SparseSGD(part.parameters(), 0.1, comm=comm, density=0.2)
            return LocalOptimizer(torch.optim.SGD(part.parameters(), 0.1), part, comm, every=3)

        def make_whole():
            named = model if whole else [(name, p) for name, p in model.named_parameters() if int(name[0]) > 1]
            return DistributedOptimizer(torch.optim.SGD(rest.parameters(), 0.1), named, comm, "none")

        makers = [make_other, make_whole] if order == "before" else [make_whole, make_other]
        optimizers = [make() for make in makers]
        for step in range(7):
            model.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            local = [p.grad.clone() for p in part.parameters()]
            for optimizer in optimizers:
                optimizer.step()
        if other == "LocalOptimizer":
            optimizers[order == "after"].synchronize()
        return bits(model), local[0].sum().item()

    results = simulate(P, lambda comm: (run(comm, True), run(comm, False))).results
    assert len({text for pair in results for text, _ in pair}) == 1
    assert len({value for (_, value), _ in results}) == P  # gradients of the part stay local


def test_a_parameter_that_distributed_optimizer_steps_from_now_on_is_refused_by_sparse_sgd():
    def program(comm):
        model = net()
        first = SparseSGD(model.parameters(), 0.1, comm=comm)
        second = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm)
        loss_of(model, batch(comm.rank, 0)).backward()
        with pytest.raises(RuntimeError, match="let only one optimizer update it"):
            first.step()
        second.step()
        third = SparseSGD(model.parameters(), 0.1, comm=comm)
        loss_of(model, batch(comm.rank, 1)).backward()
        third.step()
        with pytest.raises(RuntimeError, match="let only one optimizer update it"):
            second.step()
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1


@pytest.mark.parametrize("at_once", [True, False])
def test_a_layer_that_has_left_sparse_sgd_may_have_another_optimizer(at_once):
    def program(comm):
        model = net()
        first = SparseSGD(model.parameters(), 0.1, comm=comm)
        train(comm, model, first, range(1))
        left = list(model[4].parameters())
        first.param_groups[0]["params"] = [*model[:4].parameters()]
        if not at_once:
            train(comm, model, first, range(1, 2))
        second = DistributedOptimizer(torch.optim.SGD(left, 0.1), zip("ab", left, strict=True), comm)
        for step in range(2, 5):
            loss_of(model, batch(comm.rank, step)).backward()
            first.step()
            second.step()
            model.zero_grad()
        return bits(model)

    assert len(set(simulate(P, program).results)) == 1


def test_two_sparse_sgds_may_step_the_same_parameters_in_turn():
    def run(make, ranks, comm):
        model = net()
        optimizers = [make(model.parameters(), lr) for lr in (0.1, 0.2)]
        for step in range(4):
            model.zero_grad()
            (sum(loss_of(model, batch(rank, step)) for rank in ranks) / len(ranks)).backward()
            optimizers[step % 2].step()
        return parameters(model)

    compared(run, algo="dense")


def test_ranks_that_have_left_a_join_may_have_other_learning_rates():
    """They take no steps of a schedule, and their rates are not used."""

    def program(comm):
        model = net()
        optimizer = SparseSGD(model.parameters(), 0.1, 0.9, comm=comm)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        with optimizer.join():
            for step in range(2 + comm.rank):
                train(comm, model, optimizer, [step])
                schedule.step()
        return bits(model), optimizer.param_groups[0]["lr"]

    results = simulate(3, program).results
    assert len(set(results)) == 1
