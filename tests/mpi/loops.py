"""Training loops as users write them, to be run on P ranks in several ways and by one process on the global batch.

A loop sees a Run: on a rank it stands for that rank, in one process for all of them. `@loop` enters it into LOOPS, with
what is expected of each way in: SAME (the default; the same parameters as one process), or another text, which is what
docs/torch.md shows.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sparsecoll.torch import DistributedOptimizer, HookState, SparseSGD, comm_hook

ONE = "one process"
OVERLAP, LOCAL, HOOK, SPARSE = "DistributedOptimizer", "overlap=False", "DDP hook", "SparseSGD"
WAYS = (OVERLAP, LOCAL, HOOK)
SAME = "same"
AFTER = "same, after `synchronize()`"
FIND = "same, with `find_unused_parameters=True`"
RAISES = "no: DDP raises"
WAITS = "no: DDP waits for the rank"
TIMEOUT = 60.0
OWN = "no: gradients are each rank's own"
NONE = "not SGD"
OPTIONS = {"bucket_bytes": 2000, "dense_below": 40, "timeout": TIMEOUT}  # several buckets, some of small parameters


def sgd(params):
    return torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01)


def net():
    """691 parameters; gradients come in another order than that of registration."""
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    ).double()


class Through(torch.nn.Module):
    """A net, or another way through it, as one call: DDP wants to see every one."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, rank=0, forward=None):
        return self.net(x) if forward is None else forward(x, rank)


@dataclass(frozen=True)
class Loop:
    title: str
    body: Callable
    model: Callable = net
    inner: Callable = sgd
    cells: dict = field(default_factory=dict)
    rtol: float = 1e-9

    def cell(self, way):
        """What is expected of a way in."""
        if way == SPARSE and way not in self.cells:
            one = self.inner([torch.nn.Parameter(torch.zeros(1)) for _ in range(3)])
            if type(one) is not torch.optim.SGD:
                return NONE
            if self.cells.get(LOCAL) == AFTER:
                return OWN
        return self.cells.get(way, SAME)


LOOPS: dict[str, Loop] = {}


def loop(title, model=net, inner=sgd, rtol=1e-9, **cells):
    """Enter a loop into LOOPS; cells: overlap=, local=, hook=, sparse= where something else than SAME is expected."""
    ways = {"overlap": OVERLAP, "local": LOCAL, "hook": HOOK, "sparse": SPARSE}

    def enter(body):
        LOOPS[body.__name__] = Loop(title, body, model, inner, {ways[k]: v for k, v in cells.items()}, rtol)
        return body

    return enter


def draw(rank, step, part=0, dtype=torch.float64, count=8):
    generator = torch.Generator().manual_seed(1_000_003 * rank + 1009 * step + part)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randn(count, 1, generator=generator, dtype=torch.float64).to(dtype)


class Run:
    """One training.

    Attributes:
        ranks: that this process stands for.
        size: of the whole job.
        last: its last rank, on which things go wrong.
        model: what is called; `module` is the net itself.
        optimizer: what steps.
    """

    def __init__(self, way, comm, model=net, inner=sgd, compressor="none", dtype=torch.float64, scaler=None, **options):
        self.way, self.comm, self.size, self.dtype = way, comm, comm.size, dtype
        self.last = comm.size - 1
        self.ranks = list(range(comm.size)) if way == ONE else [comm.rank]
        torch.manual_seed(0 if way == ONE else comm.rank)
        self.model = self.module = model()
        self.state = None
        if way == HOOK:
            self.model = torch.nn.parallel.DistributedDataParallel(
                Through(self.module), **{"bucket_cap_mb": 0.002, **options}
            )
            self.state = HookState(comm, compressor, self.model, timeout=TIMEOUT, grad_scaler=scaler)
            self.model.register_comm_hook(self.state, comm_hook)
        self.inner = self.optimizer = inner(self.module.parameters())
        if way == SPARSE:
            own = {name: self.inner.defaults[name] for name in ("lr", "momentum", "weight_decay")}
            groups = [{"params": group["params"]} for group in self.inner.param_groups]
            options = {"comm": comm, "algo": "dense", "model": self.module, "timeout": TIMEOUT, **options}
            self.inner = self.optimizer = SparseSGD(groups, **own, **options)
        if way in (OVERLAP, LOCAL):
            options = {**OPTIONS, "overlap": way == OVERLAP, **options}
            self.optimizer = DistributedOptimizer(self.inner, self.module, comm, compressor, **options)

    @property
    def params(self):
        return list(self.module.parameters())

    def loss(self, step, part=0, forward=None):
        """The mean over this process's ranks of a rank's loss; forward(x, rank): another way through the model."""
        total = 0.0
        for rank in self.ranks:
            x, y = draw(rank, step, part, self.dtype)
            if self.way == HOOK:
                out = self.model(x, rank, forward)
            else:
                out = self.model(x) if forward is None else forward(x, rank)
            total = total + torch.nn.functional.mse_loss(out.to(self.dtype), y)
        return total / len(self.ranks)

    def no_sync(self):
        if self.way in (ONE, SPARSE):
            return contextlib.nullcontext()
        return self.model.no_sync() if self.way == HOOK else self.optimizer.no_sync()

    def synchronize(self):
        if self.way in (OVERLAP, LOCAL):
            self.optimizer.synchronize()

    def mean(self):
        """Gradients are about to be looked at or changed."""
        if self.way == LOCAL:
            self.optimizer.synchronize()

    def any(self, value):
        """Whether something holds on any rank."""
        return value if self.way == ONE else self.comm.allreduce(int(value)) > 0

    def values(self):
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: t.detach().clone() for name, t in tensors.items()}

    def close(self):
        if self.way in (OVERLAP, LOCAL):
            self.optimizer.close()


def bits(values):
    return b"".join(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in values.values() if t.numel())


def alike(comm, values):
    """All ranks have the same bits."""
    mine = bits(values)
    return set(comm.allgather(mine)) == {mine}


def close(values, expected, rtol=1e-9):
    for name, t in expected.items():
        torch.testing.assert_close(values[name], t, rtol=rtol, atol=rtol, msg=lambda text, n=name: f"{n}: {text}")


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


@loop("mean of the gradients over all ranks read after `backward()`", local=AFTER)
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


@loop("skip after `synchronize()` by the norm of the mean")
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


@loop("an exception in `forward` on one rank, caught: `step()` all the same", hook=WAITS)
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


@loop("the last back-propagation in `no_sync()`", hook="no: DDP leaves them local")
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


@loop("`no_sync()` around the one in the middle")
def no_sync_in_the_middle(run):
    for step in range(4):
        run.optimizer.zero_grad()
        run.loss(step, 0).backward()
        with run.no_sync():
            run.loss(step, 1).backward()
        run.loss(step, 2).backward()
        run.optimizer.step()


@loop("`retain_graph=True` and a second `backward()` of the same graph", hook="no: DDP reduces the first only")
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


@loop("frozen from the start, unfrozen later, frozen again", model=partly_frozen, hook="no: DDP does not see it")
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


@loop("frozen between `backward()` and `step()`")
def frozen_before_the_step(run):
    for step in range(4):
        run.optimizer.zero_grad()
        run.module[2].requires_grad_(True)
        run.loss(step).backward()
        run.module[2].requires_grad_(step == 2)
        run.optimizer.step()


@loop("`synchronize()` twice, and a change between", sparse=OWN)
def synchronized_twice(run):
    for step in range(4):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.synchronize()
        torch.nn.utils.clip_grad_norm_(run.params, 0.3)
        run.synchronize()
        run.optimizer.step()


@loop("frozen, and weight decay", model=partly_frozen)
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


def two_heads():
    torch.manual_seed(torch.initial_seed())
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


@loop("a layer that one rank only uses", model=two_heads, hook=FIND)
def layer_of_one_rank(run):
    turns(run, lambda step, rank: "b" if rank == run.last and step % 3 else "a")


@loop("another layer on each rank in each step", model=two_heads, hook=FIND)
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


# -- kinds of parameters and optimizers


def convolutions():
    return (
        torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3),
            torch.nn.Tanh(),
            torch.nn.Conv2d(4, 3, 2),
            torch.nn.Flatten(),
            torch.nn.Linear(3, 1),
        )
        .double()
        .to(memory_format=torch.channels_last)
    )


def images(run):
    for step in range(4):
        run.optimizer.zero_grad()
        loss = 0.0
        for rank in run.ranks:
            generator = torch.Generator().manual_seed(100 * rank + step)
            x = torch.randn(4, 2, 4, 4, generator=generator, dtype=torch.float64)
            loss = loss + run.model(x.to(memory_format=torch.channels_last)).square().mean() / len(run.ranks)
        loss.backward()
        run.optimizer.step()


for _name, _make in {
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, 0.01, foreach=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
    "SGD, fused": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, fused=True),
}.items():

    def _images(run):
        images(run)

    _images.__name__ = f"channels_last_{_name.lower().replace(', ', '_')}"
    loop(f"`channels_last`, {_name}", model=convolutions, inner=_make)(_images)


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(40, 5, sparse=True)
        self.double()

    def forward(self, x):
        return self.table(x).tanh().mean()


def lookups(run):
    """The last rank has no words in step 1, nobody has in step 2."""
    for step in range(5):
        run.optimizer.zero_grad()
        run.ranks, ranks = [r for r in run.ranks if step != 2 and not (step == 1 and r == run.last)], run.ranks
        share = len(run.ranks) / (run.size if run.way == ONE else 1)
        if run.ranks:
            loss = 0.0
            for rank in run.ranks:
                generator = torch.Generator().manual_seed(100 * rank + step)
                loss = loss + run.model(torch.randint(0, 40, (6,), generator=generator)) / len(run.ranks)
            (loss * share).backward()
        run.ranks = ranks
        run.optimizer.step()


for _name, _make in {
    "SparseAdam": lambda params: torch.optim.SparseAdam(list(params), 0.01),
    "SGD with momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, 0.1),
}.items():

    def _lookups(run):
        lookups(run)

    _lookups.__name__ = f"sparse_embedding_{_name.lower().replace(' ', '_')}"
    loop(f"`Embedding(sparse=True)`, a rank without lookups, {_name}", model=Words, inner=_make, hook=WAITS)(_lookups)


class Odd(torch.nn.Module):
    """Empty, scalar, frozen int8, tied and half-precision parameters."""

    def __init__(self):
        super().__init__()
        self.empty = torch.nn.Parameter(torch.zeros(0, 5, dtype=torch.float64))
        self.scale = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.base = torch.nn.Parameter(torch.randint(-9, 9, (6, 16), dtype=torch.int8), requires_grad=False)
        self.inner = torch.nn.Linear(6, 16).double()
        self.outer = torch.nn.Linear(6, 16).double()
        self.outer.weight = self.inner.weight
        self.head = torch.nn.Linear(16, 1).double()

    def forward(self, x):
        h = self.inner(x) + self.outer(x).sin() + x @ self.base.double()
        return self.head(h.tanh()) * self.scale + self.empty.sum()


def wanting(params):
    return torch.optim.AdamW([p for p in params if p.requires_grad], 0.01, weight_decay=0.1)


@loop("empty, scalar, tied and frozen int8 parameters", model=Odd, inner=wanting)
def odd_parameters(run):
    plain(run)


@loop("a learning rate that warms up from 0", inner=lambda params: torch.optim.SGD(params, 0.1, momentum=0.9))
def warm_up_from_zero(run):
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: min(step / 3, 1.0))
    for step in range(6):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()
        scheduler.step()


@loop("the wrapper's `param_groups`: `lr` and `weight_decay` set in the loop")
def groups_changed(run):
    for step in range(4):
        run.optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        run.optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()


# -- what compression may do


def plain_sgd(params):
    return torch.optim.SGD(params, 0.1)


class Ledger:
    """Gradient mass: what ranks gave since the last step, with what waited, is what the step takes and what waits now.

    The loop tells when gradients are thrown away (`zero`) and when a step is taken (`settle`).
    """

    def __init__(self, run):
        self.run, self.steps = run, 0
        self.named = dict(run.module.named_parameters())
        for name, p in self.named.items():
            p.register_hook(lambda g, name=name: self._gave(name, g))
        self.zero()
        self.waited = self._residuals()

    def zero(self):
        self.given = {name: torch.zeros_like(p) for name, p in self.named.items()}

    def _gave(self, name, g):
        self.given[name] += g.detach().to_dense() if g.is_sparse else g.detach()

    def _residuals(self):
        if self.run.way == HOOK:
            kept = self.run.state.state_dict()["tensors"].get("residual", {})
            kept = {name.removeprefix("net."): t for name, t in kept.items()}
        else:
            kept = self.run.optimizer.state_dict()["sparsecoll"]["tensors"].get("residual", {})
        return {name: kept.get(name, torch.zeros_like(p)).clone() for name, p in self.named.items()}

    def _total(self, tensors):
        flat = torch.cat([tensors[name].reshape(-1).double() for name in self.named]).numpy()
        return torch.from_numpy(self.run.comm.allreduce(flat))

    def _taken(self):
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense() for n, p in self.named.items()}

    def settle(self):
        """After a step: compare. Gradients that are not thrown away are given to the next one again."""
        taken, waits = self._taken(), self._residuals()
        before = self._total(self.given) + self._total(self.waited)
        torch.testing.assert_close(self._total(taken) + self._total(waits), before, rtol=1e-9, atol=1e-9)
        self.given, self.waited, self.steps = taken, waits, self.steps + 1
