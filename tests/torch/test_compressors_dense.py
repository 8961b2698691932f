"""Compressors that send something of every value: few bits, low-rank factors, or whole buckets in turn (COVAP)."""

import math

import formulas
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from one_bucket import normal, one, step  # noqa: E402

from sparsecoll import Network, simulate  # noqa: E402
from sparsecoll.torch import DistributedOptimizer  # noqa: E402
from sparsecoll.torch.compressors import (  # noqa: E402
    ACPSGD,
    COVAP,
    FP16,
    QSGD,
    PowerSGD,
    StepContext,
    as_compressor,
    efsignsgd,
)
from sparsecoll.torch.tensors.layout import Layout  # noqa: E402


@pytest.mark.parametrize(
    ("compressor", "bits"), [(efsignsgd(), 1), (QSGD(2), 2), (QSGD(4, levels="float", feedback=True), 4)], ids=str
)
def test_low_bits_take_the_volume_of_their_formula(compressor, bits):
    P, n = 3, 512 * 30

    def program(comm):
        own = as_compressor(compressor)
        own.bind(Layout(0, (n,), ("a",), ((n,),), np.dtype(np.float32)), comm.transport, StepContext())
        before = comm.transport.traffic.copy()
        step(own, comm.transport, normal(3, n)[comm.rank])
        phases = comm.transport.traffic.since(before).phases
        return phases["split"].words_received + phases["gather"].words_received

    assert simulate(P, program).results == pytest.approx([formulas.lowbit_words(n, P, bits)] * P)


def test_efsignsgd_follows_its_algorithm():
    """Two ranks, each of which owns a bucket: Algorithm 1 with the sums compressed as the gradients are."""
    g = normal(2, 1024)

    def signs(x):
        return np.where(x < 0, -1, 1) * np.abs(x).mean()

    results, own = one(efsignsgd(), g)[0]
    sums = [g[0][:512] + signs(g[1][:512]), g[1][512:] + signs(g[0][512:])]
    np.testing.assert_allclose(results[0], np.concatenate([signs(x) for x in sums]) / 2, rtol=1e-4)
    kept = np.concatenate([sums[0] - signs(sums[0]), g[0][512:] - signs(g[0][512:])])
    np.testing.assert_allclose(own.state()["residual"]["p0"].numpy(), kept, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_is_right_on_average(bits):
    g = normal(2, 1024)
    results, _ = one(QSGD(bits), g, steps=400)[0]
    deviation = np.abs(np.mean(results, axis=0) - (g[0] + g[1]) / 2).mean()
    spread = np.std(results, axis=0).mean()
    assert deviation < 2 * spread / math.sqrt(400) + 1e-6


def test_qsgd_rounds_every_rank_bucket_and_step_by_numbers_of_its_own():
    def program(comm, seed):
        shared, found = StepContext(), []
        owns = [QSGD(2, seed=seed) for _ in range(2)]
        for index, own in enumerate(owns):
            own.bind(Layout(index, (1536, 1536), ("p",), ((1536,),), np.dtype(np.float32)), comm.transport, shared)
        for _ in range(2):
            found += [
                step(own, comm.transport, np.full(1536, 0.5, np.float32) + (np.arange(1536) % 512 == 0)) for own in owns
            ]
            shared.step += 1
        return [mean[start : start + 512].tobytes() for mean in found for start in (0, 512, 1024)]

    codes = [row for seed in (0, 1) for row in simulate(3, lambda c, s=seed: program(c, s)).results[0]]
    assert len(set(codes)) == len(codes) == 2 * 2 * 2 * 3


@pytest.mark.parametrize("compressor", [QSGD(4, feedback=True), QSGD(2, feedback=True), efsignsgd()], ids=str)
def test_with_error_feedback_few_bits_learn_as_dense_sums_do(compressor):
    """Least squares on two ranks, whose data differ: the loss is that of exact means within 2 %."""
    rng = np.random.default_rng(0)
    A, b = rng.standard_normal((2, 300, 64)).astype(np.float32), rng.standard_normal((2, 300)).astype(np.float32)

    def program(comm, compressor):
        own = as_compressor(compressor)
        own.bind(Layout(0, (64,), ("w",), ((64,),), np.dtype(np.float32)), comm.transport, StepContext())
        w, mine, wanted = np.zeros(64, np.float32), A[comm.rank], b[comm.rank]
        for _ in range(300):
            w -= 0.05 * step(own, comm.transport, mine.T @ (mine @ w - wanted) / 300)
            own.context.step += 1
        return w

    losses = []
    for own in (compressor, "none"):
        w = simulate(2, lambda comm, own=own: program(comm, own)).results
        assert w[0].tobytes() == w[1].tobytes()
        losses.append(sum(np.square(A[rank] @ w[0] - b[rank]).mean() for rank in range(2)))
    assert losses[0] < 1.02 * losses[1]


def test_fp16_does_not_overflow_where_gradients_do_not():
    g = [np.full(100, 40_000, np.float32)] * 8
    results, _ = one(FP16(), g)[0]
    np.testing.assert_allclose(results[0], 40_000, rtol=1e-3)


def low_rank():
    """Gradients of three ranks that are matrices of rank 2, and their mean."""
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((40, 2)), rng.standard_normal((2, 30))
    g = [(left * (rank + 1)) @ right for rank in range(3)]
    return g, sum(g) / 3


@pytest.mark.parametrize("compressor", [PowerSGD(2), ACPSGD(2, feedback=False)], ids=["powersgd", "acpsgd"])
def test_low_rank_gradients_are_exact_from_the_second_step(compressor):
    g, mean = low_rank()
    results, _ = one(compressor, g, steps=6)[0]
    np.testing.assert_allclose(results[-1].reshape(40, 30), mean, rtol=1e-6, atol=1e-8)


def test_acpsgd_of_low_rank_gradients_makes_up_for_the_first_step_in_the_second():
    g, mean = low_rank()
    results, _ = one(ACPSGD(2), g, steps=2)[0]
    np.testing.assert_allclose(sum(results).reshape(40, 30), 2 * mean, rtol=1e-6, atol=1e-8)


def test_acpsgd_follows_algorithm_2():
    """Two steps against a transcription with NumPy, one matrix, two ranks."""
    g = normal(2, 20, 10, dtype=np.float64)
    results, own = one(ACPSGD(rank=3, seed=5), g, steps=2)[0]
    generator = torch.Generator().manual_seed(5 * 1_000_003)
    _, q = (torch.randn(*shape, generator=generator).double().numpy() for shape in ((20, 3), (10, 3)))
    q = np.linalg.qr(q)[0]
    p = [m @ q for m in g]
    error = [m - x @ q.T for m, x in zip(g, p, strict=True)]
    p = sum(p) / 2
    np.testing.assert_allclose(results[0].reshape(20, 10), p @ q.T, rtol=1e-9, atol=1e-12)
    p = np.linalg.qr(p)[0]
    m = [x + e for x, e in zip(g, error, strict=True)]
    q = [x.T @ p for x in m]
    np.testing.assert_allclose(results[1].reshape(20, 10), p @ (sum(q) / 2).T, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        own.state()["residual"]["p0"].numpy().reshape(20, 10), m[0] - p @ q[0].T, rtol=1e-9, atol=1e-12
    )


def test_low_rank_volume_and_what_is_sent_whole():
    """r (n + m) / 2 words a step on average, times 2(P-1)/P; a bias goes whole; ACP-SGD sends half of PowerSGD."""
    P, shapes = 4, ((64, 48), (64,))
    words = {}
    for kind in (PowerSGD, ACPSGD):

        def program(comm, kind=kind):
            own = kind(rank=4)
            own.bind(Layout(0, (64 * 49,), ("w", "b"), shapes, np.dtype(np.float32)), comm.transport, StepContext())
            before = comm.transport.traffic.copy()
            for _ in range(2):
                gradient = step(own, comm.transport, normal(P, 64 * 49)[comm.rank])
                own.context.step += 1
            phases = comm.transport.traffic.since(before).phases
            mean_bias = sum(x[64 * 48 :] for x in normal(P, 64 * 49)) / P
            np.testing.assert_allclose(gradient[64 * 48 :], mean_bias, rtol=1e-5, atol=1e-6)
            return sum(c.words_received for name, c in phases.items() if name != "agree")

        words[kind] = simulate(P, program).results[0]
    share = 2 * (P - 1) / P
    assert words[PowerSGD] == 2 * share * (4 * (64 + 48) + 64)
    assert words[ACPSGD] == share * (4 * (64 + 48) + 2 * 64)


def test_covap_sends_each_tensor_once_in_i_steps():
    """Buckets of 10, 10 and 40: the last counts as three tensors at I = 3 (four by the median)."""

    def program(comm):
        shared, owns, sent = StepContext(), [], []
        lengths = (10, 10, 40)
        for index, length in enumerate(lengths):
            own = COVAP(3, start=1.0)
            own.bind(Layout(index, lengths, ("p",), ((length,),), np.dtype(np.float32)), comm.transport, shared)
            owns.append(own)
        for _ in range(3):
            row = []
            for own, length in zip(owns, lengths, strict=True):
                row.append(step(own, comm.transport, np.ones(length, np.float32)))
            shared.step += 1
            sent.append(np.concatenate(row))
        return sent

    sent = simulate(2, program).results[0]
    assert [np.count_nonzero(row) for row in sent] == [10 + 13, 13 + 0, 10 + 14]
    for tensor in (slice(0, 10), slice(10, 20), slice(20, 33), slice(33, 46), slice(46, 60)):
        times = [step for step, row in enumerate(sent) if row[tensor].all()]
        assert len(times) == 1
        np.testing.assert_array_equal(sent[times[0]][tensor], times[0] + 1)  # with all that had waited


@pytest.mark.parametrize(("backward", "interval"), [(1.0, 2), (10.0, 1), (0.11, 14), (0.01, 16)])
def test_covap_chooses_i_by_the_ratio_of_communication_to_back_propagation(backward, interval, caplog):
    """4 ranks: 2 * 3 (alpha + beta * 4 bytes * 100 values / 4) = 1.5 s."""
    network = Network(0.05, 0.2 / 100)
    layout = Layout(0, (100,), ("p",), ((100,),), np.dtype(np.float32))

    def program(comm):
        own = COVAP(backward_seconds=backward, network=network)
        own.bind(layout, comm.transport, StepContext())
        return own._interval

    assert set(simulate(4, program).results) == {interval}
    assert ("150.0 times as long" in caplog.text) == (backward == 0.01)


def test_covap_coefficient_ascends_to_one():
    own = COVAP(2, start=0.5, ascend_steps=10, ascend=0.2)
    own.context = StepContext()
    found = []
    for own.context.step in (0, 9, 10, 20, 30, 1000):
        found.append(own.coefficient)
    assert found == pytest.approx([0.5, 0.5, 0.7, 0.9, 1.0, 1.0])


def test_fp16_tells_a_scaler_of_values_beyond_its_range():
    """As torch's own hook does: they become infinite, before or after they are summed."""

    def program(comm):
        model = torch.nn.Linear(4, 1, bias=False)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.0), model, comm, "fp16", dense_below=0)
        scales = torch.tensor([1.0, 6e4, 2e5, 1e6 if comm.rank == 0 else -9e5])
        (model.weight * scales).sum().backward()
        optimizer.step()
        return model.weight.grad[0].tolist()

    for small, near, beyond, on_one in simulate(2, program).results:
        assert small == 1.0 and near == np.float16(6e4) and beyond == np.inf and not np.isfinite(on_one)


@pytest.mark.parametrize("make", [PowerSGD, ACPSGD])
@pytest.mark.parametrize("seed", [67280421310721, 2**64, -1])
def test_any_integer_is_a_seed(make, seed):
    more = {"reuse": False} if make is ACPSGD else {}
    assert one(make(rank=1, seed=seed, **more), np.ones((2, 8, 8), np.float32), steps=2)
