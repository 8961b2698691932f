"""OneBitAdam: AdamW whose momentum is sent in one bit a value, after a warm-up of local steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from sparsecoll.errors import NonFiniteError, check_integer, check_number
from sparsecoll.torch.compressors import QSGD
from sparsecoll.torch.compressors.onebit import KINDS, NEW, OneBit, divisor_of
from sparsecoll.torch.optimizers.distributed import DistributedOptimizer, Wrapper
from sparsecoll.torch.optimizers.local import LocalOptimizer
from sparsecoll.torch.optimizers.sgd_rules import names_of
from sparsecoll.torch.reduction.engine import Engine
from sparsecoll.torch.reduction.grad_scaler import Scaling, forget
from sparsecoll.torch.reduction.state import LOCAL, STATE
from sparsecoll.torch.replica.calls import Options, agreed, collective, communicator
from sparsecoll.torch.replica.guards import refuse_wrapped
from sparsecoll.torch.replica.replica import Replica
from sparsecoll.torch.tensors.layout import cut
from sparsecoll.torch.tensors.model import Named, check_whole, model_of, sparse_weights
from sparsecoll.torch.tensors.private import is_called_by_scaler, untraced
from sparsecoll.transport import as_transport
from sparsecoll.transport.all_ranks import barrier
from sparsecoll.transport.call import CollectiveCall

DIP = 0.1  # a learning rate below this part of the first one, at the end of the warm-up, is not that of its residuals


class Compressed(DistributedOptimizer):
    """OneBitAdam after the warm-up: weight decay, and steps along the means of OneBit, which are those of SGD."""

    def __init__(
        self, adamw: torch.optim.Optimizer, params: Named, model: torch.nn.Module | None, replica: Replica, own: OneBit
    ) -> None:
        optimizer = torch.optim.SGD(adamw.param_groups)
        Wrapper.__init__(self, optimizer)
        self._keeps_momentum, self._scaling = False, Scaling(self, None)
        given = replica.options
        options = Options(given.bucket_bytes, 0, False, False, given.verify, given.timeout)
        own.groups = lambda: group_by_name(optimizer, params)
        with agreed(replica.transport, given.timeout):
            self._engine = Engine(replica.transport, own, optimizer, model, options, self._scaling)
            self._engine.replica.equal = True
            self._engine.regroup(params)


def group_by_name(optimizer: torch.optim.Optimizer, params: Named) -> dict[str, dict[str, Any]]:
    """Return the groups of parameters by name."""
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    return {name: groups[p] for name, p in params.items() if p in groups}


def refuse_amsgrad(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise if a group wants the largest of all second moments."""
    if any(group.get("amsgrad") for group in groups):
        raise ValueError("amsgrad: expected False in all groups, got True: use LocalOptimizer")


class OneBitAdam(Wrapper):
    """Drop-in for torch.optim.AdamW on several ranks that sends one bit for each value in most steps.

        optimizer = OneBitAdam(model.parameters(), lr=1e-3, warm_up=1500)  # of 10,000 steps

    This is 1-bit Adam (Tang and others, ICML 2021) with a warm-up that sends few bytes, too, and second moments that
    are renewed, as in 0/1 Adam (Lu and others, 2022):

    1. The first `warm_up` steps are those of `LocalOptimizer`: every rank steps by itself as AdamW, and every `every`
       steps all ranks move by the mean of their changes, in `bits` bits a value with error feedback.
    2. From then on, with the first moment m and the second moment v, each step sends acc in one bit a value:

           acc = residual + beta1 m + (1 - beta1) gradient
           m = the mean over the ranks of what they send;  residual = acc - sent
           w = w - lr (m / (sqrt(v) / scale + eps) + weight_decay w)

       What the residuals of the warm-up hold becomes part of the first acc, as do the first moments of all ranks.
    3. v is the same on all ranks: the mean of the roots of their second moments, in 8 bits, formed after `warm_up`
       steps and after 2, 4, 8, ... times as many. A root is at least a tenth of its parameter's and bucket's mean.

    The second moments are those of a rank's own gradients, which have more noise than their mean, so that steps would
    be shorter than those of AdamW with the global batch. `scale` makes up for it; it is estimated from the gradients of
    all ranks in the step in which v is formed, for each bucket.

    After the warm-up, parameters have the same bits on all ranks after each step; during it, after each mean, see
    `LocalOptimizer`. Schedules of the learning rate, `join`, checkpoints, `discard` after a NaN and failures are as
    described there and in `DistributedOptimizer`. Gradients are local to each rank until `step`, so that accumulating
    them needs no `no_sync`, and clipping acts on each rank's own gradients. After the warm-up, `step` leaves the
    direction of the step in `p.grad`, a parameter that gets its first gradient then is refused on all ranks, and a
    plain AdamW that loads the state begins with new moments.

    Args:
        params: parameters or groups of them, as in torch, the same in the same order on every rank; of floating point.
        lr: learning rate (default: 1e-3).
        betas: as in torch.optim.AdamW (default: (0.9, 0.999)).
        eps: as in torch.optim.AdamW (default: 1e-8).
        weight_decay: as in torch.optim.AdamW (default: 0.01).
        warm_up: number of steps of the warm-up, rounded up to a multiple of `every`; about 15 % of all steps.
            `synchronize` ends a period of `every` steps early.
        every: number of steps from one mean to the next in the warm-up (default: 3).
        bits: bits per value there: 8, 4 (the default), 2 or 1.
        bucket: number of values that share a scale (default: 2048).
        scale: factor of the steps after the warm-up (default: None, for the estimate, which is in [1, sqrt(P)]).
        model: the model, whose buffers are kept the same and whose parameter names are used; required for this if
            `params` is not `model.parameters()`.
        comm: as in `DistributedOptimizer`.
        bucket_bytes: as in `DistributedOptimizer`.
        verify: as in `DistributedOptimizer`; in the warm-up, means count as steps.
        timeout: as in `DistributedOptimizer`.

    Raises:
        ValueError, TypeError: On every rank, if an option or a parameter is invalid on some rank.
        CommunicationError: On every rank, if ranks have different parameters or options.

    Volume: 2n(P-1)/P * (b + 32/bucket)/32 words, where b is `bits` in a mean of the warm-up and 1 in a later step; once
    more with b = 8 where v is formed, and about 4096(P-1) words for each bucket of gradients. Memory: that of
    LocalOptimizer with AdamW; then, in place of AdamW's moments, four vectors of the size of the gradients.

    See Also:
        `sparsecoll.torch.LocalOptimizer`, `sparsecoll.torch.DistributedOptimizer`.
    """

    _step_supports_amp_scaling = True  # GradScaler.step() calls `step` always, which refuses it
    _now: LocalOptimizer | Compressed
    defaults: Any = None  # AdamW's, also after the warm-up: schedules of the momentum look here

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        warm_up: int,
        every: int = 3,
        bits: int = 4,
        bucket: int = 2048,
        scale: float | None = None,
        model: torch.nn.Module | None = None,
        comm: Any = None,
        bucket_bytes: int | None = 25 << 20,
        verify: bool | int = 0,
        timeout: float | None = None,
    ) -> None:
        transport, self._model = communicator(comm, timeout), model_of(params) if model is None else model

        def build(call: CollectiveCall) -> tuple[torch.optim.AdamW, QSGD, OneBit]:
            for name, value in (("warm_up", warm_up), ("every", every)):
                check_integer(name, value, 1)
            if scale is not None:
                check_number("scale", scale, "(0, inf)")
            adamw = torch.optim.AdamW(params, lr, betas, eps, weight_decay)
            refuse_amsgrad(adamw.param_groups)
            check_whole(p for group in adamw.param_groups for p in group["params"])
            refuse_wrapped(self._model, "model")
            tables = sparse_weights(self._model)
            if any(id(p) in tables for group in adamw.param_groups for p in group["params"]):
                raise ValueError(
                    "params: expected parameters with dense gradients, got the weight of an Embedding(sparse=True): use"
                    " sparse=False, or give the table a DistributedOptimizer of torch.optim.SparseAdam"
                )
            groups = [{k: repr(v) for k, v in group.items() if k != "params"} for group in adamw.param_groups]
            call.signature |= {"warm_up": warm_up, "scale": scale, "param_groups": groups}
            call.agree(entries=0)
            means = -(-warm_up // every)
            later = OneBit(1, bucket, True, warm_up=means * every, before=means * (every - 1), scale=scale)
            return adamw, QSGD(bits, bucket, feedback=True), later

        adamw, first, self._later = collective(transport, "OneBitAdam", timeout, build)
        self.defaults = adamw.defaults
        super().__init__(adamw)
        self._closed, self._means = False, self._later.warm_up - self._later.before
        named = [(name, p) for p, name in names_of(adamw.param_groups, None).items()]
        options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "verify": verify, "timeout": timeout}
        self._use(
            LocalOptimizer(
                adamw, named if self._model is None else self._model, comm, first, every=every, dense_below=0, **options
            )
        )
        self._engine.after = self._end_warm_up

    def _use(self, now: LocalOptimizer | Compressed) -> None:
        self._now, self._engine, self.optimizer = now, now._engine, now.optimizer

    @property
    def warming_up(self) -> bool:
        """Whether the warm-up goes on."""
        return isinstance(self._now, LocalOptimizer)

    # -- the end of the warm-up

    def _end_warm_up(self) -> None:
        """After a mean, where all ranks have the same parameters: end the warm-up if it is over. All ranks or none."""
        window = self._engine
        if window.replica.context.step < self._means:
            return
        params, saved = window.members.named(), window.state_dict()[STATE]
        params = {name: params[name] for name in dict.fromkeys([*saved["order"], *params]) if name in params}
        residuals, own = saved["tensors"].get("residual", {}), self._later
        saved |= {"compressor": own.describe(), "replicated": sorted(own.replicated_state), "buckets": []}
        tensors = window.replica.call("end of the warm-up", lambda _: self._converted(params, residuals))

        def load() -> None:
            self._engine.load_state_dict({STATE: {**saved, "tensors": tensors}}, lambda: None)
            self._engine.replica.suspect = False  # the mean has made the parameters the same; frozen ones may differ

        self._go_on(params, load)  # at the end of which no rank may fail alone

    def _converted(self, params: Named, residuals: Named) -> dict[str, Named]:
        """Return OneBit's first state, of AdamW's moments and of residuals in units of the parameters. Collective."""
        replica, groups = self._engine.replica, group_by_name(self.optimizer, params)
        signs = {name: -1 if group["maximize"] else 1 for name, group in groups.items()}  # SGD negates later
        result: dict[str, Named] = {kind: {} for kind in KINDS}
        for layout in cut(params, [*params], replica.options.bucket_bytes):
            with layout.device.stream_context():
                flat = {kind: layout.zeros() for kind in KINDS}
                views = {kind: layout.by_name(array) for kind, array in flat.items()}
                for name in layout.names:
                    moments, (beta, other) = self.optimizer.state.get(params[name]), groups[name]["betas"]
                    if moments:
                        steps = float(moments["step"])
                        views["residual"][name].copy_(moments["exp_avg"]).mul_(signs[name] * beta / (1 - beta**steps))
                        views["square"][name].copy_(moments["exp_avg_sq"]).div_(1 - other**steps)
                    if (gradient := params[name].grad) is not None:
                        views["momentum"][name].copy_(gradient)  # for an estimate of its noise
                    if not views["square"][name].isfinite().all():
                        raise NonFiniteError(
                            f"second moments of {name!r}: expected finite values, got NaN or infinity: call discard()"
                            " on all ranks to give up the steps since the last mean"
                        )
                own = flat["square"], flat["momentum"], groups, self._later.bucket, self._later.scale
                flat["divisor"] = divisor_of(replica.transport, layout, *own)
                flat["momentum"][:] = 0
                views["divisor"] = layout.by_name(flat["divisor"])
                for name, waits in residuals.items():
                    if name in layout.names:
                        rate, first = (float(groups[name].get(key, 0)) for key in ("lr", "initial_lr"))
                        rate = (rate if rate >= DIP * first else first) or float(self.defaults["lr"]) or 1.0
                        views["residual"][name].add_(waits * views["divisor"][name], alpha=signs[name] / rate)
            for kind, tensors in views.items():
                result[kind].update(tensors)
        return result

    def _go_on(self, params: Named, load: Callable[[], None]) -> None:
        """Go on without the warm-up, from a state that `load` loads, on all ranks or on none. Collective."""
        before = self._now
        later = Compressed(self.optimizer, params, self._model, self._engine.replica, self._later)
        try:
            self._use(later)
            load()
            later._engine.replica.call("end of the warm-up", lambda _: barrier(later._engine.replica.transport))
        except Exception:
            later.close()
            self._use(before)
            raise

    def _load(self, state: dict[str, Any]) -> None:
        def stage(call: CollectiveCall) -> bool:
            of_warm_up = LOCAL in state or STATE not in state
            if STATE not in state and any("dampening" in group for group in state.get("param_groups", ())):
                raise ValueError(
                    "state_dict: expected moments, got none: torch's functions lose those from after the warm-up: save"
                    " optimizer.state_dict() of every rank with sparsecoll.torch.save"
                )
            refuse_amsgrad(state.get("param_groups", ()))
            call.signature |= {"state of the warm-up": of_warm_up}
            call.agree(entries=0)
            if of_warm_up and not self.warming_up:
                raise ValueError(
                    f"state_dict: expected one from after the warm-up, as this optimizer is: {NEW}, and load"
                )
            return of_warm_up

        if self._engine.replica.call("load_state_dict", stage) == self.warming_up:
            super()._load(state)
        else:
            self._go_on(self._engine.members.named(), lambda: super(OneBitAdam, self)._load(state))

    # -- as the optimizer of the stage

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; collective after the warm-up, and in every `every`-th step of it.

        Args:
            closure: function that computes this rank's loss and gradients again and returns the loss.

        Returns:
            What the closure returns; after the warm-up, its mean over the ranks.

        Raises:
            NonFiniteError: On every rank, if a parameter (in the warm-up) or a gradient is NaN or infinity on some
                rank: see `discard`.
            CommunicationError: On every rank, if the sum failed on some rank.
            RuntimeError: A GradScaler calls; the optimizer is closed; or, on every rank, a parameter gets its first
                gradient after the warm-up.
        """
        if is_called_by_scaler(self):
            forget(self)
            raise RuntimeError("OneBitAdam takes no GradScaler, which skips steps on single ranks: use bfloat16")
        if self._closed:
            raise RuntimeError("step: expected none after close(), got one: make a torch.optim.AdamW to go on alone")
        return self._now.step(closure)

    def synchronize(self) -> None:
        """Make parameters the same on all ranks, before you evaluate or save; collective.

        In the warm-up this is `LocalOptimizer.synchronize`; afterwards they are the same.
        """
        if self.warming_up and not self._closed:
            with self._engine.replica.agreed():
                self._engine.finish(goes_on=lambda: self.warming_up)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Context manager for loops written for DistributedDataParallel; back-propagation never communicates here."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Context manager that allows different numbers of steps on the ranks; collective.

        See `LocalOptimizer.join` and, after the warm-up, `DistributedOptimizer.join`.
        """
        with self._engine.replica.reporting():
            yield
            if self.warming_up and not self._closed:
                self._engine.finish(goes_on=lambda: self.warming_up)
        if not self.warming_up:
            with self._now.join():
                pass

    def discard(self) -> None:
        """Skip the step of this back-propagation; in the warm-up, all steps since the last mean; collective.

        It is the cure for a NaN on one rank.
        """
        self._now.discard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, or to zero."""
        self._now.zero_grad(set_to_none)

    def add_param_group(
        self, param_group: dict[str, Any], named_parameters: Iterable[tuple[str, torch.Tensor]] = ()
    ) -> None:
        """Add a group as in torch, in the warm-up, see `LocalOptimizer.add_param_group`; collective."""
        if not self.warming_up:
            raise RuntimeError(
                f"add_param_group: expected a call in the warm-up, which gives parameters their second moments: {NEW}"
            )
        with self._engine.replica.agreed():
            refuse_amsgrad([param_group])
        super().add_param_group(param_group, named_parameters)

    def move(self, comm: Any) -> None:
        """Continue on another communicator, as that of `sparsecoll.shrink` after a rank was lost; collective on it.

        See `LocalOptimizer.move` and, after the warm-up, `DistributedOptimizer.move`. All ranks must be in the same
        stage: a new rank first loads a state of it.

        Args:
            comm: communicator, as in `sparsecoll.allreduce`.
        """
        transport = as_transport(comm, self._engine.replica.options.timeout)

        def compare(call: CollectiveCall) -> None:
            call.signature |= {"warming up": self.warming_up}
            call.agree(entries=0)

        collective(transport, "move of OneBitAdam", self._engine.replica.options.timeout, compare)
        self._now.move(transport)

    def close(self) -> None:
        """Release the parameters; no step may follow."""
        self._now.close()
        self._closed = True

    def __repr__(self) -> str:
        return f"OneBitAdam({self.optimizer!r}, warming_up={self.warming_up})"
