"""Train a table of hashed n-grams whose rows are divided among the ranks, and compare with one process.

    python examples/ngram_table.py
    mpirun -n 4 python -m mpi4py examples/ngram_table.py
    torchrun --nproc-per-node 4 examples/ngram_table.py

A memory of n-grams, as in Engram (DeepSeek, 2026): the last two and three bytes of a text are hashed, by several hash
functions, to rows of a table, and a small dense net predicts the next byte from these rows. The table is too large for
one rank, so each owns n/P rows and their optimizer state. In each step:

    1. Fetch: each rank asks the owners for the rows that its batch needs (alltoall of row numbers, and of rows).
    2. Back-propagation gives each rank a gradient of these rows.
    3. reduce_scatter(owner="range"): the owners receive the sums of their rows, and update them.

All ways to start it print the same losses, because the ranks share the batches of one process.
"""

from __future__ import annotations

import sysconfig
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

import sparsecoll
import sparsecoll.torch
from sparsecoll.transport import as_transport

ROWS, WIDTH, HEADS, BATCH, STEPS = 1 << 18, 16, 2, 840, 300  # 840 is divisible by 1 to 8
PRIMES = 1_000_003, 998_244_353


class OwnedTable:
    """A table of which each rank holds ROWS / P successive rows, and torch's Adagrad for them.

    Args:
        comm: communicator.
        lr: learning rate.
    """

    def __init__(self, comm: Any, lr: float = 0.3) -> None:
        self.comm = comm
        self.edges = np.array([ROWS * j // comm.size for j in range(comm.size + 1)])
        first, last = self.edges[comm.rank : comm.rank + 2].tolist()
        self.rows = torch.nn.Parameter(torch.zeros(last - first, WIDTH))
        self.optimizer = torch.optim.Adagrad([self.rows], lr)

    def fetch(self, wanted: torch.Tensor) -> torch.Tensor:
        """Return rows of the table, given their ascending numbers. Collective."""
        numbers = wanted.numpy()
        cuts = np.searchsorted(numbers, self.edges)
        parts = [numbers[a:b] for a, b in pairwise(cuts)]
        marks = [sparsecoll.SparseVector(part, np.ones(len(part), np.bool_), ROWS) for part in parts]
        asked = sparsecoll.alltoall(self.comm, marks)
        table, first = self.rows.detach().numpy(), self.edges[self.comm.rank]
        answers = [y.indices.astype(np.int64) for y in asked]
        found = sparsecoll.alltoall(self.comm, [sparsecoll.RowSparse(i, table[i - first], ROWS) for i in answers])
        return torch.from_numpy(np.concatenate([part.values for part in found]))

    def step(self, numbers: torch.Tensor, gradient: torch.Tensor) -> int:
        """Update the table by the mean of all ranks' gradients; return how many rows this rank updated. Collective."""
        own = sparsecoll.RowSparse(numbers.numpy(), gradient.numpy(), ROWS)
        mean = sparsecoll.reduce_scatter(self.comm, own, owner="range", op="mean")
        index = torch.from_numpy(mean.rows - self.edges[self.comm.rank])[None]
        self.rows.grad = torch.sparse_coo_tensor(
            index, torch.from_numpy(mean.values), self.rows.shape, is_coalesced=True, check_invariants=False
        )
        self.optimizer.step()
        return mean.nnz


def hashed(text: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the rows of the n-grams that end before positions of a text: 2 and 3 bytes, HEADS hash functions."""
    last = [text[at - distance].long() for distance in (1, 2, 3)]
    two, three = last[0] + 256 * last[1], last[0] + 256 * last[1] + 65536 * last[2]
    keys = [(gram + (2 + kind) * prime) * prime for kind, gram in enumerate((two, three)) for prime in PRIMES[:HEADS]]
    return torch.stack([(key >> 7) % ROWS for key in keys], 1)


def train(comm: Any) -> list[float]:
    """Train; return the mean losses that are printed, in bits per byte."""
    torch.manual_seed(0)
    if BATCH % comm.size:
        raise SystemExit(f"expected a number of ranks that divides {BATCH}, got {comm.size}")
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    net = torch.nn.Sequential(torch.nn.Linear(2 * HEADS * WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, 256))
    table = OwnedTable(comm)
    inner = torch.optim.Adam(net.parameters(), 0.003)
    optimizer = sparsecoll.torch.DistributedOptimizer(inner, net, comm, compressor="none")
    generator, losses, shown = torch.Generator().manual_seed(1), [], []
    traffic = sparsecoll.traffic(comm)
    received = traffic.total.bytes_received
    for step in range(1, STEPS + 1):
        at = torch.randint(3, len(text), (BATCH,), generator=generator)[comm.rank :: comm.size]  # this rank's part
        numbers, places = hashed(text, at).unique(return_inverse=True)
        vectors = table.fetch(numbers).requires_grad_()
        loss = functional.cross_entropy(net(vectors[places].flatten(1)), text[at].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updated = table.step(numbers, vectors.grad)
        losses.append(loss.item())
        if step % (STEPS // 3) == 0:
            mean = sparsecoll.allreduce(comm, np.array(losses) / np.log(2), "dense", op="mean").values.mean()
            shown.append(float(mean))
            if comm.rank == 0:
                print(f"step {step}: {mean:.3f} bits per byte; {len(numbers)} rows fetched, {updated} updated here")
            losses.clear()
    if comm.rank == 0:
        received = (traffic.total.bytes_received - received) / STEPS
        print(f"{len(table.rows):,} of {ROWS:,} rows here; {received:,.0f} bytes received in a step")
    optimizer.close()
    return shown


def main() -> None:
    sparsecoll.torch.init_process_group()  # the processes of torchrun, or those of mpirun
    torch.set_num_threads(1)
    train(as_transport(None))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
