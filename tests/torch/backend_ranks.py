"""python backend_ranks.py FOLDER: each call on the backend "sparsecoll" and on gloo, for P = 1 to 5.

Each of five ranks writes what differs to a file of its own, a dict from the name of a case to texts. The ranks are
forked, so that the modules, which take seconds to import, are imported once.
"""

import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import backend_more_calls  # noqa: F401
import numpy as np
import torch
import torch._dynamo  # which DDP and torch.compile import
import torch.distributed as dist
from backend_calls import CASES, SLOW, model, own
from torch.nn.parallel import DistributedDataParallel

import sparsecoll
import sparsecoll.torch
from sparsecoll.torch.backend import Options, ProcessGroupSparsecoll
from sparsecoll.transport import as_transport

RANKS = 5


def same(a, b):
    """Whether two results are; values within rounding, because ranks are added in another order."""
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if not torch.is_tensor(a):
        return a == b
    if a.layout is torch.sparse_coo:
        assert a.layout is b.layout and b.is_coalesced() and a.coalesce().indices().equal(b.indices())
        a, b = a.coalesce().values(), b.values()
    return a.dtype is b.dtype and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


def outcome(function, group):
    try:
        return "returns", function(group)
    except Exception as error:
        kind = RuntimeError if isinstance(error, (RuntimeError, ValueError)) else type(error)
        return kind.__name__, traceback.format_exc()


def bits(result):
    """The bits of the tensors of a result that are the same on all ranks."""
    return [x.coalesce().values().tolist() for x in result if torch.is_tensor(x) and x.is_sparse]


def compare(group, gloo, failed):
    """Add to `failed` what differs between two groups of the same ranks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for name, function in CASES.items():
        if name in SLOW and size != 2:
            continue
        (expected, a), (got, b) = outcome(function, gloo), outcome(function, group)
        if expected != got or (got == "returns" and not same(a, b)):
            failed[name].append(f"P = {size}, rank {rank}: gloo {expected} {a}\nsparsecoll {got} {b}")
        if name.startswith("sparse_sum"):
            rows = [None] * size
            dist.all_gather_object(rows, bits([b] if torch.is_tensor(b) else b), group=gloo)
            if any(str(row) != str(rows[0]) for row in rows):
                failed[name].append(f"P = {size}, rank {rank}: other bits than rank 0")


def check_few_bits(exact):
    """Sums in 8 and 4 bits: near, equal on all ranks, unbiased over steps; what they do not take is exact."""
    size, n = dist.get_world_size(), 5_000
    for name, error in (("int8", 0.03), ("int4", 0.6)):
        group = dist.new_group(pg_options=Options(dense=name))
        buffer, total, expected = torch.zeros(n), torch.zeros(n), torch.zeros(n)
        for step in range(10):
            x = torch.randn(n, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            buffer.copy_(x)
            dist.all_reduce(buffer, group=group)
            dist.all_reduce(x, group=exact)
            assert not buffer.equal(x) and (buffer - x).norm() < error * x.norm()
            total, expected = total + buffer, expected + x
        assert (total - expected).norm() < error * expected.norm() / 3
        rows = [torch.zeros(n) for _ in range(size)]
        dist.all_gather(rows, buffer, group=exact)
        assert all(row.equal(buffer) for row in rows)
        half = torch.ones(n, dtype=torch.bfloat16)
        dist.all_reduce(half, dist.ReduceOp.AVG, group=group)
        assert half.tolist() == [1] * n
        ragged = torch.ones(n // 8, 8) if dist.get_rank() % 2 else torch.ones(8, n // 8).T  # contiguous on some ranks
        dist.all_reduce(ragged, group=group)
        assert torch.allclose(ragged, torch.full((n // 8, 8), float(size)))
        whole = torch.ones(n, dtype=torch.complex64) * (1 / 3 + 1j)
        dist.all_reduce(total := whole.clone(), group=group)
        dist.all_reduce(whole, group=exact)
        assert total.equal(whole)
        overflow = torch.ones(n)
        overflow[3] = float("inf") if dist.get_rank() == 1 else 1
        dist.all_reduce(overflow, group=group)
        assert torch.isinf(overflow).nonzero().tolist() == [[3]] and overflow[0] == size
        huge = torch.full((n,), 1e300, dtype=torch.float64)  # no scale of float32 holds it
        dist.all_reduce(huge, group=group)
        assert torch.allclose(huge, torch.full_like(huge, 1e300 * size))
        whole = dist.ReduceOp.SUM
        for x, op in ((torch.ones(n) / 3, dist.ReduceOp.MAX), (torch.arange(n), whole), (torch.ones(9), whole)):
            y = x.clone()
            dist.all_reduce(x, op, group=group)
            dist.all_reduce(y, op, group=exact)
            assert x.equal(y)
        group = dist.new_group(pg_options=Options(dense=name, dense_below=0))
        net = DistributedDataParallel(model(), process_group=group)
        with net.join(divide_by_initial_world_size=False):
            for _ in range(1 + dist.get_rank() % 2):
                net(own(exact, 5, 4)).sum().backward()
    for given, text in ((3, "pg_options: expected sparsecoll"), ("int8", "pg_options")):
        try:
            dist.new_group(pg_options=given)
        except TypeError as error:
            assert text in str(error)


def check_adapters():
    """The hook, the optimizers and calls of the library share the connections of the group."""
    transport, files = as_transport(None), len(os.listdir("/proc/self/fd"))
    assert as_transport(dist.group.WORLD) is transport
    net = model()
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(sparsecoll.torch.HookState(dist.group.WORLD, "none", net), sparsecoll.torch.comm_hook)
    nets = [net, model(), model()]
    made = [
        sparsecoll.torch.SparseSGD(nets[1].parameters(), 0.1),
        sparsecoll.torch.DistributedOptimizer(torch.optim.SGD(nets[2].parameters(), 0.1), nets[2].named_parameters()),
    ]
    for called, optimizer in zip((ddp, *nets[1:]), (torch.optim.SGD(net.parameters(), 0.1), *made), strict=True):
        called(own(dist.group.WORLD, 5, 4)).sum().backward()
        optimizer.step()
    assert as_transport(None) is transport and len(os.listdir("/proc/self/fd")) <= files + 2


def check_unknown(folder):
    """Groups that torch.distributed does not know, as torchft makes one after the other."""
    for place, options in (("first", Options), ("second", Options())):
        store, rank = dist.PrefixStore(place, dist.FileStore(f"{folder}/unknown", RANKS)), dist.get_rank()
        group = ProcessGroupSparsecoll(store, rank, RANKS, timedelta(seconds=60), options)
        x = torch.sparse_coo_tensor([[rank]], torch.ones(1, 2), (RANKS, 2), check_invariants=True)
        group.allreduce([x], dist.AllreduceOptions()).wait()
        assert x.to_dense().equal(torch.ones(RANKS, 2))
        group.abort()


def worker(rank, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    job = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": RANKS}
    dist.init_process_group("sparsecoll", timeout=timedelta(seconds=60), **job)
    failed = {name: [] for name in CASES}
    for size in range(1, RANKS + 1):
        group = dist.group.WORLD if size == RANKS else dist.new_group(list(range(size)))
        gloo = dist.new_group(list(range(size)), backend="gloo")
        if rank < size:
            compare(group, gloo, failed)
    unknown = ("unknown", lambda: check_unknown(folder))
    for name, check in (("few_bits", lambda: check_few_bits(gloo)), ("adapters", check_adapters), unknown):
        kind, text = outcome(lambda _, check=check: check(), None)
        failed[name] = [] if kind == "returns" else [text]
    dist.destroy_process_group()
    dist.init_process_group("sparsecoll", **job)  # at the same place
    x = torch.ones(3)
    dist.all_reduce(x)
    failed["again"] = [] if x.tolist() == [RANKS] * 3 else [str(x)]
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(failed))


if __name__ == "__main__":
    sparsecoll.allreduce(None, sparsecoll.RowSparse([1], np.ones((1, 2), np.float32), 3))  # loads the kernels
    torch.multiprocessing.start_processes(worker, (sys.argv[1],), RANKS, start_method="fork")
