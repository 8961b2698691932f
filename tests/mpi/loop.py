"""A registry of training loops as users write them, and of what is expected of each kind of optimizer.

A loop sees a Run: on a rank it stands for that rank, in one process for all of them. `@loop` enters it into LOOPS; what
is expected is SAME (the default; the same parameters as one process), or another text, which docs/torch.md shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from runs import HOOK, LOCAL, OVERLAP, SPARSE, net, sgd

SAME = "same"
AFTER = "same, after `synchronize()`"
FIND = "same, with `find_unused_parameters=True`"
RAISES = "no: DDP raises"
WAITS = "no: DDP waits for the rank"
OWN = "no: gradients are local to each rank"
NONE = "not SGD"


@dataclass(frozen=True)
class Loop:
    title: str
    body: Callable
    model: Callable = net
    inner: Callable = sgd
    cells: dict = field(default_factory=dict)
    rtol: float = 1e-9

    def cell(self, way):
        """What is expected of one kind of optimizer."""
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
