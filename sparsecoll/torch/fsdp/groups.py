"""The groups of parameters that FSDP2 reduces together. All that the adapter knows of FSDP2's internals is here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

from sparsecoll.collectives.options import CallOptions
from sparsecoll.collectives.reduce_scatter import reduce_scatter_vectors
from sparsecoll.torch.tensors.layout import Layout, device_of, residual_dtype
from sparsecoll.torch.tensors.private import hooks_after
from sparsecoll.transport import Transport
from sparsecoll.vector import DenseVector

WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")  # what torch.compile and checkpointing add to names


@dataclass(frozen=True)
class Shard:
    """The part of one parameter that is on this rank.

    Attributes:
        name: of the parameter.
        param: what the optimizer updates, a DTensor.
        dim: dimension in which the parameter is divided.
        shape: shape of this rank's part.
        padded: shape of the largest part, to which gradients are padded.
    """

    name: str
    param: torch.Tensor
    dim: int
    shape: tuple[int, ...]
    padded: tuple[int, ...]

    @property
    def local(self) -> torch.Tensor:
        """The values on this rank."""
        return self.param.to_local().detach()  # type: ignore[attr-defined,no-any-return]

    def sizes(self, parts: int) -> list[int]:
        """Return the sizes of all parts in dimension `dim`, as torch.chunk divides it."""
        whole, most = self.param.shape[self.dim], self.padded[self.dim]
        return [max(0, min(most, whole - most * part)) for part in range(parts)]

    def names(self, parts: int) -> list[str]:
        """Return the names of all parts in a layout of `parts` ranks."""
        return [self.name] if parts == 1 else [f"{self.name} (part {i})" for i in range(parts)]


class Group:
    """The parameters of one `fully_shard` call: FSDP gathers them together, and reduces their gradients together.

    Args:
        names: name of each module of the model, by id.
    """

    def __init__(self, module: Any, names: dict[int, str]) -> None:
        self.module, self._group = module, module._get_fsdp_state()._fsdp_param_groups[0]
        infos = [p._module_info for p in self._group.fsdp_params]
        self._names = [WRAPPERS.sub("", f"{names[id(info.module)]}.{info.param_name}".lstrip(".")) for info in infos]

    def lay_out_all(self, hook: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        """Let torch reduce zeros for all trainable parameters without a gradient, and for no others.

        It decides by what was trainable in the last forward pass, and leaves gradients, and zeros, of the parameters'
        dtype beside accumulated ones, which may have another. `hook` is that of `Failures`.
        """
        group, post_backward = self._group, self._group.post_backward
        self.module.set_reduce_scatter_unused_params(True, recurse=False)

        def prepare() -> None:
            params = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
            for p in params if group.is_sharded else ():
                p._unsharded_param.requires_grad_(p.sharded_param.requires_grad)
            if group.reduce_grads and any(p.unsharded_accumulated_grad is not None for p in params):
                for p in (p for p in params if p.unsharded_accumulated_grad is None):
                    own, grad = p._unsharded_param, p._unsharded_param.grad
                    if own.requires_grad or grad is not None:
                        grad, own.grad = torch.zeros_like(own) if grad is None else grad, None
                        p.unsharded_accumulated_grad = grad.to(p.reduce_dtype)

        prepared = hook(prepare)
        group.post_backward = lambda *args: (prepared(), post_backward(*args))[1]  # type: ignore[func-returns-value]

    @property
    def parameters(self) -> list[Shard]:
        """All parameters, those that are not trained among them."""
        return [
            Shard(
                name, p.sharded_param, p.fsdp_placement.dim, tuple(p.sharded_size), tuple(p.padded_sharded_param_size)
            )
            for name, p in zip(self._names, self._group.fsdp_params, strict=True)
        ]

    @property
    def shards(self) -> list[Shard]:
        """The trainable parameters, in the order in which their gradients are laid out."""
        return [shard for shard in self.parameters if shard.param.requires_grad]

    @property
    def shard_group(self) -> Any:
        """The process group over which parameters are sharded."""
        return self._group.mesh_info.shard_process_group

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of the gradients that are reduced."""
        policy = self._group.mp_policy
        own = (p.sharded_param.dtype for p in self._group.fsdp_params if p.sharded_param.requires_grad)
        return policy.reduce_dtype or policy.param_dtype or next(own, torch.float32)

    def reads_at_once(self, values: torch.Tensor) -> bool:
        """Return whether torch computes with reduced gradients before back-propagation has ended.

        Otherwise it only makes views of them, which may be written until then.
        """
        group = self._group
        as_they_are = values.device.type == "cpu" and values.dtype in (torch.float32, torch.bfloat16)
        if not as_they_are or values.dtype != group._orig_dtype or group.force_sum_reduction_for_comms:
            return True
        return any(
            p.sharded_param.grad is not None or p.offload_to_cpu or hooks_after(p.sharded_param)
            for p in group.fsdp_params
        )

    def divisor(self, values: torch.Tensor) -> float:
        """Return the number by which torch divides gradients after they have been reduced.

        It is 1 unless torch sums instead of averaging: for `values` of float16 or float64, which it also divides by a
        part of the number of ranks before, and with `set_force_sum_reduction_for_comms`.
        """
        group = self._group
        given = values.dtype, values.device.type, group.gradient_divide_factor, group.force_sum_reduction_for_comms
        _, after, *_ = _get_gradient_divide_factors(self.shard_group, None, *given)
        return after or 1.0

    def factor(self, replicas: int) -> float:
        """Return by what the mean over replicas is to be multiplied: torch sums with `set_gradient_divide_factor`."""
        return 1.0 if self._group.gradient_divide_factor is None else float(replicas)

    def layout(self, index: int, lengths: tuple[int, ...], parts: int) -> Layout:
        """Return the layout of the gradients of `parts` ranks, one after the other, as FSDP lays them out."""
        shards = self.shards
        names = [name for part in zip(*(shard.names(parts) for shard in shards), strict=True) for name in part]
        shapes = [shard.padded for _ in range(parts) for shard in shards]
        whole = shards[0].local if shards else torch.empty(0, device="cpu")
        return Layout(index, lengths, tuple(names), tuple(shapes), residual_dtype(self.reduce_dtype), device_of(whole))

    def padding(self, views: Mapping[str, torch.Tensor], parts: int) -> Iterator[torch.Tensor]:
        """Yield views of the padding in a flat tensor of `layout`, whose parameters are the named `views`."""
        for shard in self.shards:
            sizes = [shard.shape[shard.dim]] if parts == 1 else shard.sizes(parts)
            for name, size in zip(shard.names(parts), sizes, strict=True):
                if size < shard.padded[shard.dim]:
                    yield views[name].narrow(shard.dim, size, shard.padded[shard.dim] - size)

    def length(self, parts: int) -> int:
        """Return the number of values in `layout`."""
        return parts * sum(torch.Size(shard.padded).numel() for shard in self.shards)


def groups_of(model: Any) -> list[Group]:
    """Return the groups of a model, in the order of its modules.

    Raises:
        TypeError: The model is not fully sharded.
        ValueError: It is sharded in a way that cannot be served, or other code reduces its gradients.
    """
    if not isinstance(model, torch.nn.Module) or isinstance(model, FullyShardedDataParallel):
        kind = type(model).__name__
        raise TypeError(f"model: expected a module after torch.distributed.fsdp.fully_shard(module), got a {kind}")
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise RuntimeError(f"torch: expected 2.13 or later, got {torch.__version__}, whose FSDP lacks what is needed")
    if not (sharded := [module for module in model.modules() if isinstance(module, FSDPModule)]):
        raise TypeError(
            "model: expected one after torch.distributed.fsdp.fully_shard(model), got one that is not sharded"
        )
    names = {id(module): name for name, module in model.named_modules()}  # each module once
    states = {id(module._get_fsdp_state()): module for module in reversed(sharded)}  # several may have one state
    kept = [module for module in sharded if states[id(module._get_fsdp_state())] is module]
    for module in kept:
        if len(module._get_fsdp_state()._fsdp_param_groups) > 1:
            raise ValueError(
                f"model: expected one mesh for all parameters of a module, got several in {names[id(module)]!r}"
            )
    groups = [Group(module, names) for module in kept if module._get_fsdp_state()._fsdp_param_groups]
    for group in groups:
        group.module.reshard()  # a forward pass may have left other parameters, with values of before
    _check(model, groups)
    return groups


def _check(model: torch.nn.Module, groups: list[Group]) -> None:
    for group in groups:
        where = group.module._get_fsdp_state()._fsdp_param_groups[0]
        if not hasattr(where.mesh_info, "shard_process_group"):
            raise TypeError(
                "model: expected one after fully_shard(model), got one whose parameters are only replicated"
            )
        if where.mesh_info.replicate_mesh_dim is not None:
            raise ValueError(
                "model: expected one that is sharded over one dimension of a mesh, got HSDP's two, over which torch"
                " sums gradients densely: call fully_shard(module, mesh=mesh['shard']) and pass"
                " replicas=mesh['replicate']"
            )
        if where._all_reduce_hook is not None or type(where._reduce_scatter_comm).__name__ != "DefaultReduceScatter":
            raise ValueError("model: expected one that nothing is attached to, got one with a hook or a reduce-scatter")
    shards = [shard for group in groups for shard in group.shards]
    meshes = {tuple(dist.get_process_group_ranks(group.shard_group)) for group in groups}
    if len(meshes) != 1 or any(shard.param.device_mesh.ndim != 1 for shard in shards):  # type: ignore[attr-defined]
        raise ValueError(
            "model: expected all parameters on one mesh of one dimension, got several meshes or dimensions"
        )
    known = {id(shard.param) for shard in shards}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in known:
            raise ValueError(
                f"model: expected all trainable parameters to be sharded, got {name!r}, which would not be reduced:"
                " call fully_shard(model) last, on the whole model"
            )


class ReduceScatter:
    """A reduce-scatter in place of torch's, as `FSDPModule.set_custom_reduce_scatter` takes it.

    Args:
        reduce: called with the gradients of all parts, the memory for this rank's, and the factor of their mean.
        memory: returns memory for that many values of a dtype, or None for any.
    """

    def __init__(
        self,
        reduce: Callable[[torch.Tensor, torch.Tensor, float], None],
        memory: Callable[[int, torch.dtype], torch.Tensor | None] = lambda size, dtype: None,
    ) -> None:
        self._reduce, self._memory = reduce, memory

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a message, as torch asks for it: first for all parts, then for this rank's."""
        memory = self._memory(torch.Size(size).numel(), dtype)
        return torch.empty(*size, dtype=dtype, device=device) if memory is None else memory

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Reduce; `op` is AVG or SUM."""
        kind = getattr(op, "op", op)
        if kind not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError(
                "set_gradient_divide_factor needs set_force_sum_reduction_for_comms(True), because a reduce-scatter of"
                " sparsecoll sums or averages"
            )
        self._reduce(input_tensor, output_tensor, 1.0 if kind == dist.ReduceOp.AVG else float(group.size()))


def reduce_scatter_tensors(
    transport: Transport, values: torch.Tensor, out: torch.Tensor, factor: float, timeout: float | None
) -> None:
    """Write this rank's region of factor * the mean of all ranks' values to `out`; sums are float32. Collective."""
    half = values.dtype == torch.bfloat16  # which NumPy lacks
    device = device_of(values)
    vector = DenseVector(device.array(values.float() if half else values))
    options = CallOptions(timeout=timeout, nonfinite="pass", value_dtype="bfloat16" if half else None)
    reduction = transport.in_order(lambda: reduce_scatter_vectors(transport, vector, options))
    assert isinstance(reduction.value, DenseVector)
    total = device.tensor(reduction.value.values)
    out.copy_(total if factor == transport.size else total / (transport.size / factor))
