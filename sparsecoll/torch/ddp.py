"""The compressors as a communication hook of torch's DistributedDataParallel.

DDP reads the annotations of a hook as types: no `from __future__ import annotations` here.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from sparsecoll.agreement import together
from sparsecoll.progress import in_background
from sparsecoll.torch.compressors import COVAP, Compressor, Shared, resolve
from sparsecoll.torch.device import device_of
from sparsecoll.torch.engine import State, restore
from sparsecoll.torch.layout import Layout, residual_dtype
from sparsecoll.transport import as_transport, default_comm


class HookState:
    """What `comm_hook` needs.

    Residuals belong to parameters, not to buckets: nothing is lost when DDP makes its buckets anew.

    Args:
        comm: mpi4py communicator with the ranks of DDP's process group in the same order; None: MPI.COMM_WORLD.
        compressor: a name of `sparsecoll.torch.COMPRESSORS` or a Compressor object.
        named_parameters: the model's, for names in `state_dict`; without, they are numbered as they come.
        timeout: see DistributedOptimizer.
    """

    def __init__(
        self,
        comm: Any = None,
        compressor: str | Compressor = "topk",
        named_parameters: Iterable[tuple[str, torch.Tensor]] = (),
        timeout: float | None = None,
    ) -> None:
        self.transport = as_transport(default_comm() if comm is None else comm)
        self._compressor = resolve(compressor)
        if isinstance(self._compressor, COVAP):
            raise ValueError("compressor: expected another than COVAP, which cuts buckets by the lengths of them all")
        self._timeout = timeout
        self._shared = Shared()
        self._names = {id(p): name for name, p in named_parameters}
        self._bound: dict[int, Compressor] = {}
        self._left: State = {}  # of parameters whose bucket is gone

    def _name(self, p: torch.Tensor) -> str:
        return self._names.setdefault(id(p), str(len(self._names)))

    def of(self, bucket: GradBucket) -> Compressor:
        """The compressor of a bucket, bound to the parameters that it has now; collective when they are new."""
        params = bucket.parameters()
        names = tuple(self._name(p) for p in params)
        index, dtype = bucket.index(), residual_dtype(bucket.buffer().dtype)
        old = self._bound.get(index)
        if old is not None and old.layout.names == names:
            return old
        for compressor in list(self._bound.values()):  # buckets are made anew, all of them
            for kind, entries in compressor.state().items():
                self._left.setdefault(kind, {}).update({name: t.clone() for name, t in entries.items()})
        self._bound.pop(index, None)
        shapes = tuple(tuple(p.shape) for p in params)
        lengths = (0,) * index + (int(bucket.buffer().numel()),)
        compressor = resolve(self._compressor)
        layout = Layout(index, lengths, names, shapes, dtype, device_of(bucket.buffer()))
        with together(self.transport, "bind", self._timeout):
            compressor.bind(layout, self.transport, self._shared, self._timeout)
        restore(compressor, self._left)
        self._bound[index] = compressor
        return compressor

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and other tensors by kind and parameter name, and the steps taken."""
        tensors = {kind: dict(entries) for kind, entries in self._left.items()}
        for compressor in self._bound.values():
            for kind, entries in compressor.state().items():
                tensors.setdefault(kind, {}).update({name: t.clone() for name, t in entries.items()})
        return {"rank": self.transport.rank, "step": self._shared.step, "tensors": tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; thresholds and boundaries are found anew.

        Raises:
            ValueError: the state was saved by another rank.
        """
        if state["rank"] != self.transport.rank:
            raise ValueError(f"state_dict: expected that of rank {self.transport.rank}, got rank {state['rank']}'s")
        self._bound, self._left, self._shared.step = {}, state["tensors"], state["step"]

    def finished(self, bucket: GradBucket) -> None:
        """Count steps."""
        if bucket.is_last():
            self._shared.step += 1


def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `model.register_comm_hook(state, comm_hook)`: the mean of a bucket by a compressor, over MPI.

    DDP wants a process group for its own start-up (gloo will do); gradients go through `state.comm`.
    """
    where = bucket.buffer().device
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[where] if where.type == "cuda" else None)

    device = device_of(bucket.buffer())
    mark = device.mark()

    def job() -> None:
        try:
            with device.after(mark):
                buffer = bucket.buffer()
                compressor = state.of(bucket)
                flat = buffer.to(device.tensors(0, compressor.layout.dtype).dtype)
                compressor.mean(state.transport, device.array(flat))
                state.finished(bucket)
                if flat.data_ptr() != buffer.data_ptr():
                    buffer.copy_(flat)
                future.set_result(buffer)
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]

    in_background(state.transport, job)
    return future
