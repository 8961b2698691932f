"""Process groups in place of MPI's communicators: the tests over MPI then run under torchrun.

torchrun --nproc-per-node 3 --no-python python -m pytest -p no:pytest_mpi tests/mpi
"""

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

RUNNING = "TORCHELASTIC_RUN_ID" in os.environ


class GroupComm(DeviceMesh):
    """A mesh of one dimension, with those methods of mpi4py's communicators that tests use."""

    ndim = 1
    rank = property(lambda self: self.group.rank())
    size = property(lambda self: self.group.size())

    def __init__(self, group):
        self.group = group

    def get_group(self):
        return self.group

    def get_coordinate(self):
        return [self.rank]

    def allgather(self, item):
        items = [None] * self.size
        dist.all_gather_object(items, item, group=self.group)
        return items

    def allreduce(self, item):
        return sum(self.allgather(item))

    def bcast(self, item, root=0):
        return self.allgather(item)[root]

    def Barrier(self):
        dist.barrier(group=self.group)

    def send(self, item, dest):
        dist.send_object_list([item], group=self.group, group_dst=dest)

    def recv(self, source=0):
        items = [None]
        dist.recv_object_list(items, group=self.group, group_src=source)
        return items[0]

    def Dup(self):
        return self.Split(0, self.rank)

    def Split(self, color, key):
        """Collective over all ranks of this group, which must be the whole job."""
        members = {}
        for rank, other in enumerate(self.allgather(color)):
            members.setdefault(other, []).append(rank)
        groups = {other: dist.new_group(ranks) for other, ranks in members.items()}
        return GroupComm(groups[color])

    def Free(self):
        """Destroy the group, once gloo's threads have dropped the tensors of its last call, which takes the GIL.

        The destructor of a group waits for these threads with the GIL held.
        """
        time.sleep(0.2)
        dist.destroy_process_group(self.group)


def world():
    """All ranks of the torchrun."""
    if not dist.is_initialized():
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    return GroupComm(dist.group.WORLD)
