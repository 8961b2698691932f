"""Random training loops over MPI: the same as one process on the global batch, and not a gradient lost on the way.

All ranks draw the same program from its number. SPARSECOLL_LOOPS says how many are run.
"""

import os
import random

import pytest
import torch
from loops_of_steps import Raise
from runs import LOCAL, ONE, OVERLAP, Ledger, Run, alike, close, net, plain_sgd, sgd

from sparsecoll.torch.compressors import COVAP, QSGD, PowerSGD, RandomKCompressor, TopKCompressor, efsignsgd, oktopk

pytestmark = [pytest.mark.mpi, pytest.mark.mpich, pytest.mark.usefixtures("process_group")]
COUNT = int(os.environ.get("SPARSECOLL_LOOPS", "14"))  # each compressor in each of two ways
COMPRESSORS = [
    TopKCompressor(0.1, algo="allgather"),
    oktopk(0.1),
    PowerSGD(2),
    efsignsgd(),
    RandomKCompressor(0.1),
    QSGD(4, feedback=True),
    COVAP(2, start=1.0),
]
ACTIONS = {  # name -> weight
    "backward": 8,
    "backward under no_sync": 3,
    "step": 8,
    "zero_grad": 6,
    "zero_grad in place": 2,
    "model.zero_grad": 3,
    "synchronize": 2,
    "clip": 3,
    "edit": 2,
    "freeze": 2,
    "unfreeze": 3,
    "save and load": 1,
    "raise on all": 1,
    "raise on one": 1,
    "closure": 2,
}

BEGINNINGS = ("backward", "backward under no_sync", "synchronize", "raise on all", "clip", "edit")


def program(seed, edits):
    """A list of actions. A mean that was changed in place is stepped on or thrown away next, as the engine demands.

    Nor is a step given up in the middle of which layers were frozen: what it has reduced is kept when buckets change.
    """
    draw, actions, edited, begun = random.Random(seed), [], False, False
    for _ in range(draw.randrange(5, 16)):
        (action,) = draw.choices(list(ACTIONS), ACTIONS.values())
        if action in ("clip", "edit"):
            if not edits:
                continue
            edited = True
        elif edited:
            action, edited = draw.choice(["step", "zero_grad", "model.zero_grad"]), False
        actions.append(action)
        if action in ("freeze", "unfreeze") and begun:
            actions.append("step")
        begun = actions[-1] not in ("step", "zero_grad", "zero_grad in place") and (begun or action in BEGINNINGS)
    return [*actions, "zero_grad", "backward", "step"]


class Interpreter:
    """Carries out a program on a Run; `make` makes a new one, for loading."""

    def __init__(self, make, ledger):
        self.make, self.step = make, 0
        self.run = make()
        self.ledger = Ledger(self.run) if ledger else None

    def play(self, actions):
        for action in actions:
            getattr(self, "_" + action.replace(" ", "_").replace(".", "_"))()
        self.run.close()
        return self.run

    def _loss(self, **options):
        self.step += 1
        return self.run.loss(self.step, **options)

    def _backward(self):
        if any(p.requires_grad for p in self.run.params):
            self._loss().backward()

    def _backward_under_no_sync(self):
        with self.run.no_sync():
            self._backward()

    def _step(self):
        self.run.optimizer.step()
        if self.ledger:
            self.ledger.settle()

    def _zeroed(self):
        if self.ledger:
            self.ledger.zero()

    def _zero_grad(self):
        self.run.optimizer.zero_grad()
        self._zeroed()

    def _zero_grad_in_place(self):
        self.run.optimizer.zero_grad(set_to_none=False)
        self._zeroed()

    def _model_zero_grad(self):
        self.run.model.zero_grad()
        self._zeroed()

    def _synchronize(self):
        self.run.synchronize()

    def _clip(self):
        self.run.mean()
        self.run.synchronize()
        torch.nn.utils.clip_grad_norm_(self.run.params, 0.1)

    def _edit(self):
        self.run.synchronize()
        for p in self.run.params:
            if p.grad is not None:
                p.grad.data.mul_(0.7)

    def _freeze(self):
        self.run.module[2].requires_grad_(False)

    def _unfreeze(self):
        self.run.module[2].requires_grad_(True)

    def _save_and_load(self):
        self._zero_grad()
        old = self.run
        self.run = self.make()
        self.run.module.load_state_dict(old.module.state_dict())
        self.run.optimizer.load_state_dict(old.optimizer.state_dict())
        old.close()
        if self.ledger:
            self.ledger = Ledger(self.run)

    def _raise_on_all(self):
        self._raise(range(self.run.size))

    def _raise_on_one(self):
        """That rank goes on with step(), adding nothing."""
        self._zero_grad()
        self._raise([self.run.last])
        self._step()

    def _raise(self, bad):
        run, good = self.run, [r for r in self.run.ranks if r not in bad]

        def forward(x, rank):
            first = run.module[:2](x)
            return run.module[2:](Raise.apply(first) if rank in bad else first)

        if run.way == ONE and good:
            run.ranks, ranks = good, run.ranks
            (self._loss() * (len(good) / len(ranks))).backward()
            run.ranks = ranks
            return
        try:
            self._loss(forward=forward).backward()
        except MemoryError:
            self._zero_grad()

    def _closure(self):
        def closure():
            self._zero_grad()
            loss = self._loss()
            loss.backward()
            return loss

        self.run.optimizer.step(closure)
        if self.ledger:
            self.ledger.settle()


def in_one_process(comm, seed):
    actions, way = program(seed, edits=True), (OVERLAP, LOCAL)[seed % 2]
    alone = Interpreter(lambda: Run(ONE, comm, net, sgd), False).play(actions)
    run = Interpreter(lambda: Run(way, comm, net, sgd), False).play(actions)
    assert alike(comm, run.values()), (seed, actions)
    try:
        close(run.values(), alone.values(), 1e-8)
    except AssertionError as error:
        raise AssertionError(f"program {seed}, {way}: {actions}") from error


def conserved(comm, seed):
    actions, way = program(seed, edits=False), (OVERLAP, LOCAL)[seed % 2]
    compressor = COMPRESSORS[seed // 2 % len(COMPRESSORS)]
    try:
        player = Interpreter(lambda: Run(way, comm, net, plain_sgd, compressor), True)
        run = player.play(actions)
    except Exception as error:
        raise AssertionError(f"program {seed}, {way}, {compressor}: {actions}") from error
    assert player.ledger.steps and alike(comm, run.values()), (seed, actions)


def test_random_loops_are_those_of_one_process(comm):
    for seed in range(COUNT):
        in_one_process(comm, seed)


def test_random_loops_lose_no_gradient(comm):
    for seed in range(COUNT):
        conserved(comm, seed)
