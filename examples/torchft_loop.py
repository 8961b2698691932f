"""Train with torchft while replicas are killed and join: the loss is that of one process with all samples of a step.

torchft_lighthouse --min_replicas 1 --bind [::]:29510
TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/torchft_loop.py  # in each of several shells, on any hosts
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
import torchft
from torch.nn.functional import cross_entropy

from sparsecoll.torch.backend import Options, ProcessGroupSparsecoll

WORDS, BATCH = 100, 12  # samples of a step, which any number of replicas up to 4 share equally


class ReconfigurableGroup(torchft.process_group.ProcessGroupWrapper):
    """Makes a process group of this library for each quorum, as torchft's ProcessGroupGloo makes one of gloo."""

    def _create_pg(self, store, rank, size):
        return ProcessGroupSparsecoll(store, rank, size, self._timeout, Options)

    def getBackendName(self):
        return "torchft-sparsecoll"


GROUPS = {"sparsecoll": ReconfigurableGroup, "gloo": torchft.ProcessGroupGloo}


def samples(seed: int, count: int = BATCH):
    """Return bags of 8 words, and whether words of the first or of the second half are more frequent in them."""
    words = torch.randint(WORDS, (count, 8), generator=torch.Generator().manual_seed(seed))
    return words, (words < WORDS // 2).double().mean(1).round().long()


def train(backend: str, steps: int, show: int) -> None:
    """Train as one replica; print the loss on other samples every `show` steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.EmbeddingBag(WORDS, 16, sparse=True), torch.nn.Linear(16, 2)).double()
    plain = torch.optim.SGD(net.parameters(), 2.0)

    def state():
        return {"net": net.state_dict(), "optimizer": plain.state_dict()}

    def load(saved):
        net.load_state_dict(saved["net"])
        plain.load_state_dict(saved["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # of this replica, of one rank
    place = {"store_addr": "localhost", "store_port": store.port, "rank": 0, "world_size": 1}
    group = GROUPS[backend](timeout=timedelta(seconds=30))
    manager = torchft.Manager(group, load, state, min_replica_size=1, use_async_quorum=False, **place)
    optimizer = torchft.Optimizer(manager, plain)
    while manager.current_step() < steps:
        optimizer.zero_grad()  # waits for the replicas of this step; one that joins loads the state of another
        step, count = manager.current_step(), manager.num_participants()
        words, labels = samples(step)
        own = slice(manager.participating_rank(), None, count)
        cross_entropy(net(words[own]), labels[own]).backward()
        for work in [manager.allreduce(p.grad) for p in net.parameters()]:
            work.wait()  # if a replica is lost, this tells the manager, and does not raise
        optimizer.step()  # does nothing then, and the step is made again
        if manager.current_step() > step and manager.current_step() % show == 0:
            words, labels = samples(-1, 200)
            print(f"{step + 1} {cross_entropy(net(words), labels):.9f} {count}", flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=GROUPS, default="sparsecoll")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--show", type=int, default=20)
    args = parser.parse_args()
    train(args.backend, args.steps, args.show)
