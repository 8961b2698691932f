"""Quality after 200 rounds of an ElasticGroup in which 20 workers are killed and 20 join, and of undisturbed ones.

    python perf/kills.py --json perf/results/kills.json

Four workers, threads of one process, learn the byte that follows 16 others, by DiLoCo with AdamW inside, 20 steps a
round. In rounds that are drawn, a worker ends before or after it has sent its changes; a new one with the same share of
the data joins at once. The deadline is so long that only the dead are late. Quality is the loss in bits per byte.
"""

import itertools
import threading

import harness
import numpy as np
import torch
from nets import addresses, quality
from torch import distributed as dist, nn

from sparsecoll.torch import DiLoCo, ElasticGroup

WORKERS, ROUNDS, EVERY, KILLS = 4, 200, 20, 20


class Killed(Exception):
    """The worker has died."""


class Group(ElasticGroup):
    """Its worker dies in some rounds, before or after it sends."""

    def exchange(self, number, *given):
        when = self.ends.pop(number, None)
        if when == "before":
            raise Killed(number)
        found = super().exchange(number, *given)
        if when == "after":
            raise Killed(number)
        return found


def net():
    """Return a net of 205 k parameters, and scores (count, 256) of the byte that follows 16 bytes."""
    layers = (nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 256))
    return nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), *layers)


def work(store, seed, rank, ends, preset, results, x, y, test):
    """Train as the worker of a share of the data, and as those that replace it; the last one's model is the result."""
    own = torch.arange(rank, len(y), WORKERS)
    for life in itertools.count():
        torch.manual_seed(seed)
        model = net()
        inner = torch.optim.AdamW(model.parameters(), 2e-3)
        group = Group(store, deadline=3.0, workers=WORKERS if life == 0 else 1, name=f"{rank}.{life}")
        group.ends = ends[rank] if ends else {}
        optimizer = DiLoCo(inner, model, group, preset=preset, every=EVERY)
        draw = torch.Generator().manual_seed(1000 * seed + 10 * life + rank)
        try:
            while group.number < ROUNDS:
                for part in inner.param_groups:
                    part["lr"] = 2e-3 * min(10 * (group.number + 1), ROUNDS - group.number) / ROUNDS
                chosen = own[torch.randint(len(own), (64,), generator=draw)]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[chosen].int()), y[chosen].long()).backward()
                optimizer.step()
        except Exception as error:
            if "Killed" not in repr(error):
                raise
            continue
        optimizer.synchronize()
        results[rank] = quality(model, test, "bits")
        return


def rows(options):
    """Yield the quality of each seed, undisturbed and disturbed."""
    torch.set_num_threads(1)
    (x, y), test = addresses(16)
    read = x, y[:, -1], (test[0].int(), test[1][:, -1])
    for seed, preset, killed in itertools.product(options.seeds, options.presets, (False, True)):
        draw = np.random.default_rng(seed)
        ends = [{} for _ in range(WORKERS)]
        for number in draw.choice(np.arange(5, ROUNDS - 5), KILLS, replace=False):
            ends[draw.integers(WORKERS)][int(number)] = draw.choice(["before", "after"])
        results, store = {}, dist.HashStore()
        given = killed and ends, preset, results, *read
        threads = [threading.Thread(target=work, args=(store, seed, rank, *given)) for rank in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == WORKERS and len({*results.values()}) == 1, results
        yield {"preset": preset, "killed": KILLS * killed, "seed": seed, "bits per byte": results[0]}


def main():
    """Train and print; save the rows."""
    options = harness.options(__doc__, seeds=[0, 1, 2, 3, 4], presets=["diloco", "sparseloco"])
    harness.record(rows(options), options)


if __name__ == "__main__":
    main()
