"""The process group: what the library does better runs over its sockets, and all else in gloo or NCCL inside."""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup  # type: ignore[attr-defined]

from sparsecoll.collectives.allreduce import allreduce
from sparsecoll.torch.backend.lowbit import LowBitSums
from sparsecoll.torch.backend.options import Options, resolve
from sparsecoll.torch.backend.work import Call, Watched
from sparsecoll.torch.replica.calls import collective
from sparsecoll.torch.replica.process_group import name_of_start
from sparsecoll.torch.tensors import private
from sparsecoll.transport import Transport, launcher
from sparsecoll.transport.all_ranks import spread
from sparsecoll.transport.call import CollectiveCall
from sparsecoll.transport.process_groups import connect_group
from sparsecoll.transport.progress import completed_future, in_background

LOST_SECONDS = 5.0  # in which the ranks of a call that has failed in gloo tell each other so
OptionsOf = Options | Callable[[], Options]
CONNECTION = ("onnection", "imed out", "timeout", "gloo/transport")  # words of what gloo raises if a rank is gone
OPERATIONS = {"SUM": "sum", "AVG": "mean"}
PASSED = {  # calls whose exceptions name ranks, besides allreduce; those of send and recv have one in their arguments
    *("broadcast", "reduce", "allreduce_coalesced", "barrier", "gather", "scatter", "alltoall", "alltoall_base"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base", "reduce_scatter_single"),
    *("all_gather_single_coalesced", "reduce_scatter_single_coalesced", "all_to_all_single"),
}


class Naming:
    """Replaces exceptions of gloo, which all ranks get at about the same time, by one that names the lost rank."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lost: Exception | None = None  # what has named the rank
        self._lock = threading.Lock()  # works are waited for by several threads

    def __call__(self, name: str, error: RuntimeError) -> Exception:
        if not any(word in str(error) for word in CONNECTION):  # of the arguments: no rank is gone
            return error
        with self._lock:
            if self._lost is None:
                try:
                    collective(self._transport, name, LOST_SECONDS, lambda _: None, failed=error)
                except Exception as named:
                    self._lost = named
            return self._lost or error


class ProcessGroupSparsecoll(ProcessGroup):
    """A process group whose `allreduce` sums sparse tensors, and dense ones if `options` say so, by the library.

    Its connections are also those of the library's calls on this group.

    Args:
        store: of this group alone.
        rank: of this process in the group.
        size: number of ranks.
        timeout: of calls.
        options: the options, or a function that returns them, or raises, which is told to all ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, options: OptionsOf) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, arg-type]  # what Python classes can call
        if launcher.TORCHRUN in os.environ:  # which keeps the store when it restarts the job
            store = PrefixStore(name_of_start(store, rank, size, timeout), store)
        self._store = store
        self._transport = connect_group(self, "own", timeout.total_seconds())  # torch need not know the group
        self._named = Naming(self._transport)
        seconds, drawn = timeout.total_seconds(), partial(_drawn_name, options=options)
        name, chosen = collective(self._transport, "init_process_group", seconds, drawn)
        backends = private.inner_backends(PrefixStore(name, store), rank, size, timeout)
        self._gloo = backends["cpu"]
        self._inner: Any = ProcessGroup(store, rank, size)
        for group in (self, self._inner):
            private.serve_by(group, backends)
        self._watched = backends["cuda"] is backends["cpu"]  # works of NCCL are not waited for by the CPU
        self._sums = LowBitSums(chosen)
        self._kept: deque[Any] = deque(maxlen=64)  # works that C++ code may hold

    @property
    def _seconds(self) -> float:
        return private.seconds_of(self._gloo)

    def get_group_store(self) -> Any:
        """Return the store of this group."""
        return self._store

    @private.untraced
    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # torch has three
        """Sum tensors over the ranks in place, see `torch.distributed.all_reduce`."""
        x = tensors if torch.is_tensor(tensors) else tensors[0]
        opts = args[0] if args else kwargs.get("opts", kwargs.get("op"))
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM if opts is None else opts)
        name = OPERATIONS.get(str(getattr(op, "op", op)).rpartition(".")[2])
        one = x is tensors or len(tensors) == 1
        if one and x.layout is torch.sparse_coo:
            return self._call(partial(self._sum_sparse, x=x, name=name), x, opts)
        if one and name and self._sums.take(x):
            return self._call(partial(self._sums.write, x=x, op=name), x, opts)
        work = self._passed("allreduce", tensors, *args, **kwargs)
        # DDP's join() hands it to C++ code, which keeps only the C++ half of the object
        if one and x.numel() == 1 and getattr(opts, "asyncOp", True):
            self._kept.append(work)
        return work

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, see `torch.distributed.monitored_barrier`."""
        self._inner.monitored_barrier(timeout or timedelta(seconds=self._seconds), wait_all_ranks)

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: torch's own, which would split the backend of C++ that a Python group lacks, ends the process."""
        raise NotImplementedError("split_group: use torch.distributed.new_group(ranks), on all ranks of the job")

    def _call(self, own: Callable[[CollectiveCall], None], x: torch.Tensor, opts: Any) -> Call:
        """Make a call of the library, which changes x."""
        inference = torch.is_inference_mode_enabled()  # of this thread, as the stream is
        stream = torch.cuda.current_stream(x.device) if x.is_cuda else None

        def inside(call: CollectiveCall) -> None:  # of the thread that makes the call
            with torch.inference_mode(inference), torch.no_grad(), torch.cuda.stream(stream):
                own(call)

        call = partial(collective, self._transport, "all_reduce", self._seconds, inside)
        asynchronous = getattr(opts, "asyncOp", True)
        return Call(in_background(self._transport, call) if asynchronous else completed_future(call), [x])

    def _sum_sparse(self, call: CollectiveCall, x: torch.Tensor, name: str | None) -> None:
        if name is None or (name == "mean" and not x.dtype.is_floating_point):
            raise ValueError(
                f"op: expected SUM, or AVG of floats, for a sparse tensor of {x.dtype}: use a dense one (x.to_dense())"
            )
        base = private.base_of(x)  # torch passes a view of a complex tensor
        local, wire = x.detach().cpu(), None
        if x.dtype is torch.bfloat16:  # NumPy has none
            local, wire = local.float(), "bfloat16"
        options: Any = {"op": name, "value_dtype": wire, "timeout": self._seconds, "nonfinite": "pass"}
        y = allreduce(call.transport, local, **options)
        if base is not None and base.is_complex():
            x, values = base, torch.view_as_complex(y.values().contiguous())
            y = torch.sparse_coo_tensor(
                y.indices(), values, x.shape, device=values.device, is_coalesced=True, check_invariants=False
            )
        x.copy_(y)

    def _passed(self, name: str, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else None
        while isinstance(first, (list, tuple)) and first:
            first = first[0]
        watched = self._watched or getattr(first, "is_cpu", False)
        try:
            work = getattr(self._inner, name)(*args, **kwargs)
        except RuntimeError as error:  # gloo scatters in the call itself
            named = self._named(name, error) if watched else error
            if named is error:
                raise
            raise named from error
        return Watched(work, partial(self._named, name)) if watched and work is not None else work


def _drawn_name(call: CollectiveCall, options: OptionsOf) -> tuple[str, Options]:
    """Return a name that rank 0 draws, since the store may hold what gloo left in it for such a group, and options."""
    chosen = options if isinstance(options, Options) else options()
    call.signature |= dataclasses.asdict(chosen)
    call.agree(entries=0)
    drawn = np.frombuffer(secrets.token_bytes(8) if call.transport.rank == 0 else b"", np.uint8)
    return bytes(spread(call.transport, drawn)).hex(), chosen


def _passing(name: str) -> Any:
    @private.untraced
    def call(self: ProcessGroupSparsecoll, *args: Any, **kwargs: Any) -> Any:
        return self._passed(name, *args, **kwargs)

    return call


for _name in PASSED:
    if hasattr(ProcessGroup, _name):  # in this version of torch
        setattr(ProcessGroupSparsecoll, _name, _passing(_name))


private.serve_monitored_barrier(ProcessGroupSparsecoll)


def create(group: Any, options: Any) -> ProcessGroupSparsecoll:
    """Return a process group, as `torch.distributed.Backend.register_backend` with `extended_api` expects it."""
    chosen = partial(resolve, options, not group.global_ranks_in_group)
    return ProcessGroupSparsecoll(group.store, group.group_rank, group.group_size, group.timeout, chosen)
