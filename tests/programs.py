"""Random training programs: whatever a loop does, no gradient is lost and ranks hold the same bits, or all raise.

All ranks draw the same program from its seed: one or two optimizers on one communicator, and what users do between two
steps. After each step, what the ranks have given, with what waited before, is what parameters have moved and what waits
now. If an action raises, it does so on all ranks, and residuals are as before.
"""

import copy
import random

import torch
from torch.optim.sgd import sgd as functional_sgd

from sparsecoll.torch import DistributedOptimizer, LocalOptimizer, SparseSGD
from sparsecoll.torch.compressors import QSGD, RandomKCompressor, TopKCompressor, efsignsgd, oktopk

LR = 0.01
OVERLAP, AT_STEP, SPARSE, LOCAL = "overlap", "overlap=False", "SparseSGD", "LocalOptimizer"
COMPRESSORS = (
    lambda: TopKCompressor(0.1, algo="allgather"),
    lambda: oktopk(0.1),
    lambda: efsignsgd(),
    lambda: RandomKCompressor(0.1),
    lambda: QSGD(4, feedback=True),
)
BUCKETS = {"bucket_bytes": 2000, "dense_below": 40}
BY_HAND = ("p.data.add_", "p.sub_", "foreach", "functional", "inference_mode")
ACTIONS = {  # name -> weight
    "backward": 9,
    "backward_in_no_sync": 3,
    "step": 8,
    "step_by_hand": 3,
    "step_with_closure": 2,
    "clip_and_step": 2,
    "zero": 5,
    "synchronize": 2,
    "evaluate": 2,
    "save_and_load": 2,
    "load_in_place": 1,
    "overflow": 1,
    "add_group": 1,
    "add_group_wrongly": 1,
    "discard": 1,
}
EXPECTED = (  # parts of errors
    "updated by either optimizers or the loop",
    "expected finite values",
    "non-leaf",
    "expected the same bits on all ranks",
)


class Net(torch.nn.Module):
    """691 parameters; the last layer is frozen until its group is added."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.middle = torch.nn.Linear(6, 16), torch.nn.Linear(16, 32)
        self.last = torch.nn.Linear(32, 1)
        self.double()
        self.last.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Plan:
    """What all ranks draw from a seed."""

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        self.way = draw.choice([OVERLAP, OVERLAP, AT_STEP, SPARSE, LOCAL])
        self.second = draw.choice([None, OVERLAP, AT_STEP, SPARSE]) if self.way != LOCAL else None
        self.timeouts = draw.choice([(None, None), (60.0, None), (None, 60.0), (60.0, 30.0)])
        self.compressor = draw.choice(COMPRESSORS)
        self.scaled = self.second is None and self.way != LOCAL and draw.random() < 0.25
        self.every, self.foreach = draw.choice([1, 2, 3]), draw.choice([None, True, False])
        actions = draw.choices(list(ACTIONS), ACTIONS.values(), k=draw.randrange(6, 18))
        self.actions = [*actions, "zero", "backward", "step", "synchronize"]

    def __str__(self):
        ways = f"{self.way}, {self.second}, timeouts {self.timeouts}, scaled {self.scaled}"
        return f"{ways}, {self.compressor()}: {' '.join(self.actions)}"


def by_hand(kind, params):
    """Update parameters by their gradients, as a loop does that needs no optimizer."""
    params = [p for p in params if p.grad is not None]
    grads = [p.grad for p in params]
    with torch.no_grad():
        if kind == "p.data.add_":
            for p in params:
                p.data.add_(p.grad, alpha=-LR)
        elif kind == "p.sub_":
            for p in params:
                p.sub_(LR * p.grad)
        elif kind == "foreach" and params:
            torch._foreach_add_(params, grads, alpha=-LR)
        elif kind == "functional":
            options = {"weight_decay": 0.0, "momentum": 0.0, "lr": LR, "dampening": 0.0}
            functional_sgd(params, grads, [None] * len(params), nesterov=False, maximize=False, **options)
        else:
            with torch.inference_mode():
                for p in params:
                    p.sub_(LR * p.grad)


class Trainer:
    """One rank's model and optimizers, and its account."""

    def __init__(self, comm, plan):
        self.comm, self.plan, self.draw, self.added, self.count = comm, plan, plan.draw, False, 0
        self.make(Net(comm.rank))

    def make(self, model):
        """Make the optimizers of a model."""
        plan, self.model = self.plan, model
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) if plan.scaled else None
        self.ways = [plan.way] if plan.second is None else [plan.way, plan.second]
        layers = [self.model.first, self.model.middle]
        parts = [[p for layer in layers for p in layer.parameters()]]
        parts = parts if plan.second is None else [list(layer.parameters()) for layer in layers]
        self.optimizers = [self._made(*args) for args in zip(self.ways, parts, plan.timeouts, strict=False)]
        self.params = dict(self.model.named_parameters())
        if self.added:
            self._add()
        self.start_account()

    def _made(self, way, params, timeout):
        inner = torch.optim.SGD(params, LR, foreach=self.plan.foreach)
        options = {"comm": self.comm, "timeout": timeout}
        if way == SPARSE:
            options |= {"model": self.model, "grad_scaler": self.scaler}
            return SparseSGD(params, LR, algo="allgather", density=0.1, **options)
        options |= {"compressor": self.plan.compressor(), **BUCKETS}
        if way == LOCAL:
            return LocalOptimizer(inner, self.model, every=self.plan.every, **options)
        options |= {"overlap": way == OVERLAP, "grad_scaler": self.scaler}
        own = set(map(id, params))  # what SparseSGD reduces, no other may
        pairs = [(name, p) for name, p in self.model.named_parameters() if id(p) in own]
        return DistributedOptimizer(inner, pairs if SPARSE in self.ways else self.model, **options)

    # -- the account

    def start_account(self):
        self.given = {name: torch.zeros_like(p) for name, p in self.params.items()}
        for name, p in self.params.items():
            if p.requires_grad:
                self.watch(name, p)
        self.clipped = 1.0
        self.waits, self.starts = self.residuals(), self.values()

    def watch(self, name, p):
        def gives(gradient):
            self.given[name] += gradient.detach() / (1.0 if self.scaler is None else self.scaler.get_scale())

        p.register_hook(gives)

    def of(self, *ways):
        return [optimizer for optimizer, way in zip(self.optimizers, self.ways, strict=True) if way in ways]

    def names_of(self, optimizers):
        ids = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        return [name for name, p in self.params.items() if id(p) in ids]

    def values(self):
        return {name: p.detach().clone() for name, p in self.params.items()}

    def residuals(self):
        """In units of gradients."""
        found = {name: torch.zeros_like(p) for name, p in self.params.items()}
        for optimizer, way in zip(self.optimizers, self.ways, strict=True):
            kept = optimizer.state_dict()["sparsecoll"]["tensors"].get("residual", {})
            found |= {name: t / (LR if way == SPARSE else 1.0) for name, t in kept.items()}
        return found

    def total(self, tensors, names):
        flat = torch.cat([tensors[name].reshape(-1) for name in names]).numpy()
        return torch.from_numpy(sum(self.comm.allgather(flat)))

    def settle(self, names):
        """These parameters have taken a step."""
        waits, values = self.residuals(), self.values()
        moved = {name: (self.starts[name] - values[name]) / (LR * self.clipped) for name in names}
        before = self.total(self.given, names) + self.total(self.waits, names)
        after = self.total(moved, names) + self.total(waits, names)
        torch.testing.assert_close(after, before, rtol=1e-8, atol=1e-8)
        self.same_bits()
        for name in names:
            self.given[name] = torch.zeros_like(values[name])
            if self.params[name].grad is not None:
                self.given[name] += self.params[name].grad
            self.waits[name] = waits[name]
        self.starts, self.clipped = values, 1.0
        if self.scaler is not None:  # gradients are unscaled now
            self.zero()

    def same_bits(self):
        mine = b"".join(p.detach().numpy().tobytes() for p in self.params.values())
        assert set(self.comm.allgather(mine)) == {mine}, "parameters differ between ranks"

    def unchanged(self):
        """Residuals are those of the last step."""
        for name, t in self.residuals().items():
            torch.testing.assert_close(t, self.waits[name], rtol=1e-12, atol=1e-15)

    # -- actions

    def play(self):
        for number, action in enumerate(self.plan.actions):
            error = None
            try:
                getattr(self, action)()
            except Exception as raised:
                error = raised
            texts = self.comm.allgather(None if error is None else str(error))
            if error is not None and (None in texts or not all(any(e in t for e in EXPECTED) for t in texts)):
                raise AssertionError(f"action {number}, {action}: {texts}") from error
            assert texts[0] is None or None not in texts, f"action {number}, {action}: {texts}"
            if error is not None:
                self.recover()
        for optimizer in self.of(OVERLAP, AT_STEP):
            optimizer.close()
        return self

    def recover(self):
        self.discard()
        self.unchanged()

    def loss(self, bad=False):
        self.count += 1
        generator = torch.Generator().manual_seed(1009 * self.comm.rank + self.count)
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        loss = (self.model(x) - x[:, :1]).square().mean()
        loss = loss * float("inf") if bad else loss
        return loss if self.scaler is None else self.scaler.scale(loss)

    def backward(self):
        self.loss().backward()

    def backward_in_no_sync(self):
        distributed = self.of(OVERLAP, AT_STEP)
        if not distributed or len(self.optimizers) > 1:
            return self.backward()
        with distributed[0].no_sync():
            self.backward()

    def _take(self, optimizers):
        for optimizer in optimizers:
            if self.scaler is None:
                optimizer.step()
            elif self.given_any():
                self.scaler.step(optimizer)
                self.scaler.update()

    def given_any(self):
        """A GradScaler wants a gradient, on this rank."""
        return any(p.grad is not None for p in self.params.values())

    def step(self):
        optimizers = self.optimizers if self.draw.random() < 0.8 else self.optimizers[-1:]
        if self.scaler is not None and not self.given_any():
            return
        self._take(optimizers)
        self.settle(self.names_of(optimizers))

    def step_by_hand(self):
        kind, optimizers = self.draw.choice(BY_HAND), self.of(OVERLAP, AT_STEP)
        if not optimizers or self.scaler is not None:
            return
        for optimizer in optimizers:
            optimizer.synchronize()
        names = [name for name in self.names_of(optimizers) if self.params[name].grad is not None]
        if names:
            by_hand(kind, [self.params[name] for name in names])
            self.settle(names)

    def closure(self):
        self.zero()
        loss = self.loss()
        loss.backward()
        return loss

    def step_with_closure(self):
        if len(self.optimizers) > 1 or self.scaler is not None:
            return
        self.optimizers[0].step(self.closure)
        self.settle(self.names_of(self.optimizers))

    def clip_and_step(self):
        if self.of(SPARSE) or not self.given_any():
            return
        for optimizer in self.optimizers:
            if self.scaler is not None:
                optimizer.synchronize()
                self.scaler.unscale_(optimizer)
            else:
                optimizer.synchronize()
        params = [self.params[name] for name in self.names_of(self.optimizers)]
        norm = float(torch.nn.utils.clip_grad_norm_(params, 0.05))
        self.clipped = min(1.0, 0.05 / (norm + 1e-6))
        if self.draw.random() < 0.7:
            self._take(self.optimizers)
            self.settle(self.names_of(self.optimizers))
        else:
            self.zero()
            if self.scaler is not None:
                self.scaler.update()

    def zero(self):
        kind, set_to_none = self.draw.choice(["optimizer", "model", "p.grad = None"]), self.draw.random() < 0.7
        if kind == "optimizer":
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)
        elif kind == "model":  # in place, it is an edit of the mean, which the next step would take
            self.model.zero_grad(set_to_none=set_to_none or bool(self.of(OVERLAP, AT_STEP)))
        else:
            for p in self.params.values():
                p.grad = None
        for t in self.given.values():
            t.zero_()
        self.clipped = 1.0

    def synchronize(self):
        for optimizer in self.of(OVERLAP, AT_STEP):
            optimizer.synchronize()

    def evaluate(self):
        with torch.inference_mode():
            assert self.model(torch.ones(2, 6, dtype=torch.float64)).isfinite().all()

    def save_and_load(self):
        """In the middle of a step, the gradients of which are lost."""
        states = copy.deepcopy([optimizer.state_dict() for optimizer in self.optimizers])
        scaler = None if self.scaler is None else self.scaler.state_dict()
        values, waits = copy.deepcopy(self.model.state_dict()), self.waits
        for optimizer in self.of(OVERLAP, AT_STEP):
            optimizer.close()
        model = Net(100 + self.comm.rank)
        model.last.requires_grad_(self.added)
        self.make(model)
        self.model.load_state_dict(values)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        if scaler is not None:
            self.scaler.load_state_dict(scaler)
            self.scaler.scale(torch.zeros(()))  # torch's own step() raises before the first scale()
        self.waits, self.starts = waits, self.values()
        self.unchanged()

    def load_in_place(self):
        for optimizer in self.optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self.zero()
        self.unchanged()

    def overflow(self):
        self.zero()
        self.loss(bad=self.comm.rank == self.comm.size - 1).backward()
        self._take(self.optimizers)
        assert self.scaler is not None, "a step was taken with an infinite gradient"
        self.zero()
        self.unchanged()

    def add_group(self):
        if not self.added:
            self.added = True
            self.model.last.requires_grad_(True)
            self._add()
            for name in ("last.weight", "last.bias"):
                self.watch(name, self.params[name])
            self.starts |= {name: self.params[name].detach().clone() for name in ("last.weight", "last.bias")}

    def _add(self):
        self.optimizers[0].add_param_group({"params": list(self.model.last.parameters()), "lr": LR})

    def add_group_wrongly(self):
        if self.added:
            return
        params = list(self.model.last.parameters())
        if self.comm.rank == self.comm.size - 1:
            params = [params[0].requires_grad_(True) * 1, params[1]]
        try:
            self.optimizers[0].add_param_group({"params": params, "lr": LR})
        finally:
            self.model.last.requires_grad_(False)

    def discard(self):
        for optimizer in self.of(OVERLAP, AT_STEP):
            optimizer.discard()
        self.zero()
