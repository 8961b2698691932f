"""OneBit: what OneBitAdam sends after its warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from sparsecoll.algorithms import LowBit
from sparsecoll.torch.compressors.base import StepContext
from sparsecoll.torch.compressors.qsgd import QSGD
from sparsecoll.torch.compressors.versions import Versioned
from sparsecoll.torch.tensors.layout import Array, Layout
from sparsecoll.transport import Transport
from sparsecoll.transport.all_ranks import allgather
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import DenseVector

KINDS = ("residual", "momentum", "square", "divisor")  # of state
LEAST = 0.1  # root of a second moment, as a part of the mean of the roots of its parameter and bucket
SAMPLE = 4096  # values of a bucket, about, of which all ranks compare gradients
NEW = "make a new OneBitAdam, which begins with a warm-up"
Groups = Mapping[str, Mapping[str, Any]]  # of an optimizer, by name of the parameter


@dataclass
class OneBit(QSGD):
    """1-bit Adam: the mean is that of the momentum, divided by sqrt(v) + eps.

        square = b2 square + (1 - b2) gradient^2    (of this rank)
        acc = residual + b1 m + (1 - b1) gradient
        m = the mean over the ranks of what they send;  residual = acc - sent
        out = m / divisor

    Args:
        warm_up: number of steps after which `divisor` was formed; after 2, 4, 8, ... times as many it is formed again.
        before: number of steps taken before the first one that the replica counts.
        scale: what the roots of second moments are divided by; None for an estimate, see `noise_of`.

    Attributes:
        groups: returns the optimizer's groups by name of the parameter.
    """

    name = "onebit"
    replicated_state = frozenset({"momentum", "divisor"})
    momentum: ClassVar[bool] = True  # for which warnings of clipping look

    warm_up: int = 1
    before: int = 0
    scale: float | None = None
    groups: Callable[[], Groups] = field(init=False, repr=False)

    def bind(self, layout: Layout, transport: Transport, context: StepContext, timeout: float | None = None) -> None:
        super().bind(layout, transport, context, timeout)
        own = [self.versions.add(Versioned(layout.zeros(), layout.slices)) for _ in KINDS[1:]]
        self._momentum, self._square, self._divisor = own

    def compensate(self, gradient: Array, scale: float = 1.0, source: Array | None = None) -> DenseVector:
        """acc = residual + b1 m + (1 - b1) gradient."""
        if source is not None:
            gradient[:] = source
        times, rest = divmod(self.context.step + self.before, self.warm_up)
        forms_divisor = rest == 0 and times > 1 and times & (times - 1) == 0
        self._gradient = gradient.copy() if forms_divisor else None
        self._square.trial = self._square.current.copy()
        arrays = self._square.trial, self._momentum.current, self._divisor.current
        squares, momenta, divisors = map(self.layout.by_name, arrays)
        groups = self.groups()
        for name, own in self.layout.by_name(gradient).items():
            if name not in groups:
                raise RuntimeError(f"parameter {name!r}: expected it in param_groups, as in the warm-up: {NEW}")
            if own.any() and not divisors[name].any():
                raise RuntimeError(
                    f"parameter {name!r}: expected gradients during the warm-up, got the first one after it, when there"
                    f" is no second moment to divide by: {NEW}"
                )
            beta, other = groups[name]["betas"]
            squares[name].mul_(other).addcmul_(own, own, value=1 - other)
            own.mul_(1 - beta).add_(momenta[name], alpha=beta)
        return super().compensate(gradient, scale)

    def communicate(self, transport: Transport, message: DenseVector) -> None:
        super().communicate(transport, message)
        if self._gradient is not None:
            with CollectiveCall(transport, "second moments", self.timeout):
                own = self._square.trial, self._gradient, self.groups(), self.bucket, self.scale
                self._divisor.trial = divisor_of(transport, self.layout, *own)

    def update(self, out: Array, message: DenseVector, reduced: None) -> None:
        self._momentum.trial = out.copy()
        divisors = self.layout.by_name(self._divisor.current if self._divisor.trial is None else self._divisor.trial)
        for name, mean in self.layout.by_name(out).items():
            mean.div_(divisors[name]) if divisors[name].any() else mean.zero_()

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        own = zip(KINDS[1:], (self._momentum, self._square, self._divisor), strict=True)
        return super().state() | {kind: self.layout.by_name(versioned.base) for kind, versioned in own}

    def state_shape(self, kind: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return shape


def divisor_of(
    transport: Transport,
    layout: Layout,
    squares: Array,
    gradient: Array,
    groups: Groups,
    bucket: int,
    scale: float | None,
) -> Array:
    """Return sqrt(v) / scale + eps, where sqrt(v) is the mean over the ranks of the roots of `squares`. Collective.

    It is 0 for a parameter that has only zeros on all ranks. Otherwise, sqrt(v) is at least LEAST times its mean over
    the parameter and over the bucket: values of a bucket get errors of the same size in one bit.
    """
    root, sums = DenseVector(layout.empty()), LowBit(bits=8, levels="float", rounding="nearest")
    sums.sum_of(Channel(transport, layout.length), DenseVector(squares**0.5), root, 0, mean=True)
    mine = np.array([bool(part.any()) for part in layout.by_name(squares).values()], np.uint8)
    used: Any = allgather(transport, mine).any(axis=0)
    transport.waitall()
    whole, parts = layout.device.tensor(root.values), layout.by_name(root.values)
    padded = torch.nn.functional.pad(whole, (0, -layout.length % bucket)).view(-1, bucket)
    means = padded.mean(1, dtype=torch.float64).float()  # whose bits do not depend on the order of the sum
    least = layout.split(means.repeat_interleave(bucket)[: layout.length].to(padded.dtype))
    for (name, part), is_used in zip(parts.items(), used, strict=True):
        if not is_used:
            part.zero_()
        elif part.numel():
            floor = least[name].clamp_(min=float(part.mean(dtype=torch.float64).float())).mul_(LEAST)
            torch.maximum(part, floor, out=part)
    if scale is None:
        scale = noise_of(transport, layout.device.tensor(gradient), whole)
    for (name, part), is_used in zip(parts.items(), used, strict=True):
        part.div_(scale).add_(groups[name]["eps"] if is_used else 0.0)
    return root.values


def noise_of(transport: Transport, gradient: torch.Tensor, root: torch.Tensor) -> float:
    """Return how many times too large the noise of a rank's gradient makes the roots of second moments. Collective.

    With the mean gradient G and the gradient g of a rank, this is sqrt(E g^2 / E G^2), in [1, sqrt(P)], over SAMPLE
    values of one step, each divided by its root.
    """
    some = slice(None, None, gradient.numel() // SAMPLE | 1)
    sample = gradient[some].div(root[some]).nan_to_num(0.0, 0.0, 0.0).float().cpu().numpy()
    samples = allgather(transport, sample).astype(np.float64)
    transport.waitall()
    single, mean = float((samples**2).sum()) / transport.size, float((samples.mean(axis=0) ** 2).sum())
    return math.sqrt(min(max(single / mean, 1.0), transport.size)) if mean else 1.0
