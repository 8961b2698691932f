"""Buckets and the compressors bound to them; their state, by parameter name, outlives the layout of the buckets."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from sparsecoll.torch.compressors import Compressor, TopKCompressor, as_compressor
from sparsecoll.torch.reduction.bucket import Bucket
from sparsecoll.torch.reduction.rows import RowBucket, RowSum
from sparsecoll.torch.reduction.state import Tensors, check, collect, joined, renamed, restore
from sparsecoll.torch.replica.broadcasts import broadcast_tensors
from sparsecoll.torch.replica.guards import STATES, checksum_of, checksum_of_state, undoing
from sparsecoll.torch.replica.replica import Replica
from sparsecoll.torch.tensors.layout import Layout, cut, has_rows, takes_part
from sparsecoll.torch.tensors.model import Named
from sparsecoll.torch.tensors.private import values_of
from sparsecoll.transport.all_ranks import allgather, barrier, broadcast
from sparsecoll.transport.call import CollectiveCall

logger = logging.getLogger(__name__)
EMPTY: dict[str, Any] = {"step": 0, "order": [], "tensors": {}, "compressor": "", "replicated": [], "buckets": []}


class Buckets:
    """Buckets with their compressors, in the order in which they are reduced; none at first.

    A Compressor object holds options; each bucket has a copy of it, bound to its layout, with the bucket's state.

    Attributes:
        index_of: parameter name -> number of its bucket.
        order: names of the parameters in the order in which they are laid out, the same on all ranks.
        pending: whether a reduction was accepted since the last step.
    """

    def __init__(self, compressor: Compressor, replica: Replica, parts: Mapping[str, int] | None = None) -> None:
        self.order: list[str] = []
        self.index_of: dict[str, int] = {}
        self._compressor, self._replica = compressor, replica
        self._parts = {} if parts is None else parts  # whose parameters share no bucket
        self._rows: set[str] = set()  # parameters reduced as rows: a rank has had such a gradient, none a dense one
        self._dense: set[str] = set()  # parameters of which a rank has had a dense gradient
        self._pairs: list[tuple[Bucket, Compressor]] = []
        self._parked: Tensors = {}  # tensors of parameters that are in no bucket
        self.pending = False
        self._base: Tensors = {}  # as of the last step, of buckets that were released after such a reduction
        self._before: Tensors = {}  # as of the step before, of parameters without one in the last step
        self._warned = False  # whether rank 0 has warned that residuals are lost
        self._extra: dict[tuple[str, ...], tuple[int, str]] = {}  # of buckets that are gone: epoch, state as JSON

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[tuple[Bucket, Compressor]]:
        return iter(self._pairs)

    def __getitem__(self, index: int) -> tuple[Bucket, Compressor]:
        return self._pairs[index]

    @property
    def has_residuals(self) -> bool:
        """Whether a bucket has a residual."""
        return any(compressor.keeps_gradient for _, compressor in self)

    # -- layout

    def make(self, trainable: Collection[str] | None, first: Sequence[str] = ()) -> None:
        """Create the buckets: of `order`, then of rank 0's `first`, then of all others, last ones first. Collective.

        Args:
            trainable: names of the parameters that take part; None: those that require gradients on some rank.
        """

        def lay_out(_: CollectiveCall) -> None:
            self.order = self._agree_on_order(trainable, first)
            self.lay_out(self._replica.options.bucket_bytes, self._replica.options.dense_below)

        self.all_or_none(lay_out)

    def all_or_none(self, lay_out: Callable[[CollectiveCall], None]) -> None:
        """Make buckets on all ranks, or leave none on any. Collective."""

        def make(call: CollectiveCall) -> None:
            lay_out(call)
            barrier(call.transport)

        try:
            self._replica.call("buckets", make)
        except Exception:
            self.release()
            raise

    def tables(self) -> set[int]:
        """Return the ids of the parameters whose gradients are rows, or will be."""
        own, flagged = self._replica.params, self._replica.sparse_weights
        return {id(p) for n, p in own.items() if n in self._rows or (id(p) in flagged and n not in self._dense)}

    def learn(self, rows: Collection[str], dense: Collection[str]) -> bool:
        """Learn which parameters have gradients of rows on a rank, and dense ones; return whether buckets change."""
        before = self._rows
        self._dense = self._dense | set(dense)
        self._rows = (before | set(rows)) - self._dense
        changed = (before ^ self._rows) & set(self.index_of)
        for name in sorted(changed.intersection(dense)) if self._replica.transport.rank == 0 else ():
            logger.warning(
                "gradient of %r: expected a sparse one on all ranks, as before, got a dense one: it is reduced as a"
                " dense gradient from now on",
                name,
            )
        return bool(changed)

    def _agree_on_order(self, trainable: Collection[str] | None, first: Sequence[str]) -> list[str]:
        transport, params = self._replica.transport, self._replica.params
        names = list(params)
        numbers = {name: i for i, name in enumerate(names)}
        known = list(dict.fromkeys([*self.order, *first, *reversed(names)]))
        on = set(trainable or ())
        if trainable is None:
            sparse = self._replica.sparse_weights
            mine = [
                (takes_part(p), has_rows(p.grad) or id(p) in sparse, p.grad is not None and not has_rows(p.grad))
                for p in params.values()
            ]
            anywhere = allgather(transport, np.array(mine, np.uint8).ravel()).any(axis=0).reshape(-1, 3)
            on, rows, dense = ({name for name, is_ in zip(names, column, strict=True) if is_} for column in anywhere.T)
            self.learn(rows, dense)
        order = np.array([numbers[name] for name in known], np.int64)
        order = broadcast(transport, order) if order.size else order
        return [names[i] for i in order.tolist() if names[i] in on]

    def lay_out(self, bucket_bytes: int | None = None, dense_below: int = 0) -> None:
        """Create the buckets again for the parameters in `order`; state of parameters is kept. Collective."""
        self.release()
        params, own, transport = self._replica.params, self._compressor, self._replica.transport
        small = {n for n in self.order if params[n].numel() < dense_below or own.sends_whole(params[n], transport)}
        for layout in cut(params, self.order, bucket_bytes, small - self._rows, self._rows, self._parts):
            self.bind(params, layout)

    def bind(self, params: Mapping[str, torch.Tensor], layout: Layout) -> tuple[Bucket, Compressor]:
        """Add a bucket with a compressor of its own. Collective."""
        replica, options, compressor = self._replica, self._replica.options, self._compressor_of(layout)
        compressor.bind(layout, replica.transport, replica.context, options.timeout)
        kind = RowBucket if layout.rows else Bucket
        bucket = kind(params, layout, compressor.versions, options.gradient_as_bucket_view)
        bucket.versions.continued = self.pending
        layout.device.synchronize()  # jobs have a stream of their own
        parked, saved = restore([compressor], self._parked), json.loads(self._extra_state().get(layout.names, "{}"))
        if saved and _has_keys_of(json.loads(json.dumps(compressor.extra_state())), saved):
            compressor.load_extra_state(saved)  # otherwise `dense_below` was another one: begin with none
        pairs, index_of = [*self._pairs, (bucket, compressor)], self.index_of | dict.fromkeys(layout.names, len(self))
        self._pairs, self.index_of, self._parked = pairs, index_of, parked  # all or none
        return pairs[-1]

    def _compressor_of(self, layout: Layout) -> Compressor:
        own = self._compressor
        if layout.rows:
            return RowSum(**own.for_rows())
        if not layout.small:
            return as_compressor(own)
        waits = self._parked.get("residual", {}).keys()  # of rows, or from when `dense_below` was another one
        small = own.for_small()
        if small != "none" or waits.isdisjoint(layout.names):
            return as_compressor(small)
        alone = own.stands_alone and self._replica.transport.size == 1  # as in an ElasticGroup
        return as_compressor(own) if alone else TopKCompressor(1.0, "dense")

    def release(self, start: int = 0) -> None:
        """Discard the buckets from number `start` on; their parameters keep their state, and that before this step."""
        if gone := [compressor for _, compressor in self._pairs[start:]]:
            if self.pending:
                self._base = joined(collect(gone, {}), self._base)  # a bucket may be released twice before a step
            for compressor in gone:
                compressor.versions.commit()
            self._extra = self._extra | {c.layout.names: (c.epoch, json.dumps(c.extra_state())) for c in gone}
            parked, index_of = collect(gone, self._parked), {n: i for n, i in self.index_of.items() if i < start}
            self._parked, self._pairs, self.index_of = parked, self._pairs[:start], index_of  # all or none

    def _extra_state(self) -> dict[tuple[str, ...], str]:
        """Return the other state of buckets, also of those that are gone; what a failure left may differ by rank."""
        here = {c.layout.names: (c.epoch, json.dumps(c.extra_state())) for _, c in self}
        return {n: text for n, (epoch, text) in (self._extra | here).items() if epoch == self._replica.transport.epoch}

    def share_state(self, name: str, root: int = 0) -> None:
        """After `release`, make state that is the same on all ranks that of rank `root`, or none. Collective."""
        replica, self._extra, self._replica.context.epoch = self._replica, {}, None
        for kind in sorted(self._compressor.replicated_state):
            own = dict(sorted(self._parked.pop(kind, {}).items()))
            self._base.pop(kind, None)

            def share(call: CollectiveCall, own: Named = own) -> bool:
                mine = zlib.crc32(repr([(n, t.shape, t.dtype) for n, t in own.items()]).encode())
                if np.ptp(allgather(call.transport, np.array([mine]))):  # a rank lacks it
                    return False
                broadcast_tensors(call.transport, own.values(), root)
                return True

            if replica.call(name, share):
                self._parked[kind] = own

    def rename(self, names: Mapping[str, str]) -> None:
        """Discard all buckets, and rename parameters, old name -> new name; the state of all others is dropped."""
        self.release()
        self._parked, self._base = renamed(self._parked, names), renamed(self._base, names)
        self._rows, self._dense = ({names[n] for n in own if n in names} for own in (self._rows, self._dense))
        self._extra = {tuple(names[n] for n in own): t for own, t in self._extra.items() if names.keys() >= set(own)}
        self.order = [names[name] for name in self.order if name in names]

    # -- a reduction, and a step

    def leave_out(self, used: Set[str]) -> set[str]:
        """Before `accept`, restore the state of parameters without a gradient of which noise was sent; return them."""
        left: set[str] = set()
        for bucket, compressor in self:
            if not compressor.keeps_zeros:
                bucket.layout.device.wait_stream()
                compressor.versions.exclude(bucket.params.keys() - used)
                left |= bucket.params.keys() - used
        return left

    def accept(self) -> None:
        """Accept the reduction: the next one starts from the trial states."""
        self.pending = True
        for bucket, _ in self:
            bucket.accept()
            bucket.layout.device.wait_stream()

    def spoil(self) -> None:
        """Write NaN in place of all gradients, for optimizers of some of them."""
        for bucket, _ in self:
            for p in bucket.params.values():
                if p.grad is not None:
                    values_of(p.grad).fill_(float("nan"))

    def drop(self) -> None:
        """Drop the reduction: trial states are discarded."""
        for bucket, _ in self:
            bucket.drop()

    def commit(self) -> None:
        """Make the state of the last accepted reduction permanent, because the optimizer has stepped."""
        for bucket, _ in self:
            bucket.versions.commit()
        self.pending, self._base = False, {}

    def keep(self, names: Set[str]) -> None:
        """Before `commit`, keep the state of the last step of parameters that may have had no step: see `revert`."""
        self._before = {}
        for state in (*(compressor.state() for _, compressor in self), self._base) if names else ():
            for kind in state.keys() - self._compressor.replicated_state:
                own = {name: state[kind][name].detach().clone() for name in state[kind].keys() & names}
                self._before.setdefault(kind, {}).update(own)

    def revert(self, name: str) -> None:
        """Return to the state of the step before for a parameter that had no step."""
        kept = {kind: {name: entries[name]} for kind, entries in self._before.items() if name in entries}
        if name in self._replica.params:
            self._parked = restore([compressor for _, compressor in self], joined(self._parked, kept))

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Return to the state of the last step, for all parameters or for those named."""
        if base := self._base:  # goes into the buckets that were made since; a rollback of theirs returns to it
            if names is not None:  # gone on this rank alone, perhaps: what ranks share stays
                kinds = base.keys() - self._compressor.replicated_state
                base = {kind: {name: t for name, t in base[kind].items() if name in names} for kind in kinds}
            self._parked = restore([compressor for _, compressor in self], joined(self._parked, base))
        for bucket, _ in self:
            bucket.versions.rollback(names)
        if names is None:
            self.pending, self._base = False, {}

    # -- saved state

    def state_dict(self, unstepped: Set[str] = frozenset()) -> dict[str, Any]:
        """Return tensors by kind and parameter name as of the last step, and other state by bucket.

        Args:
            unstepped: parameters that `keep` was told of, and that had no step since.
        """
        before = {kind: {n: t for n, t in own.items() if n in unstepped} for kind, own in self._before.items()}
        tensors = joined(joined(collect([compressor for _, compressor in self], self._parked), self._base), before)
        return {
            "rank": self._replica.transport.rank,
            "size": self._replica.transport.size,
            "compressor": self._compressor.describe(),
            "replicated": sorted(self._compressor.replicated_state),
            "step": self._replica.context.step,
            "order": list(self.order),
            "rows": sorted(self._rows),
            "dense": sorted(self._dense),
            "filled": any(own for kind, own in tensors.items() if kind not in self._compressor.replicated_state),
            "tensors": tensors,
            "buckets": [[list(names), text] for names, text in self._extra_state().items()],
        }

    def load_state_dict(
        self,
        state: Callable[[], Mapping[str, Any] | None],
        load: Callable[[], Any] = lambda: None,
        same: Sequence[torch.optim.Optimizer] = (),
        others: Sequence[torch.optim.Optimizer] = (),
    ) -> Mapping[str, Any]:
        """Load what `state_dict` returned, on all ranks or on none; buckets are created as they were. Collective.

        Args:
            state: returns the state; None begins with empty residuals. What it raises is raised on all ranks.
            load: loads the rest, once the state has been found to fit (see `check`).
            same: the optimizers that `load` loads whose states are the same on all ranks.
            others: the other optimizers that it loads.

        Returns:
            The state; an empty one for None.
        """
        replica, extra = self._replica, dict[tuple[str, ...], tuple[int, str]]()

        def read(call: CollectiveCall) -> Mapping[str, Any]:
            if (given := state()) is not None:
                check(given, replica.transport, replica.params, self._compressor)
            own = given or EMPTY
            kinds, rows = {kind: len(entries) for kind, entries in own["tensors"].items()}, own.get("rows", [])
            call.signature |= {"steps": own["step"], "residuals": given is not None, "tensors": kinds, "rows": rows}
            call.signature["order of parameters"] = own["order"]
            extra.update((tuple(names), (call.transport.epoch, text)) for names, text in own["buckets"])
            call.agree()
            try:
                load()
            except KeyError as error:
                raise ValueError(f"state_dict: expected that of an optimizer, got one without {error}") from error
            tensors = [own["tensors"].get(kind, {}) for kind in sorted(own["replicated"])]
            call.signature[STATES] = [checksum_of(tensors), *map(checksum_of_state, same)]
            call.agree(entries=0)  # by messages: none returns before all have loaded
            return own

        with undoing(*same, *others):
            own = replica.call("load_state_dict", read)
        if not own["compressor"]:
            self._warn_of_loss()
        self._pairs, self.index_of, self._parked, self._base = [], {}, dict(own["tensors"]), {}  # all or none
        self._before, self.pending = {}, False
        self.order = [name for name in own["order"] if name in replica.params]
        self._rows, self._dense = (set(own.get(kind, ())) & set(replica.params) for kind in ("rows", "dense"))
        replica.context.step, replica.suspect = own["step"], self._compressor.communicates  # models may differ
        self._extra = extra if own["compressor"] == self._compressor.describe() else {}
        return own

    def _warn_of_loss(self) -> None:
        """Warn once, on rank 0, that residuals are replaced by none."""
        if self._warned or self._replica.transport.rank:
            return
        states = [self._parked, *(compressor.state() for _, compressor in self)]
        kinds = {kind for state in states for kind in state} - self._compressor.replicated_state
        tensors = (t for state in states for kind in kinds & state.keys() for t in state[kind].values())
        if any(bool(values_of(t).any()) for t in tensors):
            self._warned = True
            logger.warning(
                "load_state_dict: expected a state with residuals, got one without them, such as from get_state_dict of"
                " torch.distributed.checkpoint: the values in the residuals are lost. Save"
                " optimizer.state_dict() of every rank with sparsecoll.torch.save, and load that"
            )


def _has_keys_of(own: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Return whether a saved state has all keys of this bucket's, also in mappings within."""
    return own.keys() <= saved.keys() and all(
        _has_keys_of(part, saved[key])
        for key, part in own.items()
        if isinstance(part, Mapping) and isinstance(saved[key], Mapping)
    )
