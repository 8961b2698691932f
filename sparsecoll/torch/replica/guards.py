"""Mistakes that would go unnoticed: means that DDP overwrites, equal samples, Adam, momentum twice."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from sparsecoll.torch.compressors import Compressor, StepContext
from sparsecoll.torch.tensors.model import bits_of, own_part
from sparsecoll.torch.tensors.private import inside_ddp, is_trial_step, values_of
from sparsecoll.transport import Transport
from sparsecoll.transport.all_ranks import allgather

logger = logging.getLogger(__name__)

STATES = "checksum of the optimizer's state (load the same one on all ranks)"
NO_MEAN = "Leave it so: with momentum before the compression, there is no mean gradient to clip"
CURE = (
    "which would put its own, dense means in place of the compressed ones: leave the model as it is (with Accelerate,"
    " prepare_model(model, evaluation_mode=True)), or keep DistributedDataParallel and a plain optimizer and register"
    " sparsecoll.torch.comm_hook"
)


def refuse_wrapped(model: Any, argument: str, within: bool = True) -> None:
    """Raise unless a model, passed as `argument`, is None or a plain module; with `within`, all modules in it, too."""
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module or None, got {type(model).__name__}")
    modules = [model] if model is None or not within else model.modules()
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        raise TypeError(f"{argument}: expected a plain model, got a DistributedDataParallel, {CURE}")


def refuse_renormalized(model: torch.nn.Module | None) -> None:
    """Raise if a module of the model changes rows of its parameter in the forward pass, different ones on each rank."""
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    for name, module in () if model is None else model.named_modules():
        if isinstance(module, tables) and module.max_norm is not None:
            raise ValueError(
                f"{type(module).__name__} {name!r}: expected max_norm=None, got {module.max_norm}, which scales rows"
                " that a rank looks up, so that parameters would differ: scale all rows after step() instead, as by"
                " weight.data.renorm_(2, 0, max_norm)"
            )


def refuse_ddp(*_: Any) -> None:
    """A hook before a model's forward pass: raise if a DistributedDataParallel calls the model."""
    if inside_ddp() and torch.is_grad_enabled():
        raise RuntimeError(
            f"DistributedOptimizer: expected a plain model, got one inside of a DistributedDataParallel, {CURE}"
        )


def refuse_steps_outside(wrapper: Any) -> None:
    """Let a step of the wrapped optimizer raise unless the wrapper takes it: the change would not be counted."""
    known = weakref.ref(wrapper)

    def refuse(inner: torch.optim.Optimizer, *_: Any) -> None:
        if (own := known()) is not None and not (own._steps_inside or own._closed or is_trial_step(inner)):
            kind = type(own).__name__
            raise RuntimeError(
                f"step: expected that of {kind}, got that of the optimizer inside: call {kind}.step(), or close() an"
                f" older {kind} first"
            )

    for inner in getattr(wrapper.optimizer, "_optimizers", [wrapper.optimizer]):
        if hasattr(inner, "register_step_pre_hook"):
            inner.register_step_pre_hook(refuse)


def fingerprint(params: Iterable[torch.Tensor]) -> int:
    """Return a number that is equal for equal gradients, and 0 if there are none, or all are zero, or one is NaN."""
    grads = [p.grad.detach() for p in params if p.grad is not None]
    sums = [float(values_of(g).sum(dtype=torch.float64)) for g in grads]
    return zlib.crc32(np.array(sums).tobytes()) if any(sums) and all(map(math.isfinite, sums)) else 0


def warn_if_equal(transport: Transport, digest: int) -> None:
    """Warn on rank 0 if all ranks have the same gradients. Collective; called within a CollectiveCall."""
    digests = allgather(transport, np.array([digest], np.int64))
    if digest and (digests == digest).all() and transport.rank == 0:
        logger.warning(
            "the first gradients have the same sums on all %d ranks: it seems that all of them train on the same"
            " samples. Give each rank its own part of the data, as with DistributedSampler(data, num_replicas=size,"
            " rank=rank), and its own seed",
            transport.size,
        )


def checksum_of(states: Iterable[Mapping[Any, Any]]) -> int:
    """Return a checksum of the numbers and the tensors on this rank in states by name, 0 without any."""
    checksum = 0
    for name, value in (pair for own in states for pair in sorted(own.items(), key=lambda pair: str(pair[0]))):
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if torch.is_tensor(part):
                checksum = zlib.crc32(bits_of(values_of(own_part(part))), zlib.crc32(str(name).encode(), checksum))
            elif isinstance(part, (bool, int, float)):
                checksum = zlib.crc32(f"{name} {float(part)}".encode(), checksum)
    return checksum


def checksum_of_state(optimizer: torch.optim.Optimizer) -> int:
    """Return the checksum of an optimizer's state."""
    return checksum_of(optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"])


@contextlib.contextmanager
def undoing(*optimizers: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager of loading: what raises leaves optimizers with their states and groups."""
    inside = [one for own in optimizers for one in getattr(own, "_optimizers", ())]
    kept = [(o, o.state, o.param_groups) for o in (*optimizers, *inside) if isinstance(o, torch.optim.Optimizer)]
    try:
        yield
    except Exception:
        for one, state, groups in kept:
            one.state, one.param_groups = state, groups
        raise


def warn_of_state(optimizer: torch.optim.Optimizer, transport: Transport) -> None:
    """Warn on rank 0 if an optimizer has taken steps, or loaded them, before it is wrapped."""
    if transport.rank == 0 and any(state and state.get("step", 1) for state in optimizer.state.values()):
        logger.warning(
            "%s has state before it is wrapped. If it comes from a checkpoint, wrap the optimizer first and call"
            " load_state_dict() of the wrapper: residuals in a checkpoint that the plain optimizer loads are lost",
            type(optimizer).__name__,
        )


def warn_of_adam(optimizer: torch.optim.Optimizer, compressor: Compressor) -> None:
    """Warn of optimizers that divide a gradient by its own size, if most of its entries come late and added up.

    SparseAdam takes sparse gradients only, whose rows are summed exactly.
    """
    if compressor.sends_rarely and "betas" in optimizer.defaults and not isinstance(optimizer, torch.optim.SparseAdam):
        name = type(optimizer).__name__
        logger.warning(
            "%s with %s: gradients that have added up in the residual are sent as one large value, which %s divides by"
            " its own size, so that the model learns little. Use QSGD(4) or 'fp16', LocalOptimizer, which compresses"
            " the updates of %s, or torch.optim.SGD with momentum= in the compressor",
            compressor.name,
            name,
            name,
            name,
        )


def warn_of_momentum(optimizer: torch.optim.Optimizer, compressor: Compressor, tables: Collection[int] = ()) -> None:
    """Warn if a momentum acts twice: the compressor has one, too, or entries wait in its residual for many steps.

    Args:
        optimizer: its attribute `momentum_of`, if any, has the class and the option to which its momentum belongs.
        tables: ids of parameters that do not get the momentum of the compressor.
    """
    own = getattr(compressor, "momentum", 0.0)
    groups = (group for group in optimizer.param_groups if any(id(p) not in tables for p in group["params"]))
    others = [group["momentum"] for group in groups if group.get("momentum", 0.0)]
    if own and others:
        whose, option = getattr(optimizer, "momentum_of", (type(optimizer).__name__, "momentum"))
        rise = 1 / (1 - others[0]) if others[0] < 1 else math.inf
        logger.warning(
            f"{compressor.name} has a momentum of {own}, and {whose} one of {others[0]}: gradients get both, as if the"
            f" learning rate were {rise:.2g} times as large. Use {option}=0 in {whose}, or momentum=0 in the compressor"
        )
    elif others and own == 0 and compressor.sends_rarely and not hasattr(optimizer, "momentum_of"):
        logger.warning(
            "%s with momentum=%s in %s: entries that wait to be sent add up, which acts like momentum, too, so that"
            " models learn worse. Pass no compressor or algo (the default has the momentum), or momentum=None to the"
            " compressor; with DDP's hook and FSDP, use 'nesterovtopk' and SGD without momentum at three times its"
            " learning rate",
            compressor.name,
            others[0],
            type(optimizer).__name__,
        )


def warn_of_clipping(compressor: Compressor) -> None:
    """Warn that means have been changed that are no gradients any more."""
    logger.warning(
        "gradients were changed between backward() and step(), as clipping does: with %s they have momentum, and what"
        " several steps have added up, so that their norm is another one than without compression. Pass overlap=False,"
        " so that clipping acts on each rank's own gradients before they are compressed",
        compressor.name,
    )


@functools.cache
def warn_of_combined(rank: int) -> None:
    """Warn, once, that gradients of several back-propagations seem to be combined, of which the last alone counts."""
    logger.log(
        logging.DEBUG if rank else logging.WARNING,
        "p.grad was replaced before step(), after a zero_grad() that has thrown gradients away: if gradients of several"
        " back-propagations are combined (PCGrad, clipping by sample), pass overlap=False. Otherwise residuals lose"
        " what all but the last one have not sent",
    )


def warn_of_momentum_of_rows(name: str, momentum: float, context: StepContext) -> None:
    """Warn once of a parameter with sparse gradients that has no momentum, as the compressor's does not apply to it."""
    if context.warned or (context.momenta is not None and any(context.momenta([name]))):
        return
    context.warned = True
    logger.warning(
        "the momentum of %s in the compressor is not applied to the sparse gradient of %r: give this table a parameter"
        " group of its own with momentum= in the optimizer, which applies it to the mean, or make it with"
        " Embedding(sparse=False)",
        momentum,
        name,
    )
