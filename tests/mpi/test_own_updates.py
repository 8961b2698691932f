"""Loops that update parameters by themselves, or skip steps, over MPI: not a gradient is lost, whoever reduces them.

What all ranks have given in steps that were taken is what the parameters have moved, and what waits in residuals.
"""

import logging
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from runs import HOOK, LOCAL, OVERLAP, SPARSE, Run, alike  # noqa: E402
from torch.optim.sgd import sgd as functional_sgd  # noqa: E402

from sparsecoll.errors import CommunicationError  # noqa: E402
from sparsecoll.torch.compressors import QSGD, TopK  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.mpich, pytest.mark.usefixtures("process_group")]
LR, STEPS = 0.01, 6
TOPK = TopK(0.02, algo="allgather")


def wide():
    """A layer of 6000 values, of which few enter a sum, and one that fits into a sample."""
    return torch.nn.Sequential(torch.nn.Linear(6, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 1)).double()


def in_no_grad(function):
    def update(params):
        with torch.no_grad():
            function(params)

    return update


def in_inference_mode(params):
    with torch.inference_mode():
        for p in params:
            p.sub_(p.grad, alpha=LR)


def through_data(params):
    for p in params:
        p.data.add_(p.grad, alpha=-LR)


def with_new_data(params):
    for p in params:
        p.data = p.data - LR * p.grad


def as_a_vector(params):
    with torch.no_grad():
        moved = torch.nn.utils.parameters_to_vector(p - LR * p.grad for p in params)
    torch.nn.utils.vector_to_parameters(moved, params)


def in_numpy(params):
    for p in params:
        values = p.detach().numpy()
        values -= LR * p.grad.numpy()


def last_layer_first(params):
    """The others as another call, in the same step."""
    through_data(params[2:])
    in_no_grad(lambda params: [p.sub_(LR * p.grad) for p in params])(params[:2])


def fused(params):
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": LR, "dampening": 0.0, "nesterov": False}
    torch._fused_sgd_(params, [p.grad for p in params], [], maximize=False, is_first_step=False, **options)


def functional(params):
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": LR, "dampening": 0.0, "nesterov": False, "maximize": False}
    functional_sgd(params, [p.grad for p in params], [None] * len(params), **options)


UPDATES = {
    "p.data.add_": through_data,
    "p.sub_": in_no_grad(lambda params: [p.sub_(LR * p.grad) for p in params]),
    "p.copy_": in_no_grad(lambda params: [p.copy_(p - LR * p.grad) for p in params]),
    "p[:] =": in_no_grad(lambda params: [p.__setitem__(slice(None), p - LR * p.grad) for p in params]),
    "p.detach().sub_": lambda params: [p.detach().sub_(LR * p.grad) for p in params],
    "foreach": in_no_grad(lambda params: torch._foreach_add_(params, [p.grad for p in params], alpha=-LR)),
    "foreach of p.data": lambda params: torch._foreach_add_(
        [p.data for p in params], [p.grad for p in params], alpha=-LR
    ),
    "fused": in_no_grad(fused),
    "functional": in_no_grad(functional),
    "vector_to_parameters": as_a_vector,
    "p.data =": with_new_data,
    "NumPy": in_numpy,
    "inference mode": in_inference_mode,
    "two ways": last_layer_first,
}


class Account:
    """Adds up what this rank gives in steps that are taken."""

    def __init__(self, run):
        self.run = run
        self.start = [p.detach().clone() for p in run.params]
        self.given = [torch.zeros_like(p) for p in run.params]
        self.open = [torch.zeros_like(p) for p in run.params]
        for i, p in enumerate(run.params):
            p.register_hook(partial(self._gives, i))

    def _gives(self, i, gradient):
        self.open[i] += gradient.detach()

    def taken(self):
        for given, more in zip(self.given, self.open, strict=True):
            given += more
        self.skipped()

    def skipped(self):
        for more in self.open:
            more.zero_()

    def residuals(self):
        if self.run.way == HOOK:
            kept = {n.removeprefix("net."): t for n, t in self.run.state.state_dict()["tensors"]["residual"].items()}
        else:
            kept = self.run.optimizer.state_dict()["sparsecoll"]["tensors"].get("residual", {})
        unit = LR if self.run.way == SPARSE else 1.0  # SparseSGD's are in units of learning rate * gradient
        return [kept.get(name, torch.zeros_like(p)) / unit for name, p in self.run.module.named_parameters()]

    def check(self, moves=None):
        """Also that what waits is much: otherwise nothing could have been lost.

        Args:
            moves: what the parameters have moved in units of the learning rate, if not by their difference.
        """
        comm, waits = self.run.comm, self.residuals()
        moves = moves or [(a - p.detach()) / LR for a, p in zip(self.start, self.run.params, strict=True)]
        total = [torch.from_numpy(comm.allreduce((g - r).numpy())) for g, r in zip(self.given, waits, strict=True)]
        for move, expected in zip(moves, total, strict=True):
            torch.testing.assert_close(move * comm.size, expected, rtol=1e-9, atol=1e-9)
        assert sum(r.abs().sum() for r in waits) > 0.01 and alike(comm, self.run.values())


def made(way, comm, compressor=TOPK, **options):
    if way == SPARSE:
        return Run(way, comm, wide, lambda params: torch.optim.SGD(params, LR), algo="allgather", density=0.02)
    return Run(way, comm, wide, lambda params: torch.optim.SGD(params, LR), compressor, **options)


def zero(run, how, step):
    if how == "model.zero_grad" or (how == "in turn" and step % 3 == 0):
        run.model.zero_grad()
    elif how == "p.grad = None" or (how == "in turn" and step % 3 == 1):
        for p in run.params:
            p.grad = None
    elif how == "in place" and run.way != HOOK:
        run.optimizer.zero_grad(set_to_none=False)
    elif how == "in place":
        run.model.zero_grad(set_to_none=False)
    else:
        run.optimizer.zero_grad()


ZEROS = ["model.zero_grad", "p.grad = None", "optimizer.zero_grad", "in place", "in turn"]
REDUCING = [HOOK, OVERLAP, LOCAL]
BUCKETS = {HOOK: {}, OVERLAP: {"bucket_bytes": 20000}, LOCAL: {"bucket_bytes": 20000}}


@pytest.mark.parametrize("way", REDUCING)
@pytest.mark.parametrize("update", UPDATES)
def test_a_loop_that_updates_parameters_by_itself_loses_nothing(comm, way, update, caplog):
    """Nor does it if it skips steps, or reduces twice before one."""
    for number, how in enumerate(ZEROS):
        run = made(way, comm, **BUCKETS[way])
        account = Account(run)
        for step in range(STEPS):
            if number % 2 == 0:
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
            if number % 2:
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
