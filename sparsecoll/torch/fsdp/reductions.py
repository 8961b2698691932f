"""The reductions of a sharded model's gradients: when they are made, and that they succeed on all ranks or on none."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsecoll.errors import CommunicationError, NonFiniteError
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.fsdp.checkpoint import Checkpoint
from sparsecoll.torch.fsdp.groups import Group, ReduceScatter, Shard
from sparsecoll.torch.fsdp.scatter import reduce_scatter_tensors
from sparsecoll.torch.reduction.bucket import Bucket
from sparsecoll.torch.reduction.buckets import Buckets
from sparsecoll.torch.reduction.gradients import State
from sparsecoll.torch.reduction.steps import Steps
from sparsecoll.torch.replica.calls import collective
from sparsecoll.torch.replica.replica import Replica
from sparsecoll.torch.replica.rounds import Row
from sparsecoll.torch.replica.timeline import bucket_span
from sparsecoll.torch.tensors.backward import at_end_of_backward
from sparsecoll.torch.tensors.layout import Layout
from sparsecoll.torch.tensors.private import queue_callback
from sparsecoll.transport import Transport
from sparsecoll.transport.call import KNOWN, CollectiveCall
from sparsecoll.transport.collectives import allgatherv, disseminate
from sparsecoll.transport.progress import completed_future, in_background


class ShardedReductions:
    """What `sparsecoll.torch.fsdp.attach` returns: the residuals of a sharded model, and their state.

    Residuals change when an optimizer steps. A back-propagation that fails leaves them as they were after the last
    step, and so does a step that is skipped: `zero_grad()` in place of `step()`, or `discard`.

    Args:
        groups: the parameters that FSDP reduces together.
        replica: this rank's shards, and the ranks that reduce them: those with the same shards, or if there are no
            replicas, all.
        node: transport of the ranks over which parameters are sharded.
        compressor: what is bound to each group.
        checkpoint: converts the state.
        grad_scaler: torch.amp.GradScaler of the loop, or None.

    See Also:
        `sparsecoll.torch.fsdp.attach`.
    """

    def __init__(
        self,
        groups: list[Group],
        replica: Replica,
        node: Transport,
        compressor: Compressor,
        checkpoint: Checkpoint,
        grad_scaler: Any,
    ) -> None:
        self._groups, self._replica, self._node = groups, replica, node
        self._scattered = node is replica.transport  # the mean is scattered: there are no replicas
        self._parts = node.size if self._scattered else 1
        self._scaler, self._checkpoint = grad_scaler, checkpoint
        self._buckets = Buckets(compressor, replica)
        self._jobs: list[Future[None]] = []  # of the back-propagation that is under way
        self._reduced: set[int] = set()  # groups that have been reduced in it
        self._failed: Exception | None = None
        self._steps = Steps(self._buckets, replica, self._trained, "what attach() returned", self._any, self._in_layout)
        self._steps.follow_optimizers(compressor, warns=replica.transport.rank == node.rank == 0)
        self._steps.after = self._compare
        self._bind()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("ShardedReductions cannot be pickled or copied: save their state_dict()")

    @property
    def _transport(self) -> Transport:
        return self._replica.transport

    @property
    def _shards(self) -> list[Shard]:
        return [shard for group in self._groups for shard in group.shards]

    @property
    def _parameters(self) -> list[Shard]:
        return [shard for group in self._groups for shard in group.parameters]

    def _trained(self) -> dict[str, torch.Tensor]:
        return {shard.name: shard.param for shard in self._shards}

    def _in_layout(self, names: set[str]) -> set[str]:
        return {part for shard in self._shards if shard.name in names for part in shard.names(self._parts)}

    def _any(self, marks: NDArray[Any]) -> NDArray[Any]:
        """Return which marks are set on a rank with a part of the parameters. Collective.

        A rank alone cannot tell: its part may be empty, or no entry that was sent lies in it.
        """

        def combine(_: CollectiveCall) -> NDArray[Any]:
            anywhere: NDArray[Any] = disseminate(self._node, marks, np.bitwise_or)
            self._node.waitall()
            return anywhere

        return collective(self._node, "steps", self._replica.options.timeout, combine, "agree")

    def _compare(self) -> None:
        """After a step: compare replicas if that is due."""
        if not self._scattered:
            self._replica.params = {shard.name: shard.local for shard in self._shards}
            self._replica.compare_if_due()

    # -- hooks

    def install(self) -> None:
        """Set the hooks of all modules."""
        for index, group in enumerate(self._groups):
            group.module.set_reduce_scatter_unused_params(True, recurse=False)  # so that the layout is known
            if self._scattered:
                scatter = ReduceScatter(partial(self._receive, index), partial(self._memory, index))
                group.module.set_custom_reduce_scatter(scatter)
                continue
            group.module.set_all_reduce_hook(partial(self._all_reduce, index))
            if self._node.size > 1 and self._shards[0].local.device.type == "cpu":  # gloo sends twice as much
                group.module.set_custom_reduce_scatter(ReduceScatter(self._reduce_scatter_in_node))

    def _all_reduce(self, index: int, values: torch.Tensor) -> None:
        self._receive(index, values, values, 1.0)

    def _reduce_scatter_in_node(self, values: torch.Tensor, out: torch.Tensor, factor: float) -> None:
        reduce_scatter_tensors(self._node, values, out, factor, self._replica.options.timeout)

    def _memory(self, index: int, size: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the bucket's own memory for the gradients of a group, where it is free and fits."""
        if self._parts == 1:  # torch asks for the memory of gradients and of their sum, and sums nothing
            return None
        self._begin()
        bucket, _ = self._buckets[index]
        if size != bucket.layout.length or index in self._reduced:
            return None
        memory = bucket.gradient_buffer().tensor
        return memory if memory.dtype == dtype else None

    def _receive(self, index: int, values: torch.Tensor, out: torch.Tensor, factor: float) -> None:
        """Reduce the gradients of a group; runs on the thread that back-propagates."""
        self._begin()
        at_end_of_backward(self, lambda: queue_callback(self._end))
        device = self._buckets[index][0].layout.device
        again = index in self._reduced
        self._reduced.add(index)
        divisor = self._groups[index].divisor(values)
        job = partial(self._job, index, values, out, factor, divisor, again, device.record_event())
        self._jobs.append(in_background(self._transport, job))
        if self._groups[index].reads_at_once(out):
            self._jobs[-1].result()
            device.wait_stream()

    # -- a reduction, on the progress thread

    @torch.no_grad()
    def _job(
        self,
        index: int,
        values: torch.Tensor,
        out: torch.Tensor,
        factor: float,
        divisor: float,
        again: bool,
        event: Any,
    ) -> None:
        bucket, compressor = self._buckets[index]
        with bucket.layout.device.stream_context(event):
            try:
                if self._failed is None:
                    if again:  # a module that is used several times, or by parts of the loss
                        bucket.accept()
                    with CollectiveCall(self._transport, f"module {index}", compressor.timeout):
                        self._mean(bucket, compressor, values, out, factor, divisor)
            except Exception as error:
                self._failed = error
            if self._failed is not None:
                out.fill_(float("nan"))

    def _mean(
        self,
        bucket: Bucket,
        compressor: Compressor,
        values: torch.Tensor,
        out: torch.Tensor,
        factor: float,
        divisor: float,
    ) -> None:
        """Write factor * the mean of values to `out`, which torch divides by `divisor` afterwards.

        Residuals are kept in units of what the optimizer is given, whichever factors torch and a GradScaler have.
        """
        layout, keeps = bucket.layout, compressor.keeps_gradient
        if values.numel() != layout.length:
            raise RuntimeError(
                f"gradients: expected {layout.length} values of {layout.names[0]!r} and others, got {values.numel()}:"
                " parameters were frozen or unfrozen between the forward pass and its end"
            )
        scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
        before, after = (factor / (divisor * scale), divisor * scale) if keeps else (1.0, factor)
        whole = bucket.gradient_buffer()
        if values.dtype != whole.tensor.dtype:
            values = whole.tensor.copy_(values)  # which has the range for the factor
        if before != 1.0:
            torch.mul(values, before, out=whole.tensor)
        elif values.data_ptr() != whole.tensor.data_ptr():
            whole.tensor.copy_(values)
        in_place = keeps and out.dtype == whole.tensor.dtype
        mean = layout.device.array(out) if in_place else bucket.mean_buffer(keeps)[: out.numel()]
        with bucket_span(self._replica.options.timeline, layout.index, layout.length):
            compressor.allreduce_mean(self._transport, whole.array, mean)
        if keeps:  # the buffer holds the residual now, and codes without a zero leave one in what pads parameters
            for part in self._groups[layout.index].padding(layout.split(whole.tensor), self._parts):
                part.zero_()
        reduced = out if in_place else layout.device.tensor(mean)
        if after != 1.0:
            reduced.mul_(after)
        if not in_place:
            out.copy_(reduced)

    # -- a back-propagation

    def _begin(self) -> None:
        """Before the first reduction of a back-propagation: find out what has become of the last one."""
        if self._reduced:
            return
        self._steps.settle()
        self._steps.gradients.to(State.SENDING)
        if [layout.names for layout in self._layouts()] != [bucket.layout.names for bucket, _ in self._buckets]:
            self._bind()  # parameters were frozen or unfrozen

    def _end(self) -> None:
        """At the end of back-propagation: accept the reductions if they have succeeded on all ranks."""
        for job in self._jobs:
            job.result()
        for bucket, _ in self._buckets:
            bucket.layout.device.wait_stream()
        failed, self._failed, self._jobs, self._reduced = self._failed, None, [], set()
        agreed = completed_future(lambda: self._agree(failed))
        error = agreed.exception()
        if error is None:
            self._steps.accept(self._trained())
            return
        self.discard()
        for shard in self._shards:
            if shard.param.grad is not None:
                shard.param.grad.to_local().fill_(float("nan"))  # type: ignore[attr-defined]
        if self._scaler is None or not isinstance(error, NonFiniteError):
            raise error

    def _agree(self, failed: Exception | None) -> None:
        """Raise on every rank of all nodes if a reduction has failed on some, or if ranks took different steps.

        A reduction fails on all ranks that have the same shard, so that every node has one of them.
        """
        row = Row(self._replica.context.step, 0, {})
        if failed is None:
            exchanged = completed_future(
                lambda: self._replica.call(END, lambda _: row.exchange(self._transport), "agree")
            )
            failed = exchanged.exception()  # type: ignore[assignment]
        if not self._scattered:
            failed = collective(self._node, END, self._replica.options.timeout, lambda _: self._first(failed), "agree")
        if failed is not None:
            raise failed

    def _first(self, failed: Exception | None) -> Exception | None:
        """Return the exception of the first rank of this node that has one."""
        report = [] if failed is None else [type(failed).__name__, f"shard {self._node.rank}: {failed}"]
        blocks = allgatherv(self._node, np.frombuffer(bytearray(json.dumps(report).encode()), np.uint8))
        self._node.waitall()
        for kind, text in filter(None, (json.loads(bytes(block)) for block in blocks)):
            return KNOWN.get(kind, CommunicationError)(text)
        return None

    def discard(self) -> None:
        """Skip the step after back-propagation, on all ranks: residuals are restored to their values before it.

        `zero_grad()` does this, too, unless the loop has changed parameters before, as SAM does. After an exception in
        back-propagation that you catch on all ranks, call this and `model.reset_iter_state()`.
        """
        for job in self._jobs:
            job.result()
        self._jobs, self._reduced, self._failed = [], set(), None
        self._steps.gradients.to(State.EMPTY)
        self._buckets.drop()
        self._steps.discard()

    # -- layout

    def _layouts(self) -> list[Layout]:
        lengths = tuple(group.length(self._parts) for group in self._groups)
        return [group.layout(index, lengths, self._parts) for index, group in enumerate(self._groups)]

    def _bind(self) -> None:
        """Make the buckets; the state of parameters is kept. Collective."""

        def bind(_: Any) -> None:
            self._buckets.release()
            for layout in self._layouts():
                params = dict.fromkeys(layout.names, torch.empty(0, device="cpu"))
                self._buckets.bind(params, layout)

        self._replica.call("bind", bind)

    # -- saved state

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals and other state as of the last step, for torch.distributed.checkpoint. Collective.

        Returns:
            Dict with DTensors by kind and parameter name, whose first dimension counts the replicas (without replicas
            the ranks), and numbers and strings. It belongs beside the state of model and optimizer:
            `dcp.save({"model": ..., "optimizer": ..., "sparsecoll": reductions.state_dict()}, checkpoint_id=path)`.
        """
        if self._reduced:
            raise RuntimeError(
                "state_dict: expected a call after back-propagation, got one while gradients are reduced"
            )
        self._steps.settle()
        return self._checkpoint.saved(self._buckets.state_dict(), self._parameters)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after torch.distributed.checkpoint has filled it. Collective.

        Args:
            state: of any number of replicas and of ranks. With the same numbers as before, training continues bit for
                bit; otherwise residuals are scaled as by `sparsecoll.torch.redistribute`.

        Raises:
            ValueError: The state is of other parameters or another compressor.
        """
        shapes = {name: shard.padded for shard in self._parameters for name in shard.names(self._parts)}
        self._replica.params = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        own = completed_future(lambda: self._checkpoint.loaded(state, self._parameters, self._transport))
        self._buckets.load_state_dict(own.result)
        self._bind()
        self._steps.gradients.to(State.EMPTY)

    def load(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        storage_reader: Any = None,
        key: str = "sparsecoll",
    ) -> None:
        """Load the state from a checkpoint that `dcp.save` wrote with any number of nodes and ranks. Collective.

        Args:
            checkpoint_id: folder of the checkpoint.
            storage_reader: a StorageReader of torch.distributed.checkpoint, if it is not in a folder (default: None).
            key: under which the state was saved (default: "sparsecoll").

        Raises:
            ValueError: The checkpoint has no such state, or that of other parameters or another compressor.
        """
        own = self._buckets.state_dict()
        self.load_state_dict(self._checkpoint.read(own, self._parameters, checkpoint_id, storage_reader, key))


END = "end of back-propagation"
