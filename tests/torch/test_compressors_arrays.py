"""Compressors of two functions of arrays: what their messages hold, and what is refused on all ranks."""

import contextlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from nets import residuals

from sparsecoll import CommunicationError, simulate
from sparsecoll.torch import DistributedOptimizer
from sparsecoll.torch.compressors import ArrayCompressor
from sparsecoll.torch.compressors.arrays import packed, unpacked
from sparsecoll.vector import VALUE_DTYPES, dtype_of


@dataclass
class Halves(ArrayCompressor):
    """Every value in 16 bits, in either byte order."""

    name = "halves"
    order: str = "<"
    cut: int = 0
    writes: bool = False

    def compress(self, acc):
        if self.writes:
            acc[:] = 0
        return acc.astype(f"{self.order}f2")

    def decompress(self, arrays, n):
        return arrays[0][self.cut :].astype(np.float32)


@dataclass
class InPlace(Halves):
    """Every message is decompressed into the same memory."""

    def decompress(self, arrays, n):
        if not hasattr(self, "_memory"):
            self._memory = np.empty(n, np.float32)
        self._memory[:] = arrays[0]
        return self._memory


@dataclass
class EverySecond(ArrayCompressor):
    """A view whose values are not next to each other."""

    name = "every second"

    def compress(self, acc):
        return acc[::2]

    def decompress(self, arrays, n):
        return np.repeat(arrays[0], 2)


def step(compressor, P=3):
    """The parameter on each rank after one step of SGD from zero; the gradient of rank r is (r + 1) / 3."""

    def program(comm):
        p = torch.nn.Parameter(torch.zeros(2000))
        inner = torch.optim.SGD([p], 1.0)
        optimizer = DistributedOptimizer(inner, [("p", p)], comm, compressor, dense_below=10)
        (p * ((comm.rank + 1) / 3)).sum().backward()
        optimizer.step()
        return p.detach().numpy().copy()

    return simulate(P, program).results


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_messages_come_back_and_damaged_ones_are_refused(dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    arrays = [np.arange(5).astype(dtype_of(dtype)), np.empty(0, np.float32), np.ones(3, np.uint8)]
    message = packed(arrays)
    for array, back in zip(arrays, unpacked(message), strict=True):
        assert array.dtype == back.dtype and array.tobytes() == back.tobytes()
    for end in range(message.size):
        with pytest.raises(CommunicationError):
            unpacked(message[:end])
    rng = np.random.default_rng(0)
    for _ in range(200):
        damaged = message.copy()
        damaged[rng.integers(0, 56)] ^= 1 << rng.integers(0, 8)
        with contextlib.suppress(CommunicationError):
            unpacked(damaged)


@pytest.mark.parametrize("order", ["<", ">"])
def test_all_ranks_take_the_mean_of_what_was_decompressed(order):
    values = step(Halves(order))
    mean = sum(np.float32(np.float16((rank + 1) / 3)) for rank in range(3)) / np.float32(3)
    assert all(value.tobytes() == values[0].tobytes() for value in values)
    np.testing.assert_allclose(values[0], -mean, rtol=1e-6)


def test_a_view_with_strides_is_sent():
    for value in step(EverySecond()):
        np.testing.assert_allclose(value, -2 / 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("compressor", "text"),
    [(Halves(cut=1), r"decompress: expected an array of shape \(2000,\)"), (Halves(writes=True), "read-only")],
)
def test_a_wrong_length_and_a_change_of_the_gradient_are_refused(compressor, text):
    with pytest.raises(Exception, match=text):
        step(compressor)


def test_decompress_may_return_the_same_memory_again():
    """The residual is what this rank has not sent, not what another has not."""

    def kept(compressor):
        def program(comm):
            p = torch.nn.Parameter(torch.zeros(2000))
            optimizer = DistributedOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], comm, compressor, dense_below=10)
            (p * ((comm.rank + 1) / 3)).sum().backward()
            optimizer.step()
            return residuals(optimizer)["p"].tolist()

        return simulate(3, program).results

    assert kept(InPlace()) == kept(Halves())
