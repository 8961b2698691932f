"""Broadcasts of tensors, of an optimizer's state, and of a whole model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from sparsecoll.torch.calls import collective, communicator
from sparsecoll.torch.tensors import check_whole, describe
from sparsecoll.transport import Transport
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.collectives import broadcast, spread

MESSAGE_BYTES = 64 << 20  # of small tensors that are sent together


@torch.no_grad()
def broadcast_tensors(transport: Transport, tensors: Iterable[torch.Tensor], root: int = 0) -> None:
    """Broadcast the values of tensors, several small tensors in one message. Collective."""
    if transport.size == 1:
        return
    groups: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    for t in (part for whole in tensors for part in _parts(whole)):
        if t.numel():
            lists = groups.setdefault((t.dtype, t.device), [[]])
            if sum(other.nbytes for other in lists[-1]) > MESSAGE_BYTES:
                lists.append([])
            lists[-1].append(t)
    with transport.phase("broadcast"):
        for group in (group for lists in groups.values() for group in lists):
            raw = torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in group]).cpu()
            sent, start = torch.from_numpy(broadcast(transport, raw.numpy(), root)), 0
            for t in group:
                t.copy_(sent[start : start + t.nbytes].view(t.dtype).view(t.shape))
                start += t.nbytes


def _parts(t: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return views of a tensor that are small enough for a message, so that no copy of a long table is needed."""
    if t.nbytes <= MESSAGE_BYTES or not t.is_contiguous():
        return [t]
    return torch.split(t.detach().view(-1), MESSAGE_BYTES // t.element_size())


def _described(value: Any) -> Any:
    """Return shape and dtype of a tensor, with the number of stored entries if it is sparse; a number as it is."""
    if not torch.is_tensor(value):
        return value
    stored = [value.sparse_dim(), value._nnz()] if value.is_sparse else []
    return {"tensor": [list(value.shape), str(value.dtype).removeprefix("torch."), *stored]}


def _made(p: torch.Tensor, shape: list[int], dtype: torch.dtype, *stored: int) -> torch.Tensor:
    """Return a tensor of state of a parameter, to be filled; a coalesced sparse one if entries are `stored`."""
    if not stored:
        return torch.zeros(shape, dtype=dtype, device=p.device if shape else "cpu")
    dims, nnz = stored
    indices = torch.zeros(dims, nnz, dtype=torch.int64, device=p.device)
    values = torch.zeros(nnz, *shape[dims:], dtype=dtype, device=p.device)
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)


def broadcast_optimizer(transport: Transport, optimizer: torch.optim.Optimizer, root: int = 0) -> None:
    """Broadcast an optimizer's state: its tensors and numbers, and the numbers in its parameter groups. Collective.

    What only other ranks have is removed, as the momentum of a first step that the root has not taken.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    plain = (bool, int, float, str, type(None))
    for entries in (optimizer.state.get(p, {}) for p in params):
        entries |= {key: v.coalesce() for key, v in entries.items() if torch.is_tensor(v) and v.is_sparse}
    table = {
        "groups": [{k: v for k, v in g.items() if isinstance(v, plain)} for g in optimizer.param_groups],
        "state": [
            {
                key: _described(v)
                for key, v in optimizer.state.get(p, {}).items()
                if torch.is_tensor(v) or isinstance(v, plain)
            }
            for p in params
        ],
    }
    text = np.frombuffer(json.dumps(table).encode(), np.uint8)
    roots = json.loads(bytes(spread(transport, text, root)))
    for group, numbers in zip(optimizer.param_groups, roots["groups"], strict=True):
        group.update(numbers)
    tensors = []
    for p, known, entries in zip(params, table["state"], roots["state"], strict=True):
        for key in known.keys() - entries.keys():
            del optimizer.state[p][key]
        for key, value in sorted(entries.items()):
            own = optimizer.state[p]
            if not isinstance(value, dict):
                own[key] = value
                continue
            shape, dtype, *stored = value["tensor"]
            if _described(own.get(key)) != value:
                own[key] = _made(p, shape, getattr(torch, dtype), *stored)
            new = own[key]
            tensors += [new._indices(), new._values()] if stored else [new]
    broadcast_tensors(transport, tensors, root)


@torch.no_grad()
def broadcast_model(model: torch.nn.Module, comm: Any = None, root: int = 0) -> None:
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
        call.signature |= {**describe(tensors), "root": int(root)}
        call.agree(entries=0)
        broadcast_tensors(transport, tensors.values(), root)

    collective(transport, "broadcast", None, broadcast_all)
