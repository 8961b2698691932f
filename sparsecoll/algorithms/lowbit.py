"""LowBit: the sum of all n values in few bits a value, by two phases.

The owner of each region sums what the others send quantized, quantizes the sum again, and sends it to all, as the
two-way compression of Tang and others ("DoubleSqueeze", ICML 2019) and of Zheng, Huang, Kwok ("Communication-Efficient
Distributed Blockwise Momentum SGD with Error-Feedback", NeurIPS 2019), with each rank the server of one region.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsecoll.algorithms.base import Algorithm, Reduction
from sparsecoll.algorithms.primitives import pipeline
from sparsecoll.errors import CommunicationError, NonFiniteError, check_choice, check_integer
from sparsecoll.formats import Buffer, Codes
from sparsecoll.formats.codes import check_bucket
from sparsecoll.kernels.memory import empty
from sparsecoll.select import Vector
from sparsecoll.select.randomk import mix
from sparsecoll.transport.base import ReceiveRequest
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import DenseVector, SparseVector, accumulator_dtype

LEVELS = {"linear": (8, 4, 2, 1), "float": (8, 4)}  # numbers of bits
ROUNDING = ("stochastic", "nearest")
DTYPES = ("float16", "bfloat16", "float32", "float64")

Span = tuple[int, int]


@dataclass(kw_only=True)
class LowBit(Algorithm):
    """Sum of all n values in 8, 4, 2 or 1 bits a value, at any number of ranks.

    1. Reduce-scatter: rank j owns the j-th of P regions, of whole buckets. Every rank quantizes its values in the
       regions of the others and sends them to the owners; its own region it adds as it is, without rounding.
    2. The owner adds what arrives in rank order owner, owner - 1, owner - 2, ..., in float32 (float64 for float64).
    3. It quantizes the sum and sends it to all. Every rank decodes the same bytes, the owner too.

    Both steps are divided into chunks, of which some are in flight while others are quantized and added. The rounding
    errors of the values and of the sum are not part of `contributed` (those of a sum are its owner's), so that a
    residual keeps them and they enter the next sum; the owner's share enters it without another rounding. With one rank
    nothing is rounded.

    A dense x gives a dense array of its shape and dtype; with `return_reduction` and for a sparse x a SparseVector.

    Volume: 2n(P-1)/P * (bits + 32/bucket)/32 words in 2(P-1) messages a chunk. Memory: n/P values, and the messages.

    Args:
        k: None; there is no selection.
        selector: None.
        bits: bits per value, sign included: 8 (the default), 4, 2 or 1.
        levels: "linear" (the default) for multiples of the largest magnitude of a bucket divided by 2^(bits-1) - 1, as
            in QSGD, or "float" for floats of 8 bits (E4M3) or 4 bits (E3M0), for values of very different magnitudes.
        rounding: "stochastic" (the default) rounds up or down at random so that sums are unbiased. "nearest"
            rounds to the nearest level, for use with error feedback, since its errors are smaller; with 1 bit the
            levels are then a bucket's mean magnitude with both signs (EF-SignSGD), and with 2 bits 5/8 and 15/8 of it.
        bucket: number of values that share a scale (default: 512).
        seed: seed of the stochastic rounding (default: 0); each rank and call derives its own from it.

    Raises:
        ValueError: An option is out of range, 1 bit is used without rounding="nearest", or a call has `value_dtype`,
            `k` or `density`; or, on every rank, a value or sum is not finite, which has no scale, whatever `nonfinite`
            says, or with rounding="nearest" in 1 or 2 bits the magnitudes of a bucket add up to more than 3.4e38.
        TypeError: An option has a wrong type; or, on every rank, x does not hold float16, bfloat16, float32 or float64.

    See Also:
        `sparsecoll.torch.compressors.QSGD`, `sparsecoll.torch.compressors.efsignsgd`.

    >>> def program(comm):
    ...     x = np.array([0.5, -1.0, 0.25], np.float32)
    ...     return sparsecoll.allreduce(comm, x, sparsecoll.LowBit(bits=8))
    >>> sparsecoll.simulate(2, program).results[0].round(1)
    array([ 1. , -2. ,  0.5], dtype=float32)
    """

    name = "lowbit"
    semantics = "rounded_sum"
    takes_dense = True
    returns_dense = True

    bits: int = 8
    levels: str = "linear"
    rounding: str = "stochastic"
    bucket: int = 512
    seed: int = 0
    _calls: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.k is not None or self.selector is not None:  # LowBit(4) would mean four entries
            raise ValueError(f"k, selector: expected None for {self.name!r}, which sums all values: use bits={self.k}")
        check_choice("levels", self.levels, LEVELS)
        check_choice("rounding", self.rounding, ROUNDING)
        check_integer("bits", self.bits)
        if self.bits not in LEVELS[self.levels]:
            expected = ", ".join(map(str, LEVELS[self.levels]))
            raise ValueError(f"bits: expected one of {expected} with levels={self.levels!r}, got {self.bits}")
        if self.bits == 1 and self.rounding != "nearest":
            raise ValueError(f"rounding: expected 'nearest' with 1 bit, got {self.rounding!r}")
        check_bucket(self.bucket)
        check_integer("seed", self.seed)

    @property
    def codes(self) -> Codes:
        """The messages of this algorithm."""
        return Codes(self.bits, "mean" if self.rounding == "nearest" and self.bits <= 2 else self.levels, self.bucket)

    @property
    def keeps_zeros(self) -> bool:
        """Whether a level is zero."""
        return self.codes.levels != "mean"

    def __call__(self, channel: Channel, x: Vector, k: int) -> Reduction:
        if x.dtype.name not in DTYPES:
            raise TypeError(f"x: expected one of {', '.join(DTYPES)} with algo={self.name!r}, got {x.dtype}")
        if channel.value_dtype is not None:
            raise ValueError(f"value_dtype: expected None with algo={self.name!r}, got {channel.value_dtype!r}")
        local = x if isinstance(x, DenseVector) else DenseVector(x.to_dense())
        value = DenseVector.empty(x.length, x.dtype, x)
        self._calls += 1
        phases = self.sum_of(channel, local, value, seed=mix(mix(self.seed, channel.rank), self._calls))
        if isinstance(x, SparseVector):
            return Reduction(value.to_sparse(), lambda: phases.contributed().to_sparse())
        return Reduction(value, phases.contributed)

    def sum_of(
        self, channel: Channel, x: DenseVector, value: DenseVector, seed: int, mean: bool = False, take: bool = False
    ) -> TwoPhases:
        """Write the sum, or with `mean` the mean, of all ranks' vectors to `value`; it may be x without `take`.

        Args:
            value: memory of the result.
            seed: of the stochastic rounding, another one on every rank.
            mean: divide the sum by the number of ranks (default: False).
            take: subtract what contributed from x (default: False): what remains is the residual.
        """
        phases = TwoPhases(channel, self.codes, None if self.rounding == "nearest" else seed, x, value, take)
        phases.run(channel.size if mean else 1)
        return phases


class TwoPhases:
    """One sum: the parts of x go to their owners quantized, and the sums of the owners to all.

    Args:
        channel: channel of the messages.
        codes: how values are quantized.
        seed: seed of the stochastic rounding; None to round to the nearest level.
        x: this rank's values.
        value: memory of the result.
        take: whether what contributes is subtracted from x.
    """

    def __init__(
        self, channel: Channel, codes: Codes, seed: int | None, x: DenseVector, value: DenseVector, take: bool
    ) -> None:
        self._transport, self._codes, self._take = channel.transport, codes, take
        self._rank, self._size, self._channel = channel.rank, channel.size, channel
        self._seeds = (None, None) if seed is None else (mix(seed, 0), mix(seed, 1))
        self._x, self._value = x.values, value.values
        buckets = -(-x.length // codes.bucket)
        region = 4 * -(-buckets // self._size) * codes.bucket * codes.bits // 32
        chunks = pipeline.chunks(region, self._transport.one_node)
        edges = [min(buckets * j // (self._size * chunks) * codes.bucket, x.length) for j in range(self._size * chunks)]
        self._edges, self._chunks = [*edges, x.length], chunks
        low, high = self._edges[self._rank * chunks], self._edges[(self._rank + 1) * chunks]
        self._low, dtype = low, accumulator_dtype(x.dtype)
        self._total = self._x[low:high] if take and dtype == x.dtype else empty(high - low, dtype, self._x)
        self._sent: list[tuple[Span, Buffer]] = []  # what `contributed` needs

    def _span(self, rank: int, chunk: int) -> Span:
        """The indices of a chunk of a rank's region."""
        return self._edges[rank * self._chunks + chunk], self._edges[rank * self._chunks + chunk + 1]

    def run(self, divisor: int) -> None:
        """Send, add, and write the sum divided by `divisor` to `value`; with one rank, both are x."""
        if self._size == 1:
            if DenseVector(self._x).first_not_finite() is not None:
                raise NonFiniteError("x: expected finite values, got NaN or infinity")
            self._value[:] = self._x
            (self._x if self._take else self._total)[:] = 0
            return
        split: deque[list[ReceiveRequest | None]] = deque()
        gathered: deque[tuple[list[ReceiveRequest | None], Buffer]] = deque()
        ahead = pipeline.STAGES_AHEAD
        for stage in range(self._chunks + 2 * ahead):
            if stage < self._chunks:
                split.append(self._send_parts(stage))
            self._transport.progress()
            if ahead <= stage < self._chunks + ahead:
                gathered.append(self._send_sum(stage - ahead, split.popleft()))
            self._transport.progress()
            if stage >= 2 * ahead:
                self._write(stage - 2 * ahead, *gathered.popleft(), divisor)

    def _receives(self, spans: list[Span]) -> list[ReceiveRequest | None]:
        """Start the receives from rank - 1, rank - 2, ... of what these spans hold; None for an empty one."""
        steps = zip(range(1, self._size), spans, strict=True)
        return [self._transport.irecv((self._rank - step) % self._size) if b > a else None for step, (a, b) in steps]

    def _send_parts(self, chunk: int) -> list[ReceiveRequest | None]:
        """Quantize and send a chunk of each other rank's region; start to receive those of the own one."""
        with self._channel.phase("split"):
            for step in range(1, self._size):
                to = (self._rank + step) % self._size
                a, b = self._span(to, chunk)
                if b > a:
                    message = self._encode(self._x[a:b], a, self._seeds[0], self._take)
                    self._transport.isend(to, message)
                    if not self._take:
                        self._sent.append(((a, b), message))
            return self._receives([self._span(self._rank, chunk)] * (self._size - 1))

    def _send_sum(
        self, chunk: int, requests: list[ReceiveRequest | None]
    ) -> tuple[list[ReceiveRequest | None], Buffer]:
        """Add a chunk of the own region, quantize and send the sum; start to receive those of the other regions."""
        a, b = self._span(self._rank, chunk)
        total = self._total[a - self._low : b - self._low]
        if b > a and not (self._take and total.dtype == self._x.dtype):
            total[:] = self._x[a:b]
        with self._channel.phase("split"):
            for request in requests:
                if request is not None:
                    self._codes.decode(self._checked(request.wait(), a, b), a, total, add=True)
        with self._channel.phase("gather"):
            message = self._encode(total, a, self._seeds[1], self._take or total.dtype == self._x.dtype)
            if b > a:
                for step in range(1, self._size):
                    self._transport.isend((self._rank + step) % self._size, message)
            if self._take and total.dtype != self._x.dtype:
                self._x[a:b] = total
            spans = [self._span((self._rank - step) % self._size, chunk) for step in range(1, self._size)]
            return self._receives(spans), message

    def _write(self, chunk: int, requests: list[ReceiveRequest | None], own: Buffer, divisor: int) -> None:
        """Write a chunk of every region to the result."""
        with self._channel.phase("gather"):
            for step in range(self._size):
                a, b = self._span((self._rank - step) % self._size, chunk)
                request = requests[step - 1] if step else None
                message = own if request is None else self._checked(request.wait(), a, b)
                self._codes.decode(message, a, self._value[a:b], divisor=divisor)
                if step == 0 and not self._take and self._total.dtype != self._x.dtype:
                    self._total[a - self._low : b - self._low] -= self._value[a:b]

    def _encode(self, values: Any, first: int, seed: int | None, keep_error: bool) -> Buffer:
        message = empty(self._codes.size(first, values.size), np.uint8, values)
        if not self._codes.encode(values, first, seed, message, keep_error):
            raise NonFiniteError(
                f"x: expected finite values and sums, which alone can be quantized, got NaN or infinity between index"
                f" {first} and {first + values.size - 1}"
            )
        return message

    def _checked(self, message: Buffer, a: int, b: int) -> Buffer:
        """Return a message of the values from a to b - 1."""
        expected = self._codes.size(a, b - a)
        if message.size != expected:
            raise CommunicationError(
                f"rank {self._rank}: expected {expected} bytes for the values from {a} to {b - 1}, got {message.size}"
            )
        return message

    def contributed(self) -> DenseVector:
        """Return this rank's share of the sum: what its messages hold and, in its own region, x minus the rest."""
        share = DenseVector.empty(self._x.size, self._total.dtype, DenseVector(self._x))
        for (a, b), message in self._sent:
            self._codes.decode(message, a, share.values[a:b])
        own = slice(self._low, self._low + self._total.size)
        np.subtract(self._x[own], self._total, out=share.values[own])
        return share
