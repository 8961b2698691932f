"""Private interfaces of torch: what each is used in place of. Those of FSDP2 are in `fsdp/groups.py`.

`tests/torch/test_private.py` has a test named after each function, which fails if torch changes what it uses.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from traceback import walk_stack
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT = "torch.distributed.checkpoint.state_dict"  # torch's module of get_state_dict and set_state_dict
OPTIMIZER = "torch.optim.optimizer"  # torch's module of what calls step() between hooks

# -- tensors


def version(t: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, 0 for inference tensors; in place of comparing its values."""
    return 0 if t.is_inference() else t._version


def values_of(t: torch.Tensor) -> torch.Tensor:
    """Return the stored values of a sparse tensor, or a dense tensor itself; `values()` wants a coalesced one."""
    return t._values() if t.is_sparse else t


def indices_of(t: torch.Tensor) -> torch.Tensor:
    """Return the indices of a sparse tensor; `indices()` wants a coalesced one."""
    return t._indices()


def base_of(t: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor of which one is a view, None for no view; nothing public tells it."""
    return t._base if t._is_view() else None


def is_flat(p: torch.Tensor) -> bool:
    """Return whether this is a flat parameter of FullyShardedDataParallel; in place of its class, which is private."""
    return getattr(p, "_is_flat_param", False)


def has_buffers(module: torch.nn.Module) -> bool:
    """Return whether a module has buffers of its own; in place of `buffers(recurse=False)`, which takes longer."""
    return bool(module._buffers)


# -- back-propagation


def hooks_after(p: torch.Tensor) -> list[int]:
    """Return the ids of the hooks of `register_post_accumulate_grad_hook`, in order; nothing public tells them."""
    return [*(p._post_accumulate_grad_hooks or ())]  # type: ignore[attr-defined]


def backward_number() -> int:
    """Return the number of the back-propagation on this thread, -1 for none; nothing public tells it."""
    return torch._C._current_graph_task_id()


# returns the node that autograd executes on this thread, or None; nothing public tells it
backward_node = torch._C._current_autograd_node


def queue_callback(call: Callable[[], None]) -> None:
    """Call a function when back-propagation ends, after those queued before; in place of a line after `backward()`."""
    Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def at_end_of_backward(owner: Any, call: Callable[[], None]) -> None:
    """Call a function once when the current back-propagation ends. For use in a hook on a gradient.

    Reentrant checkpointing back-propagates within back-propagation; the end is that of the outermost one.
    `backward()` raises what `call` raises.

    Args:
        owner: object for which `call` runs only once per back-propagation, however often this function is called.
    """
    task = backward_number()
    asked = owner.__dict__.setdefault("_backward_tasks", set())
    if task in asked:
        return

    def end() -> None:
        if (node := backward_node()) is None:
            if asked:
                asked.clear()
                call()
            return
        if not (successors := [successor for successor, _ in node.next_functions if successor is not None]):
            at_end_of_backward(owner, call)
            return

        def outside(_: Any) -> None:  # on the outer level
            handle.remove()
            at_end_of_backward(owner, call)

        handle = successors[0].register_prehook(outside)  # where autograd comes next

    queue_callback(end)
    asked.add(task)


def inside_ddp() -> bool:
    """Return whether a DistributedDataParallel runs its forward pass; a public hook would need its model."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is not None


def profiled() -> bool:
    """Return whether a profiler of torch records; in place of spans recorded in vain, which take microseconds."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


# -- process groups


def inner_backends(store: Any, rank: int, size: int, timeout: timedelta) -> dict[str, Any]:
    """Return torch's backends by the type of their devices, of a group that has none; nothing public makes them."""
    gloo = dist.distributed_c10d.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout=timeout)
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":  # torch compares the calls of ranks
        gloo = dist.distributed_c10d._create_process_group_wrapper(gloo, "gloo", store, rank, size, timeout)
    gloo._set_sequence_number_for_group()
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return {"cpu": gloo, "cuda": gloo}
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
    nccl._set_sequence_number_for_group()
    return {"cpu": gloo, "cuda": nccl}


def seconds_of(backend: Any) -> float:
    """Return the timeout of gloo, which users change by a private function of torch; its options tell it."""
    return float(getattr(backend, "wrapped_pg", backend).options._timeout.total_seconds())


def serve_by(group: Any, backends: Mapping[str, Any]) -> None:
    """Let backends serve a group; what makes a group of torch's backends also makes it a known one."""
    kinds = dist.ProcessGroup.BackendType
    for device, backend in backends.items():
        kind = kinds.GLOO if backend is backends["cpu"] else kinds.NCCL
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)


def serve_monitored_barrier(kind: type) -> None:
    """Let torch.distributed.monitored_barrier accept groups of a class, too; it asks for the name "gloo"."""
    original = dist.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        one: Any = group or dist.distributed_c10d.GroupMember.WORLD
        if isinstance(one, kind):
            one.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]
        else:
            original(group, timeout, wait_all_ranks)

    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier


# -- optimizers


def state_dict_hooks(optimizer: torch.optim.Optimizer, moment: str) -> Iterable[Callable[..., Any]]:
    """Return the hooks that `register_MOMENT_hook` has registered; torch calls them only for its own `state_dict`."""
    return getattr(optimizer, f"_optimizer_{moment}_hooks").values()  # type: ignore[no-any-return]


def is_trial_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch.distributed.checkpoint takes this step, for an optimizer without state to make its own.

    Its functions do so with gradients of zero and lr = 0, on all ranks, before they save or load. They expect that
    nothing else comes of it: no step counts, and residuals are not sent. They are found by name on the stack, since
    nothing public tells such a step.
    """
    if any(group.get("lr", 0) != 0 for group in optimizer.param_groups):  # a few optimizers have none
        return False
    frames = (frame for frame, _ in walk_stack(inspect.currentframe()))
    return any(f.f_code.co_name == "_init_optim_state" and f.f_globals.get("__name__") == CHECKPOINT for f in frames)


def is_stepping(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any thread is in step() of an optimizer: torch calls no hook after a step that raises."""
    frames = (frame for last in sys._current_frames().values() for frame, _ in walk_stack(last))
    return any(f.f_globals.get("__name__") == OPTIMIZER and f.f_locals.get("self") is optimizer for f in frames)


def untraced(function: Callable[..., Any]) -> Any:
    """Return a function that torch.compile does not trace; `torch.compiler.disable` would import the compiler.

    C++ code may call it while torch.compile traces, as DDP's reducer does, and it is compiled as a function of its own.
    """
    disabled: list[Any] = []

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return called


def first_post_hook(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> torch.utils.hooks.RemovableHandle:
    """Register a hook after steps before all others of an optimizer, in place of `register_step_post_hook`'s order."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


# -- GradScaler


def is_called_by_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a GradScaler calls step() and leaves the decision to it, as `_step_supports_amp_scaling` asks for.

    It then calls step() after an overflow, too, and sets this attribute meanwhile.
    """
    return "found_inf" in vars(optimizer)


def skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a GradScaler has called step() of a fused optimizer after an overflow, which changes nothing."""
    return float(getattr(optimizer, "found_inf", 0) or 0) > 0


def calling_scaler() -> torch.amp.GradScaler | None:
    """Return the GradScaler that calls the step of an optimizer on this thread, or None; most optimizers never see it.

    It is found on the stack.
    """
    frames, code = walk_stack(inspect.currentframe()), torch.amp.GradScaler.step.__code__
    return next((frame.f_locals["self"] for frame, _ in frames if frame.f_code is code), None)


def scaler_state(scaler: torch.amp.GradScaler, key: int) -> dict[str, Any]:
    """Return what a scaler has recorded of the optimizer with this id since `update()`; nothing public tells it."""
    return scaler._per_optimizer_states.get(key, {})


def check_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Let a scaler check for gradients that are not finite; in place of `unscale_`, which it refuses a second time."""
    scaler._check_inf_per_device(optimizer)


def scale_device(scaler: torch.amp.GradScaler) -> torch.device:
    """Return the device of a scaler's scale; `get_scale()` returns a float."""
    assert scaler._scale is not None
    return scaler._scale.device
