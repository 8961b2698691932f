"""SparseSGD: torch.optim.SGD whose gradients are summed over the ranks by a sparse allreduce with error feedback."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sparsecoll import api
from sparsecoll.agreement import together
from sparsecoll.algorithms import Algorithm, resolve
from sparsecoll.algorithms.base import Reduction
from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Format
from sparsecoll.torch.device import Host, device_of
from sparsecoll.torch.flat import FlatVector, Update
from sparsecoll.torch.layout import residual_dtype
from sparsecoll.torch.replicas import share
from sparsecoll.traffic import Traffic
from sparsecoll.transport import Transport, as_transport, default_comm

STATE = "sparsecoll"  # key of the library's own part of state_dict


class SparseSGD(torch.optim.Optimizer):
    """Drop-in for torch.optim.SGD in data-parallel training: Ok-Topk SGD (Li and Hoefler 2022, Algorithm 2).

    Each step, on every rank, with learning rate a and P ranks:

        acc = residual + a * gradient                      (line 4)
        u, contributed = sparse allreduce of acc           (line 5)
        residual = acc - contributed                       (line 6)
        w = w - u / P                                      (line 7)

    Weight decay and momentum act on the reduced update u / P, so they are the same on all ranks and are never
    compressed; with density=1 or algo="dense" the steps are those of torch.optim.SGD on the mean gradient, under a
    learning-rate schedule too. Parameters are broadcast from rank 0 when they are first seen, and stay the same bits
    on all ranks. Works without mpirun, on one rank.

    Args:
        params: parameters or groups, floating point, on the CPU or (with CuPy) a CUDA device; every rank the same ones
            in the same order.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD.
        comm: mpi4py communicator (or the comm of sparsecoll.simulate). None: MPI.COMM_WORLD, or one rank without MPI.
        algo: a name of sparsecoll.ALGORITHMS or an Algorithm object.
        density: share of all parameters that each rank selects, in (0, 1]. Ignored by algo="dense", which sends all.
        k: their number, instead of density.
        format, value_dtype, timeout: as in sparsecoll.allreduce.

    Raises:
        ValueError, TypeError: an option is invalid; in `step`, on every rank, a gradient holds NaN or infinity. What
            was finite in the gradients of that step is in the residual then, and training may go on.
        CommunicationError: ranks disagree, or a peer did not answer.

    Volume of a step: the algorithm's. Memory: the residual (n values; float32 for half-precision parameters) and, with
    momentum, the buffers. Gradients of ranks where a parameter took no part count as zero.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        comm: Any = None,
        algo: str | Algorithm = "oktopk",
        density: float = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        dampening: float = 0.0,
        maximize: bool = False,
        k: int | None = None,
        format: str | Format = "auto",
        value_dtype: str | None = None,
        timeout: float | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name}: expected at least 0, got {value}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(f"nesterov: expected momentum > 0 and dampening 0, got {momentum} and {dampening}")
        if not 0 < density <= 1:
            raise ValueError(f"density: expected in (0, 1], got {density}")
        self._algorithm = resolve(algo)
        self._transport: Transport = as_transport(default_comm() if comm is None else comm)
        chosen = {} if self._algorithm.takes_dense else {"density": density} if k is None else {"k": k}
        self._options: dict[str, Any] = {
            **chosen,
            "format": format,
            "value_dtype": value_dtype,
            "timeout": timeout,
        }
        self._flats: list[tuple[FlatVector, Algorithm]] = []
        self._built = False
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)
        self._built = True
        self._lay_out()

    @property
    def traffic(self) -> Traffic:
        """Bytes, messages and seconds of this rank so far, per phase; live."""
        return self._transport.traffic

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; collective once training has begun, since the new parameters are broadcast."""
        super().add_param_group(param_group)
        if self._built:
            self._lay_out()

    def _lay_out(self) -> None:
        """Put all parameters into flat vectors, one per residual dtype and device; residuals that exist are kept."""
        by_kind: dict[tuple[Any, Host], list[torch.Tensor]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                by_kind.setdefault((residual_dtype(p.dtype), device_of(p)), []).append(p)
        algorithms = [algorithm for _, algorithm in self._flats]
        self._flats = []
        for number, ((dtype, _), params) in enumerate(by_kind.items()):
            flat = FlatVector(params, dtype)
            for p, residual in zip(params, flat.residuals, strict=True):
                state = self.state[p]
                if "residual" in state:
                    residual.copy_(state["residual"])
                else:
                    with together(self._transport, "parameters", self._options["timeout"]):
                        share(self._transport, [p])
                state["residual"] = residual
            known = number < len(algorithms)
            fresh = self._algorithm if number == 0 else copy.deepcopy(self._algorithm)
            self._flats.append((flat, algorithms[number] if known else fresh))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step on all ranks; collective. `closure` evaluates this rank's loss again and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for flat, algorithm in self._flats:
            with flat.device.here():
                self._compensate(flat, groups)
                reduction = self._reduce(flat, algorithm)
                flat.residual.update(reduction.contributed)
                for p, update in flat.updates(reduction.value):
                    self._apply(p, update, groups[p])
        return loss

    def _reduce(self, flat: FlatVector, algorithm: Algorithm) -> Reduction:
        try:
            return api.allreduce_vectors(self._transport, lambda: (flat.residual.vector, algorithm), **self._options)
        except Exception:
            flat.residual.drop_not_finite()
            raise

    @staticmethod
    def _compensate(flat: FlatVector, groups: dict[torch.Tensor, dict[str, Any]]) -> None:
        """acc = residual + lr * gradient, in the residual's memory."""
        for p, residual in zip(flat.params, flat.residuals, strict=True):
            if p.grad is not None:
                sign = -1 if groups[p]["maximize"] else 1
                gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
                residual.add_(gradient, alpha=sign * float(groups[p]["lr"]))

    def _apply(self, p: torch.Tensor, update: Update, group: dict[str, Any]) -> None:
        """torch.optim.SGD's step on the reduced update, which is in units of the learning rate already."""
        lr, momentum, share = float(group["lr"]), group["momentum"], 1 / self._transport.size
        if momentum == 0:
            if group["weight_decay"]:
                p.mul_(1 - lr * group["weight_decay"])
            update.add_to(p, -share)
            return
        state = self.state[p]
        buffer = state.get("momentum_buffer")
        damp = 1.0 if buffer is None else 1 - group["dampening"]
        if buffer is None:
            buffer = state["momentum_buffer"] = torch.zeros_like(p)
        elif state["momentum_lr"] not in (0.0, lr):
            buffer.mul_(lr / state["momentum_lr"])  # buffers hold lr * velocity: follow the schedule
        state["momentum_lr"] = lr
        decay = lr * group["weight_decay"]
        buffer.mul_(momentum)
        update.add_to(buffer, damp * share)
        if decay:
            buffer.add_(p, alpha=damp * decay)
        if group["nesterov"]:
            if decay:
                p.mul_(1 - decay)
            update.add_to(p, -share)
            p.sub_(buffer, alpha=momentum)
        else:
            p.sub_(buffer)

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with each parameter's residual, and the algorithms' thresholds and boundaries.

        Differs between ranks (residuals are local): save one file per rank. Safe for torch.load(weights_only=True).
        """
        state: dict[str, Any] = super().state_dict()
        state[STATE] = {
            "rank": self._transport.rank,
            "size": self._transport.size,
            "algorithms": [algorithm.state_dict() for _, algorithm in self._flats],
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a run on as many ranks stopped, with the same bits.

        Raises:
            CommunicationError: the state was saved by another rank or at another number of ranks.
        """
        own = state_dict[STATE]
        here = (self._transport.rank, self._transport.size)
        if (own["rank"], own["size"]) != here:
            raise CommunicationError(
                f"state_dict: expected the one of rank {here[0]} of {here[1]},"
                f" got that of rank {own['rank']} of {own['size']}"
            )
        plain = {name: value for name, value in state_dict.items() if name != STATE}
        residuals = {number: entry["residual"] for number, entry in plain["state"].items()}
        super().load_state_dict(plain)
        ordered = [p for group in self.param_groups for p in group["params"]]
        for (
            number,
            saved,
        ) in residuals.items():  # torch has cast them to the parameter's dtype: take the saved bits
            self.state[ordered[number]]["residual"] = saved
        self._lay_out()
        for (_, algorithm), saved in zip(self._flats, own["algorithms"], strict=True):
            algorithm.load_state_dict(saved)
