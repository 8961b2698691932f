"""From gradients to their means: hooks fill buckets during back-propagation, the progress thread reduces them.

A reduction is all or nothing: every bucket is reduced on trial, then one round of all ranks tells whether all went well
everywhere, and only then gradients become means. What error feedback keeps of it becomes the state of the next step
when the optimizer steps; until then it can be taken back.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsecoll import trace
from sparsecoll.agreement import together
from sparsecoll.errors import CommunicationError, NonFiniteError
from sparsecoll.progress import in_background
from sparsecoll.torch.backward import at_end_of_backward
from sparsecoll.torch.compressors import Compressor, Free, NoCompression, Shared, resolve
from sparsecoll.torch.device import device_of
from sparsecoll.torch.layout import Bucket, fuse, residual_dtype
from sparsecoll.torch.replicas import Buffers, Named, compare, describe, in_order, mean_of, share, share_optimizer
from sparsecoll.torch.state import Tensors, check, collect, encode_extra, restore
from sparsecoll.torch.timeline import Timeline
from sparsecoll.transport import Transport
from sparsecoll.transport.collectives import allgather, broadcast

logger = logging.getLogger(__name__)

PROFILED = slice(2, 7)  # steps of which back-propagation and communication are compared, if a compressor asks
COMPILING = 300.0  # seconds: the least timeout of the first reduction, in which kernels may be compiled
CHANGED, JOINED, SUSPECT = 1, 2, 4  # flags of a round
OWNER = "_sparsecoll_engine"  # attribute of a parameter: a weak reference to the engine that has hooked it


@dataclass
class Round:
    """What all ranks say at the end of a reduction.

    Attributes:
        steps: taken by each rank before this one.
        flags: any rank's.
        joined: how many ranks have run out of data.
        used, sparse, trainable: by parameter, whether any rank has a gradient, a sparse one, wants one.
        modules: which modules with buffers have changed them on any rank.
    """

    steps: list[int]
    flags: int
    joined: int
    used: list[bool]
    sparse: list[bool]
    trainable: list[bool]
    modules: list[bool]


@dataclass(frozen=True)
class Options:
    """Of an Engine; see DistributedOptimizer."""

    bucket_bytes: int | None = 25 << 20
    dense_below: int = 1024
    overlap: bool = True
    verify: int = 0
    timeout: float | None = None
    timeline: Timeline | None = None

    def check(self) -> None:
        """Raise unless each option is what it should be.

        Raises:
            TypeError, ValueError: one is not.
        """
        for name, least in (("bucket_bytes", 1), ("dense_below", 0), ("verify", 0)):
            value = getattr(self, name)
            if name == "bucket_bytes" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an integer, got {value!r}")
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if not isinstance(self.overlap, bool):
            raise TypeError(f"overlap: expected True or False, got {self.overlap!r}")
        if self.timeout is not None and (isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float))):
            raise TypeError(f"timeout: expected seconds or None, got {self.timeout!r}")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout: expected more than 0 seconds, or None to wait for ever, got {self.timeout}")
        if self.timeline is not None and not isinstance(self.timeline, Timeline):
            raise TypeError(f"timeline: expected a sparsecoll.torch.Timeline, got {self.timeline!r}")


class Engine:
    """Reduces the gradients of named parameters.

    Args:
        optimizer: whose state follows rank 0's where ranks are brought together again.

    Attributes:
        params: all named parameters; those that want gradients are in buckets.
        seconds: of this rank by kind of work (see `sparsecoll.trace`), and "exposed": waited for in `synchronize`.
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
        self._compressor = compressor
        self._optimizer, self._model = optimizer, model
        self._options = options
        self._buffers = Buffers(model)
        self._shared = Shared()
        self._synchronizing = True
        self._buckets: list[tuple[Bucket, Compressor]] = []
        self._order: list[str] = []  # names by when their gradients came first; buckets are made in this order
        self._saved: dict[str, Any] = {}  # state that waits for buckets to be made
        self._parked: Tensors = {}  # state of parameters that are in no bucket
        self._handles: dict[str, Any] = {}
        self._forward_hook: Any = None
        self._profile: list[tuple[float, list[float]]] = []
        self._forward_end = self._stepped = time.perf_counter()
        self._scale = 1.0
        self._threads = torch.get_num_threads()
        self._early = options.overlap  # whether buckets are sent before back-propagation ends
        self._warmed = False  # whether a reduction has succeeded
        self._suspect = False  # whether this rank's parameters may differ from the others'
        self.closed = False
        self.seconds = dict.fromkeys((*trace.KINDS, "exposed"), 0.0)
        self._unusable: NonFiniteError | None = None  # what the next step raises: gradients that are not finite
        self._given: dict[str, tuple[torch.Tensor, int]] = {}  # means that are gradients now, and their versions
        self._end_reduction()
        self.discard()

    # -- parameters

    def add(self, params: Mapping[str, torch.Tensor]) -> None:
        """More parameters; collective. All ranks must have the same ones; values are taken from rank 0."""
        new = {name: p for name, p in params.items() if name not in self.params}
        tensors = {**new, **(self._buffers.tensors if not self.params else {})}

        def call() -> None:
            with together(self.transport, "parameters", self._patience) as conversation:
                taken = set(params) - set(new)
                if taken:
                    raise ValueError(f"named_parameters: expected every name once, got {min(taken)!r} again")
                for p in new.values():
                    if p.requires_grad:
                        residual_dtype(p.dtype)
                        device_of(p)
                conversation.call |= {
                    **describe(tensors),
                    "compressor": self._compressor.describe(),
                    "bucket_bytes": self._options.bucket_bytes,
                    "dense_below": self._options.dense_below,
                    "overlap": self._options.overlap,
                    "verify": self._options.verify,
                }
                conversation.agree()
                share(self.transport, tensors.values())

        in_order(self.transport, call)
        self._remember()
        self.params.update(new)
        self._known = {id(p) for p in self.params.values()}
        self._hook_all()
        self._order = []

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
        if self._model is not None and self._compressor.profiles and self._forward_hook is None:
            self._forward_hook = self._model.register_forward_hook(partial(_note_forward, weakref.ref(self)))

    def close(self) -> None:
        """Take the hooks off the parameters; nothing is reduced any more."""
        for name, handle in self._handles.items():
            handle.remove()
            if getattr(self.params[name], OWNER, lambda: None)() is self:
                delattr(self.params[name], OWNER)
        if self._forward_hook is not None:
            self._forward_hook.remove()
        self._handles.clear()
        self.closed = True

    def move(self, transport: Transport) -> None:
        """Go on over another communicator, with rank 0's parameters, buffers and optimizer state; collective on it."""
        self.transport = transport
        self._remember()
        if self._saved:
            self._saved |= {"rank": transport.rank, "size": transport.size}
        tensors = {**self.params, **self._buffers.tensors}

        def call() -> None:
            with together(transport, "move", self._options.timeout) as conversation:
                conversation.call |= describe(tensors)
                conversation.agree()
                share(transport, tensors.values())
                share_optimizer(transport, self._optimizer)

        in_order(transport, call)
        self._suspect = False
        self._end_reduction()
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
        self._place = {name: i for i, (bucket, _) in enumerate(self._buckets) for name in bucket.params}
        self._waiting = [set(bucket.params) for bucket, _ in self._buckets]
        self._sent: list[Future[float]] = []
        self._failed: Exception | None = None
        self._changed = False
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
        self._dirty = True
        if not self._synchronizing:
            return
        self._last = time.perf_counter()
        self._first = self._last if self._first is None else self._first
        if self._options.overlap:
            at_end_of_backward(self, self.synchronize)
        if not self._buckets:
            if name not in self._order:
                self._order.append(name)
            return
        place = self._place.get(name)
        if place is None or not self._early or self._profiling:
            return
        if name in self._taken:  # once more in this back-propagation, or after one that was broken off
            self._changed = True
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
        gone = {name for name, (gradient, _) in self._given.items() if not _same(self.params[name].grad, gradient)}
        for name, (gradient, version) in self._given.items():
            if name not in gone and gradient._version > version + (name == first):
                self._failed = RuntimeError(
                    f"gradient of {name!r}: expected step() or zero_grad() of the optimizer before the next"
                    " back-propagation, got a gradient that was changed in place after it had been reduced"
                )
        if gone:
            for bucket, compressor in self._buckets:
                bucket.recycle(compressor.rollback(None if len(gone) == len(self._given) else gone))
        for name in gone:
            del self._given[name]
        self._scale = float(self.scaler.get_scale()) if self.scaler is not None else 1.0

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
        mark = bucket.layout.device.mark()
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
            stack.enter_context(bucket.layout.device.after(mark))
            try:
                assert bucket.gradient is not None
                out = bucket.means(compressor.keeps_gradient)
                compressor.mean(self.transport, bucket.gradient.array, out)
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
                with together(self.transport, "gradients", self._patience):
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
        if not self._opened:
            self._open()
        if not self._buckets:
            self._fuse()
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
        mine = self._row(flags)
        end = in_background(self.transport, lambda: self._round(*mine))
        seconds: list[Any] = []
        error: Exception | None = None
        futures: list[Future[Any]] = [*self._sent, end]
        for future in futures:
            try:
                seconds.append(future.result())
            except Exception as problem:
                error = error or problem
        self.seconds["exposed"] += time.perf_counter() - start
        outcome: Any = None if error is not None else seconds.pop()
        changed = error is None and bool(outcome.flags & CHANGED)
        stale = error is None and {n for n, t in zip(self.params, outcome.trainable, strict=True) if t} != set(
            self._place
        )
        alone = error is None and outcome.joined == self.transport.size
        if error is not None or changed or stale or alone:
            self._drop()
            if error is not None:
                self._fail(error)
                return outcome or Round([], 0, 0, [], [], [], [])
            if stale:
                self._rebucket(outcome.trainable)
            if changed:
                self._without_early()
            return outcome if alone else None
        self._accept(outcome, seconds)
        return outcome  # type: ignore[no-any-return]

    def _drop(self) -> None:
        """Leave everything as it was before the reduction."""
        for bucket, compressor in self._buckets:
            compressor.drop()
            bucket.reset()
        scale = self._scale
        self._end_reduction()
        self._opened, self._scale = True, scale

    def _fail(self, error: Exception) -> None:
        """Raise what failed; gradients that are not finite are passed on, for whoever looks at them before the step."""
        self._opened = False
        if not isinstance(error, NonFiniteError):
            raise error
        self._unusable, self._reduced, self._dirty = error, True, False
        for name in self._place:
            p = self.params[name]
            p.grad = torch.full_like(p, float("nan"), requires_grad=False)

    def _without_early(self) -> None:
        if self._early and self.transport.rank == 0:
            logger.warning(
                "gradients came more than once in a back-propagation (reentrant checkpointing does so;"
                " use_reentrant=False does not), so they are sent at its end from now on"
            )
        self._early = False

    def _accept(self, outcome: Round, seconds: list[float]) -> None:
        """The reduction is good on all ranks: gradients become means."""
        scales = []
        for bucket, compressor in self._buckets:
            bucket.recycle(compressor.keep())
            bucket.finish(compressor.keeps_gradient)
            bucket.layout.device.catch_up()
            scales.append(self._scale_of(compressor))
            if not self._warmed:
                compressor.timeout = self._options.timeout
        self._warmed = True
        about = dict(zip(self.params, zip(outcome.used, outcome.sparse, strict=True), strict=True))
        self._given.clear()
        for name, place in self._place.items():
            bucket, (used, sparse) = self._buckets[place][0], about[name]
            p = self.params[name]
            if used or self._arrived(bucket, name):
                bucket.give(name, sparse, scales[place])
                assert p.grad is not None
                self._given[name] = p.grad, p.grad._version
        if any(outcome.modules):
            tensors = self._buffers.of(outcome.modules)
            in_order(self.transport, lambda: self._share_buffers(tensors))
            self._buffers.mark()
        if self._profiling:
            self._measure(seconds)
        self._end_reduction()
        self._reduced, self._dirty, self._unusable = True, False, None

    def _arrived(self, bucket: Bucket, name: str) -> bool:
        """Whether residuals have brought a gradient for a parameter that took part on no rank."""
        assert bucket.mean is not None
        return self.params[name].requires_grad and bool(bucket.layout.part(bucket.mean.tensor, name).any())

    def _share_buffers(self, tensors: list[torch.Tensor]) -> None:
        with together(self.transport, "buffers", self._options.timeout):
            share(self.transport, tensors)

    def _row(self, flags: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """This rank's part of a round."""
        gradients = [p.grad for p in self.params.values()]
        joined = bool(flags & JOINED)
        bits = [
            *(g is not None and not joined for g in gradients),
            *(g is not None and g.is_sparse for g in gradients),
            *(p.requires_grad for p in self.params.values()),
            *(changed and not joined for changed in self._buffers.changed()),
        ]
        return np.array([self._shared.step, flags], np.int64), np.packbits(np.array(bits, np.uint8))

    def _round(self, head: NDArray[Any], bits: NDArray[Any]) -> Round:
        """Tell all ranks how it went here; whatever failed on one fails on all."""
        if getattr(self._failed, "on_all_ranks", False):
            return Round([], 0, 0, [], [], [], [])  # known to all
        with together(self.transport, "end of reduction", self._patience), self.transport.phase("agree"):
            if self._failed is not None:
                raise self._failed
            row = np.concatenate([head.view(np.uint8), bits])
            rows = allgather(self.transport, row)
            self.transport.flush()
            heads = np.ascontiguousarray(rows[:, : head.nbytes]).view(np.int64)
            active = heads[(heads[:, 1] & JOINED) == 0]
            if active.size and (active[:, 0] != active[0, 0]).any():
                raise CommunicationError(
                    "steps: expected every rank to take or skip the same ones, got"
                    f" {heads[:, 0].tolist()} taken by ranks 0 to {len(heads) - 1}"
                )
        everywhere = np.bitwise_or.reduce(rows[:, head.nbytes :], axis=0)
        n, modules = len(self.params), self._buffers.modules
        flat = np.unpackbits(everywhere, count=3 * n + modules).astype(bool).tolist()
        outcome = Round(
            heads[:, 0].tolist(),
            int(np.bitwise_or.reduce(heads[:, 1])),
            int(((heads[:, 1] & JOINED) != 0).sum()),
            flat[:n],
            flat[n : 2 * n],
            flat[2 * n : 3 * n],
            flat[3 * n :],
        )
        if outcome.flags & SUSPECT:
            self._compare()
            self._suspect = False
        return outcome

    # -- the optimizer's step

    def before_step(self) -> None:
        """Make sure that gradients are the means. Collective where they are not.

        Raises:
            NonFiniteError: a gradient holds NaN or infinity on some rank; on every rank.
        """
        if self.closed:
            return
        if self._dirty or not self._reduced:
            self.synchronize()
        if self._unusable is not None:
            error = self._unusable
            self.discard()
            raise error

    def after_step(self) -> None:
        """The optimizer has stepped: what the reductions since the last step have kept is the state of the next one."""
        if self.closed:
            return
        if self.scaler is not None and self._scale == 1.0:  # found in this very step
            for _, compressor in self._buckets:
                compressor.rescale(1 / float(self.scaler.get_scale()))
        for bucket, compressor in self._buckets:
            bucket.recycle(compressor.commit())
        self._given.clear()
        self._reduced = self._dirty = False
        self._stepped = time.perf_counter()
        self._shared.step += 1
        if self._options.verify and self._shared.step % self._options.verify == 0:
            in_order(self.transport, self._compare)

    def failed_step(self, error: Exception) -> None:
        """The optimizer has raised on this rank: tell the others, who may have stepped, in their next reduction."""
        self._suspect = True
        logger.error("rank %d: the wrapped optimizer's step failed: %s", self.transport.rank, error)

    def discard(self) -> None:
        """Give this step up: gradients are about to be thrown away, and residuals are as they were before it."""
        if self._taken or self._sent:
            self._changed = True  # of a back-propagation that was broken off: sent again with the next one
        for bucket, compressor in self._buckets:
            bucket.recycle(compressor.rollback())
        self._given.clear()
        self._opened = self._reduced = self._dirty = False
        self._unusable = None

    def mean_loss(self, loss: Any) -> Any:
        """The mean of a closure's loss over the ranks, of its own type."""
        if loss is None or self.closed:
            return loss
        value = float(loss.detach() if torch.is_tensor(loss) else loss)
        mean = in_order(self.transport, lambda: mean_of(self.transport, value, self._options.timeout))
        return torch.full_like(loss.detach(), mean) if torch.is_tensor(loss) else mean

    def join(self) -> None:
        """Take part in the others' reductions, adding nothing, until no rank has data; then follow the last one."""
        if self.closed:
            return
        self.discard()
        while True:
            for name in self._place:
                self.params[name].grad = None
            outcome = self._attempt(JOINED)
            if outcome is None:
                continue
            if outcome.joined == self.transport.size:
                break
            for bucket, compressor in self._buckets:
                bucket.recycle(compressor.commit())
        self.discard()
        root = int(np.argmax(outcome.steps))
        tensors = [*self.params.values(), *self._buffers.tensors.values()]

        def follow() -> None:
            with together(self.transport, "join", self._options.timeout):
                share(self.transport, tensors, root)
                share_optimizer(self.transport, self._optimizer, root)

        in_order(self.transport, follow)
        self._shared.step = max(outcome.steps)

    # -- buckets

    def _fuse(self, wanted: list[bool] | None = None) -> None:
        """Make the buckets, in the order in which rank 0's gradients came.

        Args:
            wanted: which parameters want gradients on any rank; None: asked for.
        """
        names = list(self.params)
        numbers = {name: i for i, name in enumerate(names)}
        known = [*self._order, *(name for name in reversed(names) if name not in set(self._order))]

        def make() -> None:
            with together(self.transport, "buckets", self._patience):
                mine = np.array([p.requires_grad for p in self.params.values()], np.uint8)
                on: Any = wanted or allgather(self.transport, mine).any(axis=0).tolist()
                order = np.array([numbers[name] for name in known], np.int64)
                if order.size:
                    order = broadcast(self.transport, order)
                self._order = [names[i] for i in order.tolist() if on[i]]
                bind()
                self.transport.flush()

        def bind() -> None:
            options = self._options
            params = {name: self.params[name] for name in self._order}
            for bucket in fuse(params, self._order, options.bucket_bytes, options.dense_below):
                plain = bucket.small and not isinstance(self._compressor, Free)
                compressor = NoCompression() if plain else resolve(self._compressor)
                compressor.bind(bucket.layout, self.transport, self._shared, self._patience)
                bucket.layout.device.finish()  # jobs have a stream of their own
                self._buckets.append((bucket, compressor))

        in_order(self.transport, make)
        self._restore()
        opened, failed, scale = self._opened, self._failed, self._scale
        self._end_reduction()
        self._opened, self._failed, self._scale = opened, failed, scale

    def _rebucket(self, wanted: list[bool]) -> None:
        """Parameters were frozen or unfrozen: other buckets; what they have left is kept by name."""
        self._remember()
        self._fuse(wanted)

    # -- the profiler of COVAP (section III.B)

    @property
    def _profiling(self) -> bool:
        """Whether this step is measured; then nothing overlaps, so that neither disturbs the other."""
        return bool(self._compressor.profiles) and self._shared.ccr is None

    def _measure(self, seconds: list[float]) -> None:
        """After the last of the steps profiled: CCR. A reduction lasts as long as on the rank that came last.

        Back-propagation begins when the model's forward pass ends; of a model that is not known it is taken to be two
        thirds of the time since the last step.
        """
        start = (
            self._forward_end if self._forward_hook is not None else self._stepped + (self._last - self._stepped) / 3
        )
        self._profile.append((max(self._last - start, 0.0), seconds))
        if len(self._profile) < PROFILED.stop:
            return
        mine = [[backward, *seconds] for backward, seconds in self._profile[PROFILED]]

        def all_of_them() -> NDArray[Any]:
            with together(self.transport, "profile", self._options.timeout):
                return allgather(self.transport, np.median(np.array(mine), axis=0))

        table = in_order(self.transport, all_of_them)
        compute = float(table[:, 0].mean())
        self._shared.ccr = float(table[:, 1:].min(axis=0).sum()) / compute if compute > 0 else 1.0
        self._profile.clear()

    # -- checks and state

    def _compare(self) -> None:
        tensors = {**self.params, **self._buffers.tensors}
        compare(self.transport, tensors, self._shared.step, self._options.timeout)

    def state_dict(self) -> dict[str, Any]:
        """Tensors by kind and parameter name as of the last step, other state by bucket, and what they belong to."""
        if self._sent or self._taken:
            raise RuntimeError(
                "state_dict: expected a call outside of back-propagation, got one while gradients are sent"
            )
        if not self._buckets and self._saved:
            return dict(self._saved)
        compressors = [compressor for _, compressor in self._buckets]
        return {
            "rank": self.transport.rank,
            "size": self.transport.size,
            "compressor": self._compressor.describe(),
            "replicated": sorted(self._compressor.replicated),
            "step": self._shared.step,
            "ccr": self._shared.ccr,
            "order": list(self._order),
            "tensors": collect(compressors, self._parked),
            "buckets": encode_extra(compressors),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, load: Callable[[], None]) -> None:
        """Go on from there; buckets are made as they were. Collective: what is raised on one rank is raised on all.

        Args:
            state: what `state_dict` returned; None begins with empty residuals.
            load: loads the rest, once the state has been found to fit.
        """

        def call() -> None:
            with together(self.transport, "load_state_dict", self._patience) as conversation:
                if state is not None:
                    check(state, self.transport.rank, self.transport.size, self.params, self._compressor.describe())
                conversation.call["steps"] = 0 if state is None else state["step"]
                conversation.agree()
                load()

        in_order(self.transport, call)
        self._buckets, self._parked, self._given = [], {}, {}
        self._end_reduction()
        self.discard()
        self._suspect = False
        if state is None:
            self._saved, self._order = {}, []
            return
        self._order = [name for name in state["order"] if name in self.params]
        self._shared.step, self._shared.ccr = state["step"], state["ccr"]
        self._saved = dict(state)
        if self._order:
            self._fuse([name in set(self._order) for name in self.params])

    def _remember(self) -> None:
        """Buckets are about to be made anew: keep what belongs to parameters."""
        if self._buckets:
            for _, compressor in self._buckets:
                compressor.commit()
            self._sent, self._taken = [], set()
            self._saved = {**self.state_dict(), "buckets": []}
            self._buckets = []
            self._end_reduction()

    def _restore(self) -> None:
        """Put saved state into new buckets."""
        saved, self._saved = self._saved, {}
        compressors = [compressor for _, compressor in self._buckets]
        self._parked = restore(compressors, saved.get("tensors", {}))
        if len(saved.get("buckets", ())) == len(compressors) and saved.get("compressor") == self._compressor.describe():
            for compressor, text in zip(compressors, saved["buckets"], strict=True):
                compressor.load_extra_state(json.loads(text))


def _same(grad: torch.Tensor | None, given: torch.Tensor) -> bool:
    """Whether a gradient is the one that was given, or (with create_graph) a sum that it is a part of."""
    return grad is given or (grad is not None and grad.grad_fn is not None)


def _call_hook(engine: weakref.ref[Engine], name: str, p: torch.Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive._hook(name, p)


def _note_forward(engine: weakref.ref[Engine], *_: Any) -> None:
    alive = engine()
    if alive is not None:
        alive._forward_end = time.perf_counter()
