"""Train word vectors on the source text of Python's standard library, with gradients that stay rows on every rank.

    python examples/word2vec.py
    mpirun -n 4 python -m mpi4py examples/word2vec.py
    torchrun --nproc-per-node 4 examples/word2vec.py

Skip-gram with negative sampling (Mikolov and others, NeurIPS 2013). All three print the same losses, because the ranks
share the batches of one process. `--text` takes another file, or a folder of .txt files.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

import sparsecoll
import sparsecoll.torch
from sparsecoll.transport import as_transport

WIDTH, WINDOW, NEGATIVES, BATCH = 64, 4, 5, 1020  # the batch of all ranks together; 1020 is divisible by 1 to 6
SHOWN = "list", "integer", "directory", "thread"


class SkipGram(torch.nn.Module):
    """Two vectors for each word: as the word in the middle, and as one of its context."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.middle = torch.nn.Embedding(words, width, sparse=True)
        self.context = torch.nn.Embedding(words, width, sparse=True)
        torch.nn.init.uniform_(self.middle.weight, -0.5 / width, 0.5 / width)
        torch.nn.init.zeros_(self.context.weight)

    def forward(self, middle: torch.Tensor, context: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair."""
        vectors = self.middle(middle)
        near = (vectors * self.context(context)).sum(1)
        far = torch.einsum("bd,bkd->bk", vectors, self.context(negatives))
        return -functional.logsigmoid(near) - functional.logsigmoid(-far).sum(1)


def read(path: str | None) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Return the words by frequency, the text as their numbers, and how often each comes; rare words are left out."""
    folder = Path(path or sysconfig.get_path("stdlib"))
    files = [folder] if folder.is_file() else sorted(folder.glob("*.txt" if path else "*.py"))
    files += sorted(folder.glob("[a-z]*/*.py")) if path is None else []  # of packages, such as asyncio
    texts = (file.read_text(errors="replace").lower() for file in files)
    found = [word for text in texts for word in re.findall(r"[a-z]+", text)]
    counts = [(word, count) for word, count in Counter(found).most_common() if count >= 5]
    numbers = {word: number for number, (word, _) in enumerate(counts)}
    ids = torch.tensor([numbers[word] for word in found if word in numbers])
    return list(numbers), ids, torch.tensor([count for _, count in counts], dtype=torch.float64)


def batches(ids: torch.Tensor, counts: torch.Tensor, rank: int, size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield this rank's part of each batch: middle words, words of their contexts, and random words.

    All ranks draw the same numbers. Frequent words are thinned out, as in the paper.
    """
    generator, mine = torch.Generator().manual_seed(1), slice(rank, None, size)
    keep = (1e-3 * len(ids) / counts).sqrt()[ids]
    kept = ids[torch.rand(len(ids), generator=generator, dtype=torch.float64) < keep]
    noise = (counts**0.75).cumsum(0)
    while True:
        at = torch.randint(WINDOW, len(kept) - WINDOW, (BATCH,), generator=generator)
        distance = torch.randint(1, WINDOW + 1, (BATCH,), generator=generator)
        side = 2 * torch.randint(2, (BATCH,), generator=generator) - 1
        drawn = torch.rand(BATCH, NEGATIVES, generator=generator, dtype=torch.float64) * noise[-1]
        yield kept[at][mine], kept[at + side * distance][mine], torch.searchsorted(noise, drawn)[mine]


def neighbours(model: SkipGram, words: list[str], word: str) -> list[str]:
    """Return the words whose vectors point in nearly the same direction."""
    vectors = functional.normalize(model.middle.weight.detach())
    order = (vectors @ vectors[words.index(word)]).argsort(descending=True)
    return [words[number] for number in order[1:5].tolist()]


def train(comm: Any, path: str | None, steps: int) -> list[float]:
    """Train; return the mean losses that are printed."""
    if BATCH % comm.size:
        raise SystemExit(f"expected a number of ranks that divides {BATCH}, got {comm.size}")
    torch.manual_seed(0)
    words, ids, counts = read(path)
    model = SkipGram(len(words), WIDTH)
    inner = torch.optim.SparseAdam(list(model.parameters()), lr=0.01)
    optimizer = sparsecoll.torch.DistributedOptimizer(inner, model, comm)
    start, losses, shown = optimizer.traffic.copy(), [], []
    for step, batch in zip(range(1, steps + 1), batches(ids, counts, comm.rank, comm.size), strict=False):
        optimizer.zero_grad()
        loss = model(*batch).mean()
        loss.backward()  # now .grad is the mean over all ranks, a sparse tensor with the rows of all ranks
        optimizer.step()
        losses.append(loss.item())
        if step % (steps // 3) == 0:
            shown.append(float(sparsecoll.allreduce(comm, np.array(losses), "dense", op="mean").values.mean()))
            losses.clear()
            if comm.rank == 0:
                here = len(torch.cat([numbers.flatten() for numbers in batch[1:]]).unique())
                rows = model.context.weight.grad._nnz()
                print(f"step {step}: loss {shown[-1]:.4f}; {here} rows here, {rows} on all ranks, of {len(words)}")
    if comm.rank == 0:
        received = optimizer.traffic.since(start).total.bytes_received / steps
        dense = 2 * (comm.size - 1) / comm.size * sum(4 * p.numel() for p in model.parameters())
        print(f"bytes received in a step: {received:,.0f}; with dense gradients {dense:,.0f}")
        for word in SHOWN if path is None else words[:4]:
            print(f"{word}: {', '.join(neighbours(model, words, word))}")
    optimizer.close()
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="file, or folder of .txt files")
    parser.add_argument("--steps", type=int, default=1500, help="at least 3 (default: 1500)")
    arguments = parser.parse_args()
    if arguments.steps < 3:
        parser.error(f"--steps: expected at least 3, got {arguments.steps}")
    sparsecoll.torch.init_process_group()  # the processes of torchrun, or those of mpirun
    torch.set_num_threads(1)
    train(as_transport(None), arguments.text, arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
