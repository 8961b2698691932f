"""More cases of `backend_calls`: complex sparse sums, and calls in compiled code."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from backend_calls import case, own, sparse
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel


@case
def sparse_sum_of_complex(group):
    x = sparse(group, "rows", torch.complex64) * (1 + 2j)
    x = x.to_dense() if dist.get_backend(group) == "gloo" else x  # gloo keeps each rank's
    dist.all_reduce(x, group=group)
    return x.to_dense() if x.is_sparse else x


@case
def compiled_with_calls(group):
    def function(x):
        dist.broadcast(x, group_src=0, group=group)
        dist.all_reduce(x, group=group)
        return x * 2

    torch._dynamo.reset()
    net = torch.nn.Linear(4, 2)
    torch.nn.init.ones_(net.weight)
    parallel = torch.compile(DistributedDataParallel(net, process_group=group), backend="aot_eager")
    parallel(own(group, 3, 4)).sum().backward()
    return torch.compile(function, backend="aot_eager")(own(group, 4)), net.weight.grad


@case
def call_in_a_callback_of_another(group):
    """As torch's hook for PowerSGD makes them."""

    def then(_):
        y = own(group, 4)
        dist.all_reduce(sparse(group, "rows"), group=group, async_op=True).wait()
        return dist.all_reduce(y, group=group, async_op=True).get_future().wait()[0]

    for _ in range(20):  # so that the last one is not over before it has a callback
        work = dist.all_reduce(sparse(group, "rows"), group=group, async_op=True)
    return work.get_future().then(then).wait()


@case
def sparse_sum_in_inference_mode(group):
    with torch.inference_mode():
        x = sparse(group, "rows")
        dist.all_reduce(x, group=group, async_op=True).wait()
        y = sparse(group, "rows")
        dist.all_reduce(y, group=group)
        return x.to_dense() + y.to_dense()


@case
def uneven_inputs_and_means_over_those_who_stay(group):
    """DDP leaves a sum to C++ code, which waits for it."""
    net = torch.nn.Linear(4, 2)
    torch.nn.init.ones_(net.weight)
    parallel = DistributedDataParallel(net, process_group=group)
    with parallel.join(divide_by_initial_world_size=False):
        for step in range(2 + dist.get_rank(group) % 2):
            parallel(own(group, 3, 4) + step).sum().backward()
    return net.weight.grad


@case
def sums_of_one_value_keep_no_tensor(group):
    seen = []
    for _ in range(3):
        x = torch.ones(1000)
        seen.append(StorageWeakRef(x.untyped_storage()))
        dist.all_reduce(x[0], group=group)
    del x
    end = time.monotonic() + 20  # gloo's thread lets the last one go
    while time.monotonic() < end and not all(ref.expired() for ref in seen):
        time.sleep(0.01)
    return [ref.expired() for ref in seen]


@case
def polled_sums(group):
    """A wait that ends before the sum does says nothing about ranks."""
    for _ in range(30):
        x = own(group, 200_000)
        work = dist.all_reduce(x, group=group, async_op=True)
        while True:
            try:
                work.wait(timedelta(milliseconds=1))
                break
            except RuntimeError:
                pass
    return x
