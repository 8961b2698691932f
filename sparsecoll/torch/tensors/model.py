"""The parameters and buffers of a model by name, those that ranks can train, and gradients and buffers that change."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sparsecoll.torch.tensors.private import has_buffers, is_flat, version

Named = dict[str, torch.Tensor]
logger = logging.getLogger(__name__)

HOW = {"foreach", "fused", "capturable", "differentiable"}  # options of optimizers by which the same is computed
COMPARED_BYTES = 16 << 20  # of a buffer of which a copy is kept, to notice what version counters do not tell


def model_of(given: Any) -> torch.nn.Module | None:
    """Return the model, given itself or a generator of its `parameters()` or `named_parameters()`; else None."""
    if inspect.isgenerator(given) and given.gi_frame is not None:
        given = inspect.getgeneratorlocals(given).get("self")
    return given if isinstance(given, torch.nn.Module) else None


def named(given: Any) -> Named:
    """Return parameters by name, from a Module or from (name, parameter) pairs.

    Raises:
        TypeError: neither.
        ValueError: a name comes twice.
    """
    result: Named = {}
    for pair in given.named_parameters() if isinstance(given, torch.nn.Module) else given:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                "named_parameters: expected (name, parameter) pairs, as of model.named_parameters(), or the model,"
                f" got {type(pair).__name__} in it"
            )
        name, p = pair
        if name in result and result[name] is not p:
            raise ValueError(f"named_parameters: expected every name once, got {name!r} again")
        result[name] = p
    return result


def sparse_weights(model: torch.nn.Module | None) -> set[int]:
    """Return the ids of the parameters of modules with `sparse=True`, whose gradients are rows."""
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    modules = () if model is None else model.modules()
    return {id(module.weight) for module in modules if isinstance(module, tables) and module.sparse}


class Buffers:
    """A model's buffers, such as BatchNorm's running statistics, as they are now, and which of them have changed.

    Attributes:
        replaced: whether the last call of `changed` found other names, shapes or dtypes than the last `mark`.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model, self._marked = model, _buffers_by_module(model)
        self._versions = [_versions(own) for own in self._marked]
        self._copies = [_copies(own) for own in self._marked]
        self._raised: list[bool] = [False] * len(self._marked)  # those whose versions had been raised
        self._differ = self._raised  # those that had changed at all
        self.replaced = False

    @property
    def tensors(self) -> Named:
        """All buffers by name."""
        return {name: b for own in _buffers_by_module(self._model) for name, b in own.items()}

    def mark(self) -> None:
        """Let `changed` report changes from now on."""
        modules = _buffers_by_module(self._model)
        if self.replaced or len(modules) != len(self._marked):
            self._raised, self._differ = [False] * len(modules), [True] * len(modules)
            self._copies, self._versions = [{} for _ in modules], [[] for _ in modules]
        for i, own in enumerate(modules):
            if self._differ[i] or _versions(own) != self._versions[i]:  # which a broadcast has raised
                self._copies[i] = {} if self._raised[i] else _copies(own)
        self._marked, self._versions = modules, [_versions(own) for own in modules]
        self._raised = self._differ = [False] * len(modules)
        self.replaced = False

    def changed(self) -> list[bool]:
        """Return for each module that had buffers at the last `mark` whether one of them has changed since.

        Most forward passes assign another tensor or raise a version counter. Others write to `.data`, or have a kernel
        write (`F.batch_norm`), so that values are compared as well, up to COMPARED_BYTES for each buffer.
        """
        modules = _buffers_by_module(self._model)
        self.replaced = [*map(_forms, modules)] != [*map(_forms, self._marked)]
        if self.replaced:
            return [True] * len(self._marked)
        raised, differ = [], []
        for now, then, versions, copies in zip(modules, self._marked, self._versions, self._copies, strict=True):
            raised.append(any(b is not then[name] for name, b in now.items()) or _versions(now) != versions)
            differ.append(
                raised[-1]
                or any(name not in copies or not are_equal(b, copies[name]) for name, b in _compared(now).items())
            )
        self._raised, self._differ = raised, differ
        return differ

    def unchanged(self) -> set[str]:
        """Return the names of the buffers of modules in which none has changed since the last `mark`."""
        return {name for own, is_ in zip(self._marked, self.changed(), strict=True) if not is_ for name in own}

    def of(self, modules: Iterable[bool]) -> list[torch.Tensor]:
        """Return the buffers of the modules, as of the last `mark`, for which `modules` is True."""
        tensors = self.tensors
        return [tensors[name] for own, is_ in zip(self._marked, modules, strict=True) if is_ for name in own]


def _buffers_by_module(model: torch.nn.Module | None) -> list[Named]:
    """Return the buffers that have values by name for each module that has any of its own; each buffer once."""
    found: list[Named] = []
    seen: set[int] = set()
    for prefix, module in () if model is None else model.named_modules():
        if not has_buffers(module):
            continue
        own = {f"{prefix}.{name}".lstrip("."): b for name, b in module.named_buffers(recurse=False)}
        own = {name: b for name, b in own.items() if id(b) not in seen and not torch.nn.parameter.is_lazy(b)}
        seen |= set(map(id, own.values()))
        if own:
            found.append(own)
    return found


def _forms(tensors: Named) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, b.shape, b.dtype) for name, b in tensors.items()]


def _versions(tensors: Named) -> list[int]:
    return [version(b) for b in tensors.values()]


def _compared(tensors: Named) -> Named:
    return {name: b for name, b in tensors.items() if not b.is_sparse and b.nbytes <= COMPARED_BYTES}


@torch.no_grad()
def _copies(tensors: Named) -> Named:
    return {name: b.detach().clone() for name, b in _compared(tensors).items()}


def bits_of(t: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, on the CPU."""
    return memoryview(t.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())


def are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same values, on the CPU whether they have the same bits."""
    if a.device != b.device:
        return False
    has_words = (t.is_contiguous() and t.storage_offset() * t.itemsize % 8 == 0 for t in (a, b))
    if a.is_cpu and a.numel() and a.nbytes % 8 == 0 and all(has_words):
        words, others = (t.detach().view(-1).view(torch.int64).numpy() for t in (a, b))
        return bool((words == others).all())  # 20 times as fast as torch.equal
    return torch.equal(a, b)


def check_buffers(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise TypeError unless buffers can be set to those of another rank."""
    for name, b in tensors.items():
        kind = "nested" if b.is_nested else "quantized" if b.is_quantized else str(b.layout).removeprefix("torch.")
        if kind != "strided":
            found = f"{kind} one: keep it as a plain attribute of the module"
        elif b.is_conj() or b.is_neg():
            found = f"lazy view: register its {'resolve_conj()' if b.is_conj() else 'resolve_neg()'}"
        elif b.is_inference() or any(size > 1 and not step for size, step in zip(b.shape, b.stride(), strict=True)):
            found = "tensor of inference_mode or an expanded one: register its clone(), made outside of that mode"
        else:
            continue
        raise TypeError(f"buffer {name!r}: expected a dense tensor that can be written to, got a {found}")


def describe(tensors: Mapping[str, torch.Tensor], kind: str = "parameter") -> dict[str, str]:
    """Return name, shape and dtype of each tensor, for ranks to compare; an error shows only those that differ."""
    return {
        f"{kind} {i}": f"{name!r}, {tuple(t.shape)}, {str(t.dtype).removeprefix('torch.')}"
        for i, (name, t) in enumerate(tensors.items())
    }


def check_whole(params: Iterable[torch.Tensor], comm: Any = None) -> None:
    """Raise unless every rank holds all values of these parameters, or a DTensor's part that no other of `comm` has.

    Raises:
        TypeError: one is a DTensor or ShardedTensor, or FSDP's flat parameter, or it has no values yet.
    """
    comm = comm.get_group() if hasattr(comm, "mesh_dim_names") else comm
    for p in params:
        if p.is_meta or torch.nn.parameter.is_lazy(p):
            cure = "to_empty() and initialize it" if p.is_meta else "call it once on a batch"
            raise TypeError(
                f"params: expected tensors with values, got one {'on meta' if p.is_meta else 'of a lazy module'}: give"
                f" the model its values first ({cure})"
            )
        kinds = {base.__name__ for base in type(p).__mro__}
        if isinstance(comm, dist.ProcessGroup) and "DTensor" in kinds:
            shared = {*dist.get_process_group_ranks(comm)} & {*p.device_mesh.mesh.flatten().tolist()}  # type: ignore[attr-defined]
            if shared == {dist.get_rank()}:
                continue
            raise ValueError(
                f"comm: expected the group across workers, with one rank of the mesh of a DTensor, got ranks"
                f" {sorted(shared)} of it: shard on one dimension of a mesh, and pass the group of the other one"
            )
        if kinds & {"DTensor", "ShardedTensor"} or is_flat(p):
            raise TypeError(
                f"params: expected whole tensors on every rank, got a {type(p).__name__} as FSDP and tensor parallelism"
                " make: use sparsecoll.torch.fsdp.attach and a plain optimizer for a model of fully_shard, or"
                " LocalOptimizer with the process group across workers"
            )


def own_part(t: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor that are on this rank: of a DTensor, its local tensor."""
    return t.to_local().detach() if hasattr(t, "to_local") else t


def is_finite(t: torch.Tensor) -> bool:
    """Return whether a tensor has no NaN or infinity: in one pass if its sum is finite."""
    return bool(t.sum().isfinite()) or bool(t.isfinite().all())


def of_optimizer(optimizer: torch.optim.Optimizer, params: Named) -> Named:
    """Return the named parameters; raise unless all of the optimizer's are among them."""
    known = {id(p) for p in params.values()}
    for p in (p for group in optimizer.param_groups for p in group["params"] if id(p) not in known):
        raise ValueError(
            f"named_parameters: expected all of the optimizer's parameters, one of shape {tuple(p.shape)} is missing"
        )
    return params


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the options of an optimizer's groups and their numbers of parameters, the same on all ranks."""
    names = {"lr": None, "momentum": None, **getattr(optimizer, "defaults", {})}.keys() - HOW
    found: dict[str, Any] = {}
    for i, group in enumerate(optimizer.param_groups):
        for name in sorted(names & group.keys()):
            value = group[name]
            value = value.item() if torch.is_tensor(value) and value.is_cpu and value.numel() == 1 else value
            parts = value if isinstance(value, tuple) else (value,)
            if all(isinstance(part, (bool, int, float, str)) for part in parts):
                plain = list(value) if isinstance(value, tuple) else float(value) if type(value) is int else value
                found[f"{name} of param_groups[{i}]"] = plain
        found[f"number of parameters in param_groups[{i}]"] = len(group["params"])
    return found


def names_in_groups(optimizer: torch.optim.Optimizer, params: Named) -> dict[str, list[str]]:
    """Return the names of the parameters in each group, for ranks to compare."""
    names = {id(p): name for name, p in params.items()}
    groups = enumerate(optimizer.param_groups)
    return {f"names in param_groups[{i}]": [names.get(id(p), "") for p in group["params"]] for i, group in groups}


def momenta_of(optimizer: torch.optim.Optimizer, params: Named, names: Sequence[str]) -> list[float]:
    """Return the momenta of named parameters, with Adam's first beta for one, and 0 where the optimizer has none."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    own = (groups.get(id(params[name]), {}) for name in names)
    return [float(group.get("momentum") or group.get("betas", (0.0,))[0]) for group in own]


# -- gradients that change


class Seen(NamedTuple):
    """The gradient of a parameter as it was at some moment: the tensor, and how often it had been changed in place."""

    gradient: torch.Tensor | None
    version: int

    @classmethod
    def of(cls, p: torch.Tensor) -> Seen:
        """Return the gradient of a parameter as it is now."""
        return cls(p.grad, -1 if p.grad is None else version(p.grad))

    def has_changed(self, p: torch.Tensor) -> bool:
        """Return whether the gradient is another tensor now, or was changed in place."""
        return p.grad is not self.gradient or (p.grad is not None and version(p.grad) != self.version)


class Watch:
    """Notices gradients that have changed between the end of back-propagation and their reduction, and warns once.

    Args:
        who: whose gradients are local to each rank until then.
        cure: what clips the mean, for the warning.
    """

    def __init__(self, who: str, cure: str) -> None:
        self._who, self._cure = who, cure
        self._seen: dict[int, Seen] = {}
        self._handles: dict[int, Any] = {}
        self._warned = False

    def over(self, params: Iterable[torch.Tensor]) -> None:
        """Watch the gradients of these parameters as well."""
        for p in params:
            if not self._warned and p.requires_grad and id(p) not in self._handles:
                hook = partial(_record, weakref.ref(self))
                self._handles[id(p)] = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def record(self, p: torch.Tensor) -> None:
        """Back-propagation has completed a gradient."""
        if not self._warned:
            self._seen[id(p)] = Seen.of(p)

    def check(self, params: Iterable[torch.Tensor]) -> None:
        """Warn, before the reduction, if gradients have changed since back-propagation."""
        seen, self._seen = self._seen, {}
        if any(p.grad is not None and id(p) in seen and seen[id(p)].has_changed(p) for p in params):
            self._warned = True
            for handle in self._handles.values():
                handle.remove()
            logger.warning(
                "gradients were changed between backward() and step(), as clipping does: with %s that acts on each"
                " rank's own gradients before they are averaged, not on their mean as on one process. %s",
                self._who,
                self._cure,
            )


def _record(watch: weakref.ref[Watch], p: torch.Tensor) -> None:
    if (alive := watch()) is not None and p.grad is not None:
        alive.record(p)
