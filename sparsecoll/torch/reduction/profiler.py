"""COVAP's profiler (section III.B): the ratio of the seconds of communication and of back-propagation."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from sparsecoll.torch.compressors import StepContext
from sparsecoll.torch.replica.calls import collective
from sparsecoll.transport import Transport
from sparsecoll.transport.collectives import allgather

STEPS = slice(2, 7)  # those that count, after the first ones, in which kernels are compiled

_profilers: MutableMapping[torch.nn.Module, WeakSet[Profiler]] = WeakKeyDictionary()  # by the model that they measure


class Profiler:
    """Compares back-propagation and communication over some steps in which they do not overlap.

    Back-propagation begins when the model's forward pass ends. Of a model that is not known it is taken to be two
    thirds of the time from the optimizer's last step to the last gradient.
    """

    def __init__(self, model: torch.nn.Module | None, context: StepContext, wanted: bool) -> None:
        self._context, self._wanted = context, wanted
        self._begin: float | None = None
        self._stepped = time.perf_counter()
        self._rows: list[list[float]] = []
        self._handle = None
        if model is not None and wanted:
            _profilers.setdefault(model, WeakSet()).add(self)
            self._handle = model.register_forward_hook(_forward)

    @property
    def active(self) -> bool:
        """Whether this step is measured; if so, communication does not overlap with back-propagation."""
        return self._wanted and self._context.ccr is None

    def stepped(self) -> None:
        """The optimizer has stepped."""
        self._begin, self._stepped = None, time.perf_counter()

    def measure(self, transport: Transport, end: float, seconds: list[float], timeout: float | None) -> None:
        """Measure a step, if it is to be measured; the last one gives `StepContext.ccr`. Collective.

        A reduction is timed by the rank that began it last. Measuring begins anew if the number of buckets changes.

        Args:
            end: time.perf_counter at the last gradient; 0 if that is not known.
            seconds: of the reductions, by bucket.
        """
        if not self.active:
            return
        begin = self._stepped + (end - self._stepped) / 3 if self._begin is None else self._begin
        if self._rows and len(self._rows[-1]) != 1 + len(seconds):
            self._rows.clear()
        self._rows.append([max(end - begin, 0.0), *seconds])
        if len(self._rows) < STEPS.stop:
            return
        measured = np.array(self._rows[STEPS])
        own = np.median(measured, axis=0)
        own[0] = np.median(_known(measured[:, 0]))
        rows = collective(transport, "profile", timeout, lambda _: allgather(transport, own))
        compute = float(_known(rows[:, 0]).mean())
        self._context.ccr = float(rows[:, 1:].min(axis=0).sum()) / compute if compute > 0 else 1.0

    def close(self) -> None:
        """Remove the hook from the model."""
        if self._handle is not None:
            self._handle.remove()


def _known(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds of back-propagation that are known, which are not 0; one 0 if none are."""
    return seconds[seconds > 0] if (seconds > 0).any() else np.zeros(1)


def _forward(model: torch.nn.Module, *_: Any) -> None:
    """A hook that refers to no profiler, so that a model can be pickled and a copy of it is not measured."""
    for profiler in _profilers.get(model, ()):
        profiler._begin = time.perf_counter()
