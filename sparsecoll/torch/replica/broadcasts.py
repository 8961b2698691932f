"""Broadcasts of tensors, of an optimizer's state, and of a whole model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from sparsecoll.collectives.options import check_root
from sparsecoll.torch.replica.calls import collective, communicator
from sparsecoll.torch.tensors.model import check_whole, describe, own_part
from sparsecoll.torch.tensors.private import indices_of, values_of
from sparsecoll.transport import Transport, all_ranks
from sparsecoll.transport.call import CollectiveCall

MESSAGE_BYTES = 64 << 20  # of small tensors that are sent together
PLAIN = (bool, int, float, str, type(None))


@torch.no_grad()
def broadcast_tensors(transport: Transport, tensors: Iterable[torch.Tensor], root: int = 0) -> None:
    """Broadcast the values of tensors, several small tensors in one message. Collective."""
    if transport.size == 1:
        return
    groups: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    for t in (part for whole in tensors for part in _parts(own_part(whole))):
        if t.numel():
            lists = groups.setdefault((t.dtype, t.device), [[]])
            if sum(other.nbytes for other in lists[-1]) > MESSAGE_BYTES:
                lists.append([])
            lists[-1].append(t)
    with transport.phase("broadcast"):
        for group in (group for lists in groups.values() for group in lists):
            raw = torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in group]).cpu()
            sent, start = torch.from_numpy(all_ranks.broadcast(transport, raw.numpy(), root)), 0
            for t in group:
                t.copy_(sent[start : start + t.nbytes].view(t.dtype).view(t.shape))
                start += t.nbytes


def _parts(t: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return views of a tensor that are small enough for a message, so that no copy of a long table is needed."""
    if t.nbytes <= MESSAGE_BYTES or not t.is_contiguous():
        return [t]
    return torch.split(t.detach().view(-1), MESSAGE_BYTES // t.element_size())


def _described(value: Any) -> Any:
    """Return a value as JSON: numbers as they are, of a tensor shape, dtype and, if sparse, the stored entries."""
    if torch.is_tensor(value):
        stored = [value.sparse_dim(), values_of(value).shape[0]] if value.is_sparse else []
        dtype, on_cpu = str(value.dtype).removeprefix("torch."), value.device.type == "cpu"
        return {"tensor": [list(value.shape), dtype, on_cpu, *stored]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_described(item) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _described(item) for key, item in value.items()}}
    return value if isinstance(value, PLAIN) else {"other": type(value).__name__}


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of an optimizer's group, also in tuples and in tensors of one element."""
    found = {key: v.item() if torch.is_tensor(v) and v.numel() == 1 else v for key, v in group.items()}
    return {k: v for k, v in found.items() if all(isinstance(x, PLAIN) for x in (v if type(v) is tuple else (v,)))}


def _leveled(p: torch.Tensor, own: Any, roots: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a parameter's state in the structure of the root's (`roots`); append the tensors to fill to `tensors`."""
    if not isinstance(roots, dict):
        return roots
    ((kind, content),) = roots.items()
    if kind == "other":
        return own
    if kind == "dict":
        entries = own if isinstance(own, dict) else {}
        sent = {key: not (isinstance(item, dict) and "other" in item) for key, item in content.items()}
        known = {key: item for key, item in content.items() if key in entries or sent[key]}
        return {key: _leveled(p, entries.get(key), item, tensors) for key, item in known.items()}
    if kind != "tensor":
        mine = own if isinstance(own, (list, tuple)) and len(own) == len(content) else [None] * len(content)
        items = [_leveled(p, one, item, tensors) for one, item in zip(mine, content, strict=True)]
        return tuple(items) if kind == "tuple" else items
    shape, dtype, on_cpu, *stored = content
    device = torch.device("cpu") if on_cpu and not shape else p.device  # of numbers of steps
    new = own if _described(own) == roots else _made(p, shape, getattr(torch, dtype), device, *stored)
    tensors += [indices_of(new), values_of(new)] if stored else [new]
    return new


def _made(p: torch.Tensor, shape: list[int], dtype: torch.dtype, device: Any, *stored: int) -> torch.Tensor:
    """Return a tensor of state of a parameter, to be filled; a coalesced sparse one if entries are `stored`."""
    if not stored and hasattr(p, "to_local") and shape == list(p.shape):
        return torch.zeros_like(p, dtype=dtype, requires_grad=False)
    if not stored:
        return torch.zeros(shape, dtype=dtype, device=device)
    dims, nnz = stored
    indices = torch.zeros(dims, nnz, dtype=torch.int64, device=p.device)
    values = torch.zeros(nnz, *shape[dims:], dtype=dtype, device=p.device)
    return torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, is_coalesced=True, check_invariants=False
    )


def broadcast_optimizer(transport: Transport, optimizer: torch.optim.Optimizer, root: int = 0) -> None:
    """Broadcast an optimizer's state, tensors and numbers, also in lists, and the numbers in its groups. Collective.

    What only other ranks have is removed, as the momentum of a first step that the root has not taken. Objects of other
    types stay as they are on each rank.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for entries in (optimizer.state.get(p, {}) for p in params):
        entries |= {key: v.coalesce() for key, v in entries.items() if torch.is_tensor(v) and v.is_sparse}
    table = {
        "groups": [_numbers(group) for group in optimizer.param_groups],
        "state": [_described(optimizer.state.get(p, {})) for p in params],
    }
    roots = json.loads(bytes(all_ranks.spread(transport, np.frombuffer(json.dumps(table).encode(), np.uint8), root)))
    for group, numbers in zip(optimizer.param_groups, roots["groups"], strict=True):
        for key, value in numbers.items():
            if torch.is_tensor(group.get(key)):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
    tensors: list[torch.Tensor] = []
    for p, entries in zip(params, roots["state"], strict=True):
        if p in optimizer.state or entries.get("dict"):
            optimizer.state[p] = _leveled(p, optimizer.state[p], entries, tensors)
    broadcast_tensors(transport, tensors, root)


@torch.no_grad()
def broadcast(model: torch.nn.Module, comm: Any = None, root: int = 0) -> None:
    """Set the parameters and buffers of a model to those of one rank. Collective.

    Args:
        model: the model, with the same modules on every rank.
        comm: communicator, as in `sparsecoll.allreduce`; None, the default, for the default process group of
            torch.distributed, otherwise MPI.COMM_WORLD.
        root: rank whose values are sent to all (default: 0).

    Raises:
        CommunicationError: On every rank, if models differ in a name, shape or dtype.
    """
    transport = communicator(comm)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def broadcast_all(call: CollectiveCall) -> None:
        check_whole(tensors.values())
        call.signature |= {**describe(tensors), "root": check_root(root, transport)}
        call.agree(entries=0)
        broadcast_tensors(transport, tensors.values(), root)

    collective(transport, "broadcast", None, broadcast_all)
