"""Every compressor of the registry: same bits everywhere, nothing lost, resumed exactly."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nets import batch, bits, loss_of, net, train  # noqa: E402
from one_bucket import OPTIONS, one  # noqa: E402

import sparsecoll  # noqa: E402
from sparsecoll import simulate  # noqa: E402
from sparsecoll.errors import CommunicationError  # noqa: E402
from sparsecoll.testing import check_compressor  # noqa: E402
from sparsecoll.torch import COMPRESSORS, DistributedOptimizer, WarmUp, redistribute  # noqa: E402
from sparsecoll.torch.compressors import (  # noqa: E402
    COVAP,
    DRAGONN,
    FP16,
    QSGD,
    ChunkedTopK,
    PowerSGD,
    RandomKCompressor,
    TopKCompressor,
    as_compressor,
    dgc,
    nesterovtopk,
    oktopk,
)

REPLICATED = [name for name in COMPRESSORS if name != "free"]
CONSERVING = {
    name: as_compressor(name) for name in REPLICATED if name not in ("fp16", "qsgd", "dgc", "nesterovtopk", "covap")
} | {
    "dgc without momentum": dgc(momentum=0.0),
    "covap with coefficient 1": COVAP(interval=3, start=1.0),
    "qsgd with feedback": QSGD(2, feedback=True),
    "topk, float16 on the wire": TopKCompressor(0.1, value_dtype="float16"),
    "topk over spardl": TopKCompressor(0.05, algo="spardl"),
    "topk over gtopk": TopKCompressor(0.05, algo="gtopk"),
    "topk over cltk": TopKCompressor(0.05, algo="cltk"),
    "chunktopk by owners": ChunkedTopK(8, 64, algo="owners"),
    "chunktopk requantized": ChunkedTopK(8, 64, algo="owners", requantize=True),
    "oktopk object": TopKCompressor(0.05, algo=sparsecoll.OkTopk(tau=2, tau_prime=2)),
    "dragonn, all compressed": DRAGONN(0.05, selective=False),
    "dragonn, float16 on the wire": DRAGONN(0.05, selective=False, value_dtype="float16"),
}


CHECKED = CONSERVING | {
    "covap": COVAP(2),
    "fp16": FP16(),
    "qsgd": QSGD(),
    "dgc": dgc(),
    "nesterovtopk": nesterovtopk(),
    "topk, reused thresholds": TopKCompressor(0.1, "allgather", sparsecoll.select.ThresholdReuse()),
    "oktopk from a warm-up": oktopk(WarmUp(0.05, 6), algo=sparsecoll.OkTopk(tau=3, tau_prime=4)),
}


@pytest.mark.parametrize("name", COMPRESSORS)
def test_options_are_as_given_once_a_bucket_is_bound(name):
    """Nothing that a compressor learns of its rank or bucket takes the name of an option."""
    gradients = [np.ones((8, 8), np.float32)] * 2
    assert [own.describe() for _, own in one(name, gradients)] == [as_compressor(name).describe()] * 2


@pytest.mark.parametrize("name", CHECKED)
def test_every_compressor_keeps_the_contract(name):
    check_compressor(as_compressor(CHECKED[name]), conserves=name in CONSERVING)


class Forgetting(TopKCompressor):
    """A compressor of the user's that keeps nothing of what it does not send."""

    name = "forgetting"

    def update(self, out, message, reduced):
        super().update(out, message, reduced)
        self._residual.trial[:] = 0


def test_what_is_wrong_with_a_compressor_is_told():
    with pytest.raises(AssertionError, match="forgetting: gradients and residuals"):
        check_compressor(Forgetting(0.05))


def test_nan_where_another_rank_selects():
    def program(comm):
        weight = torch.nn.Parameter(torch.zeros(100))
        inner = torch.optim.SGD([weight], 0.1)
        optimizer = DistributedOptimizer(
            inner, [("w", weight)], comm, TopKCompressor(0.05, algo="cltk"), overlap=False, **OPTIONS
        )
        weight.grad = torch.arange(100.0)
        if comm.rank == 1:
            weight.grad[0] = float("nan")
        with pytest.raises(sparsecoll.NonFiniteError, match="gradient of 'w'"):
            optimizer.step()

    simulate(2, program)


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
    "name", ["none", "topk", "fp16", "acpsgd", "powersgd", "covap", "qsgd", "efsignsgd", "dragonn"]
)
def test_the_mean_of_ones_is_one(name):
    """Means divide: 49 times 1/49 is less than 1."""
    options = {"density": 1.0} if name in ("topk", "dragonn") else {}
    compressor = type(as_compressor(name))(**options)
    results, _ = one(compressor, [np.ones(16, np.float32)] * 49)[0]
    arrived = results[0][results[0] != 0]  # dragonn's slots collide
    np.testing.assert_array_equal(arrived, 1)
    assert arrived.size == 16 or (name == "dragonn" and arrived.size)


@pytest.mark.parametrize(
    "make,name",
    [
        (lambda: TopKCompressor(0), "density"),
        (lambda: TopKCompressor(algo="x"), "algo"),
        (lambda: dgc(momentum=1.0), "momentum"),
        (lambda: dgc(clip=0), "clip"),
        (lambda: QSGD(3), "bits"),
        (lambda: QSGD(bucket=1), "bucket"),
        (lambda: PowerSGD(0), "rank"),
        (lambda: COVAP(0), "interval"),
        (lambda: COVAP(backward_seconds=0), "backward_seconds"),
        (lambda: COVAP(start=2), "start"),
        (lambda: FP16("float32"), "value_dtype"),
        (lambda: RandomKCompressor(2), "density"),
        (lambda: as_compressor("x"), "compressor"),
        (lambda: WarmUp(0.1, 0), "steps"),
    ],
)
def test_bad_options_are_refused(make, name):
    with pytest.raises(ValueError, match=name):
        make()


def test_a_compressor_is_a_name_or_an_object():
    with pytest.raises(TypeError, match="expected a name, a Compressor"):
        as_compressor(3)
    with pytest.raises(TypeError, match="got the class TopK"):
        as_compressor(TopKCompressor)
    with pytest.raises(TypeError, match="selector: expected an object"):
        TopKCompressor(selector="exakt")


def test_an_algorithm_is_top_k_over_it():
    algorithm = sparsecoll.OkTopk(tau=5)
    compressor = as_compressor(algorithm)
    assert compressor.describe() == TopKCompressor(algo=algorithm).describe() and compressor.algo is not algorithm


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_and_preset_goes_by_its_own_name(name):
    """In errors, in the comparison of ranks and in saved state."""
    compressor = as_compressor(name)
    assert compressor.describe().partition("(")[0] == compressor.signature()["compressor"] == name

    def program(comm):
        model = net()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, comm, compressor)
        return optimizer.state_dict()["sparsecoll"]["compressor"]

    assert {text.partition("(")[0] for text in simulate(2, program).results} == {name}
