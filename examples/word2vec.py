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

import torch
import torch.distributed as dist
from torch.nn import functional

import sparsecoll.torch

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


def shown(step: int, losses: list[float], model: SkipGram, batch: tuple[torch.Tensor, ...]) -> float:
    """Print on rank 0, and return, the mean of these losses over all ranks."""
    mean = torch.tensor(losses, dtype=torch.float64).mean()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    if dist.get_rank() == 0:
        table = model.context.weight
        here = len(torch.cat([words.flatten() for words in batch[1:]]).unique())
        print(f"step {step}: loss {mean:.4f}; {here} rows here, {table.grad._nnz()} on all ranks, of {len(table)}")
    return float(mean)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; return the mean losses that are printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="file, or folder of .txt files")
    parser.add_argument("--steps", type=int, default=1500)
    given = parser.parse_args(arguments)
    sparsecoll.torch.init_process_group()  # the processes of torchrun, or those of mpirun
    rank, size = dist.get_rank(), dist.get_world_size()
    if BATCH % size:
        raise SystemExit(f"expected a number of ranks that divides {BATCH}, got {size}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    words, ids, counts = read(given.text)
    model = SkipGram(len(words), WIDTH)
    inner = torch.optim.SparseAdam(list(model.parameters()), lr=0.01)
    optimizer = sparsecoll.torch.DistributedOptimizer(inner, model)
    start, losses, kept = optimizer.traffic.copy(), [], []
    for step, batch in zip(range(1, given.steps + 1), batches(ids, counts, rank, size), strict=False):
        optimizer.zero_grad()
        loss = model(*batch).mean()
        loss.backward()  # now .grad is the mean over all ranks, a sparse tensor with the rows of all ranks
        optimizer.step()
        losses.append(loss.item())
        if step % max(given.steps // 3, 1) == 0:
            kept.append(shown(step, losses, model, batch))
            losses.clear()
    if rank == 0:
        received = optimizer.traffic.since(start).total.bytes_received / given.steps
        dense = 2 * (size - 1) / size * sum(4 * p.numel() for p in model.parameters())
        print(f"bytes received in a step: {received:,.0f}; with dense gradients {dense:,.0f}")
        for word in SHOWN if given.text is None else words[:4]:
            print(f"{word}: {', '.join(neighbours(model, words, word))}")
    optimizer.close()
    dist.destroy_process_group()
    return kept


if __name__ == "__main__":
    main()
