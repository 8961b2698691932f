"""QSGD and EF-SignSGD: few bits for each value, by the sum `sparsecoll.LowBit`."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecoll.algorithms import LowBit
from sparsecoll.errors import NonFiniteError
from sparsecoll.select.randomk import mix
from sparsecoll.torch.compressors.base import ErrorFeedback
from sparsecoll.torch.tensors.layout import Array
from sparsecoll.transport import Transport
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import DenseVector


@dataclass
class QSGD(ErrorFeedback):
    """Quantizes each value to `bits` bits: a sign and one of 2^(bits-1) - 1 levels, with unbiased stochastic rounding.

    `bucket` consecutive values share a scale, their largest magnitude (the paper's practical variant, section 4). Each
    rank owns a region, whose sum it quantizes again (see `sparsecoll.LowBit`), so that the volume does not grow with P.
    Volume: 2n(P-1)/P * (bits + 32/bucket)/32 words. The paper: Alistarh, Grubic, Li, Tomioka, Vojnovic, NeurIPS 2017.

    Args:
        bits: bits per value, sign included: 8 (the default), 4 or 2; or 1 with `feedback`, see `efsignsgd`.
        bucket: number of values that share a scale (default: 512).
        feedback: keep the rounding errors, of the sums too, and add them to the next gradient (default: False, as in
            the paper). Values are then rounded to the nearest level, and with 2 bits the levels are 5/8 and 15/8 of the
            mean magnitude with both signs: error feedback needs a small error, not one that is zero on average.
        seed: seed of the rounding (default: 0); each rank derives random numbers for each bucket from (seed, rank,
            bucket, step).
        levels: "linear" (the default), or "float" for floats of 8 bits (E4M3) or 4 bits (E3M0).

    Raises:
        ValueError: `bits`, `bucket` or `levels` is out of range.
    """

    name = "qsgd"

    bits: int = 8
    bucket: int = 512
    feedback: bool = False
    seed: int = 0
    levels: str = "linear"

    def __post_init__(self) -> None:
        if self.bits not in (8, 4, 2, 1)[: 3 + self.feedback]:
            raise ValueError(f"bits: expected 8, 4 or 2, or 1 with feedback, got {self.bits}")
        self.keeps_gradient, self.keeps_zeros = self.feedback, self.algorithm.keeps_zeros  # which raises

    @property
    def algorithm(self) -> LowBit:
        """The sum, with its options."""
        rounding = "nearest" if self.feedback else "stochastic"
        return LowBit(bits=self.bits, levels=self.levels, rounding=rounding, bucket=self.bucket)

    def allreduce_mean(self, transport: Transport, gradient: Array, out: Array, source: Array | None = None) -> None:
        self._out = DenseVector(out)
        super().allreduce_mean(transport, gradient, out, source)
        del self._out  # whose memory the next gradient may take

    def compress(self, acc: Array | DenseVector) -> DenseVector:
        return acc if isinstance(acc, DenseVector) else DenseVector(acc)

    def communicate(self, transport: Transport, message: DenseVector) -> None:
        """Write the mean, and leave in acc what did not contribute: chunks are compressed and sent at the same time."""
        seed = mix(mix(mix(self.seed, self.own_rank), self.layout.index), self.context.step)
        with self._agreed(transport):
            channel = Channel(transport, self.layout.length)
            try:
                self.algorithm.sum_of(channel, message, self._out, seed, mean=True, take=self.keeps_gradient)
            except NonFiniteError:
                self.check_finite(message)  # names the parameter
                raise

    def update(self, out: Array, message: DenseVector, reduced: None) -> None:
        pass


def efsignsgd(bucket: int = 512) -> QSGD:
    """EF-SignSGD (Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD", ICML 2019).

    Each rank sends the signs of acc, one bit per value, and the mean of |acc| of each bucket of values:
    acc = residual + gradient, sent = mean(|acc|) * sign(acc), residual = acc - sent (Algorithm 1). A sum of signs is
    not a sign, so each rank owns a region, of whose sum it sends the signs and mean magnitudes, and keeps the error of
    that, too: the blockwise two-way compression of Zheng, Huang and Kwok (NeurIPS 2019, Algorithm 1), with every rank
    the server of a region. Volume: 2n(P-1)/P * (1 + 32/bucket)/32 words.

    Args:
        bucket: number of values that share a scale (default: 512).

    Returns:
        QSGD with `bits=1` and `feedback=True`.

    Raises:
        ValueError: `bucket` is out of range.
    """
    made = QSGD(1, bucket, feedback=True)
    made.name = "efsignsgd"  # type: ignore[misc]
    return made
