"""Saved state: tensors by kind and parameter name, and what they belong to, in one format; and files of it."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsecoll.errors import CommunicationError
from sparsecoll.torch.compressors import Compressor
from sparsecoll.torch.tensors.model import own_part
from sparsecoll.transport import Transport

STATE = "sparsecoll"  # key of the library's own part of a state_dict, which has at least these keys
INNER = "sparsecoll_inner"  # key of that of the wrapped optimizer, if it has one, too
LOCAL, MOVED = "sparsecoll_local", ("shared", "own")  # key of LocalOptimizer's, and of tensors in it
KEYS = frozenset({"rank", "size", "compressor", "replicated", "step", "order", "tensors", "buckets"})
UNFILLED = "dcp.load fills only what a new optimizer has; use sparsecoll.torch.save and load, on each rank"
UNNAMED = ": pass the model to HookState, both where the state is saved and where it is loaded"
Tensors = dict[str, dict[str, torch.Tensor]]


def collect(compressors: Iterable[Compressor], parked: Tensors) -> Tensors:
    """Return copies of the tensors of compressors, and `parked`, those of parameters that are in no bucket."""
    tensors: Tensors = {kind: dict(entries) for kind, entries in parked.items()}
    for compressor in compressors:
        for kind, entries in compressor.state().items():
            tensors.setdefault(kind, {}).update({name: t.detach().clone() for name, t in entries.items()})
    return tensors


def joined(tensors: Tensors, others: Tensors) -> Tensors:
    """Return the tensors of both; those of `others` where both have one of a kind and name."""
    return {kind: tensors.get(kind, {}) | others.get(kind, {}) for kind in tensors | others}


def restore(compressors: Iterable[Compressor], tensors: Tensors) -> Tensors:
    """Copy saved tensors into compressors; return those of parameters that no compressor has."""
    left = {kind: dict(entries) for kind, entries in tensors.items()}
    for compressor in compressors:
        own = {kind: set(entries) & set(left.get(kind, ())) for kind, entries in compressor.state().items()}
        compressor.load_state({kind: {name: left[kind].pop(name) for name in names} for kind, names in own.items()})
    return {kind: entries for kind, entries in left.items() if entries}


def check(
    state: Mapping[str, Any], transport: Transport, params: Mapping[str, torch.Tensor], compressor: Compressor
) -> None:
    """Raise unless a saved state is this rank's, of these parameters and this compressor.

    Raises:
        CommunicationError: it is another rank's, or of another number of ranks.
        ValueError: it is of other parameters or another compressor.
    """
    check_keys(state)
    if state.get("filled") and not state["tensors"]:
        raise ValueError(f"state_dict: expected the residuals that were saved, got none: {UNFILLED}")
    rank, size, method = transport.rank, transport.size, compressor.describe()
    if (state["rank"], state["size"]) != (rank, size):
        other = "sparsecoll.torch.redistribute makes it of all ranks' files"
        cure = "load the file that this rank saved" if state["size"] == size else other
        raise CommunicationError(
            f"state_dict: expected the one of rank {rank} of {size}, got that of rank {state['rank']} of"
            f" {state['size']}; {cure}"
        )
    saved = state["compressor"]
    if saved.partition("(")[0] != method.partition("(")[0]:
        raise ValueError(f"state_dict: expected the state of compressor {method}, got that of {saved}")
    for kind, entries in state["tensors"].items():
        for name, t in entries.items():
            if name not in params:
                cure = "" if params and not name.isdigit() else UNNAMED
                raise ValueError(f"state_dict: expected names of parameters, got {name!r}{cure}")
            expected = compressor.state_shape(kind, tuple(params[name].shape))
            if expected is not None and tuple(t.shape) != expected:
                text = f"state_dict: {kind} of {name!r}: expected shape {expected}, got {tuple(t.shape)}"
                if kind in compressor.replicated_state:
                    kinds = " and ".join(map(repr, sorted(compressor.replicated_state)))
                    text += (
                        f" of {saved}, and this is {method}: use the options with which it was saved, or delete {kinds}"
                        " from its 'tensors' on all ranks, which begins with new ones"
                    )
                raise ValueError(text)


def check_keys(state: Any) -> None:
    """Raise unless a state has what `state_dict` of the adapter saves."""
    if missing := KEYS - set(state if isinstance(state, Mapping) else ()):
        raise ValueError(f"state_dict: expected one of sparsecoll.torch, got one without {min(missing)!r}")


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Return tensors under new names of parameters (`names`: old -> new), without those that have no new name."""
    return {kind: {names[name]: t for name, t in entries.items() if name in names} for kind, entries in tensors.items()}


def renamed_state(state: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a saved state under new names, without what belongs to parameters that have no new name."""
    lists = {key: [names[name] for name in state.get(key, ()) if name in names] for key in ("order", "rows", "dense")}
    buckets = [[[names[name] for name in own], text] for own, text in state["buckets"] if names.keys() >= set(own)]
    return {**state, **lists, "tensors": renamed(state["tensors"], names), "buckets": buckets}


def redistribute(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Convert saved states to another number of ranks.

    The residual of rank i goes to the new rank i mod `size`, multiplied by size / old size. Since an update is the mean
    over the ranks, the residuals then move the parameters as far as they would have before. Other tensors that belong
    to a rank (velocities) are treated in the same way, state that is the same on all ranks is copied (for
    fewer ranks, OneBitAdam's divisor times sqrt(old size / size), since means have more noise), and thresholds
    and boundaries are found again. States of a LocalOptimizer between two means have the parameters of their ranks: all
    new ranks go on from the mean of these. The wrapped optimizer's state is that of old rank `rank` mod old size.

    Args:
        states: list of the `state_dict()` of all ranks 0, 1, ... of a DistributedOptimizer, SparseSGD, LocalOptimizer
            or HookState.
        rank: the new rank whose state is returned, 0 to size - 1.
        size: new number of ranks.

    Returns:
        State for `load_state_dict` of the new rank.

    Raises:
        ValueError: States are missing, in another order, or of different parameters, or there is no such `rank`.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank: expected 0 to {size - 1}, got {rank}")
    own = [local_parts(state.get(STATE, state)) for state in states]
    _check_parts(own)
    replicated, scale = set(own[0]["replicated"]), size / len(own)
    tensors: Tensors = {}
    for kind, entries in own[0]["tensors"].items():
        if kind in replicated:
            less = (len(own) / size) ** 0.5 if kind == "divisor" else 1.0  # OneBitAdam's, for noise of fewer ranks
            tensors[kind] = {name: t.mul(less) if less > 1 else t.clone() for name, t in entries.items()}
            continue
        every = kind == "square"  # OneBitAdam's, whose mean all have
        mine = [part["tensors"][kind] for part in (own if every else own[rank::size])]
        factor = 1 / len(own) if every else scale
        tensors[kind] = {name: _summed([m[name] for m in mine], t, factor) for name, t in entries.items()}
    new = {**own[0], "rank": rank, "size": size, "tensors": tensors, "buckets": []}
    if STATE not in states[0]:
        return new
    local = {LOCAL: _joined_changes([local_parts(state[LOCAL]) for state in states])} if LOCAL in states[0] else {}
    return {**states[rank % len(states)], STATE: new, **local}


def _joined_changes(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return LocalOptimizer's part of a state, with the mean of all ranks' changes since their last mean."""
    shared = {name: t for part in parts for name, t in part["shared"].items()}
    own = {}
    for name, t in shared.items():
        start = t.to(torch.promote_types(t.dtype, torch.float32))
        mine = [part["own"].get(name, start) for part in parts]
        own[name] = start.sub(sum(start - p for p in mine), alpha=1 / len(parts)).to(t.dtype)
    return {**parts[0], "steps": max(part["steps"] for part in parts), "shared": shared, "own": own}


def _summed(parts: Sequence[torch.Tensor], like: torch.Tensor, scale: float) -> torch.Tensor:
    """Return scale * the sum of parts, some of which may be sparse; zeros if there are none."""
    if any(part.is_sparse != like.is_sparse for part in parts):
        parts = [part.to_dense() if part.is_sparse else part for part in parts]
    elif like.is_sparse:
        return (sum(parts, torch.zeros_like(like)) * scale).coalesce()
    return torch.stack([*parts]).sum(0).mul_(scale) if parts else torch.zeros_like(like)


def _check_parts(own: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless these are the states of all ranks, in order."""
    for part in own:
        check_keys(part)
    if not own or [part["rank"] for part in own] != list(range(own[0]["size"])):
        last = own[0]["size"] - 1 if own else "..."
        raise ValueError(f"states: expected those of ranks 0 to {last}, got {[part['rank'] for part in own]}")
    if len({part["step"] for part in own}) > 1:
        raise ValueError(f"states: expected those of one step, got those after {[part['step'] for part in own]} steps")
    known = [{(kind, name) for kind, entries in part["tensors"].items() for name in entries} for part in own]
    for rank, entries in enumerate(known):
        if entries != known[0]:
            kind, name = min(entries ^ known[0])
            raise ValueError(f"states: expected {kind} of {name!r} of all ranks, got that of one of ranks 0 and {rank}")


def without_numpy(groups: Iterable[dict[str, Any]]) -> None:
    """Make Python's numbers of NumPy's, as of a schedule, in options of optimizers: torch.load refuses those."""
    for group in groups:
        for name, value in group.items():
            if isinstance(value, tuple):
                group[name] = tuple(one.item() if isinstance(one, np.generic) else one for one in value)
            elif isinstance(value, np.generic):
                group[name] = value.item()


# -- files


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """Call torch.save atomically: the file has the old content or the new one, whenever the process is killed.

    Residuals differ between ranks, so every rank saves its own file, and the checkpoint of the job is complete when all
    have. The state is first written to another file, `.NAME.` and eight digits, which a process leaves if it is killed.

    Args:
        state: a `state_dict()`, or anything else that torch.save takes.
        path: name of the file, whose mode is kept, or of a link to it.

    Raises:
        OSError: The file cannot be written; the old one is unchanged. If the disk becomes full, torch.save makes a
            RuntimeError of it.
    """
    path = Path(os.path.realpath(path))
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with part.open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name is on the disk, too
    finally:
        os.close(folder)


def load(path: str | os.PathLike[str]) -> Any:
    """Load what `save` wrote, with `weights_only=True`: tensors, numbers, strings and containers of them, but no code.

    Args:
        path: name of the file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged, or contains something else.
    """
    try:
        return torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(
            f"{path}: expected a file of tensors that torch.save wrote, torch.load raised {reason}"
        ) from error


def local_parts(value: Any) -> Any:
    """Return saved values, with this rank's part in place of each DTensor."""
    if isinstance(value, Mapping):
        return {key: local_parts(part) for key, part in value.items()}
    if isinstance(value, list):
        return [local_parts(part) for part in value]
    return own_part(value) if torch.is_tensor(value) else value


def part_of(state: Mapping[str, Any], local: bool) -> Any:
    """Return the library's part of a state, if any: with residuals of changes if `local`, otherwise of gradients."""
    if STATE in state and (LOCAL in state) is not local:
        raise ValueError(
            f"state_dict: expected residuals of {('gradients', 'changes')[local]}, got those of"
            f" {('changes', 'gradients')[local]}: without the keys that begin with 'sparsecoll' it can be loaded"
        )
    return state.get(STATE)


def filled(local: Mapping[str, Any]) -> bool:
    """Whether LocalOptimizer's part of a state has tensors."""
    outer = local["outer"] if isinstance(local["outer"], list) else [local["outer"]]
    return bool(local["own"] or any(one["state"] for one in outer))


def local_of(state: Mapping[str, Any], params: Mapping[str, torch.Tensor], shard: Any) -> dict[str, Any]:
    """Return the part of a state that is LocalOptimizer's, after a check; that of a plain optimizer has none."""
    if (own := state.get(LOCAL)) is None:
        part_of(state, local=True)
        return {}
    if missing := {"steps", "outer", "shard", *MOVED}.difference(own) | {STATE}.difference(state):
        raise ValueError(f"state_dict: expected that of LocalOptimizer, got one without {min(missing)!r}")
    if own["shard"] != shard:
        raise CommunicationError(
            f"state_dict: expected that of the shard at {shard} (place and shape of the mesh), got that at"
            f" {own['shard']}: load the file that this rank saved or, on other meshes, what LocalOptimizer.read returns"
        )
    if own.get("filled") and not filled(own):
        raise ValueError(f"state_dict: expected the outer state that was saved, got none: {UNFILLED}")
    here = {name: tuple(p.shape) for name, p in params.items()}
    for name, t in [(name, t) for kind in MOVED for name, t in own[kind].items()]:
        if name not in here:
            raise ValueError(f"state_dict: expected names of parameters, got {name!r}")
        if here[name] != tuple(t.shape):
            raise ValueError(f"state_dict: expected {name!r} of shape {here[name]}, got {tuple(t.shape)}")
    return dict(own)
