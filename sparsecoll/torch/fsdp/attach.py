"""`attach`: gives a sharded model a compressor, after checks in which its ranks agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sparsecoll import algorithms
from sparsecoll.algorithms import Algorithm, as_algorithm
from sparsecoll.torch.compressors import FP16, Compressor, NoCompression, TopKCompressor, as_compressor
from sparsecoll.torch.fsdp.checkpoint import Checkpoint
from sparsecoll.torch.fsdp.failures import Failures
from sparsecoll.torch.fsdp.groups import Group, groups_of
from sparsecoll.torch.fsdp.reductions import ShardedReductions
from sparsecoll.torch.reduction.grad_scaler import enabled
from sparsecoll.torch.replica.calls import Options, collective
from sparsecoll.torch.replica.replica import Replica
from sparsecoll.transport import Transport, as_transport
from sparsecoll.transport.all_ranks import allgather, barrier
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.process_groups import is_group
from sparsecoll.transport.progress import completed_future


def attach(
    model: Any,
    replicas: Any = None,
    compressor: str | Compressor | Algorithm = "topk",
    *,
    timeout: float | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    verify: bool | int = 0,
) -> ShardedReductions:
    """Use a compressor to reduce the gradients of a model that is sharded by `torch.distributed.fsdp.fully_shard`.

    With `replicas` this is HSDP: inside a node, gradients are reduce-scattered densely, and each rank then reduces its
    shard over the ranks of the other nodes that have the same one, with the compressor. Without, it is FSDP: gradients
    are reduce-scattered over all ranks with the compressor. Call it on all ranks, after `fully_shard` and before the
    first back-propagation; with `replicas`, parameters are set to those of the first replica.

    Memory, per rank: with a compressor that keeps a residual, two arrays (the residual, and the gradients that become
    the next one) of the size of the shard, with `replicas`; of the size of the whole model, without. They are float32,
    or float64 for gradients in float64.

    Args:
        model: module after `fully_shard`, over one dimension of a mesh.
        replicas: the ranks with the same shard: a one-dimensional DeviceMesh, such as `mesh["replicate"]`, or a
            ProcessGroup; None, the default, if each shard is on one rank.
        compressor: name in `sparsecoll.torch.COMPRESSORS`, a Compressor object, or a sparsecoll.Algorithm object, for
            top k over it (default: "topk"). With `replicas` all but COVAP and sgdtopk; without, "topk" (algo="auto"),
            "fp16" and "none", of which every entry goes straight to the rank that owns its part: 2k(P-1)/P words if
            entries are spread evenly, n(P-1)/2P and n(P-1)/P.
        timeout: seconds to wait for a message before CommunicationError is raised; None, the default, for no limit.
        grad_scaler: the torch.amp.GradScaler of the loop, if there is one: gradients are unscaled before they are added
            to a residual, and values that are not finite are passed on to all ranks, so that it skips the step.
        verify: number of steps after which the bits of all shards are compared between replicas; 0, the default, for
            never, and True for 100.

    Returns:
        ShardedReductions, which has the state to be saved.

    Raises:
        TypeError: The model is not fully sharded, or an argument has a wrong type.
        ValueError: The model is sharded over several dimensions of a mesh, something is attached to it already,
            `replicas` lacks this rank or contains ranks with other shards, or the compressor cannot be used here.
        RuntimeError: torch.distributed is not initialized, or torch is too old.
        CommunicationError: Models or arguments differ between ranks.

    See Also:
        `sparsecoll.torch.HookState`, for DistributedDataParallel.

    >>> mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))  # doctest: +SKIP
    >>> fully_shard(model, mesh=mesh["shard"])  # doctest: +SKIP
    >>> reductions = sparsecoll.torch.fsdp.attach(model, mesh["replicate"], "topk")  # doctest: +SKIP
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("attach needs a process group: call torch.distributed.init_process_group() first")
    groups = groups_of(model)
    if not any(group.shards for group in groups):
        raise ValueError("model: expected trainable parameters, got none")
    node = as_transport(groups[0].shard_group, timeout)
    transport = node if replicas is None else _replicas(replicas, groups, node, timeout)

    def attached() -> ShardedReductions:
        own = _checked(compressor, replicas is not None)
        options, scaler = Options(verify=verify, timeout=timeout), enabled(grad_scaler)
        if replicas is None and options.verify:
            raise ValueError("verify: expected 0 without replicas, which are compared, got another number")
        replica = Replica(transport, None, options)
        ranks = _introduce(replica, node, groups, {**own.signature(), "verify": options.verify})
        checkpoint = Checkpoint(ranks, None if replicas is None else _group(replicas), groups[0].shard_group)
        return ShardedReductions(groups, replica, node, own, checkpoint, scaler)

    reductions = Failures(transport, node, timeout).together("attach", attached)
    reductions.install()
    return reductions


def _checked(compressor: str | Compressor | Algorithm, has_replicas: bool) -> Compressor:
    own = as_compressor(compressor)
    if own.needs_all_buckets:
        raise ValueError(
            f"compressor: expected one that works bucket by bucket, got {own.name!r}, which needs the lengths of all"
            " buckets"
        )
    if isinstance(own, TopKCompressor) and own.clip is not None:
        raise ValueError(
            f"clip: expected None for parameters whose norm no rank knows, got {own.clip}; clip the mean with"
            " torch.nn.utils.clip_grad_norm_"
        )
    return own if has_replicas else scattered(own)


def _replicas(replicas: Any, groups: list[Group], node: Transport, timeout: float | None) -> Transport:
    """Return the transport of the ranks with the same shard; an error on one rank is raised on its node."""

    def connect() -> Transport:
        if not is_group(replicas):
            kind = f"{type(replicas).__module__}.{type(replicas).__qualname__}"
            raise TypeError(f"replicas: expected a one-dimensional DeviceMesh or a ProcessGroup, got {kind}")
        transport = as_transport(replicas, timeout)
        inside = set(dist.get_process_group_ranks(groups[0].shard_group))
        shared = sorted(inside & set(dist.get_process_group_ranks(_group(replicas))))
        if shared != [dist.get_rank()]:
            raise ValueError(
                f"replicas: expected this rank ({dist.get_rank()}) and ranks that other shard groups have, got ranks"
                f" {shared} of this one: pass the other dimension of the mesh"
            )
        return transport

    found = completed_future(connect)
    collective(node, "attach", timeout, lambda _: barrier(node), failed=found.exception())  # type: ignore[arg-type]
    return found.result()


def _introduce(replica: Replica, node: Transport, groups: list[Group], options: dict[str, Any]) -> list[list[int]]:
    """Compare the models of all ranks, set them to the first replica's, and return the global ranks by replica."""
    shards = {shard.name: shard for group in groups for shard in group.shards}
    signature = options | {"shards": node.size, "modules": [len(group.shards) for group in groups]}
    signature |= {"names": list(shards), "sizes": [list(shard.param.shape) for shard in shards.values()]}
    signature["reduce_dtype"] = [str(group.reduce_dtype) for group in groups]

    def compare(call: CollectiveCall) -> list[list[int]]:
        call.signature |= signature
        call.agree(entries=0)
        return allgather(node, np.array([dist.get_rank()])).T.tolist()  # type: ignore[no-any-return]

    inside = collective(node, "attach", replica.options.timeout, compare)
    if replica.transport is node:
        return inside
    values = {shard.name: shard.local for shard in shards.values()}
    frozen = {s.name: s.local for group in groups for s in group.parameters if not s.param.requires_grad}
    replica.introduce(values | frozen, signature | {"shard": node.rank})
    return replica.call("attach", lambda _: allgather(replica.transport, np.array(inside[0]))).tolist()  # type: ignore[no-any-return]


def _group(replicas: Any) -> Any:
    return replicas.get_group() if hasattr(replicas, "get_group") else replicas


EXACT = (algorithms.Auto, algorithms.Allgather)  # the exact sum of what the ranks selected, and nothing more


def scattered(compressor: Compressor) -> Compressor:
    """Return the compressor as one that scatters its mean.

    Raises:
        ValueError: The method has no such form.
    """
    if type(compressor) not in (NoCompression, FP16, TopKCompressor):
        raise ValueError(
            f"compressor: expected 'topk', 'fp16' or 'none' without replicas, got {compressor.name!r}: the other"
            " methods have no reduce-scatter"
        )
    if isinstance(compressor, TopKCompressor) and not isinstance(algo := as_algorithm(compressor.algo), EXACT):
        raise ValueError(f"algo: expected 'auto' without replicas, where sums are scattered, got {algo.name!r}")
    compressor.scatters = True
    return compressor
