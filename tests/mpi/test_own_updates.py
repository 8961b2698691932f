"""Loops that update parameters by themselves, or skip steps, over MPI: not a gradient is lost, whoever reduces them.

What all ranks have given in steps that were taken is what the parameters have moved, and what waits in residuals.
"""

import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases import pairwise  # noqa: E402
from runs import HOOK, OVERLAP, SPARSE, Run  # noqa: E402
from updates import BUCKETS, LR, REDUCING, STEPS, TOPK, UPDATES, ZEROS, Account, made, through_data, wide, zero  # noqa: E402

from sparsecoll.errors import CommunicationError  # noqa: E402
from sparsecoll.torch.compressors import QSGD  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.mpich, pytest.mark.usefixtures("process_group")]


@pytest.mark.parametrize(("way", "update", "how"), pairwise(REDUCING, UPDATES, ZEROS))
def test_a_loop_that_updates_parameters_by_itself_loses_nothing(comm, way, update, how, caplog):
    """Nor does it if it skips steps, or reduces twice before one."""
    run, first = made(way, comm, **BUCKETS[way]), ZEROS.index(how) % 2 == 0
    account = Account(run)
    for step in range(STEPS):
        if first:
            zero(run, how, step)
        for part in range(1 + step % 2):
            run.loss(step, part).backward()
        run.synchronize()
        if step == 3:
            account.skipped()
            zero(run, how, step)
            continue
        UPDATES[update](run.params)
        account.taken()
        if not first:
            zero(run, how, step)
    account.check()
    run.close()
    assert not caplog.records


@pytest.mark.parametrize("way", REDUCING)
@pytest.mark.parametrize("update", ["p.data.add_", "p.sub_", "optimizer"])
def test_gradients_that_are_never_zeroed_add_up(comm, way, update):
    run = made(way, comm)
    account = Account(run)
    for step in range(STEPS):
        run.loss(step).backward()
        run.synchronize()
        run.optimizer.step() if update == "optimizer" else UPDATES[update](run.params)
        account.taken()
    account.check([p.grad.clone() for p in run.params])
    run.close()


@pytest.mark.parametrize("way", [*REDUCING, SPARSE])
def test_steps_of_optimizers_that_are_taken_and_skipped(comm, way):
    """Also those with a learning rate of 0, which take a step that moves nothing."""
    for how in ZEROS:
        run = made(way, comm)
        account = Account(run)
        for step in range(STEPS):
            zero(run, how, step)
            for part in range(1 + step % 2):
                run.loss(step, part).backward()
            if step in (1, 4):
                account.skipped()
                continue
            run.optimizer.step()
            account.taken()
        zero(run, how, 0)
        account.check()
        run.close()


@pytest.mark.parametrize("way", REDUCING)
def test_a_learning_rate_of_zero_is_a_step(comm, way):
    run = made(way, comm)
    account, moves = Account(run), [torch.zeros_like(p) for p in run.params]
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0 if step % 2 else LR
        run.optimizer.step()
        account.taken()
        for move, p in zip(moves, run.params, strict=True):
            move += p.grad
    account.check(moves)
    run.close()


@pytest.mark.parametrize("way", REDUCING)
def test_steps_by_hand_and_of_an_optimizer_in_turn(comm, way):
    run = made(way, comm)
    account = Account(run)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.synchronize()
        run.optimizer.step() if step % 2 else through_data(run.params)
        account.taken()
    account.check()
    run.close()


def test_two_optimizers_on_one_model_of_ddp(comm):
    """In turn; the gradients of the other's parameters are thrown away."""
    run = made(HOOK, comm)
    both = [torch.optim.SGD(run.module[i].parameters(), LR) for i in (0, 2)]
    account = Account(run)
    for step in range(STEPS):
        run.loss(step).backward()
        both[step % 2].step()
        skipped = (2, 3) if step % 2 == 0 else (0, 1)
        for i in skipped:
            account.open[i].zero_()
        account.taken()
        run.model.zero_grad(set_to_none=step % 3 == 0)
    account.check()


@pytest.mark.parametrize("way", REDUCING)
def test_a_change_that_is_no_step(comm, way):
    """SAM: the step up counts as one unless it is discarded, and that is told."""

    def sam(run, account, discards):
        for step in range(4):
            run.optimizer.zero_grad()
            run.loss(step).backward()
            run.synchronize()
            moved = [0.05 * p.grad for p in run.params]
            for p, e in zip(run.params, moved, strict=True):
                p.data.add_(e)
            if discards:
                (run.state if way == HOOK else run.optimizer).discard()
                account.skipped()
            run.optimizer.zero_grad()
            run.loss(step).backward()
            run.synchronize()
            for p, e in zip(run.params, moved, strict=True):
                p.data.sub_(e)
            run.optimizer.step()
            account.taken()

    run = made(way, comm)
    account = Account(run)
    sam(run, account, True)
    account.check()
    run.close()
    run = made(way, comm)
    with pytest.raises(RuntimeError, match=r"updated by either optimizers or the loop.*call discard\(\) of"):
        sam(run, Account(run), False)
    run.close()


@pytest.mark.parametrize("way", [HOOK, OVERLAP])
def test_a_closure_that_changes_parameters_within_a_step(comm, way):
    """An optimizer that evaluates twice, such as SAM or a line search: only the last reduction is used."""

    class Sam(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure):
            moved = [0.05 * p.grad for p in run.params]
            torch._foreach_add_(run.params, moved)
            with torch.enable_grad():
                closure()
            torch._foreach_sub_(run.params, moved)
            super().step()

    run = Run(way, comm, wide, lambda params: Sam(params, LR), TOPK)
    account = Account(run)
    for step in range(4):

        def closure(step=step):
            account.skipped()
            run.optimizer.zero_grad()
            loss = run.loss(step)
            loss.backward()
            return loss

        closure()
        run.optimizer.step(closure)
        account.taken()
    account.check()
    run.close()


@pytest.mark.parametrize("way", REDUCING)
def test_ranks_that_do_not_take_the_same_steps_by_hand_raise(comm, way):
    if comm.size == 1:
        return
    run = made(way, comm)
    for step in range(2):
        run.loss(step).backward()
        run.synchronize()
        if step == 0 or comm.rank:
            through_data(run.params)
        run.model.zero_grad()
    with pytest.raises(CommunicationError, match="expected every rank to take or skip the same ones, got 1 on rank 0"):
        run.loss(2).backward()
        run.synchronize()
    run.close()


@pytest.mark.parametrize("way", REDUCING)
def test_steps_by_hand_count(comm, way):
    """For random numbers, schedules and `verify`, also without a residual."""
    run = made(way, comm, QSGD(4), verify=1)
    for step in range(4):
        run.loss(step).backward()
        run.synchronize()
        through_data(run.params)
        run.model.zero_grad()
    state = run.state.state_dict() if way == HOOK else run.optimizer.state_dict()["sparsecoll"]
    assert state["step"] == 4
    run.params[0].data += comm.rank
    if comm.size > 1:
        with pytest.raises(CommunicationError, match="verify: expected the same bits"):
            run.loss(4).backward()
            run.synchronize()
    run.close()


@pytest.mark.parametrize("way", REDUCING)
def test_a_grad_scaler_and_gradients_that_the_loop_holds(comm, way):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    run = made(way, comm, scaler=scaler)
    account, held = Account(run), []
    for step in range(STEPS):
        loss = run.loss(step) * (float("inf") if step == 2 and comm.rank == 0 else 1.0)
        scaler.scale(loss).backward()
        run.synchronize()
        scaler.step(run.optimizer)
        scaler.update()
        for more in account.open:
            more /= 64.0 if step <= 2 else 32.0
        account.skipped() if step == 2 else account.taken()
        held += [p.grad for p in run.params]
        run.model.zero_grad()
    assert scaler.get_scale() == 32 and np.isfinite(sum(g.abs().sum().item() for g in held[: len(run.params)]))
    account.check()
    run.close()


@pytest.mark.parametrize("way", [HOOK, OVERLAP])
def test_mistakes_with_momentum_and_adam_are_told_by_the_users_names(comm, way, caplog):
    for inner, compressor, text in [
        (lambda p: torch.optim.SGD(p, LR, momentum=0.9), "nesterovtopk", "nesterovtopk has a momentum of 0.7, and SGD"),
        (torch.optim.AdamW, "oktopk", "oktopk with AdamW"),
    ]:
        run = Run(way, comm, wide, inner, compressor)
        with caplog.at_level(logging.WARNING, "sparsecoll"):
            for step in range(2):
                run.loss(step).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
        assert caplog.text.count(text) == (comm.rank == 0)
        run.close()
