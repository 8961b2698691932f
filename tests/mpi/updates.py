"""Loops that update parameters themselves, and an account of what they have given."""

from functools import partial

import torch
from runs import HOOK, LOCAL, OVERLAP, SPARSE, Run, alike
from torch.optim.sgd import sgd as functional_sgd

from sparsecoll.torch.compressors import TopKCompressor

LR, STEPS = 0.01, 6
TOPK = TopKCompressor(0.02, algo="allgather")


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
