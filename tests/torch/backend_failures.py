"""python backend_failures.py FOLDER: what ranks raise on the backend "sparsecoll" when others fail or leave.

Each of four ranks, which are forked, writes a file of its own, a dict from the name of a case to the text.
"""

import json
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # which DDP imports
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsecoll
import sparsecoll.torch

RANKS = 4
SECONDS = 6  # of the groups' timeout


def rows(n=9, d=2, dtype=torch.float32):
    return torch.sparse_coo_tensor([[1, 3]], torch.ones(2, d, dtype=dtype), (n, d), check_invariants=True)


def text_of(function):
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__} after {time.monotonic() - start:.1f} s: {error}"
    return "nothing"


def other_shapes(group, rank):
    dist.all_reduce(rows(9 + rank % 2), group=group)


def other_dtypes(group, rank):
    dist.all_reduce(rows(dtype=torch.float32 if rank else torch.float64), group=group)


def another_operation(group, rank):
    dist.all_reduce(rows(), dist.ReduceOp.MAX, group=group)


def calls_that_torch_compares(group, rank):
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    del os.environ["TORCH_DISTRIBUTED_DEBUG"]
    dist.all_reduce(torch.ones(3 + rank % 2), group=group)


def one_rank_alone(group, rank):
    """A rank fails before its call; the others wait for it."""
    if rank == 2:
        time.sleep(SECONDS + 3)
        raise KeyError("on purpose")
    dist.all_reduce(rows(), group=group)


def dense_alone(group, rank):
    if rank == 2:
        time.sleep(SECONDS + 3)
        raise KeyError("on purpose")
    dist.all_reduce(torch.ones(5), group=group)


def one_wrong_argument(group, rank):
    """gloo refuses it on one rank; no rank is gone, so that later calls have errors of their own, or none."""
    counts = torch.ones(2, dtype=torch.int64)
    operation = dist.ReduceOp.SUM if rank else dist.ReduceOp.AVG
    first = text_of(dist.all_reduce(counts, operation, group=group, async_op=True).wait)
    assert ("cast" in first) == (rank == 0), first
    second = text_of(lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, group=group))
    assert "BAND" in second, second
    summed = rows()
    dist.all_reduce(summed, group=group)
    raise RuntimeError(f"then {summed.to_dense().sum():.0f}")


def splitting(group, rank):
    group.split_group([0, 1], group_name="half")


def options_wrong_on_one_rank(group, rank):
    dist.new_group(timeout=timedelta(seconds=SECONDS), pg_options="int8" if rank == 1 else None)


def leave(rank):
    if rank == 3:
        os._exit(0)


def sparse_without(group, rank):
    leave(rank)
    work = dist.all_reduce(rows(), group=group, async_op=True)
    work.wait()


def dense_without(group, rank):
    """Every work names the rank, not the first one alone."""
    leave(rank)
    works = [dist.all_reduce(torch.ones(5), group=group, async_op=True) for _ in range(3)]
    texts = [text_of(wait) for wait in (works[0].wait, works[1].get_future().wait, works[2].wait)]
    raise RuntimeError(min(texts, key=lambda text: "rank 3" in text))


def scatter_without(group, rank):
    leave(rank)
    dist.reduce_scatter_tensor(torch.ones(1), torch.ones(RANKS), group=group)


def backward_without(group, rank):
    net = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group, bucket_cap_mb=1e-6)
    leave(rank)
    net(torch.ones(1, 3)).sum().backward()


TOGETHER = (other_shapes, other_dtypes, another_operation, calls_that_torch_compares, one_wrong_argument)
TOGETHER += (splitting, options_wrong_on_one_rank, one_rank_alone, dense_alone)
LEAVING = (sparse_without, dense_without, scatter_without, backward_without)


def job(rank, folder, name):
    return {"init_method": f"file://{folder}/{name}", "rank": rank, "world_size": RANKS}


def worker(rank, folder):
    """All ranks stay."""
    dist.init_process_group("sparsecoll", timeout=timedelta(seconds=60), **job(rank, folder, "together"))
    texts = {}
    for function in TOGETHER:
        group = dist.new_group(timeout=timedelta(seconds=SECONDS))
        texts[function.__name__] = text_of(lambda f=function, g=group: f(g, rank))
        dist.barrier()
    Path(folder, f"together.{rank}.json").write_text(json.dumps(texts))
    os._exit(0)


def without_one(rank, folder, name):
    """Rank 3 leaves the default group, which all have made before."""
    dist.init_process_group("sparsecoll", timeout=timedelta(seconds=20), **job(rank, folder, name))
    there = [Path(folder, f"{name}.{other}.there") for other in range(RANKS)]
    there[rank].touch()
    while not all(path.exists() for path in there):
        time.sleep(0.01)
    text = text_of(lambda: globals()[name](dist.group.WORLD, rank))
    Path(folder, f"{name}.{rank}.json").write_text(json.dumps({name: text}))
    os._exit(0)


def main(folder):
    warnings.simplefilter("ignore")
    sparsecoll.allreduce(None, sparsecoll.RowSparse([1], np.ones((1, 2), np.float32), 3))  # loads the kernels
    torch.set_num_threads(1)
    start = torch.multiprocessing.start_processes
    started = [start(worker, (folder,), RANKS, start_method="fork", join=False)]
    started += [start(without_one, (folder, f.__name__), RANKS, start_method="fork", join=False) for f in LEAVING]
    for one in started:
        while not one.join():
            pass


if __name__ == "__main__":
    main(sys.argv[1])
