"""RandomK: indices that are not sent."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from one_bucket import normal, one, step  # noqa: E402

from sparsecoll import simulate  # noqa: E402
from sparsecoll.torch.compressors import (  # noqa: E402
    RandomKCompressor,
    StepContext,
)
from sparsecoll.torch.tensors.layout import Layout  # noqa: E402


def test_randomk_takes_the_same_coordinates_everywhere_and_sends_no_index():
    P, n = 4, 4000

    def program(comm):
        own = RandomKCompressor(0.1)
        own.bind(Layout(0, (n,), ("p",), ((n,),), np.dtype(np.float32)), comm.transport, StepContext())
        gradient = np.full(n, comm.rank + 1, np.float32)
        before = comm.transport.traffic.copy()
        gradient = step(own, comm.transport, gradient)
        phases = comm.transport.traffic.since(before).phases
        return gradient, sum(c.words_received for name, c in phases.items() if name != "agree")

    results = simulate(P, program).results
    for gradient, words in results:
        assert np.count_nonzero(gradient) == 400 and set(np.unique(gradient)) == {0, 2.5}
        assert words == 2 * 400 * (P - 1) / P


def test_randomk_leaves_generators_alone():
    np.random.seed(3)
    torch.manual_seed(3)
    expected = np.random.RandomState(3).rand(), float(torch.rand(1, generator=torch.Generator().manual_seed(3)))
    one(RandomKCompressor(0.1), normal(2, 100))
    assert (np.random.rand(), float(torch.rand(1))) == expected
