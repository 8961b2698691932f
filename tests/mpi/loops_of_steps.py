"""Training loops: what is done with gradients, and steps that are skipped or fail."""

import torch
from loop import AFTER, RAISES, WAITS, loop
from runs import ONE

# -- gradients are looked at and changed before the step


@loop("`zero_grad(); backward(); step()`")
def plain(run):
    for step in range(4):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()


@loop("clipping by norm before `step()`", local=AFTER)
def clip_norm(run):
    for step in range(4):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.mean()
        torch.nn.utils.clip_grad_norm_(run.params, 0.3)
        run.optimizer.step()


@loop("clipping by value, edits of `p.grad.data`", local=AFTER)
def clip_value(run):
    for step in range(4):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.mean()
        torch.nn.utils.clip_grad_value_(run.params, 0.02)
        for p in run.params:
            p.grad.data.add_(0.01)
        run.params[1].grad = run.params[1].grad.abs()
        run.optimizer.step()


@loop("gradients of a layer set to None before `step()`", local=AFTER)
def gradient_taken_away(run):
    for step in range(4):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.mean()
        if step % 2:
            run.params[2].grad = run.params[3].grad = None
        run.optimizer.step()


@loop("`zero_grad(set_to_none=False)` and clipping", local=AFTER)
def zero_grad_in_place(run):
    for step in range(5):
        run.optimizer.zero_grad(set_to_none=False)
        run.loss(step).backward()
        run.mean()
        torch.nn.utils.clip_grad_norm_(run.params, 0.3)
        run.optimizer.step()


@loop("`model.zero_grad()`")
def model_zero_grad(run):
    for step in range(4):
        run.model.zero_grad(set_to_none=step % 2 == 0)
        run.loss(step).backward()
        run.optimizer.step()


@loop("no `zero_grad` at all: gradients add up over steps")
def never_zeroed(run):
    for step in range(4):
        run.loss(step).backward()
        run.optimizer.step()


@loop("`zero_grad()` after `step()`, and twice")
def zero_grad_at_the_end(run):
    for step in range(4):
        run.loss(step).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        if step == 1:
            run.optimizer.zero_grad()


@loop("a learning rate set by the norm of the mean gradient after `backward()`", local=AFTER)
def read_the_mean(run):
    for step in range(3):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.mean()
        norm = sum(p.grad.square().sum() for p in run.params).sqrt()
        for group in run.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + norm.item())
        run.optimizer.step()


# -- steps that are skipped


@loop("skip after the loss: `zero_grad(); continue`, without `backward()`")
def skip_by_loss(run):
    for step in range(6):
        run.optimizer.zero_grad()
        loss = run.loss(step)
        if step in (0, 3):
            continue
        loss.backward()
        run.optimizer.step()


@loop("skip after `backward()`: `zero_grad(); continue`")
def skip_after_backward(run):
    for step in range(6):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        if step in (0, 3):
            run.optimizer.zero_grad()
            continue
        run.optimizer.step()


@loop("skip after `synchronize()`, decided by the norm of the mean")
def skip_after_synchronize(run):
    for step in range(6):
        run.loss(step).backward()
        run.synchronize()
        norm = sum(p.grad.square().sum() for p in run.params).sqrt()
        if step in (0, 3) or norm > 1e6:
            run.optimizer.zero_grad(set_to_none=step == 0)
            continue
        run.optimizer.step()
        run.model.zero_grad()


@loop("skip with `model.zero_grad()`")
def skip_with_models_zero_grad(run):
    for step in range(6):
        run.model.zero_grad()
        run.loss(step).backward()
        if step in (0, 2, 3):
            continue
        run.optimizer.step()


@loop("an exception in `forward` on all ranks, caught")
def forward_raises(run):
    for step in range(5):
        run.optimizer.zero_grad()
        try:
            loss = run.loss(step)
            if step == 2:
                raise MemoryError("forward")
        except MemoryError:
            continue
        loss.backward()
        run.optimizer.step()


@loop("an exception in `forward` on one rank, caught, then `step()`", hook=WAITS)
def forward_raises_on_one_rank(run):
    for step in range(5):
        run.optimizer.zero_grad()
        if step == 2 and run.last in run.ranks:  # it has no gradient
            run.ranks, ranks = [r for r in run.ranks if r != run.last], run.ranks
            if run.ranks:
                (run.loss(step) * len(run.ranks) / run.size).backward()
            run.ranks = ranks
        else:
            run.loss(step).backward()
        run.optimizer.step()


class Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        raise MemoryError("backward")


@loop("an exception in `backward` on all ranks, caught: `zero_grad(); continue`", hook=RAISES)
def backward_raises(run):
    def forward(x, rank):
        first = run.module[:2](x)
        return run.module[2:](Raise.apply(first) if bad else first)

    for step in range(6):
        bad = step in (0, 3)
        run.optimizer.zero_grad()
        try:
            run.loss(step, forward=forward).backward()
        except MemoryError:
            run.optimizer.zero_grad()
            continue
        run.optimizer.step()


@loop(
    "an exception in `backward` on one rank, caught: `zero_grad(); step()`",
    hook=WAITS,
)
def backward_raises_on_one_rank(run):
    for step in range(6):
        bad = run.last if step in (0, 3) else -1

        def forward(x, rank, bad=bad):
            first = run.module[:2](x)
            return run.module[2:](Raise.apply(first) if rank == bad else first)

        run.optimizer.zero_grad()
        if run.way == ONE and bad >= 0:
            run.ranks, ranks = [r for r in run.ranks if r != bad], run.ranks
            if run.ranks:
                (run.loss(step) * len(run.ranks) / run.size).backward()
            run.ranks = ranks
        else:
            try:
                run.loss(step, forward=forward).backward()
            except MemoryError:
                run.optimizer.zero_grad()
        run.optimizer.step()
