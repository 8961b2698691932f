"""From gradients to their means: hooks fill buckets during back-propagation, the progress thread reduces them."""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsecoll import trace
from sparsecoll.agreement import together
from sparsecoll.errors import CommunicationError
from sparsecoll.progress import in_background
from sparsecoll.torch.compressors import Compressor, Free, NoCompression, Shared, resolve
from sparsecoll.torch.device import device_of
from sparsecoll.torch.layout import Bucket, fuse, residual_dtype
from sparsecoll.torch.timeline import Timeline
from sparsecoll.transport import Transport
from sparsecoll.transport.collectives import allgather, broadcast

PROFILED = slice(2, 7)  # steps of which back-propagation and communication are compared, if a compressor asks
State = dict[str, dict[str, torch.Tensor]]


class Engine:
    """Reduces the gradients of named parameters; see DistributedOptimizer for the options.

    Attributes:
        seconds: of this rank by kind of work (see `sparsecoll.trace`), and "exposed": waited for in `synchronize`.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        transport: Transport,
        compressor: str | Compressor,
        *,
        bucket_bytes: int | None,
        dense_below: int,
        overlap: bool,
        verify: int,
        timeout: float | None,
        timeline: Timeline | None,
    ) -> None:
        self.params: dict[str, torch.Tensor] = {}
        self.transport = transport
        self.timeline = timeline
        self._compressor = resolve(compressor)
        self._bucket_bytes, self._dense_below = bucket_bytes, dense_below
        self._overlap, self._verify, self._timeout = overlap, verify, timeout
        self._shared = Shared()
        self._synchronizing = True
        self._buckets: list[tuple[Bucket, Compressor]] = []
        self._order: list[str] = []  # names by when their gradients came first; buckets are made in this order
        self._saved: dict[str, Any] = {}  # state that waits for buckets to be made
        self._handles: list[Any] = []
        self._hooked: set[str] = set()
        self._profile: list[tuple[float, list[float]]] = []
        self._threads = torch.get_num_threads()
        self.seconds = dict.fromkeys((*trace.KINDS, "exposed"), 0.0)
        self._begin_step()
        self.add(params)

    def add(self, params: Mapping[str, torch.Tensor]) -> None:
        """More parameters; collective. All ranks must have the same ones; values are taken from rank 0."""
        error: Exception | None = None
        for name, p in params.items():
            if name in self.params:
                error = ValueError(f"named_parameters: expected every name once, got {name!r} again")
            try:
                residual_dtype(p.dtype)
                device_of(p)
            except TypeError as problem:
                error = problem
        call = {
            "parameters": [[name, list(p.shape), str(p.dtype)] for name, p in (self.params | dict(params)).items()],
            "compressor": self._compressor.describe(),
            "bucket_bytes": self._bucket_bytes,
            "dense_below": self._dense_below,
            "verify": self._verify,
        }

        def check() -> None:
            with together(self.transport, "parameters", self._timeout) as conversation:
                conversation.call |= call
                if error is not None:
                    raise error
                conversation.agree()
                for p in params.values():
                    broadcast_from_rank_0(self.transport, p)

        self._in_order(check)
        self._remember()
        self.params.update(params)
        for name, p in params.items():
            if p.requires_grad:
                hook = partial(self._hook, name)
                self._handles.append(p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                self._hooked.add(name)
        self._order = []

    def move(self, transport: Transport, extra: Sequence[torch.Tensor]) -> None:
        """Go on over another communicator; collective on it.

        Args:
            extra: tensors that get rank 0's values, as parameters do.
        """
        self.transport = transport
        self._remember()
        if self._saved:  # of a state that was loaded, too
            self._saved |= {"rank": transport.rank, "size": transport.size}

        def share() -> None:
            with together(transport, "move", self._timeout) as conversation:
                tensors = [*self.params.values(), *extra]
                conversation.call["tensors"] = [[list(t.shape), str(t.dtype)] for t in tensors]
                conversation.agree()
                for tensor in tensors:
                    broadcast_from_rank_0(transport, tensor)

        self._in_order(share)
        self._begin_step()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of back-propagations inside only accumulate; they are sent with those of the next one outside."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def _in_order(self, call: Any) -> Any:
        worker = self.transport.worker
        return call() if worker is None else worker.in_order(call)

    # -- during back-propagation

    def _begin_step(self) -> None:
        self._expect()
        self._first: float | None = None  # when the first and the last gradient came
        self._last = 0.0

    def _expect(self) -> None:
        """No gradient of these buckets has come."""
        self._missing = [set(bucket.params) for bucket, _ in self._buckets]
        self._place = {name: i for i, (bucket, _) in enumerate(self._buckets) for name in bucket.params}
        self._sent: list[Future[float]] = []
        self._failed = False  # a call of this step has; the rest of it is left out, on all ranks

    def _hook(self, name: str, _: torch.Tensor) -> None:
        """A parameter's gradient is complete (on the thread that back-propagates)."""
        if not self._synchronizing:
            return
        now = time.perf_counter()
        self._first = now if self._first is None else self._first
        self._last = now
        if not self._buckets:
            if name not in self._order:
                self._order.append(name)
            return
        if not self._overlap or self._profiling:
            return
        place = self._place[name]
        if name not in self._missing[place]:
            raise RuntimeError(
                f"gradient of {name!r}: expected once a step, got it again before step(); use no_sync() for all"
                " back-propagations of a step but the last"
            )
        self._buckets[place][0].take(name)
        self._missing[place].discard(name)
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send()

    def _send(self) -> None:
        """Give the next bucket to the progress thread. All ranks send bucket 0, then 1, ..."""
        bucket, compressor = self._buckets[len(self._sent)]
        mark = bucket.layout.device.mark()
        self._sent.append(in_background(self.transport, lambda: self._job(bucket, compressor, mark)))

    def _job(self, bucket: Bucket, compressor: Compressor, mark: Any) -> float:
        """Reduce one bucket, whose gradients are there at `mark`; returns its seconds."""
        if self._failed:
            return 0.0
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # holds for the thread
        name = f"bucket {bucket.layout.index}"
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.profiler.record_function(f"sparsecoll: {name}"))
            if self.timeline is not None:
                stack.enter_context(self.timeline.span(name, values=bucket.layout.length))
                stack.enter_context(trace.listening(self.timeline))
            recorder = stack.enter_context(trace.listening(trace.Recorder()))
            stack.enter_context(bucket.layout.device.after(mark))
            try:
                compressor.mean(self.transport, bucket.flat)
            except Exception:
                self._failed = True
                raise
        for kind, seconds in recorder.seconds.items():
            self.seconds[kind] += seconds
        return time.perf_counter() - start

    # -- at its end

    def synchronize(self) -> None:
        """Send what was not sent, wait for all, and let gradients be the means. Collective."""
        if not self._buckets:
            self._fuse()
        for place, (bucket, _) in enumerate(self._buckets):
            if place >= len(self._sent):
                for name in self._missing[place]:
                    bucket.take(name)
                self._send()
        if self.timeline is not None and self._first is not None:
            self.timeline.add("back-propagation", self._first, self._last)
        start = time.perf_counter()
        used = [self.params[name].grad is not None for name in self._place]
        end = in_background(self.transport, lambda: self._end_step(used))
        seconds, error = [], None
        for future in self._sent:
            try:
                seconds.append(future.result())
            except Exception as problem:
                error = error or problem
        try:
            anywhere = end.result()
        except Exception as problem:
            error = error or problem
        self.seconds["exposed"] += time.perf_counter() - start
        backward = 0.0 if self._first is None else self._last - self._first
        if error is not None:
            self._begin_step()
            raise error
        for bucket, _ in self._buckets:
            bucket.layout.device.catch_up()
        for (name, place), is_used in zip(self._place.items(), anywhere, strict=True):
            if is_used:
                self._buckets[place][0].give(name)
        if self._profiling:
            self._measure(backward, seconds)
        self._shared.step += 1
        self._begin_step()
        if self._verify and self._shared.step % self._verify == 0:
            self._in_order(self._compare)

    def _end_step(self, used: list[bool]) -> list[bool]:
        """Which parameters took part on any rank."""
        if self._failed:
            return used
        with together(self.transport, "end of step", self._timeout), self.transport.phase("agree"):
            rows = allgather(self.transport, np.packbits(np.array(used, np.uint8)))
            self.transport.flush()
        return np.unpackbits(np.bitwise_or.reduce(rows, axis=0), count=len(used)).astype(bool).tolist()  # type: ignore[no-any-return]

    def _fuse(self) -> None:
        """Make the buckets, in the order in which rank 0's gradients came."""
        names = [name for name, p in self.params.items() if name in self._hooked]
        known = [*self._order, *(name for name in reversed(names) if name not in set(self._order))]
        numbers = {name: i for i, name in enumerate(names)}

        def make() -> None:
            with together(self.transport, "buckets", self._timeout):
                bind()

        def bind() -> None:
            order = np.array([numbers[name] for name in known], np.int64)
            if order.size:
                order = broadcast(self.transport, order)
            self._order = [names[i] for i in order.tolist()]
            params = {name: self.params[name] for name in names}
            for bucket in fuse(params, self._order, self._bucket_bytes, self._dense_below):
                plain = bucket.small and not isinstance(self._compressor, Free)
                compressor = NoCompression() if plain else resolve(self._compressor)
                compressor.bind(bucket.layout, self.transport, self._shared, self._timeout)
                bucket.layout.device.finish()  # jobs have a stream of their own
                self._buckets.append((bucket, compressor))
            self.transport.flush()

        self._in_order(make)
        self._restore()
        self._expect()

    # -- the profiler of COVAP (section III.B)

    @property
    def _profiling(self) -> bool:
        """Whether this step is measured; then nothing overlaps, so that neither disturbs the other."""
        return bool(self._compressor.profiles) and self._shared.ccr is None

    def _measure(self, backward: float, seconds: list[float]) -> None:
        """After the last of the steps profiled: CCR. A reduction lasts as long as on the rank that came last."""
        self._profile.append((backward, seconds))
        if len(self._profile) < PROFILED.stop:
            return
        mine = [[backward, *seconds] for backward, seconds in self._profile[PROFILED]]

        def all_of_them() -> NDArray[Any]:
            with together(self.transport, "profile", self._timeout):
                return allgather(self.transport, np.median(np.array(mine), axis=0))

        table = self._in_order(all_of_them)
        compute = float(table[:, 0].mean())
        self._shared.ccr = float(table[:, 1:].min(axis=0).sum()) / compute if compute > 0 else 1.0
        self._profile.clear()

    # -- checks and state

    def _compare(self) -> None:
        """Raise on every rank if parameters differ, naming the first that does."""
        with together(self.transport, "verify", self._timeout), self.transport.phase("verify"):
            sums = np.array([zlib.crc32(raw_bytes(p)) for p in self.params.values()], np.uint32)
            rows = allgather(self.transport, sums)
            self.transport.flush()
        for name, column in zip(self.params, rows.T, strict=True):
            if (column != column[0]).any():
                others = [str(rank) for rank, value in enumerate(column.tolist()) if value != column[0]]
                raise CommunicationError(
                    f"verify: expected the same bits on all ranks after step {self._shared.step},"
                    f" got others than rank 0's in {name!r} on rank {', '.join(others)}"
                )

    def state_dict(self) -> dict[str, Any]:
        """Tensors by kind and parameter name, other state by bucket, and what they belong to."""
        tensors: State = {}
        for _, compressor in self._buckets:
            for kind, entries in compressor.state().items():
                tensors.setdefault(kind, {}).update({name: t.detach().clone() for name, t in entries.items()})
        if not self._buckets and self._saved:
            return dict(self._saved)
        return {
            "rank": self.transport.rank,
            "size": self.transport.size,
            "step": self._shared.step,
            "ccr": self._shared.ccr,
            "order": list(self._order),
            "tensors": tensors,
            "buckets": [json.dumps(compressor.extra_state()) for _, compressor in self._buckets],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; buckets are made as they were."""
        here = (self.transport.rank, self.transport.size)
        if (state["rank"], state["size"]) != here:
            raise CommunicationError(
                f"state_dict: expected the one of rank {here[0]} of {here[1]}, got that of rank {state['rank']} of"
                f" {state['size']} (sparsecoll.torch.redistribute makes it)"
            )
        unknown = set(state["order"]) - self._hooked
        if unknown:
            raise ValueError(f"state_dict: expected names of parameters, got {', '.join(sorted(unknown))}")
        self._buckets, self._order = [], list(state["order"])
        self._shared.step, self._shared.ccr = state["step"], state["ccr"]
        self._saved = dict(state)
        self._begin_step()
        if self._order:
            self._fuse()

    def _remember(self) -> None:
        """Buckets are about to be made anew: keep what belongs to parameters."""
        if self._buckets:
            self._saved = {**self.state_dict(), "buckets": []}
            self._buckets = []
            self._begin_step()

    def _restore(self) -> None:
        """Put saved state into new buckets."""
        saved, self._saved = self._saved, {}
        for _, compressor in self._buckets:
            restore(compressor, saved.get("tensors", {}))
        if len(saved.get("buckets", ())) == len(self._buckets):
            for (_, compressor), text in zip(self._buckets, saved["buckets"], strict=True):
                compressor.load_extra_state(json.loads(text))


def restore(compressor: Compressor, tensors: State) -> None:
    """Copy saved tensors into a compressor's own, by kind and name."""
    for kind, entries in compressor.state().items():
        for name, own in entries.items():
            if name in tensors.get(kind, {}):
                own.copy_(tensors[kind][name])


def raw_bytes(p: torch.Tensor) -> memoryview:
    """A tensor's bits."""
    return memoryview(p.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())


@torch.no_grad()
def broadcast_from_rank_0(transport: Transport, p: torch.Tensor) -> None:
    """Rank 0's values for everybody."""
    if transport.size == 1 or p.numel() == 0:
        return
    with transport.phase("broadcast"):
        raw = p.detach().contiguous().view(-1).view(torch.uint8).cpu()
        p.copy_(torch.from_numpy(broadcast(transport, raw.numpy())).view(p.dtype).view(p.shape))


def redistribute(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """The state of one of `size` ranks from the states of all ranks of a run with another number of them.

    Residuals are sums of those of the old ranks i with i mod size = rank, or zero, so that over all ranks they sum to
    what they did. Other tensors that belong to a rank (momentum of DGC) are treated alike; factors and what all ranks
    have in common are taken over; thresholds and boundaries are found anew.

    Args:
        states: `state_dict()` of DistributedOptimizer of ranks 0, 1, ... in order.
    """
    old = [state["sparsecoll"] for state in states]
    if [part["rank"] for part in old] != list(range(old[0]["size"])):
        raise ValueError(f"states: expected those of ranks 0 to {old[0]['size'] - 1}, got {[p['rank'] for p in old]}")
    tensors: State = {}
    for kind, entries in old[0]["tensors"].items():
        if kind in ("p", "q"):
            tensors[kind] = {name: t.clone() for name, t in entries.items()}
            continue
        mine = [part["tensors"][kind] for part in old[rank::size]]
        tensors[kind] = {
            name: torch.stack([m[name] for m in mine]).sum(0) if mine else torch.zeros_like(t)
            for name, t in entries.items()
        }
    own = {**old[0], "rank": rank, "size": size, "tensors": tensors, "buckets": []}
    return {**states[0], "sparsecoll": own}
