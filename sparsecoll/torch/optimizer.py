"""DistributedOptimizer: any torch optimizer, on the mean of all ranks' compressed gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.engine import Engine
from sparsecoll.torch.timeline import Timeline
from sparsecoll.traffic import Traffic
from sparsecoll.transport import as_transport, default_comm

STATE = "sparsecoll"  # key of the library's own part of state_dict


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer: before its step, gradients become their means over all ranks.

        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compressor="topk")

    Gradients are fused into buckets in the order in which they come, and each bucket is compressed and reduced in the
    progress thread while back-propagation goes on (wait-free back-propagation with tensor fusion); `step` waits for
    what is not finished. In the first step the order is learned (rank 0's holds for all), so nothing overlaps yet.
    Parameters are broadcast from rank 0 at the start. A parameter that took part on some ranks only has a zero
    gradient on the others; one that took part on none keeps its gradient None, so that the optimizer skips it.

    Gradient accumulation: all back-propagations of a step but the last inside `no_sync()`. Clipping of the means: call
    `synchronize()`, clip, then `step()`. Clipping of each rank's own gradients: `overlap=False`, clip, then `step()`.

    Args:
        optimizer: of floating-point parameters, on the CPU or (with CuPy) a CUDA device. Half-precision gradients are
            reduced in float32.
        named_parameters: (name, parameter) of all of the optimizer's; every rank the same.
        comm: mpi4py communicator (or the comm of sparsecoll.simulate). None: MPI.COMM_WORLD, or one rank without MPI.
            Between back-propagation and `step` make no other calls on it.
        compressor: a name of `sparsecoll.torch.COMPRESSORS`, or a Compressor object with options.
        bucket_bytes: of gradient in a bucket; None: the whole model in one bucket.
        dense_below: parameters of fewer values are not compressed.
        overlap: False reduces in `step`.
        verify: every so many steps compare the bits of all parameters over the ranks (True: 100; 0: never).
        timeout: seconds to wait for a peer; then CommunicationError. None: for ever, with a warning once a minute.
        timeline: records what happens when.

    Raises:
        ValueError, TypeError: an option or a parameter is invalid; on every rank.
        CommunicationError: ranks disagree (parameters, compressor, options), or bits differ.

    Memory: a flat copy of the gradients and the compressor's state (for error feedback as much again).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        comm: Any = None,
        compressor: str | Compressor = "topk",
        *,
        bucket_bytes: int | None = 25 << 20,
        dense_below: int = 1024,
        overlap: bool = True,
        verify: bool | int = 0,
        timeout: float | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.optimizer = optimizer
        known = {id(p): name for name, p in named_parameters}
        params: dict[str, torch.Tensor] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in known:
                    raise ValueError(
                        "named_parameters: expected all of the optimizer's parameters,"
                        f" one of shape {tuple(p.shape)} is missing"
                    )
                params[known[id(p)]] = p
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ValueError(f"bucket_bytes: expected at least 1 or None, got {bucket_bytes}")
        self._engine = Engine(
            params,
            as_transport(default_comm() if comm is None else comm),
            compressor,
            bucket_bytes=bucket_bytes,
            dense_below=dense_below,
            overlap=overlap,
            verify=100 if verify is True else int(verify),
            timeout=timeout,
            timeline=timeline,
        )
        self._synchronized = False

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.defaults

    @property
    def traffic(self) -> Traffic:
        """Bytes, messages and seconds of this rank so far, per phase; live."""
        return self._engine.transport.traffic

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of this rank so far by kind of work (see `sparsecoll.trace`), and "exposed": waited for in `step`."""
        return self._engine.seconds

    def move(self, comm: Any) -> None:
        """Go on over another communicator, that of `sparsecoll.shrink` after a rank was lost, say; collective on it.

        Residuals are kept; what the lost ranks held in theirs is gone with them. Parameters and the wrapped optimizer's
        tensors become those of the new rank 0, since the step that failed may have been taken by some ranks only.
        """
        tensors = [
            value
            for group in self.param_groups
            for p in group["params"]
            for _, value in sorted(self.optimizer.state.get(p, {}).items())
            if isinstance(value, torch.Tensor)
        ]
        self._engine.move(as_transport(comm), tensors)
        self._synchronized = False

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of back-propagations inside only accumulate."""
        return self._engine.no_sync()

    def synchronize(self) -> None:
        """Wait until gradients are the means; collective. `step` does it where it was not done."""
        if not self._synchronized:
            self._engine.synchronize()
            self._synchronized = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step on all ranks; collective. `closure` evaluates this rank's loss and gradients."""
        if closure is None:
            self.synchronize()
            self._synchronized = False
            return self.optimizer.step()

        def evaluated() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._engine.synchronize()
            return loss

        return self.optimizer.step(evaluated)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(
        self, param_group: dict[str, Any], named_parameters: Iterable[tuple[str, torch.Tensor]] = ()
    ) -> None:
        """As in torch, collective. Parameters without a name here are called group<i>.<j>."""
        number = len(self.optimizer.param_groups)
        self.optimizer.add_param_group(param_group)
        names = {id(p): name for name, p in named_parameters}
        added = self.optimizer.param_groups[-1]["params"]
        self._engine.add({names.get(id(p), f"group{number}.{j}"): p for j, p in enumerate(added)})

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and the compressor's by parameter name.

        Residuals differ between ranks: save one file per rank. Safe for torch.load(weights_only=True).
        """
        return {"optimizer": self.optimizer.state_dict(), STATE: self._engine.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a run on as many ranks stopped, with the same bits; collective.

        Raises:
            CommunicationError: the state was saved by another rank or at another number of ranks (see `redistribute`).
        """
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._engine.load_state_dict(state_dict[STATE])

    def close(self) -> None:
        """Take the hooks off the parameters; they train on their own from then on."""
        self._engine.close()

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("DistributedOptimizer cannot be pickled: save its state_dict()")
