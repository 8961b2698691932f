"""The reductions of a sharded model's gradients: when they are made, and that they succeed on all ranks or on none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsecoll.errors import NonFiniteError
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.fsdp.checkpoint import Checkpoint
from sparsecoll.torch.fsdp.failures import Failures
from sparsecoll.torch.fsdp.groups import Group, ReduceScatter, Shard, reduce_scatter_tensors
from sparsecoll.torch.reduction.buckets import Buckets
from sparsecoll.torch.reduction.grad_scaler import refuse_unknown
from sparsecoll.torch.reduction.steps import State, Steps
from sparsecoll.torch.replica.calls import Row
from sparsecoll.torch.replica.replica import Replica
from sparsecoll.torch.tensors.layout import Layout
from sparsecoll.torch.tensors.private import at_end_of_backward, backward_number, queue_callback
from sparsecoll.transport import Transport
from sparsecoll.transport.all_ranks import disseminate
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.progress import in_background


class ShardedReductions:
    """What `sparsecoll.torch.fsdp.attach` returns: the residuals of a sharded model, and their state.

    Residuals change when an optimizer steps. A back-propagation that fails leaves them as they were after the last
    step, and so does a step that is skipped: `zero_grad()` in place of `step()`, or `discard`.

    Args:
        groups: the parameters that FSDP reduces together.
        replica: this rank's shards, and the ranks that reduce them: those with the same shards, or if there are no
            replicas, all.
        node: transport of the ranks over which parameters are sharded.
        compressor: of which a copy is bound to each group.
        checkpoint: converts the state.
        grad_scaler: torch.amp.GradScaler of the loop, or None.
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
        self._groups, self._replica, self._node, self._transport = groups, replica, node, replica.transport
        replica.context.sums_means = True
        self._scattered = node is replica.transport  # the mean is scattered: there are no replicas
        self._parts = node.size if self._scattered else 1
        self._scaler, self._checkpoint = grad_scaler, checkpoint
        self._buckets = Buckets(compressor, replica)
        self._jobs: list[Future[None]] = []  # of the back-propagation that is under way
        self._reduced: set[int] = set()  # groups that have been reduced in it
        self._failures = Failures(replica.transport, node, replica.options.timeout)
        self._steps = Steps(self._buckets, replica, self._trained, "what attach() returned", self._any, self._in_layout)
        self._steps.follow_optimizers(compressor, warns=replica.transport.rank == node.rank == 0)
        self._steps.after = partial(self._after_step, compressor)
        self._bind()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("ShardedReductions cannot be pickled or copied: save their state_dict()")

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
        return self._failures.call(
            self._node, "steps", lambda _: disseminate(self._node, marks, np.bitwise_or), "agree"
        )

    def _after_step(self, compressor: Compressor) -> None:
        """Refuse a GradScaler that was not passed, and compare replicas if that is due."""
        refuse_unknown(self._scaler, compressor, "attach")
        self._compare_if_due()

    def _compare_if_due(self) -> None:
        """Compare replicas after a step, also of the loop's own, if that is due. Collective."""
        every, stepped, self._steps.unverified = self._replica.options.verify, self._steps.unverified, False
        if stepped and not self._scattered:
            self._replica.params = {shard.name: shard.local for shard in self._shards}
            if every and self._replica.context.step % every == 0:
                self._failures.together("verify", self._replica.compare)  # also where other shards differ

    # -- hooks

    def install(self) -> None:
        """Set the hooks of all modules."""
        hook, ask = self._failures.hook, self._ask_for_end
        for index, group in enumerate(self._groups):
            group.lay_out_all(hook)
            receive = hook(ask, ask, partial(self._receive, index))  # asks again, if that has failed
            reduce = partial(self._in_backward, receive)
            if self._parts > 1:  # a single rank scatters nothing
                group.module.set_custom_reduce_scatter(ReduceScatter(reduce, hook(partial(self._memory, index))))
                continue
            group.module.set_all_reduce_hook(reduce)
            if self._node.size > 1 and self._shards[0].local.device.type == "cpu":  # gloo sends twice as much
                group.module.set_custom_reduce_scatter(ReduceScatter(hook(self._reduce_scatter_in_node)))

    def _in_backward(self, receive: Callable[..., Any], *args: Any) -> Any:
        """Call `receive` of a hook, or raise where no end of back-propagation would tell the ranks of a failure."""
        if backward_number() < 0:
            raise RuntimeError(
                "attach: gradients are reduced outside of backward(), as schedules of torch.distributed.pipelining do:"
                " use fully_shard alone there"
            )
        return receive(*args)

    def _reduce_scatter_in_node(self, values: torch.Tensor, out: torch.Tensor, factor: float) -> None:
        job = partial(reduce_scatter_tensors, self._node, values, out, factor, self._replica.options.timeout)
        self._failures.call(self._node, "reduce_scatter", lambda _: job())

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

    def _receive(
        self, index: int, values: torch.Tensor, out: torch.Tensor | None = None, factor: float | None = None
    ) -> None:
        """Write factor * the mean of a group's gradients to `out`, or in place; torch then divides it by its divisor.

        Residuals are kept in units of what the optimizer is given, whichever factors torch and a GradScaler have.
        """
        out = values if out is None else out
        factor = self._groups[index].factor(self._transport.size) if factor is None else factor
        self._begin()
        device = self._buckets[index][0].layout.device
        again = index in self._reduced
        self._reduced.add(index)
        divisor, event = self._groups[index].divisor(values), device.record_event()

        @torch.no_grad()
        def reduce(_: CollectiveCall) -> None:
            bucket, compressor = self._buckets[index]
            layout, keeps = bucket.layout, compressor.keeps_gradient
            with device.stream_context(event):
                if again:  # a module that is used several times, or by parts of the loss
                    bucket.accept()
                if values.numel() != layout.length:
                    raise RuntimeError(
                        f"gradients: expected {layout.length} values of {', '.join(layout.names[:2])} and others, got"
                        f" {values.numel()}: parameters were frozen or unfrozen between the forward pass and its end"
                    )
                scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
                before, after = (factor / (divisor * scale), divisor * scale) if keeps else (1.0, factor)
                moved = None if compressor.keeps_zeros or self._scattered else bucket.nonzero(values)
                bucket.reduce_flat(self._transport, compressor, values, out, before, after)
                for place in () if moved is None else bucket.leave_out(self._transport, moved):
                    out[place].zero_()
                if keeps:  # the buffer holds the residual now, whose padding codes without a zero may have set
                    residual = layout.split(bucket.gradient_buffer().tensor)
                    for part in self._groups[layout.index].padding(residual, self._parts):
                        part.zero_()

        job = partial(self._failures.call, self._transport, f"module {index}", reduce)
        self._jobs.append(in_background(self._transport, self._failures.hook(job, partial(self._spoil, out))))
        if self._groups[index].reads_at_once(out):
            self._jobs[-1].result()
            device.wait_stream()

    def _ask_for_end(self, *_: Any) -> None:
        """Call `Failures.end` when back-propagation ends."""
        end = partial(self._failures.end, "end of back-propagation", self._wait, self._exchange, self._accept_or_drop)
        at_end_of_backward(self, lambda: queue_callback(end))

    @torch.no_grad()
    def _spoil(self, out: torch.Tensor) -> None:
        """Write NaN in place of means, if this back-propagation has failed."""
        if self._failures.error is not None:
            out.fill_(float("nan"))

    # -- a back-propagation

    def _begin(self) -> None:
        """Before the first reduction of a back-propagation, find out whether a step was taken with the last one."""
        if self._reduced:
            return
        self._steps.commit_or_rollback()
        self._compare_if_due()
        self._steps.gradients.to(State.SENDING)
        if [layout.names for layout in self._layouts()] != [bucket.layout.names for bucket, _ in self._buckets]:
            self._bind()  # parameters were frozen or unfrozen

    def _wait(self) -> None:
        for job in self._jobs:
            job.result()
        for bucket, _ in self._buckets:
            bucket.layout.device.wait_stream()

    def _exchange(self, ranks: Transport) -> None:
        Row(self._replica.context.step, 0, {}).exchange(ranks)

    def _accept_or_drop(self, error: Exception | None) -> Exception | None:
        """Accept the reductions of a back-propagation, or drop them; return the exception to be raised."""
        if error is None:
            self._over()
            self._steps.accept(self._trained())
            return None
        self.discard()
        for shard in self._shards:
            if shard.param.grad is not None:
                shard.param.grad.to_local().fill_(float("nan"))  # type: ignore[attr-defined]
        return None if self._scaler is not None and isinstance(error, NonFiniteError) else error

    def _over(self) -> None:
        """Record that no back-propagation is under way."""
        self._jobs, self._reduced = [], set()
        self._failures.forget()

    def discard(self) -> None:
        """Skip the step after back-propagation, on all ranks: residuals are restored to their values before it.

        `zero_grad()` does this, too, unless the loop has changed parameters before, as SAM does. After an exception in
        back-propagation that you catch on all ranks, call this and `model.reset_iter_state()`.
        """
        for job in self._jobs:
            job.result()
        self._over()
        self._buckets.drop()
        self._steps.discard()
        self._steps.gradients.to(State.EMPTY)

    # -- layout

    def _layouts(self) -> list[Layout]:
        lengths = tuple(group.length(self._parts) for group in self._groups)
        return [group.layout(index, lengths, self._parts) for index, group in enumerate(self._groups)]

    def _bind(self) -> None:
        """Make the buckets, on all ranks or on none; the state of parameters is kept. Collective."""

        def bind(_: Any) -> None:
            self._buckets.release()
            for layout in self._layouts():
                self._buckets.bind(dict.fromkeys(layout.names, torch.empty(0, device="cpu")), layout)

        self._failures.call(self._transport, "bind", lambda _: self._buckets.all_or_none(bind))

    # -- saved state

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals and other state as of the last step, for torch.distributed.checkpoint. Collective.

        Returns:
            Dict with DTensors by kind and parameter name, whose first dimension counts the replicas (without replicas
            the ranks), and numbers and strings. It belongs beside the state of model and optimizer:
            `dcp.save({"model": ..., "optimizer": ..., "sparsecoll": reductions.state_dict()}, checkpoint_id=path)`.
        """
        if self._reduced:
            raise RuntimeError("call state_dict() after back-propagation, not while gradients are reduced")

        def saved() -> dict[str, Any]:
            self._steps.commit_or_rollback()
            return self._checkpoint.saved(self._buckets.state_dict(), self._parameters)

        return self._failures.together("state_dict", saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after torch.distributed.checkpoint has filled it. Collective.

        Args:
            state: of any number of replicas and of ranks. With the same numbers as before, training continues bit for
                bit; otherwise residuals are scaled as by `sparsecoll.torch.redistribute`.

        Raises:
            ValueError: The state is of other parameters or another compressor.
        """

        def loaded() -> dict[str, Any]:
            shapes = {name: shard.padded for shard in self._parameters for name in shard.names(self._parts)}
            self._replica.params = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
            return self._checkpoint.loaded(state, self._parameters, self._transport)

        def load(own: dict[str, Any]) -> None:
            self._buckets.load_state_dict(lambda: own)
            self._bind()
            self._steps.gradients.to(State.EMPTY)

        self._failures.together("load_state_dict", partial(load, self._failures.together("load_state_dict", loaded)))

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

        def read() -> dict[str, Any]:
            together, own = self._failures.together, self._buckets.state_dict()
            return self._checkpoint.read(own, self._parameters, checkpoint_id, storage_reader, key, together)

        self.load_state_dict(self._failures.together("load", read))
