"""What the compressors with few bits a value have in common: the mean by `sparsecoll.LowBit`."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from sparsecoll.algorithms import LowBit
from sparsecoll.errors import NonFiniteError
from sparsecoll.select.randomk import mix
from sparsecoll.torch.compressors.base import ErrorFeedback
from sparsecoll.torch.tensors.device import Array
from sparsecoll.transport import Transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.channel import Channel
from sparsecoll.vector import DenseVector


@dataclass
class LowBitMean(ErrorFeedback):
    """The mean in few bits a value: derive a dataclass of options with `algorithm`.

    Compression, communication and decompression of different chunks run at the same time, so `communicate` does all:
    it writes the mean to `out`, and leaves what did not contribute in acc.
    """

    @property
    @abstractmethod
    def algorithm(self) -> LowBit:
        """The sum, with its options."""

    @property
    def seed_of_rounding(self) -> int:
        """Seed of this compressor's random numbers, from which each rank, bucket and step derives its own."""
        return 0

    def allreduce_mean(self, transport: Transport, gradient: Array, out: Array, source: Array | None = None) -> None:
        self._out = DenseVector(out)
        super().allreduce_mean(transport, gradient, out, source)

    def compress(self, acc: Array | DenseVector) -> DenseVector:
        return acc if isinstance(acc, DenseVector) else DenseVector(acc)

    def communicate(self, transport: Transport, message: DenseVector) -> None:
        seed = mix(mix(mix(self.seed_of_rounding, self.own_rank), self.layout.index), self.context.step)
        with CollectiveCall(transport, "compressor", self.timeout) as call:
            call.signature |= {"compressor": self.describe(), "length": self.layout.length}
            call.agree()
            channel = Channel(transport, self.layout.length)
            try:
                self.algorithm.sum_of(channel, message, self._out, seed, mean=True, take=self.keeps_gradient)
            except NonFiniteError:
                self.check_finite(message)  # names the parameter
                raise
            transport.waitall()

    def update(self, out: Array, message: DenseVector, reduced: None) -> None:
        pass
