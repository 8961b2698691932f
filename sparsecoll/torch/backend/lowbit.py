"""Sums of dense floats in few bits a value, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sparsecoll.algorithms import Dense, LowBit
from sparsecoll.collectives.allreduce import allreduce_vectors
from sparsecoll.collectives.options import CallOptions
from sparsecoll.kernels import kernels_of
from sparsecoll.torch.backend.options import BITS, Options
from sparsecoll.torch.tensors.layout import CPU
from sparsecoll.torch.tensors.private import base_of
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import DenseVector

Key = tuple[int, int, torch.dtype, tuple[int, ...]]


@dataclass
class LowBitSums:
    """The sums of one group, and the residual of each memory that was summed, for as long as the memory lives."""

    options: Options
    _kept: dict[Key, tuple[Any, torch.Tensor]] = field(default_factory=dict, init=False)

    def take(self, x: torch.Tensor) -> bool:
        """Return whether the options ask for a sum of x, or of its like on the other ranks, in few bits."""
        return (
            self.options.dense in BITS
            and x.layout is torch.strided
            and x.device.type == "cpu"
            and x.dtype.is_floating_point
            and not (base_of(x) is not None and base_of(x).is_complex())  # type: ignore[union-attr]  # torch passes views
            and x.numel() >= max(self.options.dense_below, 2)  # DDP's join() needs gloo's work for one value
        )

    def write(self, call: CollectiveCall, x: torch.Tensor, op: str) -> None:
        """Write the sum, or for op "mean" the mean, of all ranks' x to x.

        Args:
            call: in which this happens.
            x: tensor of floats on the CPU.
            op: "sum" or "mean".
        """
        call.signature |= {"dense": self.options.dense, "op": op, "length": x.numel(), "dtype": str(x.dtype)}
        flat = x.detach().contiguous().view(-1)
        work = flat if flat.dtype is torch.float64 else flat.float()
        values = CPU.array(work)
        largest = values.dtype.type(np.finfo(np.float32).max / (2 * call.transport.size))  # scales are float32
        fits = kernels_of(values).key_range(values)[1] <= int(largest.view(f"u{values.dtype.itemsize}"))
        held = call.agree(entries=int(fits))
        mean, channel = op == "mean", Channel(call.transport, x.numel())
        if not min(held):  # no scale has room for NaN, infinity, or the sum; nothing is rounded, and the residual stays
            options = CallOptions(nonfinite="pass", timeout=call.transport.timeout)
            reduced = allreduce_vectors(call.transport, DenseVector(values), Dense(), options)
            work = CPU.tensor(np.asarray(reduced.value.values))
            x.copy_((work / call.transport.size if mean else work).view(x.shape))
            return
        key = (x.data_ptr(), x.numel(), x.dtype, () if x.is_contiguous() else (*x.shape, *x.stride()))
        acc = self._pop(key, x)
        acc += work
        algorithm = LowBit(bits=BITS[self.options.dense], rounding="nearest")
        algorithm.sum_of(channel, DenseVector(CPU.array(acc)), DenseVector(values), 0, mean, take=True)
        call.transport.waitall()
        if work is not flat or not x.is_contiguous():  # on some ranks only, perhaps
            x.copy_(work.view(x.shape))
        self._kept[key] = StorageWeakRef(x.untyped_storage()), acc  # type: ignore[no-untyped-call]

    def _pop(self, key: Key, x: torch.Tensor) -> torch.Tensor:
        """Remove and return the residual of x; zeros if there is none. Freed memory's, or another x's, is forgotten."""
        for other in [o for o, (s, _) in self._kept.items() if s.expired() or (o[0] == key[0] and o != key)]:
            del self._kept[other]
        if key in self._kept:
            return self._kept.pop(key)[1]
        return torch.zeros(x.numel(), dtype=torch.float64 if x.dtype is torch.float64 else torch.float32, device="cpu")
