"""Where tensors live: arrays over their memory, and the order of work. All that the adapter knows of CUDA is here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsecoll.kernels.memory import from_dlpack

Array = NDArray[Any]  # or CuPy's


class Host:
    """CPU tensors and NumPy arrays over their memory. Work is done when it is asked for."""

    def array(self, tensor: torch.Tensor) -> Array:
        """A contiguous tensor's memory."""
        return tensor.detach().numpy()

    def tensor(self, array: Array) -> torch.Tensor:
        """An array's memory."""
        return torch.from_numpy(array)

    def tensors(self, size: int, dtype: Any) -> torch.Tensor:
        """A tensor of `size` zeros of a NumPy dtype."""
        return torch.zeros(size, dtype=torch.from_numpy(np.empty(0, dtype)).dtype)

    def zeros(self, size: int, dtype: Any) -> Array:
        """An array of `size` zeros."""
        return self.array(self.tensors(size, dtype))

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A CPU tensor, here."""
        return tensor

    def here(self) -> contextlib.AbstractContextManager[Any]:
        """Work inside follows what the caller has queued."""
        return contextlib.nullcontext()

    def mark(self) -> Any:
        """What the caller has queued so far."""
        return None

    def after(self, mark: Any) -> contextlib.AbstractContextManager[Any]:
        """Work inside follows a mark, beside what the caller queues meanwhile."""
        return contextlib.nullcontext()

    def catch_up(self) -> None:
        """What the caller queues from now on follows the work of `after`."""

    def finish(self) -> None:
        """Wait for the work queued here."""


class Cuda(Host):
    """Tensors of one CUDA device, and CuPy arrays over their memory. Compression has a stream of its own."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.array(torch.zeros(0, device=self._device))  # now: CuPy may be missing

    def array(self, tensor: torch.Tensor) -> Array:
        return from_dlpack(tensor.detach())  # type: ignore[no-any-return]

    def tensor(self, array: Array) -> torch.Tensor:
        return torch.from_dlpack(array)  # type: ignore[no-any-return, attr-defined]

    def tensors(self, size: int, dtype: Any) -> torch.Tensor:
        return super().tensors(size, dtype).to(self._device)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        from sparsecoll.kernels.gpu import device

        with device.using(self._device.index, torch.cuda.current_stream(self._device).cuda_stream):
            yield

    def mark(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextlib.contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream), self.here():
            yield

    def catch_up(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


HOST = Host()


@functools.cache
def _cuda(index: int) -> Cuda:
    return Cuda(index)


def device_of(tensor: torch.Tensor) -> Host:
    """Where a tensor is.

    Raises:
        TypeError: neither on the CPU nor on a CUDA device, or there without CuPy.
    """
    if tensor.device.type == "cpu":
        return HOST
    if tensor.device.type == "cuda":
        return _cuda(tensor.device.index)
    raise TypeError(f"params: expected tensors on the CPU or a CUDA device, got one on {tensor.device}")
