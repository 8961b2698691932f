"""All buckets of a model and the compressors bound to them, and what outlives them: state by parameter name."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from sparsecoll.torch.compressors import Compressor, NoCompression, StepContext, resolve
from sparsecoll.torch.layout import Bucket, fuse, takes_part
from sparsecoll.torch.options import Options
from sparsecoll.torch.replicas import Named
from sparsecoll.torch.state import Tensors, collect, encode_extra, restore, today
from sparsecoll.transport import Transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.collectives import allgather, broadcast


class Buckets:
    """Buckets with their compressors, in the order in which they are sent; none until `make`.

    Attributes:
        order: names of parameters by when their gradients came first; buckets are made in this order.
        place: parameter name -> number of its bucket.
        shared: what all compressors know.
    """

    def __init__(self, compressor: Compressor, options: Options) -> None:
        self._compressor, self._options = compressor, options
        self._pairs: list[tuple[Bucket, Compressor]] = []
        self._saved: dict[str, Any] = {}  # state that waits for buckets to be made
        self._parked: Tensors = {}  # state of parameters that are in no bucket
        self.order: list[str] = []
        self.place: dict[str, int] = {}
        self.context = StepContext()

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[tuple[Bucket, Compressor]]:
        return iter(self._pairs)

    def __getitem__(self, index: int) -> tuple[Bucket, Compressor]:
        return self._pairs[index]

    def make(
        self, transport: Transport, params: Named, timeout: float | None, wanted: Collection[str] | None = None
    ) -> None:
        """Make the buckets, in the order in which rank 0's gradients came. Collective.

        Args:
            wanted: names of the parameters that want gradients on some rank; None: asked for.
        """
        names = list(params)
        numbers = {name: i for i, name in enumerate(names)}
        known = [*self.order, *(name for name in reversed(names) if name not in set(self.order))]

        def call() -> None:
            with CollectiveCall(transport, "buckets", timeout):
                mine = [takes_part(p) if wanted is None else name in wanted for name, p in params.items()]
                on: Any = allgather(transport, np.array(mine, np.uint8)).any(axis=0) if wanted is None else mine
                order = np.array([numbers[name] for name in known], np.int64)
                if order.size:
                    order = broadcast(transport, order)
                self.order = [names[i] for i in order.tolist() if on[i]]
                self._bind(transport, {name: params[name] for name in self.order}, timeout)
                transport.flush()

        transport.in_order(call)
        self.place = {name: i for i, (bucket, _) in enumerate(self) for name in bucket.params}
        self._restore()

    def _bind(self, transport: Transport, params: Named, timeout: float | None) -> None:
        for bucket in fuse(params, self.order, self._options.bucket_bytes, self._options.dense_below):
            plain = bucket.small and self._compressor.communicates
            compressor = NoCompression() if plain else resolve(self._compressor)
            compressor.bind(bucket.layout, transport, self.context, timeout)
            bucket.layout.device.synchronize()  # jobs have a stream of their own
            self._pairs.append((bucket, compressor))

    def clear(self) -> None:
        """Buckets are about to be made anew: what belongs to parameters is kept by name."""
        if self._pairs:
            self.commit()
            self._saved = {"tensors": self._tensors()}
            self._pairs, self.place = [], {}

    def _restore(self) -> None:
        saved, self._saved = self._saved, {}
        compressors = [compressor for _, compressor in self]
        self._parked = restore(compressors, saved.get("tensors", {}))
        fits = today(saved.get("compressor", "")) == self._compressor.describe()
        if fits and len(saved.get("buckets", ())) == len(compressors):
            for compressor, text in zip(compressors, saved["buckets"], strict=True):
                compressor.load_extra_state(json.loads(text))

    # -- a reduction, and a step

    def keep(self) -> None:
        """The reduction is accepted: trial states are the state of the next reduction."""
        for bucket, compressor in self:
            bucket.recycle(compressor.keep())
            bucket.finish(compressor.keeps_gradient)
            bucket.layout.device.wait_stream()

    def drop(self) -> None:
        """The reduction is given up: everything is as it was before."""
        for bucket, compressor in self:
            compressor.drop()
            bucket.reset()

    def commit(self) -> None:
        """The optimizer has stepped."""
        for bucket, compressor in self:
            bucket.recycle(compressor.commit())

    def rollback(self, names: Collection[str] | None = None) -> None:
        """Back to the last step, for all parameters or those named."""
        for bucket, compressor in self:
            bucket.recycle(compressor.rollback(names))

    # -- saved state

    def _tensors(self) -> Tensors:
        if self._saved and not self._pairs:
            return {kind: dict(entries) for kind, entries in self._saved["tensors"].items()}
        return collect([compressor for _, compressor in self], self._parked)

    def state_dict(self, transport: Transport) -> dict[str, Any]:
        """Tensors by kind and parameter name as of the last step, other state by bucket, and what they belong to."""
        extra = encode_extra(compressor for _, compressor in self)
        return {
            "rank": transport.rank,
            "size": transport.size,
            "compressor": self._compressor.describe(),
            "replicated": sorted(self._compressor.replicated_state),
            "step": self.context.step,
            "ccr": self.context.ccr,
            "order": list(self.order),
            "tensors": self._tensors(),
            "buckets": extra if self._pairs else list(self._saved.get("buckets", ())),
        }

    def load(self, state: Mapping[str, Any], params: Named) -> None:
        """Let the next `make` restore what `state_dict` returned."""
        self._pairs, self.place, self._parked = [], {}, {}
        self._saved = dict(state)
        self.order = [name for name in state.get("order", ()) if name in params]
        self.context.step, self.context.ccr = state.get("step", 0), state.get("ccr")
