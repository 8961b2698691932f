"""Training loops: several back-propagations a step, closures, and parameters that come and go."""

import torch
from loop import AFTER, FIND, OWN, RAISES, WAITS, loop
from runs import ONE, draw, net

# -- several back-propagations a step


@loop("accumulation: all but the last in `no_sync()`")
def accumulation(run):
    for step in range(4):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.loss(step, 0).backward()
            run.loss(step, 1).backward()
        run.loss(step, 2).backward()
        run.optimizer.step()


@loop("accumulation without `no_sync()`")
def accumulation_without_no_sync(run):
    for step in range(4):
        run.optimizer.zero_grad()
        for part in range(3):
            run.loss(step, part).backward()
        torch.nn.utils.clip_grad_norm_(run.params, 1e9)
        run.optimizer.step()


@loop("only the last back-propagation in `no_sync()`", hook="no: DDP leaves them local")
def no_sync_last(run):
    for step in range(4):
        run.optimizer.zero_grad()
        run.loss(step, 0).backward()
        with run.no_sync():
            run.loss(step, 1).backward()
        run.optimizer.step()


@loop("all back-propagations in `no_sync()`, then `step()`", hook="no: DDP leaves them local")
def no_sync_always(run):
    for step in range(4):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.loss(step).backward()
        run.optimizer.step()


@loop("the second of three back-propagations in `no_sync()`")
def no_sync_in_the_middle(run):
    for step in range(4):
        run.optimizer.zero_grad()
        run.loss(step, 0).backward()
        with run.no_sync():
            run.loss(step, 1).backward()
        run.loss(step, 2).backward()
        run.optimizer.step()


@loop("`retain_graph=True` and a second `backward()` of the same graph", hook="no: DDP reduces only the first")
def retained_graph(run):
    for step in range(4):
        run.optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        run.optimizer.step()


@loop("gradient penalty: `autograd.grad(create_graph=True)`")
def gradient_penalty(run):
    for step in range(3):
        run.optimizer.zero_grad()
        loss = 0.0
        for rank in run.ranks:
            x, y = draw(rank, step)
            x.requires_grad_()
            out = run.model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = loss + (torch.nn.functional.mse_loss(out, y) + slope.square().sum()) / len(run.ranks)
        loss.backward()
        run.optimizer.step()


@loop("`backward(create_graph=True)`", hook=RAISES)
def backward_with_graph(run):
    for step in range(3):
        run.optimizer.zero_grad()
        run.loss(step).backward(create_graph=True)
        run.optimizer.step()


def checkpointed(run, reentrant):
    from torch.utils.checkpoint import checkpoint

    def forward(x, rank):
        out = run.module[:2](x)
        for _ in range(2):  # the same layers again
            out = out[:, :16] + checkpoint(run.module[2:4], out, use_reentrant=reentrant)[:, :16]
        return run.module[4](torch.cat([out, out], 1))

    for step in range(4):
        run.optimizer.zero_grad()
        run.loss(step, forward=forward).backward()
        run.optimizer.step()


@loop("`checkpoint(use_reentrant=True)` of layers that are used twice", hook=RAISES)
def reentrant_checkpoint(run):
    checkpointed(run, True)


@loop("`checkpoint(use_reentrant=False)` of layers that are used twice")
def checkpoint(run):
    checkpointed(run, False)


# -- closures


def lbfgs(params):
    return torch.optim.LBFGS(params, 0.5, max_iter=6, line_search_fn="strong_wolfe")


@loop(
    "`LBFGS` with `strong_wolfe`: `step(closure)`",
    inner=lbfgs,
    rtol=1e-6,
    hook="no: each rank searches with its own loss",
)
def closure_of_lbfgs(run):
    def closure():
        run.optimizer.zero_grad()
        loss = run.loss(0)
        loss.backward()
        return loss

    for _ in range(3):
        run.optimizer.step(closure)


@loop("`step(closure)` of SGD")
def closure_of_sgd(run):
    for step in range(4):

        def closure(step=step):
            run.optimizer.zero_grad()
            loss = run.loss(step)
            loss.backward()
            return loss

        run.optimizer.step(closure)


@loop("SAM: a step up, a second `backward()`, a step down", local=AFTER)
def two_steps_of_sam(run):
    for step in range(4):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.mean()
        norm = sum(p.grad.square().sum() for p in run.params).sqrt()
        moved = [0.05 * p.grad / norm for p in run.params]
        with torch.no_grad():
            for p, e in zip(run.params, moved, strict=True):
                p.add_(e)
        run.discard()
        run.optimizer.zero_grad()
        run.loss(step).backward()
        with torch.no_grad():
            for p, e in zip(run.params, moved, strict=True):
                p.sub_(e)
        run.optimizer.step()


# -- parameters that come and go


def partly_frozen():
    model = net()
    model[0].requires_grad_(False)
    return model


@loop(
    "parameters frozen from the start, unfrozen later, frozen again",
    model=partly_frozen,
    hook="no: DDP does not notice it",
)
def gradual_unfreezing(run):
    for step in range(9):
        if step in (3, 6):
            run.module[0].requires_grad_(step == 3)
        if step == 6:
            for p in run.module[0].parameters():
                p.grad = None
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()


@loop("parameters frozen between `backward()` and `step()`")
def frozen_before_the_step(run):
    for step in range(4):
        run.optimizer.zero_grad()
        run.module[2].requires_grad_(True)
        run.loss(step).backward()
        run.module[2].requires_grad_(step == 2)
        run.optimizer.step()


@loop("`synchronize()` twice, with clipping in between", sparse=OWN)
def synchronized_twice(run):
    for step in range(4):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.synchronize()
        torch.nn.utils.clip_grad_norm_(run.params, 0.3)
        run.synchronize()
        run.optimizer.step()


@loop("frozen parameters, with weight decay", model=partly_frozen)
def frozen_and_weight_decay(run):
    for step in range(4):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()


def only_the_last(params):
    return torch.optim.SGD(list(params)[2:], 0.1, momentum=0.9)


@loop("`add_param_group` of the wrapper", inner=only_the_last)
def group_added(run):
    for step in range(5):
        if step == 2:
            run.optimizer.add_param_group({"params": run.params[:2], "lr": 0.01})
        run.optimizer.zero_grad()
        run.model.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()


@loop("`add_param_group` of the wrapped optimizer", inner=only_the_last)
def group_added_to_the_wrapped(run):
    for step in range(5):
        if step == 2:
            run.inner.add_param_group({"params": run.params[:2], "lr": 0.01})
        run.optimizer.zero_grad()
        run.model.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()


def replace(run, index, make):
    """Put another layer in place of one, on each rank with its own values, of which those of rank 0 count."""
    old = {id(p) for p in run.module[index].parameters()}
    torch.manual_seed(7 if run.way == ONE else 7 + run.comm.rank)
    run.module[index] = layer = make()
    for group in run.inner.param_groups:
        for p in filter(lambda p: id(p) in old, group["params"]):
            run.inner.state.pop(p, None)
        group["params"] = [p for p in group["params"] if id(p) not in old]
    if list(layer.parameters()):
        run.optimizer.add_param_group({"params": layer.parameters(), "lr": 0.05})


@loop("a layer replaced: its parameters taken out of the groups, the new ones added", hook=RAISES)
def layer_replaced(run):
    for step in range(8):
        if step == 2:
            replace(run, 4, lambda: torch.nn.Linear(32, 1).double())
        if step == 4:
            replace(run, 3, lambda: torch.nn.Linear(32, 32).double())
        if step == 6:
            replace(run, 3, torch.nn.Tanh)  # in whose place nothing comes
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()


def two_heads():
    return torch.nn.ModuleDict(
        {
            "a": torch.nn.Linear(6, 16),
            "b": torch.nn.Linear(6, 16),
            "never": torch.nn.Linear(6, 16),
            "out": torch.nn.Linear(16, 1),
        }
    ).double()


def turns(run, head):
    for step in range(6):
        run.optimizer.zero_grad()
        run.loss(step, forward=lambda x, rank, s=step: run.module["out"](run.module[head(s, rank)](x))).backward()
        run.optimizer.step()


@loop("a layer that no rank uses in a step, weight decay", model=two_heads, hook=FIND)
def layers_in_turn(run):
    turns(run, lambda step, rank: "ab"[step % 2])


@loop("a layer that only one rank uses", model=two_heads, hook=FIND)
def layer_of_one_rank(run):
    turns(run, lambda step, rank: "b" if rank == run.last and step % 3 else "a")


@loop("a different layer on each rank in each step", model=two_heads, hook=FIND)
def layers_drawn_by_rank(run):
    turns(run, lambda step, rank: "ab"[(step * 5 + rank * 3) // 2 % 2])


@loop("`step()` without `backward()` on some ranks", hook=WAITS)
def step_without_backward(run):
    for step in range(4):
        run.optimizer.zero_grad()
        some = [rank for rank in run.ranks if step == 0 or rank != run.last]
        run.ranks, ranks = some, run.ranks
        if some:
            (run.loss(step) * (len(some) / (1 if run.way != ONE else run.size))).backward()
        run.ranks = ranks
        run.optimizer.step()
