"""LocalOptimizer's means: the values from which all ranks started, the changes since, and their mean."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from sparsecoll.errors import CommunicationError, NonFiniteError
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.reduction.bucket import Bucket
from sparsecoll.torch.reduction.buckets import Buckets
from sparsecoll.torch.reduction.hooks import Owner, others_of, take_over
from sparsecoll.torch.reduction.state import LOCAL, MOVED, STATE, renamed_state
from sparsecoll.torch.replica.calls import MEMBERS, Options, Round
from sparsecoll.torch.replica.guards import fingerprint
from sparsecoll.torch.replica.replica import Members, Replica, changes, check_added
from sparsecoll.torch.tensors.layout import takes_part
from sparsecoll.torch.tensors.model import Buffers, Named
from sparsecoll.transport import Transport
from sparsecoll.transport.all_ranks import barrier
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.progress import completed_future


class Window(Owner):
    """The parameters of an optimizer, their values at the last mean, and their changes since.

    Args:
        outer: moves the values of the last mean by the next one.
        names: returns pairs (name, parameter) of the model.

    Attributes:
        replica: the values of the last mean, the same on all ranks.
        members: tells which parameters were added and removed.
        steps: taken on this rank since the last mean.
        after: called after every mean, on all ranks; what it raises on one, the mean raises on all.
    """

    replaces = False  # the optimizer that LocalOptimizer wraps may be a DistributedOptimizer

    def __init__(
        self,
        transport: Transport,
        optimizer: torch.optim.Optimizer,
        outer: torch.optim.Optimizer,
        compressor: Compressor,
        model: torch.nn.Module | None,
        names: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        options: Options,
    ) -> None:
        self.steps = 0
        self.after: Callable[[], None] = lambda: None
        self._params: Named = {}
        self._moved: set[str] = set()  # parameters that took part in these steps
        self._last: set[str] = set()  # those of the last mean, in which some ranks may have failed
        self._loaded: Named = {}  # the parameters of a loaded state, until the next step
        self._refused: Exception | None = None  # what the next mean raises
        self._outer, self._names = outer, names
        self.members = Members(optimizer, self._params, names)
        self.replica = Replica(transport, None, options)
        self.replica.buffers, self.replica.changed = Buffers(model), self.members.changed
        self._shared = self.replica.params
        self._buckets = Buckets(compressor, self.replica)
        self.use(transport)

    def use(self, transport: Transport) -> None:
        """Communicate over this transport from now on. All ranks create their optimizers in the same order."""
        number = next(transport.__dict__.setdefault("_local_optimizers", itertools.count()))
        self.replica.transport, self._name = transport, f"mean of LocalOptimizer {number}"
        self._buckets.release()

    def release(self) -> None:
        """Discard the buckets, which the next mean makes again; residuals are kept."""
        self._buckets.release()

    @torch.inference_mode(False)
    @torch.no_grad()
    def regroup(self, params: Named | None = None) -> None:
        """Share parameters, with rank 0's values, and drop those that have left. Collective.

        Args:
            params: name -> parameter: those that are new, and perhaps others; None for those of the optimizer.
        """
        self._check_loaded()
        outer = self._outer.state, self._outer.param_groups[0]
        changing = vars(self), vars(self._buckets), self._params, self._shared, *outer
        with self.replica.all_or_none(self.release, *changing) as begin:
            added = self.members.added(self.members.named() if params is None else params)
            stay, others = self.members.kept(), others_of(self, added)
            shared = {name: p.detach().clone() for name, p in added.items()}
            signature = changes(added if self._params else (), self._params.keys() - stay.keys())
            self.replica.introduce(shared, signature, lambda: check_added(added, stay))
            begin()
            self._buckets.rename(stay)
            self._buckets.order = []
            for name in self._shared.keys() - stay.keys():
                self._outer.state.pop(self._shared[name], None)
            self._moved, self._last = ({stay[n] for n in names if n in stay} for names in (self._moved, self._last))
            for own, new in ((self._params, added), (self._shared, shared)):
                all_now = {**{stay[name]: p for name, p in own.items() if name in stay}, **new}
                own.clear()
                own.update(all_now)
            order = [name for name, _ in self._names() if name in self._shared]  # as if they had been there always
            outer[1]["params"] = [self._shared[n] for n in dict.fromkeys([*order, *self._shared])]
            for name, p in added.items():
                p.copy_(shared[name])
        take_over(self, others, added)

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin_step(self) -> None:
        """Called before a step, which may move parameters. Collective if some were added or removed."""
        self._check_loaded()
        if self.members.changed():
            self.regroup()
        if not self.steps:
            self._last = set()
        self._moved |= self._start()

    def _start(self) -> set[str]:
        """Return the names of parameters that take part and have not moved: all ranks start from their values now.

        The user may have loaded them since the last mean, which the next one compares.
        """
        names = {name for name, p in self._params.items() if name not in self._moved and takes_part(p)}
        for name in names:
            if not torch.equal(self._shared[name], self._params[name]):
                self._shared[name].copy_(self._params[name])
                self.replica.suspect = True
        return names

    # -- the mean

    @torch.inference_mode(False)
    @torch.no_grad()
    def mean(self, flags: int = 0) -> Round:
        """Move the parameters by the mean of their changes, if there are any, bucket by bucket. Collective.

        Args:
            flags: JOINED if this rank has no more data.

        Raises:
            NonFiniteError: a parameter is NaN or infinite on some rank; nothing has changed.
            CommunicationError: some rank failed; parameters of the buckets before that have moved on all ranks.
        """
        before = self.replica.context.step
        try:
            outcome = self._mean(flags)
        except Exception:  # ranks may have failed at different points: the next mean compares, and makes buckets again
            self.replica.suspect, self.replica.context.step = True, before
            self._buckets.release()
            raise
        if outcome.trainable or outcome.over:
            self.replica.compare_if_due()
            self.after()
        return outcome

    def _mean(self, flags: int) -> Round:
        self._check_loaded()
        if not self.steps:
            self._start()
        while (outcome := self._agree(flags)).flags & MEMBERS:
            self.regroup()
        if outcome.trainable or outcome.over:
            if outcome.trainable and outcome.trainable != set(self._buckets.index_of):
                self._buckets.release()
                self._buckets.make(outcome.trainable)
            self._last = self._last | outcome.trainable
            for bucket, compressor in self._buckets if outcome.trainable else ():
                self._reduce(bucket, compressor)
                self._apply(bucket)
            self.replica.call(self._name, lambda _: self._finish(outcome))
        return outcome

    def _agree(self, flags: int) -> Round:
        """Tell all ranks which parameters have moved here, and that they are finite. Collective."""
        replica, failed = self.replica, self._refused
        for name in [] if failed else [name for name in self._params if name in self._moved]:
            if not is_finite(self._params[name]):
                failed = NonFiniteError(
                    f"change of parameter {name!r}: expected finite values, got NaN or infinity: call discard() on all"
                    " ranks to give up the steps since the last mean"
                )
                break
        row = replica.row(flags, [name in self._moved for name in self._shared])

        def digest(outcome: Round) -> int | None:
            first = not outcome.most and replica.transport.size > 1
            return fingerprint(self._params.values()) if first else None

        outcome = replica.agree(self._name, row, digest, failed)
        if outcome.over:
            outcome.modules = [True] * len(outcome.modules)  # which ranks without data do not tell
        return outcome

    def _reduce(self, bucket: Bucket, compressor: Compressor) -> None:
        """Average the changes of a bucket, on all ranks or on none. Collective."""
        replica, layout = self.replica, bucket.layout
        taken = completed_future(lambda: bucket.take_changes(self._params, self._moved))  # on the caller's thread

        def reduce(_: CollectiveCall) -> None:
            taken.result()
            with layout.device.stream_context():
                bucket.reduce(replica.transport, compressor)
                if not bucket.mean_is_finite():
                    name = next(n for n in layout.names if not bucket.part_of_mean(n).isfinite().all())
                    raise NonFiniteError(f"change of parameter {name!r}: expected a finite mean, got an overflow")
            barrier(replica.transport)

        try:
            replica.call(self._name, reduce)
        except Exception:
            bucket.drop()
            raise
        bucket.accept()
        bucket.versions.commit()

    def _apply(self, bucket: Bucket) -> None:
        """Move the parameters of a bucket by its mean."""
        self._outer.zero_grad()  # what an earlier failure has left
        bucket.assign_grads(bucket.new_grads(bucket.layout.names))
        self._outer.step()
        for name, shared in bucket.params.items():
            shared.grad = None
            self._params[name].copy_(shared)
            self._moved.discard(name)

    def _finish(self, outcome: Round) -> None:
        """Set buffers to those of the lowest rank that has data. Collective."""
        self.replica.broadcast_buffers(outcome)
        self.steps = 0
        self.replica.context.step += 1
        barrier(self.replica.transport)

    @torch.no_grad()
    def start_anew(self, name: str, root: int, everything: bool = False) -> None:
        """Drop the steps since the last mean; values of that mean and buffers become those of rank `root`. Collective.

        With `everything`, so do parameters that took no part: some rank may be new.
        """
        self._buckets.release()
        if not self.steps:
            self._start()
        behind = self._moved | self._last | {other for other, p in self._params.items() if takes_part(p)}
        if everything:
            for other in self._shared.keys() - behind:
                self._shared[other].copy_(self._params[other])
            behind = set(self._shared)
        self.replica.follow(name, self._outer, root)
        for other in behind:
            self._params[other].copy_(self._shared[other])
        self.steps, self._moved, self._loaded, self._refused = 0, set(), {}, None

    # -- saved state

    def state_dict(self) -> dict[str, Any]:
        """Return the library's parts of a state_dict."""
        self._check_loaded()
        if self._refused is not None:
            raise self._refused
        names = sorted(self._moved)
        both = zip(MOVED, (self._shared, self._params), strict=True)
        own = {kind: {name: tensors[name].detach().clone() for name in names} for kind, tensors in both}
        state = renamed_state(self._buckets.state_dict(), self.members.kept())
        return {STATE: state, LOCAL: {"steps": self.steps, "outer": self._outer.state_dict(), **own}}

    def load_state_dict(self, state: Mapping[str, Any], load: Callable[[], Any]) -> None:
        """Load a state, on all ranks or on none, as `Buckets.load_state_dict` does. Collective."""
        if self.members.changed():
            self.regroup()
        own: dict[str, Any] = {"steps": 0, "outer": {**self._outer.state_dict(), "state": {}}, "shared": {}, "own": {}}

        def checked() -> Any:
            own.update(self._checked(state))
            return state.get(STATE)

        def load_all() -> None:
            load()
            self._outer.load_state_dict(own["outer"])

        self._buckets.load_state_dict(checked, load_all)
        with torch.no_grad():
            for tensors, kind in ((self._shared, "shared"), (self._params, "own")):
                for name, t in own[kind].items():
                    tensors[name].copy_(t)
        self.steps, self._moved, self._last = own["steps"], set(own["own"]), set()
        self._loaded, self._refused = own["own"], None
        self.replica.suspect = True  # compared in the next mean

    def _checked(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a state that is LocalOptimizer's, after a check; that of a plain optimizer has none."""
        own = state.get(LOCAL)
        if own is None:
            return {}
        missing = {"steps", "outer", *MOVED}.difference(own) | {STATE}.difference(state)
        if missing:
            raise ValueError(f"state_dict: expected that of LocalOptimizer, got one without {min(missing)!r}")
        here = {name: tuple(p.shape) for name, p in self._params.items()}
        for name, t in [(name, t) for kind in MOVED for name, t in own[kind].items()]:
            if name not in here:
                raise ValueError(f"state_dict: expected names of parameters, got {name!r}")
            if here[name] != tuple(t.shape):
                raise ValueError(f"state_dict: expected {name!r} of shape {here[name]}, got {tuple(t.shape)}")
        return dict(own)

    def _check_loaded(self) -> None:
        """Check at the next step that parameters have the values of a loaded state; if not, the next mean raises."""
        loaded, self._loaded = self._loaded, {}
        for name, t in loaded.items():
            if not torch.equal(self._params[name], t.to(self._params[name])):
                self._refused = CommunicationError(
                    f"parameter {name!r}: expected its value in the state, which was saved between two means on this"
                    " rank, got another: load the model before the optimizer, and change nothing before the next step"
                )


def is_finite(t: torch.Tensor) -> bool:
    """Return whether a tensor has no NaN or infinity: in one pass if its sum is finite."""
    return bool(t.sum().isfinite()) or bool(t.isfinite().all())
