"""Mistakes that would go unnoticed: gradients that DDP reduces as well, and ranks that train on the same samples."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from sparsecoll.transport import Transport
from sparsecoll.transport.collectives import allgather

logger = logging.getLogger(__name__)

CURE = (
    "which would put its own, dense means in place of the compressed ones: leave the model as it is (with Accelerate,"
    " prepare_model(model, evaluation_mode=True)), or keep DistributedDataParallel and a plain optimizer and register"
    " sparsecoll.torch.comm_hook"
)


def refuse_wrapped(model: Any, argument: str) -> None:
    """Raise unless a model is None or a plain module.

    Args:
        argument: that gave the model.

    Raises:
        TypeError: it is something else, or a DistributedDataParallel.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module or None, got {type(model).__name__}")
    if isinstance(model, DistributedDataParallel):
        raise TypeError(f"{argument}: expected a plain model, got a DistributedDataParallel, {CURE}")


def refuse_ddp(*_: Any) -> None:
    """A hook before a model's forward pass: raise if a DistributedDataParallel calls the model.

    Raises:
        RuntimeError: one does.
    """
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None and torch.is_grad_enabled():
        raise RuntimeError(
            f"DistributedOptimizer: expected a plain model, got one inside of a DistributedDataParallel, {CURE}"
        )


def fingerprint(params: Iterable[torch.Tensor]) -> int:
    """Return a number that is equal for equal gradients, and 0 if there are none or all are zero."""
    grads = [p.grad.detach() for p in params if p.grad is not None]
    sums = [float((g._values() if g.is_sparse else g).sum(dtype=torch.float64)) for g in grads]
    return zlib.crc32(np.array(sums).tobytes()) if any(sums) else 0


def warn_if_equal(transport: Transport, digest: int) -> None:
    """Warn on rank 0 if all ranks have the same gradients. Collective; called within a CollectiveCall."""
    digests = allgather(transport, np.array([digest], np.int64))
    if digest and (digests == digest).all() and transport.rank == 0:
        logger.warning(
            "the first gradients have the same bits on all %d ranks: it seems that all of them train on the same"
            " samples. Give each rank its own part of the data, as with DistributedSampler(data, num_replicas=size,"
            " rank=rank), and its own seed",
            transport.size,
        )
