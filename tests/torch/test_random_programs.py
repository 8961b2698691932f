"""Random training programs on the simulator; a failure names its seed, which `SPARSECOLL_PROGRAM=seed` replays.

SPARSECOLL_PROGRAMS says how many are run (`make fuzz`: 2,000).
"""

import gc
import os
from functools import partial

import pytest

torch = pytest.importorskip("torch")

torch.set_num_threads(1)

from play import run  # noqa: E402

from sparsecoll import simulate  # noqa: E402

COUNT, PARTS = int(os.environ.get("SPARSECOLL_PROGRAMS", "80")), 4
ONE = os.environ.get("SPARSECOLL_PROGRAM")


@pytest.fixture(autouse=True)
def quick_collection():
    """A DistributedOptimizer collects garbage when it is made: not what was there before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs_lose_nothing_on_any_number_of_ranks(part):
    for seed in range(part, COUNT, PARTS) if ONE is None else [int(ONE)]:
        results = simulate(1 + seed // PARTS % 4, partial(run, seed=seed)).results
        for values in results:
            assert all(torch.equal(t, results[0][name]) for name, t in values.items()), seed
