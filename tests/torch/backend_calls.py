"""Calls of torch.distributed on a group, each of which returns what it has computed; for backend_ranks.py."""

import warnings
from datetime import timedelta

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

CASES = {}
OPS = {"sum": "SUM", "product": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG", "band": "BAND", "bor": "BOR"}
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "complex64")
SLOW = (
    "functional_calls",
    "compiled",
    "compiled_with_calls",
    "fully_sharded",
)  # imports that take seconds on each rank: only P = 2
SHAPES = {  # of sparse tensors: shape, sparse dimensions, indices of a rank
    "rows": ((50, 3), 1, lambda r: [[r, 7, 2 * r + 1]]),
    "rows_of_matrices": ((9, 2, 2), 1, lambda r: [[r, 8]]),
    "rows_of_two_indices": ((4, 5, 3), 2, lambda r: [[1, 3, r % 4], [2, 2, r]]),
    "entries": ((40,), 1, lambda r: [[r, 2 * r, 39]]),
    "entries_of_a_matrix": ((6, 7), 2, lambda r: [[r, 5], [1, r]]),
    "repeated": ((30, 2), 1, lambda r: [[4, r, 4, 4]]),
    "repeated_entries": ((30,), 1, lambda r: [[4, r, 4]]),
    "empty_on_some": ((30, 2), 1, lambda r: [[4, r]] if r % 2 else [[]]),
    "empty_entries_on_some": ((30,), 1, lambda r: [[]] if r % 2 else [[4, r]]),
    "empty": ((30, 2), 1, lambda r: [[]]),
    "empty_entries": ((30,), 1, lambda r: [[]]),
}


def case(function):
    CASES[function.__name__.removeprefix("case_")] = function


def cases_of(names):
    """Decorator: one case for each name, an argument."""

    def decorate(function):
        for name in names:
            CASES[f"{function.__name__}_{name}"] = lambda group, name=name: function(group, name)

    return decorate


def own(group, *shape, dtype=torch.float32):
    """Values of this rank, small integers, whose sums and products are exact in all dtypes."""
    made = torch.Generator().manual_seed(dist.get_rank(group))
    return torch.randint(0, 3, shape, generator=made).to(dtype)


def sparse(group, kind, dtype=torch.float32):
    shape, dims, indices = SHAPES[kind]
    index = torch.tensor(indices(dist.get_rank(group)), dtype=torch.int64)
    values = own(group, index.shape[1], *shape[dims:], dtype=dtype) + 1
    return torch.sparse_coo_tensor(index, values, shape, check_invariants=True)


def neighbours(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return (rank + 1) % size, (rank - 1) % size


# -- sums


@cases_of(OPS)
def all_reduce(group, op):
    x = own(group, 7, dtype=torch.int64 if op in ("band", "bor") else torch.float32)
    dist.all_reduce(x, getattr(dist.ReduceOp, OPS[op]), group=group)
    return x


@cases_of(DTYPES)
def all_reduce_of(group, name):
    x = own(group, 3, 4, dtype=getattr(torch, name))
    dist.all_reduce(x, group=group)
    return x


@cases_of(SHAPES)
def sparse_sum(group, kind):
    x = sparse(group, kind)
    dist.all_reduce(x, group=group)
    return x


@cases_of(("float64", "float16", "bfloat16", "int32", "int64"))
def sparse_sum_of(group, name):
    through = torch.float32 if name == "float16" and dist.get_backend(group) == "gloo" else None  # gloo cannot add it
    dtype, sums = getattr(torch, name), []
    for kind in ("repeated", "entries"):
        x = sparse(group, kind, dtype).to(through or dtype)
        dist.all_reduce(x, group=group)
        sums.append(x.to(dtype))
    return sums


@case
def sparse_sum_of_nan(group):
    x = sparse(group, "rows")
    x._values()[0, 0] = float("nan")
    dist.all_reduce(x, group=group)
    return x


@cases_of(("min", "product", "band"))
def sparse_other(group, op):
    x = sparse(group, "rows", torch.int64)
    dist.all_reduce(x, getattr(dist.ReduceOp, OPS[op]), group=group)


@case
def async_sums(group):
    tensors = [sparse(group, "rows"), own(group, 5), sparse(group, "entries"), own(group, 5)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x in tensors]
    for work in works:
        assert work.wait()
        assert work.is_completed()
    return tensors


@case
def futures(group):
    tensors = [sparse(group, "rows"), own(group, 5)]
    made = [dist.all_reduce(x, group=group, async_op=True).get_future() for x in tensors]
    doubled = [future.then(lambda done: done.value()[0] * 2) for future in made]
    return [future.wait() for future in doubled]


@case
def by_the_group_itself(group):
    x, y, z = own(group, 3), own(group, 3), sparse(group, "rows")
    group.allreduce(x, dist.ReduceOp.MAX).wait()
    group.allreduce([y]).wait()
    group.allreduce([z]).wait()
    group.broadcast(x, root=0).wait()
    group.barrier().wait()
    return x, y, z


@case
def coalesced(group):
    tensors = [own(group, n) for n in (3, 5)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced(tensors, group=group)
    with dist.distributed_c10d._coalescing_manager(group):
        for x in tensors:
            dist.all_reduce(x, group=group)
    return tensors


@case
def reduce(group):
    x, last = own(group, 4), dist.get_world_size(group) - 1
    dist.reduce(x, group_dst=last, group=group)
    return x if dist.get_rank(group) == last else None


@case
def reduce_scatter(group):
    out = torch.zeros(3)
    dist.reduce_scatter(out, list(own(group, dist.get_world_size(group), 3)), group=group)
    return out


@case
def reduce_scatter_tensor(group):
    out = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(out, own(group, 2 * dist.get_world_size(group), 3), group=group)
    return out


# -- other collectives


@cases_of(("first", "last"))
def broadcast(group, root):
    x = own(group, 4)
    dist.broadcast(x, group_src=0 if root == "first" else dist.get_world_size(group) - 1, group=group)
    return x


@case
def all_gather(group):
    out = [torch.zeros(2) for _ in range(dist.get_world_size(group))]
    dist.all_gather(out, own(group, 2), group=group)
    return out


@case
def all_gather_into_tensor(group):
    out = torch.zeros(2 * dist.get_world_size(group))
    work = dist.all_gather_into_tensor(out, own(group, 2), group=group, async_op=True)
    work.wait()
    return out


@case
def gather(group):
    first = dist.get_rank(group) == 0
    out = [torch.zeros(2) for _ in range(dist.get_world_size(group))] if first else None
    dist.gather(own(group, 2), out, group_dst=0, group=group)
    return out


@case
def scatter(group):
    out, first = torch.zeros(2), dist.get_rank(group) == 0
    parts = list(own(group, dist.get_world_size(group), 2)) if first else None
    dist.scatter(out, parts, group_src=0, group=group)
    return out


@case
def all_to_all(group):
    size = dist.get_world_size(group)
    out = [torch.zeros(2) for _ in range(size)]
    dist.all_to_all(out, list(own(group, size, 2)), group=group)
    return out


@case
def all_to_all_single(group):
    size = dist.get_world_size(group)
    out, even = torch.zeros(size * (dist.get_rank(group) + 1)), torch.zeros(2 * size)
    splits = [[dist.get_rank(group) + 1] * size, list(range(1, size + 1))]
    dist.all_to_all_single(out, own(group, sum(splits[1])), *splits, group=group)
    dist.all_to_all_single(even, own(group, 2 * size), group=group)
    return out, even


@case
def barriers(group):
    dist.barrier(group)
    dist.barrier(group, async_op=True).wait()
    dist.monitored_barrier(group, timeout=timedelta(seconds=20))


@case
def objects(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    gathered, at_root, told, scattered = [None] * size, [None] * size, [{"r": rank}], [None]
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    dist.gather_object(rank, at_root if rank == 0 else None, group_dst=0, group=group)
    dist.broadcast_object_list(told, group_src=size - 1, group=group)
    dist.scatter_object_list(scattered, [str(i) for i in range(size)], group_src=0, group=group)
    return gathered, at_root, told, scattered


# -- messages


@case
def send_and_recv(group):
    rank, x, objects = dist.get_rank(group), own(group, 3), [None]
    if dist.get_world_size(group) == 1:
        return None
    if rank == 0:
        dist.send(x, group_dst=1, group=group, tag=3)
        dist.send_object_list(["one"], group_dst=1, group=group)
    if rank == 1:
        dist.recv(x, group_src=0, group=group, tag=3)
        dist.recv_object_list(objects, group_src=0, group=group)
    return x, objects


@case
def recv_from_any(group):
    x = own(group, 3)
    if dist.get_rank(group) == 1:
        dist.send(x, group_dst=0, group=group, tag=9)
    if dist.get_rank(group) == 0 and dist.get_world_size(group) > 1:
        return dist.recv(x, group=group, tag=9), x
    return None


@cases_of(("single", "batch"))
def isend_and_irecv(group, kind):
    to, source = neighbours(group)
    x, out = own(group, 3), torch.zeros(3)
    if dist.get_world_size(group) == 1:
        return None
    if kind == "single":
        works = [dist.isend(x, group=group, group_dst=to), dist.irecv(out, group=group, group_src=source)]
    else:
        ops = (
            dist.P2POp(dist.isend, x, group=group, group_peer=to),
            dist.P2POp(dist.irecv, out, group=group, group_peer=source),
        )
        works = dist.batch_isend_irecv(list(ops))
    for work in works:
        work.wait()
    return out


# -- what torch builds of them


@case
def functional_calls(group):
    x, size = own(group, 2 * dist.get_world_size(group)), dist.get_world_size(group)
    return (
        functional.all_reduce(x, "sum", group) + 0,
        functional.all_gather_tensor(x, 0, group) + 0,
        functional.reduce_scatter_tensor(x, "sum", 0, group) + 0,
        functional.all_to_all_single(x, [2] * size, [2] * size, group) + 0,
        functional.broadcast(x, 0, group) + 0,
        [t + 0 for t in functional.all_reduce_coalesced([x, x * 2], "sum", group)],
    )


@case
def compiled(group):
    def function(x):
        return functional.all_reduce(x * 2, "sum", group) + functional.all_gather_tensor(x, 0, group).sum()

    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)(own(group, 4))


@case
def differentiated(group):
    x = own(group, 4).requires_grad_()
    (differentiable.all_reduce(x, group=group) * (dist.get_rank(group) + 1)).sum().backward()
    return x.grad


@case
def dtensors(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    x = DTensor.from_local(own(group, 2, 3), mesh, [Shard(0)])
    return (
        x.full_tensor(),
        x.sum().full_tensor(),
        x.redistribute(mesh, [Replicate()]).to_local(),
        (x @ x.T).full_tensor(),
    )


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


@cases_of(("plain", "views", "hook", "static", "unused"))
def ddp(group, kind):
    net = model()
    options = {"gradient_as_bucket_view": kind == "views", "static_graph": kind == "static"}
    wrapped = DistributedDataParallel(
        net, process_group=group, bucket_cap_mb=0.0001, find_unused_parameters=kind == "unused", **options
    )
    if kind == "hook":
        wrapped.register_comm_hook(group, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(own(group, 5, 4)).sum().backward()
        optimizer.step()
    return list(net.parameters())


@case
def ddp_of_an_embedding(group):
    torch.manual_seed(0)
    table = torch.nn.Embedding(30, 3, sparse=True)
    net = DistributedDataParallel(torch.nn.Sequential(table, torch.nn.Linear(3, 1)), process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        net(torch.tensor([dist.get_rank(group), 2 * step, 7, 7])).sum().backward()
        optimizer.step()
    return table.weight, table.weight.grad.coalesce().indices()


@case
def fully_sharded(group):
    net = model()
    fully_shard(net, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    for _ in range(2):
        net(own(group, 5, 4)).sum().backward()
        optimizer.step()
    return [p.full_tensor() for p in net.parameters()]
