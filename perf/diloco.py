"""Seconds that DiLoCo waits in a round, over links of any rate and delay, beside a plain sum by gloo.

    python perf/testbed.py run --rate 100mbit --delay 20 -- \\
        python perf/diloco.py --rate 100mbit --delay 20 --update --json perf/results/diloco.json

A step sleeps for `--compute` seconds, and one of ten moves all parameters by noise; the time beyond that is waiting.
Lines of torchft, where it is installed, are those of its own DiLoCo over gloo, each rank a replica group.
"""

import subprocess
import time
from datetime import timedelta

import harness
import numpy as np
import torch
import torch.distributed as dist

import sparsecoll.torch
from sparsecoll.torch.compressors import QSGD, ChunkedTopK
from sparsecoll.transport import as_transport, default_comm
from sparsecoll.transport.all_ranks import allgather

STREAM = {"fragments": 4, "alpha": 0.5}
LINES = {
    "gloo, all values": {},
    "torchft": {"delay": 0},
    "torchft, streaming": {"delay": 29},
    "DiLoCo, all values": {},
    "DiLoCo, 4 bits": {"compressor": QSGD(4, feedback=True)},
    "SparseLoCo": {"preset": "sparseloco"},
    "SparseLoCo, requantized": {"preset": "sparseloco", "compressor": ChunkedTopK(decay=0.95, requantize=True)},
    "DiLoCo, all values, streaming": {**STREAM, "delay": 29},
    "SparseLoCo, streaming": {"preset": "sparseloco", **STREAM, "delay": 6},
}


class Noise(torch.optim.SGD):
    """Moves parameters as training would, all at once in one step of ten: ranks share processors."""

    steps, seconds = 0, 0.0

    def step(self, closure=None):
        """Add noise from a small table."""
        start = time.perf_counter()
        for group in self.param_groups if self.steps % 10 == 0 else ():
            for p in group["params"]:
                p.data.view(-1, 1000).add_(torch.randn(1000), alpha=1e-3)
        self.steps += 1
        self.seconds += time.perf_counter() - start


class Gloo:
    """DiLoCo by hand: the mean of the changes in one call."""

    def __init__(self, inner, model, every):
        self.inner, self.params, self.every, self.count = inner, list(model.parameters()), every, 0
        self.shared = [p.detach().clone() for p in self.params]

    def step(self):
        """A step, with a mean after `every` of them."""
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            flat = torch.cat([(s - p.detach()).view(-1) for s, p in zip(self.shared, self.params, strict=True)])
            dist.all_reduce(flat)
            parts = flat.div_(dist.get_world_size()).split([p.numel() for p in self.params])
            for s, p, part in zip(self.shared, self.params, parts, strict=True):
                p.data.copy_(s.sub_(part.view_as(s)))


class Torchft:
    """DiLoCo of torchft: one fragment, whose sum may end `delay` steps later."""

    def __init__(self, inner, model, every, delay):
        import torchft
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        host, rank, limit = subprocess.getoutput("hostname -I").split()[0], dist.get_rank(), timedelta(minutes=5)
        self.lighthouse = LighthouseServer(f"{host}:0", dist.get_world_size()) if rank == 0 else None
        port = torch.tensor([int(self.lighthouse.address().rpartition(":")[2]) if self.lighthouse else 0])
        first = [host]
        dist.broadcast(port, 0)
        dist.broadcast_object_list(first)
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # of this replica, of one rank
        place = {"store_addr": host, "store_port": store.port, "rank": 0, "world_size": 1, "hostname": host}
        place |= {"lighthouse_addr": f"http://{first[0]}:{int(port)}", "replica_id": f"rank {rank}"}
        given = {"use_async_quorum": False, "init_sync": False, "timeout": limit, "quorum_timeout": limit}
        group = torchft.ProcessGroupGloo(timeout=limit)
        self.manager = torchft.Manager(group, None, None, dist.get_world_size(), **given, **place)
        self.step, self.store = inner.step, store
        outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
        self.diloco = DiLoCo(self.manager, [model], inner, outer, every, pin_memory=False, fragment_sync_delay=delay)
        self.diloco.__enter__()

    def close(self):
        """Leave the job."""
        self.diloco.__exit__(None, None, None)
        dist.barrier()
        self.manager.shutdown(wait=False)


PEERS = {"gloo": Gloo, "torchft": Torchft}


def measure(options, line, model):
    """Return the row of a line: per round, seconds of waiting on the slowest rank and megabytes received."""
    inner = Noise(model.parameters(), 1.0)
    given, every = LINES[line], options.every
    made = PEERS.get(line.partition(",")[0], sparsecoll.torch.DiLoCo)
    optimizer = made(inner, model, every=every, **given)
    transport, rounds = as_transport(None), options.rounds
    waits, host = np.zeros(rounds + 1), 0
    for step in range((rounds + 1) * every):
        if step == every:  # after a first round
            host = harness.link_bytes(options.interface)[1]
        time.sleep(options.compute)
        start, own = time.perf_counter(), inner.seconds
        optimizer.step()
        waits[step // every] += time.perf_counter() - start - (inner.seconds - own)
    host = (harness.link_bytes(options.interface)[1] - host) / rounds / 1e6
    if made is not Gloo:
        optimizer.close()
    slowest = allgather(transport, waits[1:]).max(axis=0)
    row = {"line": line, "P": dist.get_world_size(), "parameters": sum(p.numel() for p in model.parameters())}
    row |= {"every": every, "compute": options.compute, "rate": options.rate, "delay ms": options.delay}
    return row | {"seconds": float(np.median(slowest)), "most": float(slowest.max()), "MB received": host}


def main():
    """Run the lines."""
    own = {"every": 30, "rounds": 3, "compute": 0.4, "million": 20, "rate": "", "delay": 0.0, "interface": "eth0"}
    options = harness.options(__doc__, lines=list(LINES), **own)
    harness.start_gloo(default_comm(), options.interface)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # hosts share processors
    layers = [torch.nn.Linear(1000, 1000, bias=False) for _ in range(options.million)]
    rows = (measure(options, line, torch.nn.Sequential(*layers)) for line in options.lines)
    harness.record(rows, options, dist.get_rank(), key=("line", "P", "rate", "delay ms", "compute"))


if __name__ == "__main__":
    main()
