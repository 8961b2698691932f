"""The compressors as a communication hook of torch's DistributedDataParallel.

DDP reads the annotations of a hook as types: no `from __future__ import annotations` here.
"""

import logging
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from sparsecoll.algorithms import Algorithm
from sparsecoll.errors import NonFiniteError
from sparsecoll.torch.compressors import Compressor, as_compressor
from sparsecoll.torch.reduction.bucket import Bucket
from sparsecoll.torch.reduction.buckets import Buckets
from sparsecoll.torch.reduction.grad_scaler import enabled, refuse_unknown
from sparsecoll.torch.reduction.rows import RowBucket, nan_rows
from sparsecoll.torch.reduction.state import UNNAMED, check_keys
from sparsecoll.torch.reduction.steps import State, Steps
from sparsecoll.torch.replica.calls import JOINED, Options, Row, agreed, agreeing, communicator
from sparsecoll.torch.replica.guards import refuse_renormalized
from sparsecoll.torch.replica.replica import Replica
from sparsecoll.torch.tensors.layout import Layout, device_of, in_memory_order, residual_dtype, takes_part
from sparsecoll.torch.tensors.model import model_of, named
from sparsecoll.torch.tensors.private import at_end_of_backward, backward_number, queue_callback
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.progress import in_background

logger = logging.getLogger(__name__)


class HookState:
    """The state of `comm_hook`.

    Residuals belong to parameters, not to buckets, so that nothing is lost when DDP rebuilds its buckets. They change
    when an optimizer with these parameters steps, or when the loop updates parameters by itself. A back-propagation
    that fails leaves them as they were, and so does a step that you skip: `zero_grad()` in its place, or `discard`. In
    DDP's `join()`, a rank that has no more data sends values from its residuals, which then change as in a step. See
    `load_state_dict` for how to resume bit for bit.

    Every parameter is compressed, small ones too, since DDP puts them into the same buckets. Sparse gradients, as of
    torch.nn.Embedding(sparse=True), are summed as rows, as by DistributedOptimizer.

    There is no `move`, since DDP cannot change its process group. After the loss of a rank, create a new group, DDP,
    HookState and optimizer, and load a checkpoint that `redistribute` has converted from the files of all ranks.

    A copy, as in a deepcopy or torch.save of the model, has `state_dict()`, and raises RuntimeError when it is used.

    Args:
        comm: DDP's process group, or an mpi4py intracommunicator with its ranks in the same order; None, the default,
            for the default process group.
        compressor: name in `sparsecoll.torch.COMPRESSORS`, a Compressor object, or a sparsecoll.Algorithm object, which
            then sums the top k (default: "topk"). COVAP sends all until it has seen DDP's last buckets, for two steps.
        named_parameters: the model, its DistributedDataParallel, or pairs (name, parameter), for names in `state_dict`
            and errors; without them parameters are numbered as DDP passes them, and no state can be loaded.
        timeout: seconds to wait for a message before CommunicationError is raised; None, the default, for no limit.
        grad_scaler: the torch.amp.GradScaler of the loop, if there is one: gradients are unscaled before they are added
            to a residual, and values that are not finite are passed on to all ranks, so that it skips the step.
        verify: number of steps after which the bits of all parameters are compared between ranks, in the next
            back-propagation, while all ranks have data; 0, the default, for never, and True for 100. Call `verify()`
            after the last step, which no back-propagation follows. Buffers are left to DDP, which broadcasts them
            before each forward pass.

    Raises:
        ValueError: The communicator and DDP's process group have different ranks (if their number is the same, this is
            raised by the first back-propagation), a compressor does not fit, or `verify` or `timeout` is out of range.
        TypeError: `grad_scaler`, `verify` or `timeout` has a wrong type, or a parameter is complex.
    """

    def __init__(
        self,
        comm: Any = None,
        compressor: str | Compressor | Algorithm = "topk",
        named_parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]] = (),
        *,
        timeout: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        verify: bool | int = 0,
    ) -> None:
        self.transport = communicator(comm, timeout)
        own, options = as_compressor(compressor), Options(verify=verify, timeout=timeout)
        self._timeout, self._scaler = timeout, enabled(grad_scaler)
        given, wrapped = named_parameters, isinstance(named_parameters, torch.nn.parallel.DistributedDataParallel)
        self._group: Any = given.process_group if wrapped else None  # type: ignore[union-attr]
        given = given.module if wrapped else given  # type: ignore[union-attr, assignment]
        refuse_renormalized(model_of(given) if self.transport.size > 1 else None)
        self._check_group()
        self._replica = Replica(self.transport, None, options)
        self._params = self._replica.params
        self._params.update(named(given))
        for p in filter(takes_part, self._params.values()):
            residual_dtype(p.dtype)
        self._names = {id(p): name for name, p in self._params.items()}
        self._named = len(self._names)  # those that come later are numbered
        self._buckets, self._needs_lengths = Buckets(own, self._replica), own.needs_all_buckets
        self._lengths: tuple[int, ...] = ()  # of the buckets of the last back-propagation
        self._complete = False  # whether all parameters of DDP are known
        self._failed: Exception | None = None  # raised by a bucket of this back-propagation, on all ranks
        self._joined = self._left = False  # whether any rank, and this one, had no data in the last reduction
        self._reduced = 0  # buckets of this back-propagation; DDP numbers all of a static graph's first one 0
        self._steps = Steps(self._buckets, self._replica, lambda: self._params, "the HookState")
        self._steps.follow_optimizers(own, warns=self.transport.rank == 0)
        self._steps.after = partial(refuse_unknown, self._scaler, own, "HookState")
        self._watched, self._computed = set[str](), set[str]()  # hooked parameters; gradients since the last reduction
        self._task = -1  # back-propagation in which it was called last

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps the state, without a communicator."""
        return {"_saved": self.state_dict()}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_saved" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise RuntimeError(
            f"A copied or loaded {type(self).__name__} has no communicator: make a new one with the options of the"
            " old one, and call load_state_dict(copy.state_dict()) of it on every rank."
        )

    def _check_group(self) -> None:
        if self._group is None and not dist.is_initialized():
            return
        size = dist.get_world_size(self._group)
        if size != self.transport.size:
            raise ValueError(
                f"comm: expected the {size} ranks of DDP's process group, got a communicator of {self.transport.size}:"
                " gradients would not be averaged over all of them; pass that group (and DDP itself if it has one of"
                " its own), or start the job with mpirun"
            )

    def _check_ranks(self) -> None:
        """Raise unless the communicator has the ranks of DDP's process group. Collective; in a CollectiveCall."""
        if not dist.is_initialized():
            return
        with self.transport.set_up():
            ranks = sorted(allgather(self.transport, np.array([dist.get_rank()], np.int64))[:, 0].tolist())
            self.transport.waitall()
        expected = sorted(dist.get_process_group_ranks(self._group or dist.group.WORLD))
        if ranks != expected:
            raise ValueError(
                f"comm: expected ranks {expected}, those of DDP's process group, got {ranks}; pass that group"
            )

    def _name(self, p: torch.Tensor) -> str:
        if self._complete and id(p) not in self._names:
            raise ValueError(
                f"parameter of shape {tuple(p.shape)}: expected those of the DistributedDataParallel that has used this"
                " HookState before, got a new one: after a layer was replaced, give the new DistributedDataParallel a"
                " HookState of its own. It can load the state_dict() of this one if you delete the names of the old"
                " layer from the kinds in its 'tensors'"
            )
        residual_dtype(p.dtype)  # DDP passes complex gradients as real numbers
        name = self._names.setdefault(id(p), str(len(self._names)))
        self._params[name] = p
        return name

    def _of(self, bucket: GradBucket) -> tuple[Bucket, Compressor]:
        """Return the memory and the compressor of a bucket; collective if DDP has put other parameters into it."""
        params = {self._name(p): p for p in bucket.parameters()}
        index, names, values = self._reduced - 1, tuple(params), bucket.buffer()
        rows = values.is_sparse  # DDP puts such a parameter into a bucket of its own
        length = 0 if rows else int(values.numel())
        lengths = (0,) * index + (length,)
        if self._needs_lengths:
            lengths = self._lengths if self._lengths[index : index + 1] == (length,) else (*lengths, -1)
        layout = self._buckets[index][0].layout if index < len(self._buckets) else None
        if layout is not None and (layout.names, layout.lengths) == (names, lengths):
            return self._buckets[index]
        self._check_group()
        self._buckets.release(index)  # those of before DDP has rebuilt all of them, if it has
        shapes = tuple(tuple(p.shape) for p in params.values())
        dtype, device = residual_dtype(values.dtype), device_of(values)
        layout = Layout(index, lengths, names, shapes, dtype, device, rows=rows)

        def bind(_: CollectiveCall) -> None:
            if index == 0:
                self._check_ranks()
            self._buckets.bind(params, layout)

        self._buckets.all_or_none(bind)
        return self._buckets[index]

    def _scale(self, compressor: Compressor) -> float:
        return float(self._scaler.get_scale()) if self._scaler is not None and compressor.unscales else 1.0

    def reduce(self, grads: GradBucket, joined: bool) -> torch.Tensor:
        """Return the mean of the gradients in a bucket, or NaN if that fails; runs on the progress thread.

        Args:
            joined: whether this rank has no more data, within DDP's `join()`.
        """
        values = grads.buffer()
        try:
            with agreed(self.transport, self._timeout):
                self._reduced += 1
                if self._reduced == 1:
                    self._failed = None
                    if joined:  # otherwise before the first gradient
                        self._steps.commit_or_rollback()
                    self._verify()
                if self._failed is None:
                    values = self._mean_of_rows(grads) if values.is_sparse else self._mean(grads)
                    if grads.is_last():
                        self._end(joined)
        except Exception as error:
            self._failed = error
            self._buckets.drop()
        if self._failed is not None:
            (p, *_) = grads.parameters()
            return nan_rows(p) if values.is_sparse else values.fill_(float("nan"))
        return values

    def finish(self) -> None:
        """End a back-propagation: accept a reduction whose last bucket DDP has not marked, or raise its failure."""
        if self._failed is None and self._reduced:
            in_background(self.transport, lambda: self._end(False)).result()
        self._reduced = 0
        for name in {n for n in self._buckets.index_of if self._params[n].requires_grad} - self._watched:
            self._watched.add(name)
            self._params[name].register_hook(partial(_before_gradient, weakref.ref(self), name))  # type: ignore[no-untyped-call]
        self._computed.clear()
        if self._failed is None and not self._left:
            self._steps.accept({name: self._params[name] for name in self._buckets.index_of})
        elif self._failed is not None:
            self._buckets.spoil()
            if self._scaler is None or not isinstance(self._failed, NonFiniteError):
                raise self._failed  # a GradScaler skips the step itself

    def _mean_of_rows(self, grads: GradBucket) -> torch.Tensor:
        bucket, compressor = self._of(grads)
        assert isinstance(bucket, RowBucket)
        scale = self._scale(compressor)
        bucket.take(grads.buffer(), scale)
        bucket.reduce(self.transport, compressor)
        return bucket.mean_tensor(scale)

    def _mean(self, grads: GradBucket) -> torch.Tensor:
        bucket, compressor = self._of(grads)
        scale, values, keeps = self._scale(compressor), grads.buffer(), compressor.keeps_gradient
        fresh = {n for n in bucket.params if n in self._computed or n not in self._watched or self._aliases(n, values)}
        used = bucket.nonzero(values, fresh) if keeps else np.empty(0, np.uint8)
        bucket.reduce_flat(self.transport, compressor, values, values, 1 / scale, scale)
        if keeps:
            for part in self._replica.call("used", lambda _: bucket.leave_out(self.transport, used), "agree"):
                values[part].zero_()  # DDP would throw away the means of parameters without a gradient on any rank
        return values

    def _aliases(self, name: str, values: torch.Tensor) -> bool:
        """Return whether a gradient is a view of the bucket, which DDP then leaves to us; otherwise it keeps a mean."""
        grad = self._params[name].grad
        return grad is not None and grad.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()

    def _verify(self) -> None:
        """Compare the replicas if that is due. Collective.

        Not yet when an optimizer has stepped: others may follow, and ZeroRedundancyOptimizer has to send parameters.
        """
        if self._steps.unverified and not self._joined:
            self._replica.compare_if_due()
        self._steps.unverified = False

    def _end(self, joined: bool) -> None:
        """Accept the reduction after its last bucket, if it succeeded on all ranks."""
        row = Row(self._replica.context.step, JOINED * joined, {})
        outcome = self._replica.call("end of back-propagation", lambda _: row.exchange(self.transport), "agree")
        self._lengths = tuple(bucket.layout.length for bucket, _ in self._buckets)[: self._reduced]
        self._joined, self._left, self._reduced = outcome.joined, joined, 0
        self._complete = True
        if joined and outcome.step is not None:  # this rank's optimizer does not step, but others do
            self._steps.accept({})
            self._replica.context.step = outcome.step
            self._steps.commit()

    def discard(self) -> None:
        """Skip the step after back-propagation, on all ranks: residuals return to what they were before it.

        `zero_grad()` does this, too, but not if the loop has changed parameters after back-propagation, as SAM does.

        Raises:
            RuntimeError: In DDP's `join()`, a rank has no more data. It would not skip this step.
        """
        if self._joined and self._steps.open:
            raise RuntimeError("discard() cannot skip this step, because a rank has left DDP's join()")
        self._steps.discard()

    def verify(self) -> None:
        """Compare the bits of all parameters between ranks now, whatever the argument `verify`; collective.

        Call it between steps: after those of all optimizers, and before the next forward pass.

        Raises:
            CommunicationError: On every rank, if they differ; the text names the first parameter that does.
        """
        self._steps.commit_or_rollback()
        self._replica.compare()
        self._steps.unverified = False

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and other tensors by kind and parameter name, as of the last step."""
        if "_saved" in self.__dict__:  # of a copy
            return self._saved  # type: ignore[no-any-return]
        self._steps.commit_or_rollback()
        state = self._buckets.state_dict()
        state["tensors"] = in_memory_order(state["tensors"], self._params, back=True)
        if len(self._names) > self._named and state["tensors"] and self.transport.rank == 0:
            logger.warning("state_dict: expected names of parameters, without which it cannot be loaded%s", UNNAMED)
        return state

    @agreeing("_replica.agreed")
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; collective.

        DDP rebuilds its buckets after its first back-propagation, or after the second one with `static_graph=True`, and
        never with `find_unused_parameters=True`. To continue bit for bit, let it do so before you load a state: call
        `backward()` of any batch (with COVAP, of two), `discard()` and `zero_grad()`, then load the states of model,
        optimizer and hook. Otherwise the first step has the initial buckets, in which most compressors send other
        entries or codes; no gradient is lost.

        Args:
            state: a state that this rank saved.

        Raises:
            CommunicationError: The state was saved by another rank, or with another number of ranks (see
                `redistribute`).
            ValueError: The state is of other parameters or another compressor.
        """

        def read() -> dict[str, Any]:
            check_keys(state)
            return {**state, "tensors": in_memory_order(state["tensors"], self._params, back=False)}

        self._buckets.load_state_dict(read)
        self._steps.gradients.to(State.EMPTY)


def _before_gradient(state: "weakref.ref[HookState]", name: str, _: torch.Tensor) -> None:
    """Find out, before the first gradient of a back-propagation, whether a step was taken with the last one's."""
    alive, task = state(), backward_number()
    if alive is not None:
        alive._computed.add(name)
    if alive is not None and task != alive._task:
        alive._task = task
        alive._steps.commit_or_rollback()


def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook for DistributedDataParallel: `model.register_comm_hook(state, comm_hook)`.

    It reduces each bucket with the state's compressor, over the communicator of the state (MPI, or the library's
    sockets). DDP needs a process group only for its own start-up (gloo is sufficient, see
    `sparsecoll.torch.init_process_group`).

    Args:
        state: HookState.
        bucket: bucket of gradients, which DDP passes.

    Returns:
        Future of the mean of the bucket over the ranks.

    Raises:
        TypeError: `state` is no HookState.
    """
    if not isinstance(state, HookState):
        raise TypeError(
            f"state: expected a HookState, got {state!r}:"
            " model.register_comm_hook(HookState(None, 'qsgd', model), comm_hook)"
        )
    return _reduced(state, bucket)


@agreeing("_replica.agreed")
def _reduced(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    device, where = device_of(bucket.buffer()), bucket.buffer().device
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[where] if where.type == "cuda" else None)
    event, joined = device.record_event(), backward_number() < 0  # join() calls this outside of a back-propagation
    if not joined:  # perhaps no gradient was watched, of layers that were frozen
        _before_gradient(weakref.ref(state), "", bucket.buffer())

    def job() -> None:
        try:
            with device.stream_context(event), torch.no_grad():
                future.set_result(state.reduce(bucket, joined))
        except Exception as error:  # of the device
            future.set_exception(error)  # type: ignore[arg-type]

    request = in_background(state.transport, job)
    if not joined:  # an exception in the future would reach the user as "Unable to cast"
        at_end_of_backward(state, lambda: queue_callback(state.finish))  # after DDP's own callback
    elif bucket.is_last():
        request.result()
        state.finish()
    return future
