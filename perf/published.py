"""Peers as published: SignSGD with majority vote in perf/training.py, SparseLoCo and DeMo in perf/convergence.py.

Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: Compressed Optimisation for Non-Convex Problems" (ICML 2018), by
an allgather as in ACP-SGD's paper.

Sarfi, Therien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo" (2025): the largest 64 of
each 4,096 values, 12 bits an index and 2 bits a value, in four bins over 6 standard deviations around the mean of a
parameter's values, each with the mean of its members; all-gathered; the residual decays by 0.95.

Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization" (2024): the largest 32 coefficients of the cosine
transform of each block of 64 x 64 values (or of what divides the shape) of the momentum, which keeps 0.999 of the rest.
Its code multiplies gradients by the learning rate first, which makes a difference where that changes.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.fft import dctn, idctn

from sparsecoll.torch.compressors import ArrayCompressor, ErrorFeedback
from sparsecoll.torch.compressors.arrays import unpacked

K, CHUNK, DECAY = 64, 4096, 0.95
BITS = np.arange(14, dtype=np.uint16)  # of an index and a value
COEFFICIENTS, SIDE, KEEP = 32, 64, 0.999


@dataclass
class MajorityVote(ArrayCompressor):
    """The sign that most ranks' gradients have."""

    name = "majority vote"
    keeps_gradient = False

    def compress(self, acc):
        """Return the signs, eight a byte."""
        return np.packbits(acc > 0)

    def decompress(self, arrays, n):
        """Return 1 for each positive value, else 0."""
        return np.unpackbits(arrays[0], count=n)

    def update(self, out, message, reduced):
        """Write the signs."""
        votes = sum(self.decompress(unpacked(block), out.size) for block in reduced)
        out[:] = np.sign(2 * votes.astype(np.int32) - self.size)  # 0 if as many have the other sign


@dataclass
class SparseLoCo(ErrorFeedback):
    """The compressor."""

    name = "published sparseloco"
    dense_below = 0

    def compensate(self, gradient, scale=1.0, source=None):
        """acc = DECAY * residual + gradient."""
        return super().compensate(gradient, DECAY, source)

    def _parts(self):
        return [slice(a, b) for a, b in pairwise(self.layout.offsets)]

    def compress(self, acc):
        """Return the message of all parameters, and leave the rest in acc."""
        parts = []
        for part in self._parts():
            x = acc.values[part]
            rows = np.pad(x, (0, -x.size % CHUNK)).reshape(-1, CHUNK)
            places = np.argpartition(np.abs(rows), CHUNK - K)[:, CHUNK - K :]
            chosen = np.take_along_axis(rows, places, 1)
            scale = 6 / 4 * max(chosen.std(), 1e-30)
            bins = np.clip(np.rint((chosen - chosen.mean()) / scale + 2), 0, 3).astype(np.uint16)
            counts, sums = (np.bincount(bins.ravel(), w, 4) for w in (None, chosen.ravel().astype(np.float64)))
            means = (sums / np.maximum(counts, 1)).astype(np.float32)
            np.put_along_axis(rows, places, chosen - means[bins], 1)
            x[:] = rows.ravel()[: x.size]
            words = (places.astype(np.uint16) | bins << 12).reshape(-1, 1)
            parts += [means.view(np.uint8), np.packbits((words >> BITS & 1).astype(np.uint8))]
        return np.concatenate(parts)

    def communicate(self, transport, message):
        """Return all ranks' messages."""
        return self.gather(transport, message)

    def update(self, out, message, reduced):
        """Write the mean."""
        out.fill(0)
        for block in reduced:
            start = 0
            for part in self._parts():
                length = part.stop - part.start
                chunks = -(-length // CHUNK)
                means = block[start : start + 16].copy().view(np.float32)
                size = chunks * K * 14 // 8
                words = np.unpackbits(block[start + 16 : start + 16 + size]).reshape(-1, 14) @ (1 << BITS)
                start += 16 + size
                places = (words & (CHUNK - 1)) + CHUNK * (np.arange(words.size) // K)
                inside = places < length
                out[part][places[inside]] += means[words[inside] >> 12]
        out /= self.size


@dataclass
class DeMo(ArrayCompressor):
    """The compressor: signs of the mean."""

    name = "published demo"
    dense_below = 0

    def compensate(self, gradient, scale=1.0, source=None):
        """acc = KEEP * residual + gradient."""
        return super().compensate(gradient, KEEP, source)

    def _blocks(self, values):
        """Return a view of each parameter in `values`, (rows, height, columns, width)."""
        for t in self.layout.by_name(values).values():
            shape = (1,) * (2 - t.ndim) + tuple(t.shape)
            height, width = (max(side for side in range(1, SIDE + 1) if length % side == 0) for length in shape)
            yield t.numpy().reshape(shape[0] // height, height, shape[1] // width, width)

    def compress(self, acc):
        """Return places and values of the largest coefficients of each block."""
        sent = []
        for blocks in self._blocks(acc.copy()):
            rows = dctn(blocks, axes=(1, 3), norm="ortho").swapaxes(1, 2).reshape(-1, blocks[0, :, 0].size)
            k = min(COEFFICIENTS, rows.shape[1])
            places = np.argpartition(np.abs(rows), -k)[:, -k:]
            sent += [places.astype(np.uint16), np.take_along_axis(rows, places, 1)]
        return sent

    def _mean(self, values, messages):
        """Write the values of messages' coefficients, each the mean over those that have it."""
        for number, blocks in enumerate(self._blocks(values)):
            rows, counts = np.zeros((2, len(blocks) * blocks.shape[2], blocks[0, :, 0].size), np.float32)
            for arrays in messages:
                places, sent = (array.reshape(len(rows), -1) for array in arrays[2 * number : 2 * number + 2])
                at = np.arange(len(rows))[:, None], places  # unique in a message
                rows[at] += sent
                counts[at] += 1
            shape = (len(blocks), blocks.shape[2], blocks.shape[1], blocks.shape[3])
            mean = (rows / np.maximum(counts, 1)).reshape(shape).swapaxes(1, 2)
            blocks[:] = idctn(mean, axes=(1, 3), norm="ortho")

    def decompress(self, arrays, n):
        """Return the values of what was sent."""
        values = np.zeros(n, np.float32)
        self._mean(values, [arrays])
        return values

    def update(self, out, message, reduced):
        """Write the signs of the mean, and subtract what this rank has sent."""
        super().update(out, message, reduced)
        self._mean(out, [unpacked(block) for block in reduced])
        np.sign(out, out=out)
