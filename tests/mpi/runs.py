"""One training in one of the ways in, over MPI, or by one process that stands for all ranks; and what is compared."""

import contextlib

import pytest
import torch

from sparsecoll.torch import DistributedOptimizer, HookState, SparseSGD, comm_hook

ONE = "one process"
OVERLAP, LOCAL, HOOK, SPARSE = "DistributedOptimizer", "overlap=False", "DDP hook", "SparseSGD"
WAYS = (OVERLAP, LOCAL, HOOK)
TIMEOUT = 60.0
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


def draw(rank, step, part=0, dtype=torch.float64, count=8):
    generator = torch.Generator().manual_seed(1_000_003 * rank + 1009 * step + part)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randn(count, 1, generator=generator, dtype=torch.float64).to(dtype)


def in_turn(cases):
    """Parameters (way, case) of all (case, ways); over Open MPI a case runs in one way, and the ways take turns."""
    return [
        pytest.param(way, case, marks=[] if i == number % len(ways) else [pytest.mark.mpich])
        for number, (case, ways) in enumerate(cases)
        for i, way in enumerate(ways)
    ]


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
        own = {name: options.pop(name) for name in ("verify",) if way == HOOK and name in options}
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
            self.state = HookState(comm, compressor, self.model, timeout=TIMEOUT, grad_scaler=scaler, **own)
            self.model.register_comm_hook(self.state, comm_hook)
        self.inner = self.optimizer = inner(self.module.parameters())
        if way == SPARSE:
            own = {name: self.inner.defaults[name] for name in ("lr", "momentum", "weight_decay")}
            groups = [{"params": group["params"]} for group in self.inner.param_groups]
            options = {"comm": comm, "algo": "dense", "model": self.module, "timeout": TIMEOUT, **options}
            options["grad_scaler"] = scaler
            self.inner = self.optimizer = SparseSGD(groups, **own, **options)
        if way in (OVERLAP, LOCAL):
            options = {**OPTIONS, "overlap": way == OVERLAP, "grad_scaler": scaler, **options}
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

    def discard(self):
        """Parameters have changed, but not by a step."""
        if self.way == HOOK:
            self.state.discard()
        elif self.way in (OVERLAP, LOCAL):
            self.optimizer.discard()

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


def train(run, steps):
    """Take plain steps with a Run, and return it."""
    for step in steps:
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.optimizer.step()
    return run


def bits(values):
    return b"".join(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in values.values() if t.numel())


def alike(comm, values):
    """All ranks have the same bits."""
    mine = bits(values)
    return set(comm.allgather(mine)) == {mine}


def close(values, expected, rtol=1e-9):
    for name, t in expected.items():
        torch.testing.assert_close(values[name], t, rtol=rtol, atol=rtol, msg=lambda text, n=name: f"{n}: {text}")


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
        return {name: kept.get(name, torch.zeros_like(p)).clone().to_dense() for name, p in self.named.items()}

    def _total(self, tensors):
        flat = torch.cat([tensors[name].reshape(-1).double() for name in self.named]).numpy()
        return torch.from_numpy(self.run.comm.allreduce(flat))

    def _taken(self):
        """Copies, since the next back-propagation adds to the memory of p.grad."""
        found = {}
        for name, p in self.named.items():
            found[name] = torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense().clone()
        return found

    def settle(self):
        """After a step: compare. Gradients that are not thrown away are given to the next one again."""
        taken, waits = self._taken(), self._residuals()
        before = self._total(self.given) + self._total(self.waited)
        torch.testing.assert_close(self._total(taken) + self._total(waits), before, rtol=1e-9, atol=1e-9)
        self.given, self.waited, self.steps = taken, waits, self.steps + 1
