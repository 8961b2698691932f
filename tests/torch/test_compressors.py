"""Every compressor of the registry: same bits everywhere, nothing lost, resumed exactly; and each one's own rule."""

import copy
import io
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nets import batch, bits, loss_of, net, train  # noqa: E402

import sparsecoll  # noqa: E402
from sparsecoll import Network, simulate  # noqa: E402
from sparsecoll.errors import CommunicationError  # noqa: E402
from sparsecoll.formats import Slots  # noqa: E402
from sparsecoll.torch import COMPRESSORS, DistributedOptimizer, WarmUp, redistribute  # noqa: E402
from sparsecoll.torch.compressors import (  # noqa: E402
    ACPSGD,
    COVAP,
    DGC,
    DRAGONN,
    FP16,
    QSGD,
    EFSignSGD,
    OkTopk,
    PowerSGD,
    RandomK,
    StepContext,
    TopK,
    resolve,
)
from sparsecoll.torch.layout import Layout  # noqa: E402

REPLICATED = [name for name in COMPRESSORS if name != "free"]
OPTIONS = {"bucket_bytes": 6000, "dense_below": 10}  # three or more buckets, vectors among what is compressed
CONSERVING = {name: resolve(name) for name in REPLICATED if name not in ("fp16", "qsgd", "dgc", "covap")} | {
    "dgc without momentum": DGC(momentum=0.0),
    "covap with coefficient 1": COVAP(interval=3, start=1.0),
    "qsgd with feedback": QSGD(2, feedback=True),
    "topk by layer": TopK({"4.*": 0.3, "*": 0.05}),
    "topk, float16 on the wire": TopK(0.1, value_dtype="float16"),
    "topk over spardl": TopK(0.05, algo="spardl"),
    "topk over gtopk": TopK(0.05, algo="gtopk"),
    "oktopk object": TopK(0.05, algo=sparsecoll.OkTopk(tau=2, tau_prime=2)),
    "an algorithm": sparsecoll.SparDL(),
    "dragonn, all compressed": DRAGONN(0.05, selective=False),
    "dragonn, float16 on the wire": DRAGONN(0.05, selective=False, value_dtype="float16"),
    "dgc, random sample": DGC(0.1, momentum=0.0, selector=sparsecoll.select.SampledThreshold(random=True)),
}


def step(own, transport, gradient):
    """The mean of a step that is taken."""
    out = np.empty_like(gradient) if own.keeps_gradient else gradient
    own.allreduce_mean(transport, gradient, out)
    own.keep()
    own.commit()
    return out


def one(compressor, gradients, steps=1, shapes=None, **world):
    """Means of `steps` reductions of one bucket, on as many ranks as there are gradients, and the bound compressors."""
    shapes = shapes or (gradients[0].shape,)

    def program(comm):
        own = resolve(compressor)
        names = tuple(f"p{i}" for i in range(len(shapes)))
        flat = gradients[comm.rank].reshape(-1)
        own.bind(Layout(0, (flat.size,), names, shapes, flat.dtype), comm.transport, StepContext())
        results = []
        for _ in range(steps):
            results.append(step(own, comm.transport, flat.copy()))
            own.context.step += 1
        return results, own

    return simulate(len(gradients), program, **world).results


def normal(P, *shape, dtype=np.float32):
    return [np.random.default_rng(rank).standard_normal(shape).astype(dtype) for rank in range(P)]


# -- for all of them


@pytest.mark.parametrize("P", [1, 3, 4])
@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_stay_the_same_bits_and_the_loss_falls(name, P):
    compressor = COVAP(2) if name == "covap" else name  # a measured interval depends on what else the machine does

    def program(comm):
        model = net(seed=comm.rank, dtype=torch.float32)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, compressor, verify=7, **OPTIONS)
        data = batch(comm.rank, 0, torch.float32)
        first = loss_of(model, data).item()
        for _ in range(120):
            optimizer.zero_grad()
            loss_of(model, data).backward()
            optimizer.step()
        return bits(model), first, loss_of(model, data).item()

    results = simulate(P, program).results
    assert len({b for b, _, _ in results}) == 1
    assert np.mean([after for _, _, after in results]) < 0.95 * np.mean([before for _, before, _ in results])


@pytest.mark.parametrize("compressor", CONSERVING.values(), ids=CONSERVING.keys())
def test_gradient_mass_is_conserved(compressor):
    """P * (w0 - w) / lr + residuals of all ranks = all gradients of all ranks."""
    P, lr = 4, 0.1

    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr)
        options = {**OPTIONS, "overlap": False}  # gradients stay local until the step
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, compressor, **options)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        given = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, batch(comm.rank, step)).backward()
            for name, p in model.named_parameters():
                given[name] += p.grad
            optimizer.step()
        moved = {name: (start[name] - p.detach()) / lr for name, p in model.named_parameters()}
        return given, optimizer.state_dict()["sparsecoll"]["tensors"].get("residual", {}), moved

    results = simulate(P, program).results
    for name, moved in results[0][2].items():
        given = sum(r[0][name] for r in results)
        kept = sum(r[1][name] for r in results if name in r[1])
        torch.testing.assert_close(P * moved + kept, given, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", [*REPLICATED, "topk by layer"])
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(name):
    made = {"topk by layer": lambda: TopK({"*": 0.1}, selector=sparsecoll.select.ThresholdReuse())}

    def program(comm):
        def fresh():
            model = net(dtype=torch.float32)
            inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
            compressor = made.get(name, lambda: name)()
            if name == "oktopk":
                compressor = OkTopk(WarmUp(0.05, 6), algo=sparsecoll.OkTopk(tau=3, tau_prime=4))
            if name == "covap":
                compressor = COVAP(2)  # a measured interval is never the same twice
            return model, DistributedOptimizer(inner, model.named_parameters(), comm, compressor, **OPTIONS)

        whole, optimizer = fresh()
        train(comm, whole, optimizer, range(9), torch.float32)
        model, optimizer = fresh()
        train(comm, model, optimizer, range(5), torch.float32)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model, optimizer = fresh()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        train(comm, model, optimizer, range(5, 9), torch.float32)
        return bits(model) == bits(whole)

    assert all(simulate(3, program).results)


@pytest.mark.parametrize("name", REPLICATED)
def test_nan_on_one_rank_raises_on_all_or_reaches_all(name):
    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, name, overlap=False, **OPTIONS)
        loss_of(model, batch(comm.rank, 0)).backward()
        if comm.rank == 1:
            model[2].weight.grad.fill_(float("nan"))
        try:
            optimizer.step()
        except ValueError as error:
            return str(error)
        return bool(torch.isnan(model[2].weight).all())

    results = simulate(3, program).results
    passes = name in ("none", "fp16")
    assert results == [True] * 3 if passes else len(set(results)) == 1 and "NaN" in results[0]


@pytest.mark.parametrize("name", ["qsgd", "topk", "none"])
def test_nan_in_a_parameter_that_is_not_compressed(name):
    """The biases, of fewer values than `dense_below`; only `none` and `fp16` pass it on."""

    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, name, overlap=False, dense_below=100)
        loss_of(model, batch(comm.rank, 0)).backward()
        if comm.rank == 1:
            model[2].bias.grad.fill_(float("nan"))
        try:
            optimizer.step()
        except ValueError as error:
            return str(error)
        return bool(torch.isnan(model[2].bias).all())

    results = simulate(3, program).results
    assert results == [True] * 3 if name == "none" else set(results) == {results[0]} and "'2.bias'" in results[0]


@pytest.mark.parametrize("P,size", [(4, 2), (2, 3), (3, 3)])
@pytest.mark.parametrize("name", ["topk", "acpsgd", "dgc"])
def test_residuals_at_another_number_of_ranks_keep_their_mean(name, P, size):
    def first(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, name, **OPTIONS)
        train(comm, model, optimizer, range(4))
        return optimizer.state_dict(), model.state_dict()

    saved = simulate(P, first).results

    def second(comm):
        model = net()
        model.load_state_dict(saved[0][1])
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, name, **OPTIONS)
        with_others = [state for state, _ in saved]
        if size != P:
            with pytest.raises(CommunicationError, match="redistribute"):
                optimizer.load_state_dict(with_others[comm.rank % P])
        optimizer.load_state_dict(redistribute(with_others, comm.rank, comm.size))
        kept = optimizer.state_dict()["sparsecoll"]["tensors"]
        train(comm, model, optimizer, range(4, 8))
        return kept, bits(model)

    results = simulate(size, second).results
    assert len({b for _, b in results}) == 1
    for name_, tensor in saved[0][0]["sparsecoll"]["tensors"]["residual"].items():
        before = sum(state["sparsecoll"]["tensors"]["residual"][name_] for state, _ in saved)
        after = sum(kept["residual"][name_] for kept, _ in results)
        torch.testing.assert_close(after / size, before / P, rtol=1e-12, atol=1e-15)  # updates are means
        assert tensor.shape == after.shape


@pytest.mark.parametrize(
    "make,name",
    [
        (lambda: TopK(0), "density"),
        (lambda: TopK({}), "density"),
        (lambda: TopK({"a": 0.1, "b": 2}), "density"),
        (lambda: TopK(algo="x"), "algo"),
        (lambda: DGC(momentum=1.0), "momentum"),
        (lambda: DGC(clip=0), "clip"),
        (lambda: QSGD(3), "bits"),
        (lambda: QSGD(bucket=1), "bucket"),
        (lambda: PowerSGD(0), "rank"),
        (lambda: COVAP(0), "interval"),
        (lambda: COVAP(start=2), "start"),
        (lambda: FP16("float32"), "value_dtype"),
        (lambda: RandomK({"*": 0.1}), "density"),
        (lambda: resolve("x"), "compressor"),
        (lambda: WarmUp(0.1, 0), "steps"),
    ],
)
def test_bad_options_are_refused(make, name):
    with pytest.raises(ValueError, match=name):
        make()


def test_a_compressor_is_a_name_or_an_object():
    with pytest.raises(TypeError, match="expected a name, a Compressor"):
        resolve(3)
    with pytest.raises(TypeError, match="got the class TopK"):
        resolve(TopK)
    with pytest.raises(TypeError, match="selector: expected an object"):
        TopK(selector="exakt")


def test_an_algorithm_is_top_k_over_it():
    algorithm = sparsecoll.OkTopk(tau=5)
    compressor = resolve(algorithm)
    assert compressor.describe() == TopK(algo=algorithm).describe() and compressor.algo is not algorithm


def test_presets_are_top_k_with_other_defaults():
    for name in ("oktopk", "densestream", "dgc", "gaussiank", "mstopk"):
        assert isinstance(resolve(name), TopK) and COMPRESSORS[name](0.5, momentum=0.25).momentum == 0.25


# -- each one's own rule


def test_topk_by_layer_takes_each_layers_share():
    g = [np.arange(1, 101, dtype=np.float32)]
    results, _ = one(TopK({"p0": 0.1, "*": 0.5}), g, shapes=((60,), (40,)))[0]
    assert np.flatnonzero(results[0]).tolist() == [*range(54, 60), *range(80, 100)]


def test_warm_up_selects_what_it_says():
    schedule = WarmUp(0.01, 8)
    results, _ = one(TopK(schedule), normal(1, 1000), steps=10)[0]
    assert [np.count_nonzero(r) for r in results] == [round(schedule.at(step) * 1000) for step in range(10)]


def test_dgc_at_density_1_is_momentum_and_masks_what_it_sends():
    """With everything sent, u is masked each time: the sum of gradients, no momentum. With nothing of a coordinate
    sent, it gathers momentum-corrected gradient."""
    g = [np.array([1, 0.5, 0, 0], np.float32)] * 2
    results, own = one(DGC(0.25, momentum=0.5), g, steps=2)[0]
    # step 1: u = v = (1, .5); coordinate 0 is sent and masked. Step 2: u = (1, .75), v = (1, 1.25): coordinate 1
    np.testing.assert_allclose(results[0], [1, 0, 0, 0])
    np.testing.assert_allclose(results[1], [0, 1.25, 0, 0])
    np.testing.assert_allclose(own.state()["residual"]["p0"].numpy(), [1, 0, 0, 0])


def test_dgc_clips_each_parameter_by_the_root_of_the_ranks():
    g = [np.array([3, 4, 0.1, 0], np.float32)] * 4
    results, _ = one(DGC(1.0, momentum=0, clip=1.0), g, shapes=((2,), (2,)))[0]
    np.testing.assert_allclose(results[0], [0.3, 0.4, 0.1, 0], rtol=1e-6)  # norm 1 / sqrt(4)


def test_randomk_takes_the_same_coordinates_everywhere_and_sends_no_index():
    P, n = 4, 4000

    def program(comm):
        own = RandomK(0.1)
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
    one(RandomK(0.1), normal(2, 100))
    assert (np.random.rand(), float(torch.rand(1))) == expected


def test_efsignsgd_sends_a_bit_a_value_and_the_mean_magnitude():
    P, g = 3, normal(3, 1000)

    def program(comm):
        own = EFSignSGD()
        own.bind(Layout(0, (1000,), ("a", "b"), ((300,), (700,)), np.dtype(np.float32)), comm.transport, StepContext())
        gradient = g[comm.rank].copy()
        before = comm.transport.traffic.copy()
        gradient = step(own, comm.transport, gradient)
        phases = comm.transport.traffic.since(before).phases
        return gradient, phases["gather"].bytes_received

    def signs(x):
        return np.sign(x) * np.abs(x).mean()

    expected = sum(np.concatenate([signs(x[:300]), signs(x[300:])]) for x in g)
    for gradient, received in simulate(P, program).results:
        np.testing.assert_allclose(gradient, expected / P, rtol=1e-5)
        assert (P - 1) * (125 + 8) <= received <= (P - 1) * (125 + 8 + 16)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_is_right_on_average(bits):
    g = normal(2, 512)
    results, _ = one(QSGD(bits), g, steps=400)[0]
    deviation = np.abs(np.mean(results, axis=0) - (g[0] + g[1]) / 2).mean()
    spread = np.std(results, axis=0).mean()
    assert deviation < 2 * spread / math.sqrt(400) + 1e-6


@pytest.mark.parametrize("compressor", [PowerSGD(2), ACPSGD(2, feedback=False)], ids=["powersgd", "acpsgd"])
def test_low_rank_gradients_are_exact_from_the_second_step(compressor):
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((40, 2)), rng.standard_normal((2, 30))
    g = [(left * (rank + 1)) @ right for rank in range(3)]
    mean = sum(g) / 3
    results, _ = one(compressor, g, steps=6)[0]
    np.testing.assert_allclose(results[-1].reshape(40, 30), mean, rtol=1e-6, atol=1e-8)
    if isinstance(compressor, ACPSGD):
        results, _ = one(ACPSGD(2), g, steps=2)[0]  # with feedback the second makes up for the first
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


def test_covap_coefficient_ascends_to_one():
    own = COVAP(2, start=0.5, ascend_steps=10, ascend=0.2)
    own.context = StepContext()
    found = []
    for own.context.step in (0, 9, 10, 20, 30, 1000):
        found.append(own.coefficient)
    assert found == pytest.approx([0.5, 0.5, 0.7, 0.9, 1.0, 1.0])


def test_covap_measures_its_interval_the_same_on_all_ranks():
    def program(comm):
        model = net()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, "covap", **OPTIONS)
        train(comm, model, optimizer, range(10))
        states = optimizer.state_dict()["sparsecoll"]
        return states["ccr"], states["buckets"], bits(model)

    results = simulate(3, program).results
    assert len({str(r) for r in results}) == 1 and results[0][0] > 0


def test_dragonn_compresses_by_equation_1():
    """A tensor is compressed where the network is slow enough for its size, on all ranks alike."""
    large, small = normal(3, 400_000), normal(3, 300)
    slow, fast = Network(1e-3, 1e-5), Network(1e-9, 1e-14)
    costs = sparsecoll.Costs(select=1e-9, encode=1e-8, decode=1e-8, call=1e-6)
    for gradients, network, expected in ((large, slow, True), (large, fast, False), (small, fast, False)):
        for results, own in one(DRAGONN(0.001), gradients, network=network, costs=costs):
            assert own.compressed is expected
            kept = np.count_nonzero(results[0])
            assert kept <= 3 * 400 if expected else kept == gradients[0].size


def test_dragonn_adds_messages_slot_by_slot_and_compares_nothing(monkeypatch):
    """One pass over all messages: none is decoded, sorted or merged. The seeds change every step, and no message is
    sent because of that."""
    decoded = []
    monkeypatch.setattr(Slots, "decode", lambda *_: decoded.append(1))
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


def test_dragonn_profiles_as_many_messages_for_any_number_of_ranks(monkeypatch):
    counts = {}
    for P in (2, 8):
        added, add = [], Slots.add_into
        with monkeypatch.context() as patch:
            patch.setattr(Slots, "add_into", lambda *a, added=added, add=add: (added.append(1), add(*a)))
            one(DRAGONN({"*": 0.01}), normal(P, 300), steps=0)
        counts[P] = len(added) / P
    assert counts[2] == counts[8] <= 8


def test_dragonn_takes_empty_buckets_and_gathers_only():
    for results, own in one(DRAGONN(0.5), [np.zeros(0, np.float32)] * 3, shapes=((0,),)):
        assert results[0].size == 0 and not own.compressed
    with pytest.raises(ValueError, match="algo: expected 'allgather'"):
        DRAGONN(algo="oktopk")


@pytest.mark.parametrize("algo", ["allgather", "oktopk", "spardl", "densestream", "gtopk"])
@pytest.mark.parametrize("value_dtype", [None, "float16"])
def test_momentum_is_cleared_only_where_this_rank_sent(algo, value_dtype):
    """A rank that sums holds what it cut and rounded of others' sums in its share; that is no reason to forget."""

    def program(comm):
        own = TopK(0.01, algo=algo, momentum=0.9, value_dtype=value_dtype)
        own.bind(Layout(0, (20_000,), ("p",), ((20_000,),), np.dtype(np.float32)), comm.transport, StepContext())
        sent, compress = [], own.compress
        own.compress = lambda acc: sent.append(compress(acc)) or sent[-1]
        gradient = np.random.default_rng(comm.rank).standard_normal(20_000).astype(np.float32)
        step(own, comm.transport, gradient)
        cleared = np.flatnonzero(own.state()["velocity"]["p"].numpy() == 0)
        return cleared.size, np.isin(cleared, sent[0].indices).all()

    for count, all_sent in simulate(8, program).results:
        assert count > 0 and all_sent


def test_nesterov_momentum_is_corrected_as_in_dgc():
    """u = m (u + g), v = v + u + g; both are cleared where v is sent."""
    g = [np.array([2, 1, 0, 0], np.float32)] * 2
    results, _ = one(DGC(0.25, momentum=0.5, nesterov=True), g, steps=3)[0]
    # step 1: u = (1, .5), v = (3, 1.5): coordinate 0 is sent. Step 2: u = (1, .75), v = (3, 3.25): coordinate 1 is.
    # Step 3: u = (1.5, .5), v = (3 + 3.5, 1.5): coordinate 0 is.
    np.testing.assert_array_equal(results[0], [3, 0, 0, 0])
    np.testing.assert_array_equal(results[1], [0, 3.25, 0, 0])
    np.testing.assert_array_equal(results[2], [6.5, 0, 0, 0])
    with pytest.raises(ValueError, match="nesterov"):
        DGC(momentum=0, nesterov=True)


def test_dgc_clips_by_the_norm_of_the_bucket():
    g = [np.array([3, 4, 0, 12], np.float32)] * 4
    results, _ = one(DGC(1.0, momentum=0, clip=6.5, clip_by="bucket"), g, shapes=((2,), (2,)))[0]
    np.testing.assert_allclose(results[0], np.array([3, 4, 0, 12]) / 13 * 3.25, rtol=1e-6)
    with pytest.raises(ValueError, match="clip_by: expected 'parameter' or 'bucket'"):
        DGC(clip_by="model")


def test_qsgd_rounds_every_rank_bucket_and_step_by_numbers_of_its_own():
    def program(comm, seed):
        shared, rows = StepContext(), []
        lengths = (512, 512)
        owns = [QSGD(2, seed=seed) for _ in lengths]
        for index, own in enumerate(owns):
            own.bind(Layout(index, lengths, ("p",), ((512,),), np.dtype(np.float32)), comm.transport, shared)
        for _ in range(2):
            rows += [
                own.compress(own.compensate(np.full(512, 0.5, np.float32) + (np.arange(512) == 0))) for own in owns
            ]
            shared.step += 1
        return [row.tobytes() for row in rows]

    codes = [row for seed in (0, 1) for rows in simulate(3, lambda c, s=seed: program(c, s)).results for row in rows]
    assert len(set(codes)) == len(codes) == 2 * 3 * 2 * 2


@pytest.mark.parametrize(
    "name", ["none", "topk", "fp16", "acpsgd", "powersgd", "covap", "qsgd", "efsignsgd", "dragonn"]
)
def test_the_mean_of_ones_is_one(name):
    """Means divide: 49 times 1/49 is less than 1."""
    options = {"density": 1.0} if name in ("topk", "dragonn") else {}
    compressor = type(resolve(name))(**options)
    results, _ = one(compressor, [np.ones(16, np.float32)] * 49)[0]
    arrived = results[0][results[0] != 0]  # dragonn's slots collide
    np.testing.assert_array_equal(arrived, 1)
    assert arrived.size == 16 or (name == "dragonn" and arrived.size)


def test_densestream_fills_its_blocks_with_true_values():
    g = normal(3, 4000)
    results, _ = one(COMPRESSORS["densestream"](0.3), g)[0]
    kept = np.count_nonzero(results[0])
    bare, _ = one(COMPRESSORS["densestream"](0.3, algo="densestream"), g)[0]
    assert kept > 1.05 * np.count_nonzero(bare[0])


def test_fp16_does_not_overflow_where_gradients_do_not():
    g = [np.full(100, 40_000, np.float32)] * 8
    results, _ = one(FP16(), g)[0]
    np.testing.assert_allclose(results[0], 40_000, rtol=1e-3)
