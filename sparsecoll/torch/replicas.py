"""What makes P processes one training: the launcher, the same parameters and buffers on all ranks, and the proof."""

from __future__ import annotations

import inspect
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

from sparsecoll.errors import CommunicationError
from sparsecoll.transport import LocalTransport, Transport, as_transport, default_comm, launcher
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.collectives import allgather, broadcast, spread

MESSAGE_BYTES = 64 << 20  # of small tensors that are sent together
Named = dict[str, torch.Tensor]
T = TypeVar("T")


def communicator(comm: Any) -> Transport:
    """The transport of a communicator; None: MPI.COMM_WORLD, or one rank without MPI.

    Raises:
        RuntimeError: it is MPI.COMM_WORLD with one rank, and a launcher has started several processes of which this MPI
            knows nothing: each of them would train on its own.
    """
    transport = as_transport(default_comm() if comm is None else comm)
    variable, processes = launcher.processes()
    if transport.size == 1 and processes > 1:
        world = default_comm()
        if comm is None or isinstance(transport, LocalTransport) or comm == world:
            raise RuntimeError(
                f"comm: expected {processes} ranks, as {variable} says, got MPI.COMM_WORLD with one: each process would"
                " train on its own. Start the job with the mpirun of mpi4py's MPI (`python -m sparsecoll doctor`"
                " tells), or pass comm=MPI.COMM_SELF if that is what you want"
            )
    return transport


def collective(
    transport: Transport, name: str, timeout: float | None, function: Callable[[CollectiveCall], T], phase: str = ""
) -> T:
    """Carry out a function inside a CollectiveCall, after the nonblocking calls that were made before it.

    Args:
        name, timeout: of the call.
        function: takes the call. What it raises on some rank is raised on all.
        phase: of its traffic; "": none.
    """

    def call() -> T:
        with CollectiveCall(transport, name, timeout) as call, transport.phase(phase) if phase else nullcontext():
            return function(call)

    return transport.in_order(call)


def attempt(function: Callable[[], T]) -> Future[T]:
    """Call a function now, on this thread; what it raises is raised by `result()`, in a call of all ranks."""
    future: Future[T] = Future()
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
    return future


# -- which tensors


def model_of(given: Any) -> torch.nn.Module | None:
    """The model whose parameters these are: a Module itself, or what its `parameters()` generators belong to."""
    if isinstance(given, torch.nn.Module):
        return given
    if inspect.isgenerator(given) and given.gi_frame is not None:
        owner = inspect.getgeneratorlocals(given).get("self")
        return owner if isinstance(owner, torch.nn.Module) else None
    return None


def named(given: Any) -> Named:
    """Name -> parameter, of a Module or of (name, parameter) pairs.

    Raises:
        TypeError: neither.
        ValueError: a name comes twice.
    """
    pairs = given.named_parameters() if isinstance(given, torch.nn.Module) else given
    result: Named = {}
    for pair in pairs:
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


class Buffers:
    """A model's buffers (BatchNorm's running statistics, for one), and which of them have changed lately."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self.tensors: Named = {}
        self._modules: list[list[str]] = []
        if model is not None:
            for prefix, module in model.named_modules():
                own = {f"{prefix}.{name}".lstrip("."): b for name, b in module.named_buffers(recurse=False)}
                own = {name: b for name, b in own.items() if not any(b is other for other in self.tensors.values())}
                if own:
                    self.tensors |= own
                    self._modules.append(list(own))
        self.mark()

    @property
    def modules(self) -> int:
        """How many modules have buffers."""
        return len(self._modules)

    def _counts(self) -> list[int]:
        return [sum(self.tensors[name]._version for name in names) for names in self._modules]

    def mark(self) -> None:
        """What is changed from now on is a change."""
        self._marked = self._counts()

    def changed(self) -> list[bool]:
        """For each module with buffers, whether one of them was changed in place since `mark`.

        A running mean is changed by the forward pass without a trace; the count of batches beside it leaves one.
        """
        return [now != then for now, then in zip(self._counts(), self._marked, strict=True)]

    def of(self, modules: Iterable[bool]) -> list[torch.Tensor]:
        """The buffers of the modules that are marked."""
        return [self.tensors[name] for names, is_ in zip(self._modules, modules, strict=True) if is_ for name in names]


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """What ranks compare of tensors: one entry each, so that a message names those that differ."""
    return {
        f"parameter {i}": f"{name!r}, {tuple(t.shape)}, {str(t.dtype).removeprefix('torch.')}"
        for i, (name, t) in enumerate(tensors.items())
    }


def refuse_sharded(params: Iterable[torch.Tensor]) -> None:
    """Raise for parameters of which each rank holds a part only.

    Raises:
        TypeError: one is a DTensor or ShardedTensor, or FSDP's flat parameter.
    """
    for p in params:
        kinds = {base.__name__ for base in type(p).__mro__}
        if kinds & {"DTensor", "ShardedTensor"} or getattr(p, "_is_flat_param", False):
            raise TypeError(
                f"params: expected whole tensors on every rank, got a {type(p).__name__} as FSDP and tensor parallelism"
                " make: sharded models are not supported; replicate the model instead (no fully_shard)"
            )


# -- the same values everywhere


@torch.no_grad()
def share(transport: Transport, tensors: Iterable[torch.Tensor], root: int = 0) -> None:
    """Root's values for all ranks, several tensors a message. Collective."""
    if transport.size == 1:
        return
    groups: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    for t in tensors:
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


def share_optimizer(transport: Transport, optimizer: torch.optim.Optimizer, root: int = 0) -> None:
    """Root's state of an optimizer for all ranks: tensors, numbers, and the numbers in its groups. Collective."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    plain = (bool, int, float, str, type(None))
    table = {
        "groups": [{k: v for k, v in g.items() if isinstance(v, plain)} for g in optimizer.param_groups],
        "state": [
            {
                key: {"tensor": [list(v.shape), str(v.dtype).removeprefix("torch.")]} if torch.is_tensor(v) else v
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
    for p, entries in zip(params, roots["state"], strict=True):
        for key, value in sorted(entries.items()):
            own = optimizer.state[p]
            if not isinstance(value, dict):
                own[key] = value
                continue
            shape, dtype = value["tensor"]
            old = own.get(key)
            if not torch.is_tensor(old) or list(old.shape) != shape:
                like = p if shape else torch.empty((), device="cpu")
                own[key] = torch.zeros(shape, dtype=getattr(torch, dtype), device=like.device)
            tensors.append(own[key])
    share(transport, tensors, root)


@torch.no_grad()
def broadcast_model(model: torch.nn.Module, comm: Any = None, root: int = 0) -> None:
    """Set the parameters and buffers of a model to those of one rank. Collective.

    Args:
        model: the model, with the same modules on every rank.
        comm: mpi4py intracommunicator, or a virtual rank of `sparsecoll.simulate`; None, the default, for
            MPI.COMM_WORLD.
        root: rank whose values are sent to all (default: 0).

    Raises:
        CommunicationError: On every rank, if models differ in a name, shape or dtype.
    """
    transport = communicator(comm)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def share_all(call: CollectiveCall) -> None:
        call.signature |= {**describe(tensors), "root": int(root)}
        call.agree(entries=0)
        share(transport, tensors.values(), root)

    collective(transport, "broadcast", None, share_all)


def raw_bytes(t: torch.Tensor) -> memoryview:
    """A tensor's bits."""
    return memoryview(t.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())


def compare(transport: Transport, tensors: Named, step: int, timeout: float | None) -> None:
    """Raise on every rank if bits differ, naming the first tensor that does. Collective."""

    def gather(_: CollectiveCall) -> Any:
        rows = allgather(transport, np.array([zlib.crc32(raw_bytes(t)) for t in tensors.values()], np.uint32))
        transport.waitall()
        return rows

    rows = collective(transport, "verify", timeout, gather, "verify")
    for name, column in zip(tensors, rows.T, strict=True):
        if (column != column[0]).any():
            others = [str(rank) for rank, value in enumerate(column.tolist()) if value != column[0]]
            raise CommunicationError(
                f"verify: expected the same bits on all ranks after step {step},"
                f" got others than rank 0's in {name!r} on rank {', '.join(others)}"
            )


def mean_of(transport: Transport, value: float, timeout: float | None) -> float:
    """The mean of one number over the ranks, the same bits on all of them. Collective."""

    def gather(_: CollectiveCall) -> list[float]:
        numbers: list[float] = allgather(transport, np.array([value], np.float64)).ravel().tolist()
        transport.waitall()
        return numbers

    numbers = collective(transport, "mean", timeout, gather)
    return math.fsum(numbers) / len(numbers) if all(map(math.isfinite, numbers)) else sum(numbers) / len(numbers)


def mean_of_loss(transport: Transport, loss: Any, timeout: float | None) -> Any:
    """The mean of a loss over the ranks, of the loss's own type. Collective."""
    mean = mean_of(transport, float(loss.detach() if torch.is_tensor(loss) else loss), timeout)
    return torch.full_like(loss.detach(), mean) if torch.is_tensor(loss) else mean


def mean_loss(transport: Transport, closure: Callable[[], Any], timeout: float | None) -> Any:
    """Evaluate a closure on every rank; the mean of the losses, of the loss's own type. Collective.

    Raises:
        CommunicationError, ValueError, TypeError: a closure has raised on some rank; on every rank.
    """
    with torch.enable_grad():
        loss = attempt(closure)

    def mean(_: CollectiveCall) -> Any:
        return mean_of_loss(transport, 0.0 if loss.result() is None else loss.result(), timeout)

    value = collective(transport, "closure", timeout, mean)
    return None if loss.result() is None else value
