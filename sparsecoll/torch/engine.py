"""From gradients to their means: hooks fill buckets during back-propagation, the progress thread reduces them.

A reduction is all or nothing: every bucket is reduced on trial, then one round of all ranks tells whether all went well
everywhere, and only then gradients become means. What error feedback keeps of it becomes the state of the next step
when the optimizer steps; until then it can be taken back.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch

from sparsecoll.errors import NonFiniteError
from sparsecoll.telemetry import trace
from sparsecoll.torch.backward import at_end_of_backward
from sparsecoll.torch.buckets import Buckets
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.device import device_of
from sparsecoll.torch.guards import fingerprint, refuse_ddp, warn_if_equal
from sparsecoll.torch.layout import Bucket, residual_dtype
from sparsecoll.torch.options import Options
from sparsecoll.torch.profiler import Profiler
from sparsecoll.torch.replicas import Buffers, Named, compare, describe, mean_of, share, share_optimizer
from sparsecoll.torch.rounds import CHANGED, JOINED, NOTHING, SUSPECT, Round, Row
from sparsecoll.torch.state import check
from sparsecoll.transport import Transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.collectives import allgather, broadcast
from sparsecoll.transport.progress import in_background

logger = logging.getLogger(__name__)

COMPILING = 300.0  # seconds: the least timeout of the first reduction, in which kernels may be compiled
OWNER = "_sparsecoll_engine"  # attribute of a parameter: a weak reference to the engine that has hooked it


class Engine:
    """Reduces the gradients of named parameters.

    Args:
        optimizer: whose state follows rank 0's where ranks are brought together again.

    Attributes:
        params: all named parameters; those that want gradients are in buckets.
        seconds: of this rank by kind of work (see `telemetry.trace`), and "exposed": waited for in `synchronize`.
        scaler: the torch.amp.GradScaler whose scale gradients have, if any.
    """

    def __init__(
        self,
        transport: Transport,
        compressor: Compressor,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        options: Options,
    ) -> None:
        self.params: Named = {}
        self.transport = transport
        self.scaler: Any = None
        self.closed = False
        self.seconds = dict.fromkeys((*trace.KINDS, "exposed"), 0.0)
        self._compressor, self._optimizer, self._options = compressor, optimizer, options
        self._known: set[int] = set()
        self._buffers = Buffers(model)
        self._buckets = Buckets(compressor, options)
        self._handles: dict[str, Any] = {}
        self._profiler = Profiler(model) if compressor.wants_profile else None
        self._guard = None if model is None else model.register_forward_pre_hook(refuse_ddp)
        self._threads = torch.get_num_threads()
        self._synchronizing = True
        self._early = options.overlap  # whether buckets are sent before back-propagation ends
        self._warmed = False  # whether a reduction has succeeded
        self._suspect = False  # whether this rank's parameters may differ from the others'
        self._scale = 1.0
        self._unusable: NonFiniteError | None = None  # what the next step raises: gradients that are not finite
        self._given: dict[str, tuple[torch.Tensor, int]] = {}  # means that are gradients now, and their versions
        self._end_reduction()
        self.discard()
        transport.sharers.append(weakref.ref(self))

    # -- parameters

    def add(self, params: Mapping[str, torch.Tensor]) -> None:
        """More parameters; collective. All ranks must have the same ones; values are taken from rank 0."""
        new = {name: p for name, p in params.items() if name not in self.params}
        tensors = {**new, **(self._buffers.tensors if not self.params else {})}

        def call() -> None:
            with CollectiveCall(self.transport, "parameters", self._patience) as call:
                taken = set(params) - set(new)
                if taken:
                    raise ValueError(f"named_parameters: expected every name once, got {min(taken)!r} again")
                for p in new.values():
                    if p.requires_grad:
                        residual_dtype(p.dtype)
                        device_of(p)
                call.signature |= {
                    **describe(tensors),
                    "compressor": self._compressor.describe(),
                    "bucket_bytes": self._options.bucket_bytes,
                    "dense_below": self._options.dense_below,
                    "overlap": self._options.overlap,
                    "verify": self._options.verify,
                }
                call.agree(entries=0)
                share(self.transport, tensors.values())

        self.transport.in_order(call)
        self._buckets.clear()
        self._end_reduction()
        self.params.update(new)
        self._known = {id(p) for p in self.params.values()}
        self._hook_all()
        self._buckets.order = []

    def _added(self) -> Named:
        """Parameters that were added to the optimizer and are not known here yet."""
        return {
            f"group{i}.{j}": p
            for i, group in enumerate(self._optimizer.param_groups)
            for j, p in enumerate(group["params"])
            if id(p) not in self._known
        }

    def _hook_all(self) -> None:
        """Hook the parameters that want gradients; one that another engine has is taken over."""
        for name, p in self.params.items():
            if p.requires_grad and name not in self._handles:
                owner = getattr(p, OWNER, lambda: None)()
                if owner is not None and owner is not self:
                    owner.close()  # of an optimizer that this one replaces: a notebook's cell was run again
                setattr(p, OWNER, weakref.ref(self))
                hook = partial(_call_hook, weakref.ref(self), name)
                self._handles[name] = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Take the hooks off the parameters; nothing is reduced any more."""
        for name, handle in self._handles.items():
            handle.remove()
            if getattr(self.params[name], OWNER, lambda: None)() is self:
                delattr(self.params[name], OWNER)
        if self._profiler is not None:
            self._profiler.close()
        if self._guard is not None:
            self._guard.remove()
        self._handles.clear()
        self.closed = True

    def move(self, transport: Transport) -> None:
        """Go on over another communicator, with rank 0's parameters, buffers and optimizer state; collective on it."""
        self.transport = transport
        self._buckets.clear()
        self._end_reduction()
        tensors = {**self.params, **self._buffers.tensors}

        def call() -> None:
            with CollectiveCall(transport, "move", self._options.timeout) as call:
                call.signature |= describe(tensors)
                call.agree()
                share(transport, tensors.values())
                share_optimizer(transport, self._optimizer)
                steps = np.array([self._buckets.context.step], np.int64)
                self._buckets.context.step = int(broadcast(transport, steps)[0])

        transport.in_order(call)
        self._suspect = False
        transport.sharers.append(weakref.ref(self))
        self.discard()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of back-propagations inside only accumulate; they are sent with those of the next one outside."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    # -- during back-propagation

    def _end_reduction(self) -> None:
        """Nothing of a reduction is under way."""
        self._taken: set[str] = set()
        self._waiting = [set(bucket.params) for bucket, _ in self._buckets]
        self._sent: list[Future[float]] = []
        self._failed: Exception | None = None
        self._changed = self._again = self._broken_off = False
        self._opened = False
        self._first: float | None = None  # when the first and the last gradient came
        self._last = 0.0

    def _hook(self, name: str, _: torch.Tensor) -> None:
        """A parameter's gradient is complete (on the thread that back-propagates)."""
        if not self._opened:
            self._open(name)
        if name in self._given:
            gradient, version = self._given[name]
            self._given[name] = gradient, version + 1
            if not _same(self.params[name].grad, gradient):
                self._take_back({name})
        self._dirty = True
        if not self._synchronizing:
            return
        self._last = time.perf_counter()
        self._first = self._last if self._first is None else self._first
        if self._options.overlap:
            self._asked = True
            at_end_of_backward(self.transport, partial(_synchronize_all, self.transport))
        if not self._buckets:
            if name not in self._buckets.order:
                self._buckets.order.append(name)
            return
        place = self._buckets.place.get(name)
        if place is None or not self._early or self._profiling or len(_sharing(self.transport)) > 1:
            return
        if self._broken_off:
            return
        if name in self._taken:  # once more in this back-propagation, or after one that was broken off
            self._changed = self._again = True
            return
        self._take(place, name)
        while len(self._sent) < len(self._buckets) and not self._waiting[len(self._sent)]:
            self._send()

    def _open(self, first: str = "") -> None:
        """A reduction begins: take back what an earlier one kept of gradients that were thrown away since.

        Args:
            first: the parameter to whose gradient has been added already.
        """
        self._opened = True
        gone = self._gone()
        for name, (gradient, version) in self._given.items():
            if name not in gone and gradient._version > version + (name == first):
                self._failed = RuntimeError(
                    f"gradient of {name!r}: expected step() or zero_grad() of the optimizer before the next"
                    " back-propagation, got a gradient that was changed in place after it had been reduced"
                )
        self._take_back(gone)
        if first:
            self._unscaled = False
        self._scale = 1.0 if self.scaler is None or self._unscaled else float(self.scaler.get_scale())

    def _gone(self) -> set[str]:
        """Parameters whose gradients were replaced after they had been reduced."""
        return {name for name, (gradient, _) in self._given.items() if not _same(self.params[name].grad, gradient)}

    def _take_back(self, gone: set[str]) -> None:
        """Gradients of these parameters were thrown away after they had been reduced: residuals are as before."""
        if gone:
            self._buckets.rollback(None if len(gone) == len(self._given) else gone)
        for name in gone:
            del self._given[name]

    def _scale_of(self, compressor: Compressor) -> float:
        """What gradients are divided by before they meet a residual, which outlives the scale."""
        return self._scale if compressor.keeps_gradient else 1.0

    def _take(self, place: int, name: str) -> None:
        bucket, compressor = self._buckets[place]
        bucket.take(name, self._scale_of(compressor))
        self._taken.add(name)
        self._waiting[place].discard(name)

    def _send(self) -> None:
        """Give the next bucket to the progress thread. All ranks send bucket 0, then 1, ..."""
        bucket, compressor = self._buckets[len(self._sent)]
        mark = bucket.layout.device.record_event()
        self._sent.append(in_background(self.transport, lambda: self._job(bucket, compressor, mark)))

    def _job(self, bucket: Bucket, compressor: Compressor, mark: Any) -> float:
        """Reduce one bucket, whose gradients are there at `mark`; returns its seconds."""
        if self._failed is not None:
            return 0.0
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # holds for the thread
        name, timeline = f"bucket {bucket.layout.index}", self._options.timeline
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.profiler.record_function(f"sparsecoll: {name}"))
            if timeline is not None:
                stack.enter_context(timeline.span(name, values=bucket.layout.length))
                stack.enter_context(trace.listening(timeline))
            recorder = stack.enter_context(trace.listening(trace.Recorder()))
            stack.enter_context(bucket.layout.device.stream_context(mark))
            try:
                assert bucket.gradient is not None
                out = bucket.means(compressor.keeps_gradient)
                compressor.allreduce_mean(self.transport, bucket.gradient.array, out)
                if bucket.small and self._compressor.keeps_gradient and not np.isfinite(out).all():
                    self._refuse(bucket)
            except Exception as error:
                self._failed = error
                raise
        for kind, seconds in recorder.seconds.items():
            self.seconds[kind] += seconds
        return time.perf_counter() - start

    def _refuse(self, bucket: Bucket) -> None:
        """Raise for a small parameter what the compressor would raise for a large one; all ranks see the same mean."""
        for name, p in bucket.params.items():
            assert bucket.mean is not None
            if not torch.isfinite(bucket.layout.part(bucket.mean.tensor, name)).all():
                local = p.grad is not None and not torch.isfinite(p.grad).all()
                with CollectiveCall(self.transport, "gradients", self._patience):
                    if local or self.transport.size == 1:
                        raise NonFiniteError(f"gradient of {name!r}: expected finite values, got NaN or infinity")
                    rows = allgather(self.transport, np.zeros(1, np.uint8))  # whoever has it raises
                    assert rows.size
                raise NonFiniteError(f"gradient of {name!r}: expected a finite sum over the ranks, got an overflow")

    # -- at its end

    @property
    def _patience(self) -> float | None:
        """The timeout of a call: longer while kernels may still be compiled."""
        timeout = self._options.timeout
        return timeout if self._warmed or timeout is None else max(timeout, COMPILING)

    def synchronize(self) -> None:
        """Send what was not sent, wait for all, and let gradients be the means. Collective.

        Raises:
            CommunicationError, RuntimeError: the reduction failed on some rank; gradients are as they were. A gradient
                that is not finite raises later, in `before_step`: until then all gradients are NaN.
        """
        self._asked = False
        if self.closed:
            return
        added = self._added()
        if added:
            self.add(added)
        self._hook_all()
        while self._attempt(0) is None:
            pass

    def _attempt(self, flags: int) -> Round | None:
        """One reduction of all buckets; None if it has to be made again."""
        if self._opened:
            self._take_back(self._gone())
        else:
            self._open()
        if not self._buckets:
            self._make_buckets()
        for place, (bucket, _) in enumerate(self._buckets):
            if place >= len(self._sent):
                for name in bucket.params if bucket.gradient is None else list(self._waiting[place]):
                    self._take(place, name)
                self._send()
        timeline = self._options.timeline
        if timeline is not None and self._first is not None:
            timeline.add("back-propagation", self._first, self._last)
        start = time.perf_counter()
        flags |= CHANGED * self._changed | SUSPECT * self._suspect
        row = Row.of(self._buckets.context.step, flags, self.params, self._buffers.changed())
        digest = None if self._warmed or self.transport.size == 1 else fingerprint(self.params.values())
        end = in_background(self.transport, lambda: self._round(row, digest))
        seconds: list[Any] = []
        error: Exception | None = None
        futures: list[Future[Any]] = [*self._sent, end]
        for future in futures:
            try:
                seconds.append(future.result())
            except Exception as problem:
                error = error or problem
        self.seconds["exposed"] += time.perf_counter() - start
        outcome: Round = NOTHING if error is not None else seconds.pop()
        if error is not None:
            self._drop()
            self._fail(error)
            return outcome
        changed, stale = outcome.flags & CHANGED, outcome.trainable != set(self._buckets.place)
        if changed or stale or outcome.joined == self.transport.size:
            if self._again:
                self._send_at_the_end()
            self._drop()
            if stale:  # parameters were frozen or unfrozen
                self._buckets.clear()
                self._make_buckets(outcome.trainable)
            return None if changed or stale else outcome
        self._accept(outcome, seconds)
        return outcome

    def _make_buckets(self, wanted: set[str] | None = None) -> None:
        self._buckets.make(self.transport, self.params, self._patience, wanted)
        self._waiting = [set(bucket.params) for bucket, _ in self._buckets]

    def _drop(self) -> None:
        """Leave everything as it was before the reduction."""
        self._buckets.drop()
        self._end_reduction()
        self._opened = True

    def _fail(self, error: Exception) -> None:
        """Raise what failed; gradients that are not finite are passed on, for whoever looks at them before the step."""
        self._opened = False
        if not isinstance(error, NonFiniteError):
            raise error
        self._unusable, self._reduced, self._dirty = error, True, False
        for name in self._buckets.place:
            p = self.params[name]
            p.grad = torch.full_like(p, float("nan"), requires_grad=False)

    def _send_at_the_end(self) -> None:
        """Send gradients when back-propagation has ended, from now on."""
        self._early = False
        logger.warning(
            "rank %d: gradients came more than once before a back-propagation ended (reentrant checkpointing does so;"
            " use_reentrant=False does not): they are sent at its end from now on",
            self.transport.rank,
        )

    def _accept(self, outcome: Round, seconds: list[float]) -> None:
        """The reduction is good on all ranks: gradients become means."""
        self._buckets.keep()
        if not self._warmed:
            for _, compressor in self._buckets:
                compressor.timeout = self._options.timeout
            if self._guard is not None:
                self._guard.remove()
        self._warmed = True
        self._given.clear()
        for name, place in self._buckets.place.items():
            bucket, compressor = self._buckets[place]
            p = self.params[name]
            if name in outcome.used or self._arrived(bucket, name):
                bucket.give(name, name in outcome.sparse, self._scale_of(compressor))
                assert p.grad is not None
                self._given[name] = p.grad, p.grad._version
        if any(outcome.modules):
            tensors = self._buffers.of(outcome.modules)
            self.transport.in_order(lambda: self._share_buffers(tensors))
            self._buffers.mark()
        if self._profiling and self._profiler is not None and self._profiler.note(self._last, seconds):
            self._buckets.context.ccr = self._profiler.ratio(self.transport, self._options.timeout)
        self._end_reduction()
        self._reduced, self._dirty, self._unusable = True, False, None

    @property
    def _profiling(self) -> bool:
        """Whether this step is measured; then nothing overlaps, so that neither disturbs the other."""
        return self._profiler is not None and self._buckets.context.ccr is None

    def _arrived(self, bucket: Bucket, name: str) -> bool:
        """Whether residuals have brought a gradient for a parameter that took part on no rank."""
        assert bucket.mean is not None
        return self.params[name].requires_grad and bool(bucket.layout.part(bucket.mean.tensor, name).any())

    def _share_buffers(self, tensors: list[torch.Tensor]) -> None:
        with CollectiveCall(self.transport, "buffers", self._options.timeout):
            share(self.transport, tensors)

    def _round(self, row: Row, digest: int | None) -> Round:
        """Tell all ranks how it went here; whatever failed on one fails on all.

        Args:
            digest: of this rank's own gradients, in the first reduction.
        """
        if getattr(self._failed, "on_all_ranks", False):
            return NOTHING  # all ranks know
        with CollectiveCall(self.transport, "end of reduction", self._patience), self.transport.phase("agree"):
            if self._failed is not None:
                raise self._failed
            outcome = row.exchange(self.transport, list(self.params))
            if digest is not None:
                warn_if_equal(self.transport, digest)
        if outcome.flags & SUSPECT:
            self._compare()
            self._suspect = False
        return outcome

    # -- the optimizer's step

    def ensure_means(self) -> None:
        """Make gradients the means. Collective where they are not yet."""
        if not self.closed and (self._dirty or not self._reduced):
            self.synchronize()

    def before_step(self) -> None:
        """Make sure that gradients are the means. Collective where they are not.

        Raises:
            NonFiniteError: a gradient holds NaN or infinity on some rank; on every rank.
        """
        self.ensure_means()
        if self._unusable is not None:
            error = self._unusable
            self.discard()
            raise error
        self._take_back({name for name in self._given if self.params[name].grad is None})

    def before_scalers_step(self, scaler: Any, found: dict[torch.device, torch.Tensor], unscaled: bool) -> None:
        """A torch.amp.GradScaler is about to look for gradients that are not finite. Collective unless they are means.

        Args:
            scaler: which divides gradients by its scale.
            found: by device, whether it has found such gradients on this rank: on some rank, afterwards.
            unscaled: whether it has divided them already.
        """
        self.scaler = scaler
        if self.closed or (self._reduced and not self._dirty):
            return
        if not unscaled:
            self.synchronize()
            return
        self._unscaled, self._scale = True, 1.0
        local = float(sum(value.item() for value in found.values()))
        anywhere = self.transport.in_order(lambda: mean_of(self.transport, local, self._patience))
        found[torch.device("cpu")] = torch.tensor(float(anywhere > 0))

    def after_step(self) -> None:
        """The optimizer has stepped: what the reductions since the last step have kept is the state of the next one."""
        if self.closed:
            return
        if self.scaler is not None and self._scale == 1.0 and not self._unscaled:  # found in this very step
            for _, compressor in self._buckets:
                compressor.rescale(1 / float(self.scaler.get_scale()))
        self._buckets.commit()
        self._given.clear()
        self._opened = self._reduced = self._dirty = self._unscaled = False
        if self._profiler is not None:
            self._profiler.stepped()
        self._buckets.context.step += 1
        if self._options.verify and self._buckets.context.step % self._options.verify == 0:
            self.transport.in_order(self._compare)

    def failed_step(self, error: Exception) -> None:
        """The optimizer has raised on this rank: tell the others, who may have stepped, in their next reduction."""
        self._suspect = True
        logger.error("rank %d: the wrapped optimizer's step failed: %s", self.transport.rank, error)

    def discard(self) -> None:
        """Give this step up: gradients are about to be thrown away, and residuals are as they were before it."""
        if self._taken or self._sent:
            self._changed = self._broken_off = True  # what was sent is sent again with the next back-propagation
        self._buckets.rollback()
        self._given.clear()
        self._opened = self._reduced = self._dirty = self._unscaled = self._asked = False
        self._unusable = None

    def mean_loss(self, loss: Any) -> Any:
        """The mean of a closure's loss over the ranks, of its own type."""
        if loss is None or self.closed:
            return loss
        value = float(loss.detach() if torch.is_tensor(loss) else loss)
        mean = self.transport.in_order(lambda: mean_of(self.transport, value, self._options.timeout))
        return torch.full_like(loss.detach(), mean) if torch.is_tensor(loss) else mean

    def join(self) -> None:
        """Take part in the others' reductions, adding nothing, until no rank has data; then follow the last one."""
        if self.closed:
            return
        self.discard()
        while True:
            for name in self._buckets.place:
                self.params[name].grad = None
            outcome = self._attempt(JOINED)
            if outcome is None:
                continue
            if outcome.joined == self.transport.size:
                break
            self._buckets.commit()
        self.discard()
        root = int(np.argmax(outcome.steps))
        tensors = [*self.params.values(), *self._buffers.tensors.values()]

        def follow() -> None:
            with CollectiveCall(self.transport, "join", self._options.timeout):
                share(self.transport, tensors, root)
                share_optimizer(self.transport, self._optimizer, root)

        self.transport.in_order(follow)
        self._buckets.context.step = max(outcome.steps)

    # -- checks and state

    def _compare(self) -> None:
        tensors = {**self.params, **self._buffers.tensors}
        compare(self.transport, tensors, self._buckets.context.step, self._options.timeout)

    def state_dict(self) -> dict[str, Any]:
        """Tensors by kind and parameter name as of the last step, other state by bucket, and what they belong to."""
        if (self._sent or self._taken) and not self._broken_off:
            raise RuntimeError("state_dict: expected a call after back-propagation, got one while gradients are sent")
        return self._buckets.state_dict(self.transport)

    def load_state_dict(self, state: Mapping[str, Any] | None, load: Callable[[], None]) -> None:
        """Go on from there; buckets are made as they were. Collective: what is raised on one rank is raised on all.

        Args:
            state: what `state_dict` returned; None begins with empty residuals.
            load: loads the rest, once the state has been found to fit.
        """

        def call() -> None:
            with CollectiveCall(self.transport, "load_state_dict", self._patience) as call:
                if state is not None:
                    check(state, self.transport.rank, self.transport.size, self.params, self._compressor.describe())
                call.signature["steps"] = 0 if state is None else state["step"]
                call.agree()
                load()
                allgather(self.transport, np.zeros(1, np.uint8))  # nobody leaves before all have loaded
                self.transport.flush()

        self.transport.in_order(call)
        self._buckets.load(state or {"tensors": {}}, self.params)
        self._given = {}
        self._end_reduction()
        self.discard()
        self._suspect = False
        if self._buckets.order:
            self._make_buckets(set(self._buckets.order))


def _same(grad: torch.Tensor | None, given: torch.Tensor) -> bool:
    """Whether a gradient is the one that was given, or (with create_graph) a sum that it is a part of."""
    return grad is given or (grad is not None and grad.grad_fn is not None)


def _sharing(transport: Transport) -> list[Engine]:
    """The engines that use a transport, in the same order on all ranks."""
    engines = [reference() for reference in transport.sharers]
    return [engine for engine in engines if engine is not None and not engine.closed and engine.transport is transport]


def _synchronize_all(transport: Transport) -> None:
    """At the end of a back-propagation: of all engines that it has met, whichever it has met first on this rank."""
    for engine in _sharing(transport):
        if engine._asked:
            engine.synchronize()


def _call_hook(engine: weakref.ref[Engine], name: str, p: torch.Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive._hook(name, p)
