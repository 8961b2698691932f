"""The state of a sharded model's residuals as DTensors, which torch.distributed.checkpoint saves and reshards.

A residual is one tensor for all replicas: its first dimension counts them, the others are those of the parameter,
sharded as the parameter is. What is conserved if their number changes is the sum over the replicas, divided by it.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, load  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard as ShardPlacement, zeros

from sparsecoll.torch.fsdp.groups import Shard
from sparsecoll.torch.reduction.state import Tensors
from sparsecoll.transport import Transport

Placements = tuple[Any, ...]
logger = logging.getLogger(__name__)


class Checkpoint:
    """Converts saved state of buckets to DTensors and back.

    Args:
        ranks: global ranks, a list for each replica with those that have its shards, in order.
        replicas: process group of the ranks with the same shard; None if the mean is scattered, so that each rank has a
            residual for all parts.
        shards: process group of the ranks of a replica.
    """

    def __init__(self, ranks: list[list[int]], replicas: Any, shards: Any) -> None:
        self._ranks, self._replicas, self._shards, self._scattered = ranks, replicas, shards, replicas is None
        self._owners = len(ranks[0] if self._scattered else ranks)  # residuals of each parameter
        self._meshes: dict[tuple[str, bool], DeviceMesh] = {}

    def _mesh(self, device: str, whole: bool) -> DeviceMesh:
        """Return the mesh of all ranks, or of this replica's."""
        key = device, whole and not self._scattered
        if key not in self._meshes and key[1]:
            ranks, names = torch.tensor(self._ranks, dtype=torch.int, device="cpu"), ("replicate", "shard")
            groups = [self._replicas, self._shards]
            self._meshes[key] = DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=names)
        elif key not in self._meshes:
            self._meshes[key] = DeviceMesh.from_group(self._shards, device)
        return self._meshes[key]

    def _placements(self, shard: Shard) -> Placements:
        first = ShardPlacement(0)
        return (first,) if self._scattered else (first, ShardPlacement(shard.dim + 1))

    def _parts_of(self, shard: Shard) -> dict[str, int]:
        """Return the parts of a parameter that this rank has a residual for: name in the layout -> size."""
        if not self._scattered:
            return {shard.name: shard.shape[shard.dim]}
        parts = len(self._ranks[0])
        return dict(zip(shard.names(parts), shard.sizes(parts), strict=True))

    # -- from the state of buckets

    def saved(self, state: Mapping[str, Any], shards: Sequence[Shard]) -> dict[str, Any]:
        """Return the state of all buckets, in this rank's part of DTensors."""
        known = {shard.name: shard for shard in shards}
        tensors: dict[str, dict[str, DTensor]] = {}
        for kind, entries in state["tensors"].items():
            own: dict[str, DTensor] = {}
            if kind in state["replicated"]:
                for name, t in entries.items():
                    mesh = self._mesh(t.device.type, whole=False)
                    own[name] = _dtensor(t, mesh, (ShardPlacement(0),), (mesh.size(), *t.shape))
            for name, shard in known.items():
                parts = self._parts_of(shard)
                if kind in state["replicated"] or entries.keys().isdisjoint(parts):  # it has never been trained
                    continue
                t = torch.cat([entries[part].narrow(shard.dim, 0, size) for part, size in parts.items()], shard.dim)
                mesh, size = self._mesh(t.device.type, whole=True), (self._owners, *shard.param.shape)
                own[name] = _dtensor(t, mesh, self._placements(shard), size)
            if own:
                tensors[kind] = own
        buckets = {str(torch.distributed.get_rank()): json.dumps(state["buckets"])}
        return {"compressor": state["compressor"], "step": state["step"], "tensors": tensors, "buckets": buckets}

    # -- to the state of buckets

    def loaded(self, state: Mapping[str, Any], shards: Sequence[Shard], transport: Transport) -> dict[str, Any]:
        """Return the state of this rank's buckets.

        Raises:
            ValueError: The state lacks something, or is of other parameters.
        """
        known: dict[str, Shard] = {shard.name: shard for shard in shards}
        tensors: Tensors = {}
        for kind, entries in state["tensors"].items():
            own = tensors.setdefault(kind, {})
            for name, t in entries.items():
                if name not in known:
                    raise ValueError(f"state_dict: expected names of parameters, got {name!r}")
                if t.ndim == known[name].param.ndim + 1 and t.shape[1:] == known[name].param.shape:
                    own.update(self._parts(t, known[name]))
                else:
                    own[name] = t.to_local()[0]
        buckets = json.loads(state["buckets"].get(str(torch.distributed.get_rank()), "[]"))
        new: dict[str, Any] = {"rank": transport.rank, "size": transport.size, "order": [], "replicated": []}
        return new | {"compressor": state["compressor"], "step": state["step"], "tensors": tensors, "buckets": buckets}

    def _parts(self, t: DTensor, shard: Shard) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parts of a parameter's residual by the names of the layout, padded."""
        rows = t.to_local()
        own = rows[0] if rows.shape[0] == 1 else rows.sum(0)
        if t.shape[0] != self._owners:
            own = own * (self._owners / t.shape[0])
        parts = self._parts_of(shard)
        for name, part in zip(parts, torch.split(own, list(parts.values()), shard.dim), strict=True):
            whole = part.new_zeros(shard.padded)
            whole.narrow(shard.dim, 0, part.shape[shard.dim]).copy_(part)
            yield name, whole

    # -- from a checkpoint of any number of ranks

    def read(
        self,
        state: Mapping[str, Any],
        shards: Sequence[Shard],
        checkpoint_id: Any,
        storage_reader: Any,
        key: str,
        together: Callable[[str, Callable[[], Any]], Any],
    ) -> dict[str, Any]:
        """Return the state in a checkpoint, with residuals of as many replicas as it has.

        Args:
            together: calls a function, and raises on all ranks what it raises on one.

        Raises:
            ValueError: It is not there, or of other parameters or another compressor.
        """

        def opened() -> tuple[Any, dict[str, Any]]:
            reader = FileSystemReader(checkpoint_id) if storage_reader is None else storage_reader
            metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
            if f"{key}.compressor" not in metadata:
                raise ValueError(f"key: expected one that the checkpoint has, got {key!r}")
            return reader, metadata

        reader, metadata = together("load", opened)  # before each call of torch, in which ranks wait for each other
        about: dict[str, Any] = {key: {"compressor": "", "step": 0}}

        def read(what: dict[str, Any]) -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                load(what, storage_reader=reader, no_dist=True)  # other ranks of the job may not have this model

        together("load", partial(read, about))
        fitting = partial(self._fitting, state, shards, metadata, key, about[key]["compressor"])
        template: dict[str, Any] = together("load", fitting)
        together("load", partial(read, {key: template}))
        return template

    def _fitting(
        self, state: Mapping[str, Any], shards: Sequence[Shard], metadata: Mapping[str, Any], key: str, saved: str
    ) -> dict[str, Any]:
        """Return a state to be filled, with tensors of the sizes that they have in a checkpoint; see `read`."""
        method, template = state["compressor"], self.saved(state, shards)
        if saved.partition("(")[0] != method.partition("(")[0]:
            raise ValueError(f"checkpoint: expected the state of compressor {method}, got that of {saved}")
        ranks = {name.rpartition(".")[2] for name in metadata if name.startswith(f"{key}.buckets.")}
        known: dict[str, Shard] = {shard.name: shard for shard in shards}
        missing: dict[str, str] = {}
        same = ranks == {str(rank) for part in self._ranks for rank in part}
        for kind in state["tensors"]:
            entries, replicated = template["tensors"].setdefault(kind, {}), kind in state["replicated"]
            for name, shard in known.items():
                own, stored = entries.pop(name, None), metadata.get(f"{key}.tensors.{kind}.{name}")
                if stored is None:
                    if own is not None and shard.param.requires_grad and not replicated:  # else of another shape
                        missing.setdefault(name, kind)
                elif own is not None and stored.size == own.shape:
                    entries[name] = own
                elif not replicated and stored.size[1:] == shard.param.shape:
                    entries[name] = self._zeros(stored, shard, whole=True)
                    same = same and stored.size[0] == self._owners
                elif replicated and own is None and saved == method and stored.size[0] == len(self._ranks[0]):
                    entries[name] = self._zeros(stored, shard, whole=False)  # of a layer that is frozen here
        if missing:
            first = f"{key}.tensors."
            names = {name.removeprefix(first).partition(".")[2] for name in metadata if name.startswith(first)}
            self._begin_anew(missing, names - (known.keys() - missing.keys()))
        if not same:
            template["buckets"] = {}
        return template

    def _begin_anew(self, missing: Mapping[str, str], others: set[str]) -> None:
        """Warn of parameters of which a checkpoint has no state, or raise if it has `others` or a part of the state.

        Args:
            missing: a kind of state by name of the parameter.
        """
        if others:
            name, kind = next(iter(missing.items()))
            raise ValueError(f"checkpoint: expected {kind} of {name!r}, got none")
        if torch.distributed.get_rank() == self._ranks[0][0]:
            names = ", ".join(map(repr, missing))
            logger.warning("checkpoint: expected state of %s, got none, as of frozen layers: it begins anew", names)

    def _zeros(self, stored: Any, shard: Shard, whole: bool) -> DTensor:
        """Return zeros of the size and dtype of a tensor in a checkpoint, over all ranks or over this replica's."""
        mesh = self._mesh(shard.local.device.type, whole)
        placements = self._placements(shard) if whole else (ShardPlacement(0),)
        return zeros(tuple(stored.size), dtype=stored.properties.dtype, device_mesh=mesh, placements=placements)


def _dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: Placements, size: tuple[int, ...]) -> DTensor:
    stride = tuple(torch.empty(size, device="meta").stride())
    part = local.unsqueeze(0).contiguous()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(size), stride=stride)
