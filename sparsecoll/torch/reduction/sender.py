"""Sending buckets: they are filled as gradients come, and the progress thread reduces one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import torch

from sparsecoll.errors import NonFiniteError
from sparsecoll.telemetry import trace
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.reduction.bucket import Bucket
from sparsecoll.torch.reduction.buckets import Buckets
from sparsecoll.torch.reduction.grad_scaler import Scaling
from sparsecoll.torch.reduction.gradients import Seen
from sparsecoll.torch.replica.replica import Replica
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.collectives import allgather
from sparsecoll.transport.progress import in_background


class Sender:
    """Sends buckets in their order, the same on all ranks, and waits for them: the progress thread reduces them.

    Args:
        scaling: the scale of gradients.
        compressor: of the parameters that are not small; if it refuses NaN and infinity, small ones refuse them, too.

    Attributes:
        seconds: of this rank by kind of work (see `telemetry.trace`), and "exposed": waited for.
        taken: names of the parameters whose gradients are in their buckets.
        failed: what a bucket of this reduction has raised.
    """

    def __init__(self, replica: Replica, buckets: Buckets, scaling: Scaling, compressor: Compressor) -> None:
        self.seconds = dict.fromkeys((*trace.KINDS, "exposed"), 0.0)
        self._replica, self._buckets, self._scaling = replica, buckets, scaling
        self._finite = not compressor.passes_nonfinite
        self._threads = torch.get_num_threads()
        self.begin()

    def begin(self) -> None:
        """Forget the last reduction."""
        self.taken: set[str] = set()
        self._seen: list[tuple[torch.Tensor, Seen]] = []  # parameters, and their gradients when they were taken
        self.failed: Exception | None = None
        self._sent: list[Future[None]] = []
        self.laid_out()

    def laid_out(self) -> None:
        """The buckets are new ones."""
        self._waiting = [set(bucket.params) for bucket, _ in self._buckets]

    def take(self, name: str) -> None:
        """Take a parameter's gradient into its bucket, and queue the buckets that are complete and next in order."""
        self._take(self._buckets.index_of[name], name)
        p = self._replica.params[name]
        self._seen.append((p, Seen.of(p)))
        while len(self._sent) < len(self._buckets) and not self._waiting[len(self._sent)]:
            self._isend()

    @property
    def altered(self) -> bool:
        """Whether a gradient was replaced, or changed in place, since it was taken during back-propagation."""
        return any(seen.has_changed(p) for p, seen in self._seen)

    def _take(self, index: int, name: str) -> None:
        bucket, compressor = self._buckets[index]
        bucket.take_grad(name, self._scaling.of(compressor))
        self.taken.add(name)
        self._waiting[index].discard(name)

    def _isend(self) -> None:
        bucket, compressor = self._buckets[len(self._sent)]
        event = bucket.layout.device.record_event()
        self._sent.append(in_background(self._replica.transport, lambda: self._job(bucket, compressor, event)))

    def _job(self, bucket: Bucket, compressor: Compressor, event: Any) -> None:
        """Reduce one bucket, whose gradients are complete at `event`."""
        if self.failed is not None:
            return
        layout = bucket.layout
        try:
            if torch.get_num_threads() != self._threads:
                torch.set_num_threads(self._threads)  # holds for the thread
            with trace.record(trace.Recorder()) as recorder, layout.device.stream_context(event):
                bucket.reduce(self._replica.transport, compressor)
                if layout.small and self._finite and not bucket.mean_is_finite():
                    self._refuse(bucket)
        except Exception as error:
            self.failed = error
            raise
        for kind, seconds in recorder.seconds.items():
            self.seconds[kind] += seconds

    def _refuse(self, bucket: Bucket) -> None:
        """Raise for a parameter that is not compressed what the compressor would raise; all ranks see the same mean."""
        transport = self._replica.transport
        for name, p in bucket.params.items():
            if not torch.isfinite(bucket.part_of_mean(name)).all():
                local = p.grad is not None and not torch.isfinite(p.grad).all()
                with CollectiveCall(transport, "gradients", self._replica.options.timeout):
                    if local or transport.size == 1:
                        raise NonFiniteError(f"gradient of {name!r}: expected finite values, got NaN or infinity")
                    rows = allgather(transport, np.zeros(1, np.uint8))  # the rank that has it raises
                    assert rows.size
                raise NonFiniteError(f"gradient of {name!r}: expected a finite sum over the ranks, got an overflow")

    def send_rest(self) -> None:
        """Send all buckets that are left after back-propagation; missing gradients count as zeros."""
        for index in range(len(self._sent), len(self._buckets)):
            bucket = self._buckets[index][0]
            for name in bucket.params if bucket.gradient is None else list(self._waiting[index]):
                self._take(index, name)
            self._isend()

    def finish(self) -> None:
        """Wait for what was sent, whatever becomes of it."""
        wait(self._sent)

    def wait(self, end: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """Wait for all buckets and for `end`, a call that is made after them.

        Returns:
            What `end` returned, and the first error.
        """
        start = time.perf_counter()
        results: list[Any] = []
        error: Exception | None = None
        last: Future[Any] = in_background(self._replica.transport, end)
        for future in [*self._sent, last]:
            try:
                results.append(future.result())
            except Exception as problem:
                results.append(None)
                error = error if getattr(error, "on_all_ranks", False) else problem  # `end` has agreed on it
        self.seconds["exposed"] += time.perf_counter() - start
        return results[-1], error
