"""Compressors that consist of two functions of arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.errors import CommunicationError
from sparsecoll.formats import Buffer
from sparsecoll.kernels.memory import asarray_like, to_host
from sparsecoll.torch.compressors.base import ErrorFeedback
from sparsecoll.torch.tensors.layout import Array
from sparsecoll.transport import Transport
from sparsecoll.vector import VALUE_DTYPES, DenseVector, accumulator_dtype, dtype_of
from sparsecoll.vector.values import native_values


@dataclass
class ArrayCompressor(ErrorFeedback):
    """A compressor of your own: derive a dataclass of its options with a `name`, `compress` and `decompress`.

    Every rank compresses acc = residual + gradient and sends the message to all ranks. The mean is that of all
    decompressed messages, added in rank order, and the residual keeps acc - decompressed. The two methods get and
    return 1-D arrays of NumPy, also for a model on a GPU; `torch.from_numpy` makes tensors of them. Their results must
    depend on nothing but their arguments and the options. Other methods of Compressor may be overridden.

    Volume: the messages of the other ranks, in ceil(log2 P) messages; 4 + 4 words more for each array.

    See Also:
        `sparsecoll.testing.check_compressor`, which checks the class.
    """

    @abstractmethod
    def compress(self, acc: NDArray[Any]) -> NDArray[Any] | Sequence[NDArray[Any]]:
        """Return what this rank sends: an array or several, of any shapes and of dtypes that SparseVector supports.

        Args:
            acc: the values to send, all finite, which cannot be written to.
        """

    @abstractmethod
    def decompress(self, arrays: list[NDArray[Any]], n: int) -> NDArray[Any]:
        """Return the n values that a message stands for.

        Args:
            arrays: what `compress` returned on some rank, as 1-D arrays.
            n: number of values.
        """

    keeps_zeros = False  # as far as anyone knows

    def message(self, acc: DenseVector) -> Buffer:
        if not self.passes_nonfinite:
            self.check_finite(acc)
        values = to_host(acc.values).view()
        values.flags.writeable = False
        made = self.compress(values)
        arrays = made if isinstance(made, (list, tuple)) else [made]
        return packed([native_values(array).ravel() for array in arrays])

    def communicate(self, transport: Transport, message: Buffer) -> list[Buffer]:
        return self.gather(transport, message)

    def update(self, out: Array, message: Buffer, reduced: list[Buffer]) -> None:
        n, dtype = self.layout.length, accumulator_dtype(out.dtype)
        total, own = np.zeros(n, dtype), np.zeros(n, dtype)
        for rank, block in enumerate(reduced):
            part = np.asarray(self.decompress(unpacked(block), n))
            if part.shape != (n,):
                raise ValueError(f"decompress: expected an array of shape ({n},), got {part.shape}")
            total += part
            own = part.astype(dtype) if rank == self.own_rank else own  # a copy: the next part may take its memory
        out[:] = asarray_like((total / self.size).astype(out.dtype), out)
        if self.keeps_gradient:
            self.contributed(DenseVector(asarray_like(own, out)))


def packed(arrays: Sequence[NDArray[Any]]) -> Buffer:
    """Return arrays as one message: their number, the dtype and the size of each, and their bytes."""
    head = [len(arrays), *(n for a in arrays for n in (VALUE_DTYPES.index(a.dtype.name), a.size))]
    return np.concatenate([np.array(head, np.int64).view(np.uint8), *(a.view(np.uint8) for a in arrays)])


def unpacked(message: Buffer) -> list[NDArray[Any]]:
    """Invert `packed`; raise CommunicationError unless the message is one of its."""
    data, arrays = message.tobytes(), []
    count = int.from_bytes(data[:8], "little")
    start = 8 + 16 * count
    heads = np.frombuffer(data, np.int64, 2 * count, 8) if 0 <= start <= len(data) else np.empty(0, np.int64)
    for kind, size in heads.reshape(-1, 2).tolist():
        dtype = dtype_of(VALUE_DTYPES[kind % len(VALUE_DTYPES)])
        end = start + size * dtype.itemsize
        if size >= 0 and end <= len(data):
            arrays.append(np.frombuffer(data[start:end], dtype))
        start = end
    if start != len(data) or len(arrays) != count:
        raise CommunicationError(f"message: expected {count} arrays that take {start} bytes, got {len(data)}")
    return arrays
