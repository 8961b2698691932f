"""Saved state of parameters that are shards: DTensors, which torch.distributed.checkpoint saves, and cuts as needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist

from sparsecoll.errors import CommunicationError, NonFiniteError
from sparsecoll.torch.reduction.state import STATE
from sparsecoll.torch.tensors.model import own_part

Path = tuple[Any, ...]


def as_shard(t: Any, p: Any) -> Any:
    """Return values of this rank's part of a parameter as a DTensor, if the parameter is one."""
    if not (hasattr(p, "to_local") and torch.is_tensor(t) and t.shape == own_part(p).shape):
        return t
    return p.from_local(t, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def mesh_of(params: Iterable[Any]) -> Any:
    """Return the device mesh of parameters that are DTensors; None if they are whole."""
    return next((p.device_mesh for p in params if hasattr(p, "to_local")), None)


def place_of(params: Iterable[Any]) -> list[list[int]]:
    """Return the place of this rank in the mesh of the parameters, and the mesh's shape; nothing if they are whole."""
    mesh = mesh_of(params)
    return [] if mesh is None else [list(mesh.get_coordinate()), list(mesh.shape)]


def raise_on_all(error: BaseException | None, mesh: Any) -> None:
    """Raise an error, and on the other ranks of the mesh that one has it. Collective on the mesh, if there is one."""
    if mesh is not None:
        kind = 0 if error is None else 2 if isinstance(error, NonFiniteError) else 1
        worst = torch.tensor([kind], device=mesh.device_type)
        for group in mesh.get_all_groups():
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        if error is None and worst.item():
            cure = "call discard() on all ranks to give up the steps since the last mean"
            raise (NonFiniteError if worst.item() == 2 else CommunicationError)(
                f"mean: expected success on all ranks of this worker, got an error on one with another shard: {cure}"
            )
    if error is not None:
        raise error


def read(
    state: dict[str, Any], checkpoint_id: Any, storage_reader: Any, key: str, mesh: Any, param_at: Callable[[Path], Any]
) -> None:
    """Add to a state what a checkpoint has, in DTensors that are cut as the parameters are. Collective on the mesh.

    Args:
        param_at: returns the parameter to which the tensor at a path in the state belongs.

    Raises:
        ValueError: There is no such checkpoint or key, or a tensor cannot be cut.
    """
    from torch.distributed.checkpoint import FileSystemReader, load  # type: ignore[attr-defined]  # slow to import

    if mesh is not None and mesh.ndim > 1:
        raise ValueError(f"checkpoint_id: expected a mesh of one dimension, got {mesh}: load a file of each rank")
    group = None if mesh is None else mesh.get_group()
    reader, found = FileSystemReader(checkpoint_id) if storage_reader is None else storage_reader, list[Any]([None])
    if group is None or dist.get_rank(group) == 0:
        try:
            found = [reader.read_metadata()]
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
    if group is not None:
        dist.broadcast_object_list(found, group=group, group_src=0)
    if isinstance(found[0], str):
        raise ValueError(f"checkpoint_id: expected a checkpoint of torch.distributed.checkpoint, got {found[0]}")
    stored, replicated = found[0].state_dict_metadata, state[STATE]["replicated"]
    paths = {name: path[1:] for name, path in (found[0].planner_data or {}).items() if path[0] == key}
    if not any(path[0] == STATE for path in paths.values()):
        raise ValueError(f"key: expected one that has the state of a LocalOptimizer in the checkpoint, got {key!r}")
    paths = {name: path for name, path in paths.items() if not _is_of_rank(path, replicated)}
    flat = {name: _empty(stored[name], param_at(path), name) for name, path in paths.items()}
    load(flat, storage_reader=reader, process_group=group, **({} if group else {"no_dist": True}))
    for name, path in paths.items():
        at, before = cast("Any", state), ""
        for part in path[:-1]:
            at = at[part] if isinstance(at, list) else at.setdefault(int(part) if before == "state" else part, {})
            before = part
        at[path[-1]] = flat[name]


def _is_of_rank(path: Path, replicated: Iterable[str]) -> bool:
    """Return whether this part of a state belongs to the shards that were: thresholds and factors are found again."""
    return path[0] == STATE and (path[1] == "buckets" or (path[1] == "tensors" and path[2] in replicated))


def _empty(stored: Any, p: Any, name: str) -> Any:
    """Return memory for a tensor in a checkpoint, as the parameter is cut; None for what is no tensor."""
    if not hasattr(stored, "size"):
        return None
    dtype = stored.properties.dtype
    if hasattr(p, "to_local") and stored.size == p.shape:
        return torch.zeros_like(p, dtype=dtype, requires_grad=False)
    if hasattr(p, "to_local") and stored.size.numel() > 1:
        raise ValueError(
            f"{name}: expected the shape {tuple(p.shape)} of its parameter, got {tuple(stored.size)}, of which parts on"
            " another number of ranks are not known: load a file of each rank"
        )
    return torch.zeros(stored.size, dtype=dtype, device=p.device if p is not None and stored.size == p.shape else "cpu")
