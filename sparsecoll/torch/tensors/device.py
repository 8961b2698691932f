"""Devices: arrays over the memory of tensors, and CUDA streams. All that the adapter knows of CUDA is here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsecoll.kernels.memory import empty, from_dlpack

Array = NDArray[Any]  # or CuPy's


class CpuDevice:
    """CPU tensors, and NumPy arrays over their memory. There are no streams: work is done when it is called."""

    def array(self, tensor: torch.Tensor) -> Array:
        """An array over the memory of a contiguous tensor."""
        return tensor.detach().numpy()

    def tensor(self, array: Array) -> torch.Tensor:
        """A tensor over the memory of an array."""
        return torch.from_numpy(array)

    def zeros_tensor(self, size: int, dtype: Any) -> torch.Tensor:
        """A 1-D tensor of `size` zeros; `dtype` is a NumPy dtype."""
        return torch.zeros(size, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device="cpu")

    def zeros(self, size: int, dtype: Any) -> Array:
        """A 1-D array of `size` zeros."""
        return self.array(self.zeros_tensor(size, dtype))

    def empty(self, size: int, dtype: Any) -> Array:
        """A 1-D array of `size` items whose values are not set."""
        return empty(size, dtype)

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to this device; on the CPU the tensor itself."""
        return tensor

    def stream_context(self, event: Any = None) -> contextlib.AbstractContextManager[Any]:
        """Context manager that chooses the stream of the work inside.

        Args:
            event: of `record_event`: the work runs on the compression stream once the event has occurred, concurrently
                with what the caller launches meanwhile. None: it runs on the caller's current stream.
        """
        return contextlib.nullcontext()

    def record_event(self) -> Any:
        """An event that occurs when all work launched so far on the caller's current stream is done."""
        return None

    def wait_stream(self) -> None:
        """Make the caller's current stream wait for the compression stream."""

    def synchronize(self) -> None:
        """Block until all work on the caller's current stream is done."""


class CudaDevice(CpuDevice):
    """Tensors of one CUDA device, and CuPy arrays over their memory. Compression has a stream of its own."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.array(torch.zeros(0, device=self._device))  # raises now where CuPy is missing

    def array(self, tensor: torch.Tensor) -> Array:
        return from_dlpack(tensor.detach())  # type: ignore[no-any-return]

    def tensor(self, array: Array) -> torch.Tensor:
        return torch.from_dlpack(array)  # type: ignore[no-any-return, attr-defined]

    def zeros_tensor(self, size: int, dtype: Any) -> torch.Tensor:
        return super().zeros_tensor(size, dtype).to(self._device)

    def empty(self, size: int, dtype: Any) -> Array:
        return self.array(torch.empty(size, dtype=super().zeros_tensor(0, dtype).dtype, device=self._device))

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    @contextlib.contextmanager
    def stream_context(self, event: Any = None) -> Iterator[None]:
        from sparsecoll.kernels.gpu import device

        with contextlib.ExitStack() as stack:
            if event is not None:
                self._stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(self._stream))
            stream = torch.cuda.current_stream(self._device)
            stack.enter_context(device.using(self._device.index, stream.cuda_stream))
            yield

    def record_event(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait_stream(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


CPU = CpuDevice()


_cuda = functools.cache(CudaDevice)


def device_of(tensor: torch.Tensor) -> CpuDevice:
    """The device that holds a tensor.

    Raises:
        TypeError: the tensor is neither on the CPU nor on a CUDA device, or it is on one and CuPy is missing.
    """
    if tensor.device.type == "cpu":
        return CPU
    if tensor.device.type == "cuda":
        return _cuda(tensor.device.index)
    raise TypeError(f"params: expected tensors on the CPU or a CUDA device, got one on {tensor.device}")
