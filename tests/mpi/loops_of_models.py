"""Training loops: kinds of parameters and optimizers."""

import contextlib

import torch
from loop import RAISES, WAITS, loop
from loops_of_steps import plain
from runs import HOOK, ONE, plain_sgd

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


class Shelf(torch.nn.Module):
    """Two tables with sparse gradients, one of them with a padding row, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(40, 5, sparse=True, padding_idx=3)
        self.bag = torch.nn.EmbeddingBag(30, 5, sparse=True, mode="sum")
        self.head = torch.nn.Linear(5, 2)
        self.double()

    def forward(self, x):
        return self.head((self.table(x).sum(1) + self.bag(x % 30)).tanh()).square().sum()


@loop(
    "`Embedding` and `EmbeddingBag` with `sparse=True`: `padding_idx`, `no_sync()`, an empty batch on a rank,"
    " `zero_grad(set_to_none=False)`",
    model=Shelf,
    inner=lambda params: torch.optim.SGD(params, 0.02, momentum=0.9),
)
def rows_accumulated(run):
    for step in range(4):
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
        for part in range(2):
            with run.no_sync() if part == 0 else contextlib.nullcontext():
                loss = 0.0
                for rank in run.ranks:
                    generator = torch.Generator().manual_seed(100 * rank + 10 * step + part)
                    count = 0 if (step, part, rank) == (2, 1, run.last) else 6
                    x = torch.randint(0, 40, (count, 3), generator=generator)
                    loss = loss + run.model(x) / len(run.ranks)
                loss.backward()
        run.optimizer.step()


class Tied(Words):
    """A table with sparse gradients, and dense ones where it is also the weight of a linear layer."""

    def forward(self, x, head=True):
        vectors = self.table(x).tanh()
        return (torch.nn.functional.linear(vectors, self.table.weight) if head else vectors).square().mean()


@loop(
    "`Embedding(sparse=True)`, also the weight of a linear layer, in some steps and on some ranks",
    model=Tied,
    inner=plain_sgd,
    hook=RAISES,
)
def rows_tied(run):
    for step in range(4):
        run.optimizer.zero_grad()
        loss = 0.0
        for rank in run.ranks:
            x = torch.randint(0, 40, (6,), generator=torch.Generator().manual_seed(100 * rank + step))
            head = run.way == HOOK or (step == 1 and rank == run.last) or step == 3
            loss = loss + (run.model(x) if run.way == HOOK else run.model(x, head)) / len(run.ranks)
        loss.backward()
        run.optimizer.step()


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
