"""What LocalOptimizer averages: the values from which all ranks started, and their changes since."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import wait
from typing import Any

import numpy as np
import torch

from sparsecoll.errors import CommunicationError
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.reduction.buckets import Buckets
from sparsecoll.torch.reduction.hooks import Owner, others_of, take_over
from sparsecoll.torch.reduction.pace import Mean, OuterOptimizers, Pace
from sparsecoll.torch.reduction.shards import Path, as_shard, mesh_of, place_of, read
from sparsecoll.torch.reduction.state import LOCAL, MOVED, STATE, filled, local_of, local_parts, renamed_state
from sparsecoll.torch.replica.calls import Options
from sparsecoll.torch.replica.replica import Members, Replica, changes, check_added
from sparsecoll.torch.tensors.model import Buffers, Named, are_equal, options_of, own_part
from sparsecoll.transport import Transport
from sparsecoll.transport.all_ranks import broadcast


def may_move(p: torch.Tensor) -> bool:
    """Return whether a step may move a parameter: a frozen one, too, by its momentum if its gradient is zero."""
    return p.requires_grad or p.grad is not None


class Window(Owner):
    """The parameters of an optimizer, their values at the last mean, and their changes since.

    Args:
        outer: moves the values of the last mean by the next one.
        names: returns pairs (name, parameter) of the model.
        device: of these values; None: that of the parameters.

    Attributes:
        replica: the values of the last mean, the same on all ranks.
        members: tells which parameters were added and removed.
        steps: taken on this rank since the last mean began.
    """

    replaces = False  # the optimizer that LocalOptimizer wraps may be a DistributedOptimizer

    def __init__(
        self,
        transport: Transport,
        optimizer: torch.optim.Optimizer,
        outer: OuterOptimizers,
        compressor: Compressor,
        model: torch.nn.Module | None,
        names: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        options: Options,
        pace: Pace,
        device: torch.device | None = None,
    ) -> None:
        self.steps = self._taken = self._number = 0
        self._params: Named = {}
        self._fragments: dict[str, int] = {}
        self._moved: set[str] = set()  # parameters that took part in these steps
        self._last: set[str] = set()  # those of the last mean, in which some ranks may have failed
        self._loaded: Named = {}  # the parameters of a loaded state, until the next step
        self._refused: Exception | None = None  # what the next mean raises
        self._under_way: list[Mean] = []
        self._optimizer, self._outer, self._names, self._pace, self._device = optimizer, outer, names, pace, device
        self._streams = pace.fragments > 1 or pace.delay > 0  # means of some parameters, or taken later
        self.members = Members(optimizer, self._params, names)
        self.replica = Replica(transport, None, options)
        self.replica.buffers, self.replica.changed = Buffers(model), self.members.changed
        self.replica.shared_options = self._rates
        self._shared = self.replica.params
        self._buckets = Buckets(compressor, self.replica, self._fragments)
        self.use(transport)

    def _rates(self) -> dict[str, float]:
        """Return the learning rates and momenta of the outer optimizers, which must be the same on all ranks."""
        rates = [options_of(own) for own in self._outer.optimizers]
        return {f"outer[{i}]: {name}": value for i, own in enumerate(rates) for name, value in own.items()}

    @property
    def _own(self) -> Named:
        """This rank's values by name."""
        return {name: own_part(p) for name, p in self._params.items()}

    def others(self) -> list[torch.Tensor]:
        """Return this rank's part of the model's parameters that the optimizer does not have."""
        known = {id(p) for p in self._params.values()}
        return [own_part(p.detach()) for _, p in self._names() if id(p) not in known]

    def use(self, transport: Transport) -> None:
        """Communicate over this transport from now on. All ranks create their optimizers in the same order."""
        self.release()
        number = next(transport.__dict__.setdefault("_local_optimizers", itertools.count()))
        self.replica.transport, self._name = transport, f"mean of LocalOptimizer {number}"

    def release(self) -> None:
        """Discard the buckets, which the next mean makes again; residuals are kept."""
        self.drop()
        self._buckets.release()

    @torch.inference_mode(False)
    @torch.no_grad()
    def regroup(self, params: Named | None = None) -> None:
        """Share parameters, with rank 0's values, and drop those that have left. Collective.

        Args:
            params: name -> parameter: those that are new, and perhaps others; None for those of the optimizer.
        """
        self._check_loaded()
        self.drop()
        changing = vars(self), vars(self._buckets), self._params, self._shared, self._fragments, *self._outer.dicts
        with self.replica.all_or_none(self.release, *changing) as begin:
            added = self.members.added(self.members.named() if params is None else params)
            stay, others = self.members.kept(), others_of(self, added)
            parts = {name: own_part(p.detach()) for name, p in added.items()}
            shared = {name: t.to(self._device or t.device, copy=True) for name, t in parts.items()}
            signature = changes(added if self._params else (), self._params.keys() - stay.keys())
            self.replica.introduce(shared, signature, lambda: check_added(added, stay))
            begin()
            self._buckets.rename(stay)
            self._buckets.order = []
            placed = self._pace.place(self._params, {n: f for n, f in self._fragments.items() if n in stay}, added)
            self._moved, self._last = ({stay[n] for n in names if n in stay} for names in (self._moved, self._last))
            tables: Any = (self._params, added), (self._shared, shared), (self._fragments, placed)
            for own, new in tables:
                all_now = {**{stay[name]: p for name, p in own.items() if name in stay}, **new}
                own.clear()
                own.update(all_now)
            order = [name for name, _ in self._names() if name in self._shared]  # as if they had been there always
            self._outer.use({n: self._params[n] for n in dict.fromkeys([*order, *self._shared])}, self._shared)
            for name, t in parts.items():
                t.copy_(shared[name])
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
        own = {name: own_part(p) for name, p in self._params.items() if name not in self._moved and may_move(p)}
        for name, t in own.items():
            before = self._shared[name]
            if (t.shape, t.dtype) != (before.shape, before.dtype):
                raise ValueError(
                    f"parameter {name!r}: expected shape {tuple(before.shape)} and {before.dtype}, as when the"
                    f" optimizer was wrapped, got {tuple(t.shape)} and {t.dtype}: convert a model before that"
                )
        if loaded := [name for name, t in own.items() if not are_equal(self._shared[name].to(t.device), t)]:
            self._share(loaded)
        return set(own)

    def _share(self, names: list[str]) -> None:
        """Start from the values that parameters have now."""
        for name in names:
            self._shared[name].copy_(self._own[name])
        self.replica.suspect = True

    @torch.no_grad()
    def start_anew(self, name: str, root: int, everything: bool = False) -> None:
        """Drop the steps since the last mean; values of that mean and buffers become those of rank `root`. Collective.

        With `everything`, so do parameters that took no part: some rank may be new.
        """
        self.release()
        if not self.steps:
            self._start()
        behind = self._moved | self._last | {other for other, p in self._params.items() if may_move(p)}
        if everything:
            for other in self._shared.keys() - behind:
                self._shared[other].copy_(self._own[other])
            behind = set(self._shared)
        self.replica.follow(name, *self._outer.optimizers, root=root)
        self._buckets.share_state(name, root)
        if everything:  # fragments depend on when parameters were added
            own = np.array([self._fragments[n] for n in self._shared])
            theirs = self.replica.call(name, lambda call: broadcast(call.transport, own, root))
            self._fragments.update(zip(self._shared, theirs.tolist(), strict=True))
        for other in behind:
            self._own[other].copy_(self._shared[other])
        self.steps, self._moved, self._loaded, self._refused = 0, set(), {}, None

    def drop(self) -> None:
        """Give up the means that are under way, after they have ended; changes and residuals stay."""
        wait([mean.result for mean in self._under_way])
        for mean in reversed(self._under_way):
            self._drop(mean)
            self.steps += mean.steps
            self.replica.context.step = mean.number
        self._under_way.clear()

    def close(self) -> None:
        """No mean follows."""
        self.drop()

    def _drop(self, mean: Mean) -> None:
        for bucket, _ in mean.buckets:
            bucket.drop()

    # -- saved state

    def state_dict(self) -> dict[str, Any]:
        """Return the library's parts of a state_dict."""
        self._check_loaded()
        if self._refused is not None:
            raise self._refused
        wait([mean.result for mean in self._under_way])  # whose changes are saved like others
        names, params = sorted(self._moved), self._params
        both = zip(MOVED, (self._shared, self._own), strict=True)
        own = {kind: {n: as_shard(of[n].detach().clone(), params[n]) for n in names} for kind, of in both}
        outer, state = self._outer.state_dict(), self._buckets.state_dict()
        for i, one in enumerate(outer if isinstance(outer, list) else [outer]):
            entries = [(j, self._param_at((LOCAL, "outer", i, "state", j, "")), of) for j, of in one["state"].items()]
            one["state"] = {j: {kind: as_shard(t, p) for kind, t in of.items()} for j, p, of in entries}
        for kind in state["tensors"].keys() - set(state["replicated"]):
            state["tensors"][kind] = {n: as_shard(t, params.get(n)) for n, t in state["tensors"][kind].items()}
        local = {"steps": self.steps, "outer": outer, "shard": place_of(params.values()), **own}
        local["filled"] = filled(local)
        return {STATE: renamed_state(state, self.members.kept()), LOCAL: local}

    def _param_at(self, path: Path) -> torch.Tensor | None:
        """Return the parameter of a tensor at this path in a state of LocalOptimizer."""
        if path[0] == STATE or path[1] in MOVED:
            return self._params.get(path[-1])
        if "state" not in path:
            return None
        given = {id(copy): self._params[name] for name, copy in self._shared.items()}
        own = self._optimizer
        if path[0] == LOCAL:
            own = self._outer.optimizers[path[2] if isinstance(path[2], int) else 0]
        p: torch.Tensor = [p for group in own.param_groups for p in group["params"]][int(path[-2])]
        return given.get(id(p), p)

    def read(self, state: dict[str, Any], checkpoint_id: Any, storage_reader: Any, key: str) -> dict[str, Any]:
        """Return a state with what a checkpoint has in place of this one's tensors. Collective within a worker."""
        local = {**state[LOCAL], "shared": {}, "own": {}}
        for one in local["outer"] if isinstance(local["outer"], list) else [local["outer"]]:
            one["state"] = {}
        new = {**state, "state": {}, STATE: {**state[STATE], "tensors": {}, "buckets": []}, LOCAL: local}
        read(new, checkpoint_id, storage_reader, key, mesh_of(self._params.values()), self._param_at)
        local["shard"] = state[LOCAL]["shard"]
        return new

    def load_state_dict(self, state: Mapping[str, Any], load: Callable[[], Any]) -> None:
        """Load a state, on all ranks or on none, as `Buckets.load_state_dict` does. Collective."""
        if self.members.changed():
            self.regroup()
        self.drop()
        own: dict[str, Any] = {"steps": 0, "outer": None, "shared": {}, "own": {}}

        def checked() -> Any:
            given = local_parts({key: state[key] for key in (STATE, LOCAL) if key in state})
            own.update(local_of(given, self._own, place_of(self._params.values())))
            return given.get(STATE)

        def load_all() -> None:
            load()
            self._outer.load_state_dict(own["outer"])

        self._buckets.load_state_dict(checked, load_all, same=self._outer.optimizers, others=[self._optimizer])
        with torch.no_grad():
            for tensors, kind in ((self._shared, "shared"), (self._own, "own")):
                for name, t in own[kind].items():
                    tensors[name].copy_(t)
        self.steps, self._moved, self._last = own["steps"], set(own["own"]), set()
        self._loaded, self._refused = own["own"], None

    def _check_loaded(self) -> None:
        """Check at the next step that parameters have the values of a loaded state; if not, the next mean raises."""
        loaded, self._loaded = self._loaded, {}
        for name, t in loaded.items():
            if not torch.equal(self._own[name], t.to(self._own[name])):
                self._refused = CommunicationError(
                    f"parameter {name!r}: expected its value in the state, which was saved between two means on this"
                    " rank, got another: load the model before the optimizer, and change nothing before the next step"
                )
