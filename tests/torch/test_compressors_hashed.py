"""RandomK and DRAGONN: indices that are not sent."""

from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from one_bucket import normal, one, step  # noqa: E402

from sparsecoll import Network, simulate  # noqa: E402
from sparsecoll.formats import SlotsFormat  # noqa: E402
from sparsecoll.torch import DistributedOptimizer  # noqa: E402
from sparsecoll.torch.compressors import DRAGONN, RandomKCompressor, StepContext  # noqa: E402
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


def test_dragonn_compresses_by_equation_1():
    """A tensor is compressed where the network is slow enough for its size, on all ranks alike."""
    large, small = normal(3, 400_000), normal(3, 300)
    slow, fast = Network(1e-3, 1e-5), Network(1e-9, 1e-14)
    for gradients, network, expected in ((large, slow, True), (large, fast, False), (small, fast, False)):
        for results, own in one(DRAGONN(0.001), gradients, network=network):
            assert own.compressed is expected
            kept = np.count_nonzero(results[0])
            assert kept <= 3 * 400 if expected else kept == gradients[0].size


def test_dragonn_selects_tensors_by_parameter():
    """In a bucket's bytes are one large parameter, which is compressed, and twenty for which that does not pay off."""
    sizes = [2000] * 10 + [400_000] + [2000] * 10
    gradients = normal(3, sum(sizes))

    def program(comm, **options):
        params = [torch.nn.Parameter(torch.zeros(n)) for n in sizes]
        named = [(str(i), p) for i, p in enumerate(params)]
        compressor = DRAGONN(0.001, network=Network(1e-9, 1e-8), **options)
        optimizer = DistributedOptimizer(torch.optim.SGD(params, 1.0), named, comm, compressor)
        for p, own in zip(params, torch.from_numpy(gradients[comm.rank]).split(sizes), strict=True):
            p.grad = own.clone()
        optimizer.step()
        optimizer.close()
        return [p.detach().numpy() for p in params]

    mean = np.split(sum(gradients) / 3, np.cumsum(sizes)[:-1])
    for steps in simulate(3, program).results:
        assert np.count_nonzero(steps[10]) <= 3 * 400
        for step_, expected in zip(steps[:10] + steps[11:], mean[:10] + mean[11:], strict=True):
            np.testing.assert_allclose(-step_, expected, atol=1e-6)
    for steps in simulate(3, partial(program, selective=False)).results:
        assert all(np.count_nonzero(step_) <= 3 * n // 100 for step_, n in zip(steps, sizes, strict=True))


def test_dragonn_adds_messages_slot_by_slot_and_compares_nothing(monkeypatch):
    """One pass over all messages: none is decoded, sorted or merged. The seeds change every step, and no message is
    sent because of that."""
    decoded = []
    monkeypatch.setattr(SlotsFormat, "decode", lambda *_: decoded.append(1))
    gradients = normal(5, 2000)
    gradients[2][:] = 0  # a rank that selects nothing

    def program(comm):
        shared, own = StepContext(), DRAGONN(0.05, selective=False, momentum=0.5)
        own.bind(Layout(0, (2000,), ("p",), ((2000,),), np.dtype(np.float32)), comm.transport, shared)
        rows = []
        for _ in range(4):
            before = comm.transport.traffic.total.messages_sent
            mean = step(own, comm.transport, gradients[comm.rank].copy())
            shared.step += 1
            rows.append((mean, comm.transport.traffic.total.messages_sent - before))
        return rows

    results = simulate(5, program).results
    assert decoded == []
    for rows in results:
        assert [messages for _, messages in rows] == [6, 3, 3, 3]
        assert all((a == b).all() for (a, _), (b, _) in zip(rows, results[0], strict=True))
        assert all(100 < np.count_nonzero(mean) <= 400 for mean, _ in rows)


def test_dragonn_takes_empty_buckets():
    for results, own in one(DRAGONN(0.5), [np.zeros(0, np.float32)] * 3, shapes=((0,),)):
        assert results[0].size == 0 and not own.compressed
