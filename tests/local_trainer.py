"""A rank that plays a random program with LocalOptimizer."""

import copy

import torch
from programs import BY_HAND, Trainer, by_hand


class LocalTrainer(Trainer):
    """With LocalOptimizer: what ranks have changed is what parameters move in the next mean, and what waits."""

    def start_account(self):
        super().start_account()
        self.pending = {name: torch.zeros_like(p) for name, p in self.params.items()}  # changes since the last mean
        inner = self.optimizers[0].optimizer
        inner.register_step_pre_hook(lambda *_: setattr(self, "before", self.values()))
        inner.register_step_post_hook(lambda *_: self.note())

    def note(self):
        for name, p in self.params.items():
            self.pending[name] += self.before[name] - p.detach()

    def changes(self):
        if not self.optimizers[0]._engine.steps:
            self.settle()

    def settle(self, *_):
        """A mean was taken."""
        names, values, waits = list(self.params), self.values(), self.residuals()
        moved = {name: self.starts[name] - values[name] for name in names}
        before = self.total(self.pending, names) + self.total(self.waits, names)
        after = self.total(moved, names) + self.total(waits, names)
        torch.testing.assert_close(after, before, rtol=1e-8, atol=1e-10)
        self.begin(waits)

    def begin(self, waits):
        """All ranks start from the same values."""
        self.same_bits()
        self.starts, self.waits = self.values(), waits
        for t in self.pending.values():
            t.zero_()

    def step(self):
        self.optimizers[0].step()
        self.changes()

    clip_and_step = step

    def step_by_hand(self):
        """Between two steps, or in place of all of them; not right after loading, which the next mean refuses."""
        if self.optimizers[0]._engine._loaded:
            return
        self.before = self.values()
        by_hand(self.draw.choice(BY_HAND), list(self.params.values()))
        self.note()

    def step_with_closure(self):
        self.optimizers[0].step(self.closure)
        self.changes()

    def backward_in_no_sync(self):
        with self.optimizers[0].no_sync():
            for _ in range(2):
                self.loss().backward()
                self.optimizers[0].step()

    def synchronize(self):
        self.optimizers[0].synchronize()
        self.settle()

    def overflow(self):
        """Given up on all ranks."""
        self.loss(bad=self.comm.rank == self.comm.size - 1).backward()
        self.optimizers[0].step()
        self.optimizers[0].synchronize()
        raise AssertionError("a mean was taken of values that are not finite")

    def save_and_load(self):
        starts, pending = self.starts, self.pending
        super().save_and_load()
        self.starts, self.pending = starts, pending

    def load_in_place(self):
        self.optimizers[0].load_state_dict(copy.deepcopy(self.optimizers[0].state_dict()))

    def discard(self):
        self.optimizers[0].discard()
        self.zero()
        self.begin(self.waits)

    def add_group(self):
        self.synchronize()
        super().add_group()
