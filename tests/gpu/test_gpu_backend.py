"""The backend of torch.distributed on a device: NCCL inside where there is a GPU, else gloo; one rank."""

import subprocess
import sys

import torch

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

device, place = torch.device(sys.argv[1]), sys.argv[2]
dist.init_process_group("sparsecoll", init_method=f"file://{place}", rank=0, world_size=1)
x = torch.arange(6.0, device=device)
dist.all_reduce(x)
dist.broadcast(x, 0)
dist.all_reduce(x, async_op=True).wait()
gathered, whole, part = [torch.zeros_like(x)], torch.zeros_like(x), torch.zeros_like(x)
dist.all_gather(gathered, x)
dist.all_gather_into_tensor(whole, x)
dist.reduce_scatter_tensor(part, x)
dist.barrier()
for found in (*gathered, whole, part):
    assert found.device.type == device.type and found.tolist() == [0, 1, 2, 3, 4, 5]
sparse = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (5,), device=device)
dist.all_reduce(sparse)
assert sparse.device.type == device.type and sparse.to_dense().tolist() == [0, 3, 0, 0, 0]
names = [None]
dist.all_gather_object(names, "rank 0")
assert names == ["rank 0"]

net = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2)).to(device)
model = DistributedDataParallel(net)
model(torch.tensor([1, 1, 3], device=device)).sum().backward()
assert net[0].weight.grad.is_sparse and net[0].weight.grad.coalesce().indices().tolist() == [[1, 3]]
assert net[1].bias.grad.tolist() == [3, 3]
dist.destroy_process_group()
print("done")
"""


def test_calls_on_the_device(tmp_path):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = [sys.executable, "-c", PROGRAM, device, str(tmp_path / "store")]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True).stdout == "done\n"
