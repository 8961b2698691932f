"""OneBitAdam in loops: schedules, groups, failures, join, and what is refused."""

import contextlib
import copy
import logging
from functools import partial

import pytest
import torch
from nets import batch, bits, close, loss_of, net, parameters
from test_onebit import EVERY, WARM_UP, go_on, one_bit, trained

from sparsecoll import simulate
from sparsecoll.errors import CommunicationError, NonFiniteError
from sparsecoll.torch import OneBitAdam

LATER = WARM_UP + 2  # a step after the warm-up


def test_a_schedule_goes_on_after_the_warm_up_and_groups_keep_their_options():
    def program(comm):
        model = net(seed=comm.rank)
        groups = [
            {"params": model[0].parameters(), "weight_decay": 0.5, "lr": 0.02},
            {"params": model[2].parameters(), "betas": (0.5, 0.9)},
            {"params": model[4].parameters()},
        ]
        optimizer = OneBitAdam(groups, warm_up=WARM_UP, every=EVERY, model=model, comm=comm)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        mine = optimizer.param_groups
        for step in range(2 * WARM_UP + 1):
            go_on(comm, model, optimizer, step, step + 1)
            schedule.step()
        assert all(a is b for a, b in zip(mine, optimizer.param_groups, strict=True))
        rates = [rate / (2 * WARM_UP + 2) for rate in (0.02, 1e-3, 1e-3)]
        assert [group["lr"] for group in mine] == pytest.approx(rates)
        assert mine[0]["weight_decay"] == 0.5 and mine[1]["betas"] == (0.5, 0.9)
        before = parameters(model)
        mine[0]["lr"] = 0.0
        go_on(comm, model, optimizer, 20, 21)
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert moved == [False, False, True, True, True, True]
        return bits(model)

    assert len(set(simulate(3, program).results)) == 1


def test_a_rate_that_is_low_at_the_end_of_the_warm_up_makes_no_large_step():
    """Residuals of the warm-up are in units of parameters: they are divided by a rate."""

    def program(comm, dip):
        model = net(seed=comm.rank)
        optimizer = one_bit(comm, model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: dip if step == WARM_UP - 1 else 1.0)
        for step in range(WARM_UP + 1):
            go_on(comm, model, optimizer, step, step + 1)
            schedule.step()
        residuals = optimizer.state_dict()["sparsecoll"]["tensors"]["residual"]
        return float(torch.cat([t.flatten() for t in residuals.values()]).norm())

    usual, low = (simulate(2, partial(program, dip=dip)).results[0] for dip in (1.0, 1e-6))
    assert low < 2 * usual


def test_weight_decay_does_not_depend_on_the_moments():
    """A step with weight decay is one without it and w (1 - lr decay)."""

    def program(comm):
        model, optimizer = trained(comm, WARM_UP)
        saved, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
        ends = []
        for decay in (0.0, 0.7):
            again, other = trained(comm, WARM_UP)
            again.load_state_dict(weights)
            other.load_state_dict(copy.deepcopy(saved))
            other.param_groups[0]["weight_decay"] = decay
            go_on(comm, again, other, LATER, LATER + 1)
            ends.append(parameters(again))
        close(ends[1], [a - 0.01 * 0.7 * w for a, w in zip(ends[0], weights.values(), strict=True)])

    simulate(2, program)


@pytest.mark.parametrize("steps", [WARM_UP - EVERY, LATER])
def test_gradients_accumulate_with_and_without_no_sync(steps):
    def program(comm, context):
        model, optimizer = trained(comm, steps)
        optimizer.zero_grad()
        with context(optimizer):
            (loss_of(model, batch(comm.rank, 30)) / 2).backward()
        (loss_of(model, batch(comm.rank, 31)) / 2).backward()
        optimizer.step()
        optimizer.synchronize()
        return bits(model)

    contexts = lambda optimizer: optimizer.no_sync(), lambda optimizer: contextlib.nullcontext()
    plain, other = (simulate(2, lambda comm, c=c: program(comm, c)).results for c in contexts)
    assert plain == other and len(set(plain)) == 1


@pytest.mark.parametrize("steps", [0, LATER])
def test_a_closure_is_as_a_step_without_one(steps):
    def program(comm, closes):
        model, optimizer = trained(comm, steps)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch(comm.rank, 30))
            loss.backward()
            return loss

        if closes:
            loss = optimizer.step(closure)
            losses = comm.allgather(float(loss.detach()))
            assert (len(set(losses)) == 1) == (steps == LATER)
        else:
            closure()
            optimizer.step()
        optimizer.synchronize()
        return bits(model)

    first, second = (simulate(2, lambda comm, c=c: program(comm, c)).results for c in (True, False))
    assert first == second and len(set(first)) == 1


@pytest.mark.parametrize("steps", [EVERY, LATER])
def test_nan_on_one_rank_fails_on_all_and_discard_gives_the_step_up(steps):
    def program(comm):
        model, optimizer = trained(comm, steps)
        kept = parameters(model)
        with pytest.raises(NonFiniteError, match=r"rank 1: (change of parameter|gradient of)"):
            for step in range(EVERY):
                optimizer.zero_grad()
                loss = loss_of(model, batch(comm.rank, 30 + step))
                (loss * (float("nan") if comm.rank == 1 else 1.0)).backward()
                optimizer.step()
        optimizer.discard()
        close(parameters(model), kept, 0, 0)
        go_on(comm, model, optimizer, 40, 40 + WARM_UP)
        assert not optimizer.warming_up
        return bits(model)

    assert len(set(simulate(3, program).results)) == 1


def test_second_moments_that_are_not_finite_do_not_end_the_warm_up():
    def program(comm):
        model, optimizer = trained(comm, WARM_UP - 1)
        if comm.rank == 1:
            optimizer.state[model[0].weight]["exp_avg_sq"][0, 0] = float("inf")
        with pytest.raises(NonFiniteError, match=r"second moments of '0\.weight'.*discard\(\)"):
            go_on(comm, model, optimizer, WARM_UP - 1, WARM_UP)
        assert optimizer.warming_up
        optimizer.discard()
        go_on(comm, model, optimizer, WARM_UP, WARM_UP + EVERY)
        assert not optimizer.warming_up
        go_on(comm, model, optimizer, WARM_UP + EVERY, 2 * WARM_UP)
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1


@pytest.mark.parametrize("counts", [(2, 3, 4), (4, 9, 16), (9, 10, 16), (16, 1, 2)])
def test_ranks_may_take_different_numbers_of_steps_in_join(counts):
    def program(comm):
        model, optimizer = trained(comm, 0, verify=1)
        with optimizer.join():
            go_on(comm, model, optimizer, 0, counts[comm.rank])
        first = bits(model)
        go_on(comm, model, optimizer, 20, 20 + 2 * WARM_UP)
        return first, bits(model)

    assert len(set(simulate(3, program).results)) == 1


def test_an_exception_in_join_is_raised_on_all_ranks():
    def program(comm):
        model, optimizer = trained(comm, LATER)
        with pytest.raises((KeyError, CommunicationError), match="here"), optimizer.join():
            go_on(comm, model, optimizer, 0, 1 + comm.rank)
            if comm.rank == 0:
                raise KeyError("here")
            go_on(comm, model, optimizer, 4, 9)

    simulate(2, program)


@pytest.mark.parametrize("steps", [EVERY, LATER])
def test_ranks_go_on_on_another_communicator(steps):
    def program(comm):
        model, optimizer = trained(comm, steps)
        half = comm.Split(comm.rank % 2, comm.rank)
        optimizer.move(half)
        go_on(half, model, optimizer, steps, 3 * WARM_UP)
        return comm.rank % 2, bits(model)

    assert len(set(simulate(4, program).results)) == 2


def test_a_rank_in_another_stage_is_refused_in_a_move():
    def program(comm):
        alone = comm.Split(comm.rank, 0)
        model = net()
        optimizer = one_bit(alone, model)
        go_on(alone, model, optimizer, 0, LATER if comm.rank else EVERY)
        with pytest.raises(CommunicationError, match="warming up"):
            optimizer.move(comm)

    simulate(2, program)


def test_parameters_of_groups_added_and_frozen_in_the_warm_up_take_part():
    def program(comm):
        model = net(seed=comm.rank)
        model[0].requires_grad_(False)
        optimizer = one_bit(comm, model)
        go_on(comm, model, optimizer, 0, EVERY)
        extra = torch.nn.Parameter(torch.full((5,), float(comm.rank)))
        optimizer.add_param_group({"params": [extra]}, [("extra", extra)])
        model[0].requires_grad_(True)
        model[2].requires_grad_(False)
        for step in range(EVERY, LATER + 2):
            optimizer.zero_grad()
            (loss_of(model, batch(comm.rank, step)) + (comm.rank + 1) * extra.square().sum()).backward()
            optimizer.step()
        before = parameters(model)
        model[2].requires_grad_(True)  # which has moments
        go_on(comm, model, optimizer, LATER + 2, LATER + 4)
        assert not torch.equal(before[2], model[2].weight)
        with pytest.raises(RuntimeError, match="add_param_group: expected a call in the warm-up"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        return bits(model), extra.tolist()

    assert len({repr(result) for result in simulate(3, program).results}) == 1


def test_a_parameter_without_gradients_in_the_warm_up_is_refused_afterwards_and_stays_until_then():
    def program(comm):
        model = net(seed=comm.rank)
        model[0].requires_grad_(False)
        optimizer = one_bit(comm, model)
        go_on(comm, model, optimizer, 0, LATER)
        model[0].requires_grad_(True)
        before = bits(model)
        for _ in range(2):
            model.zero_grad()
            loss_of(model, batch(comm.rank, LATER)).backward()
            with pytest.raises(CommunicationError, match=r"rank \d.*parameter '0.*expected gradients during the warm"):
                optimizer.step()
        assert bits(model) == before
        model[0].requires_grad_(False)
        go_on(comm, model, optimizer, LATER, LATER + 2)
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1


def test_a_parameter_that_no_rank_uses_stays_as_it_is():
    def program(comm):
        model = net(seed=comm.rank)
        model.register_parameter("unused", torch.nn.Parameter(torch.ones(40)))
        model.register_parameter("empty", torch.nn.Parameter(torch.ones(0, 3)))
        optimizer = one_bit(comm, model)
        go_on(comm, model, optimizer, 0, 2 * WARM_UP + 2)
        assert model.unused.tolist() == [1.0] * 40
        return bits(model)

    assert len(set(simulate(3, program).results)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_other_dtypes(dtype):
    def program(comm):
        model = net(seed=comm.rank, dtype=dtype)
        optimizer = one_bit(comm, model)
        first = float(loss_of(model, batch(0, 0, dtype)))
        for step in range(4 * WARM_UP):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step % 2, dtype)).backward()
            optimizer.step()
        assert float(loss_of(model, batch(0, 0, dtype))) < 0.9 * first
        return bits(model)

    assert len(set(simulate(2, program).results)) == 1


def test_wrong_arguments_are_refused_on_all_ranks():
    def program(comm):
        model = net()
        wrong = [
            ({"warm_up": 0}, "warm_up"),
            ({"every": 0}, "every"),
            ({"bits": 3}, "bits"),
            ({"scale": -1.0}, "scale"),
        ]
        for options, name in [*wrong, ({"bucket": 0}, "bucket"), ({"verify": -1}, "verify")]:
            with pytest.raises(ValueError, match=name):
                one_bit(comm, model, **(options if comm.rank == 1 else {}))
        with pytest.raises(ValueError, match="learning rate"):
            OneBitAdam(model.parameters(), -1.0 if comm.rank else 1e-3, warm_up=5, comm=comm)
        for name, values in {"warm_up": (4, 9), "every": (2, 3), "scale": (1.0, 2.0), "bits": (4, 8)}.items():
            with pytest.raises(CommunicationError, match=name):
                one_bit(comm, model, **{name: values[comm.rank]})
        with pytest.raises(CommunicationError, match="param_groups"):
            OneBitAdam(model.parameters(), betas=(0.9, 0.99 + 0.001 * comm.rank), warm_up=5, comm=comm)
        table = torch.nn.Embedding(9, 4, sparse=True)
        with pytest.raises(ValueError, match=r"dense gradients.*SparseAdam"):
            OneBitAdam(table.parameters(), warm_up=5, comm=comm)

    simulate(2, program)


@pytest.mark.parametrize("steps", [0, LATER])
def test_scalers_copies_and_steps_after_close_are_refused(steps):
    def program(comm):
        model, optimizer = trained(comm, steps)
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(RuntimeError, match=r"takes no GradScaler.*bfloat16"):
            scaler.scale(loss_of(model, batch(0, 0))).backward()
            scaler.step(optimizer)
        with pytest.raises(TypeError, match="OneBitAdam cannot be pickled"):
            copy.deepcopy(optimizer)
        assert f"warming_up={steps == 0}" in repr(optimizer)
        optimizer.close()
        with pytest.raises(RuntimeError, match="after close"):
            optimizer.step()

    simulate(2, program)


@pytest.mark.parametrize("steps", [0, LATER])
def test_clipping_acts_on_each_ranks_own_gradients(steps, caplog):
    def program(comm):
        model, optimizer = trained(comm, steps)
        loss_of(model, batch(comm.rank, 30)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.synchronize()
        return bits(model)

    with caplog.at_level(logging.WARNING):
        assert len(set(simulate(2, program).results)) == 1


@pytest.mark.parametrize("skip", ["zero_grad", "discard"])
def test_a_step_that_is_skipped_changes_nothing(skip):
    def program(comm, skips):
        model, optimizer = trained(comm, LATER)
        if skips:
            loss_of(model, batch(comm.rank, 30)).backward()
            getattr(optimizer, skip)()
        go_on(comm, model, optimizer, 31, 33)
        return bits(model)

    first, second = (simulate(2, lambda comm, s=s: program(comm, s)).results for s in (True, False))
    assert first == second


def test_errors_of_one_bit_do_not_move_parameters_with_tiny_gradients():
    """A bias before BatchNorm has gradients of rounding errors, in a bucket with larger ones."""

    def program(comm):
        torch.manual_seed(0)
        layers = torch.nn.Linear(12, 24), torch.nn.BatchNorm1d(24), torch.nn.Tanh(), torch.nn.Linear(24, 3)
        model = torch.nn.Sequential(*layers).double()
        optimizer = one_bit(comm, model, bucket=512)
        go_on(comm, model, optimizer, 0, WARM_UP)
        before = model[0].bias.detach().clone()
        go_on(comm, model, optimizer, WARM_UP, 4 * WARM_UP)
        assert (model[0].bias - before).abs().max() < 0.01 * 3 * WARM_UP * 3
        return bits(model)

    assert len(set(simulate(3, program).results)) == 1


def test_a_schedule_that_is_made_after_the_warm_up_cycles_adamws_momentum():
    def program(comm):
        model = net(seed=0)
        optimizer = OneBitAdam(model.parameters(), 0.01, comm=comm, warm_up=4)
        for step in range(8):
            if step == 6:
                schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=4)
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
            if step >= 6:
                schedule.step()
        (group,) = optimizer.param_groups
        return group["betas"][0] != 0.9, group.get("momentum", 0)

    assert simulate(2, program).results == 2 * [(True, 0)]
