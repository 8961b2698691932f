"""TopK and its presets: densities, momentum correction, clipping."""

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from one_bucket import normal, one, step

from sparsecoll import (
    Algorithm,
    Allgather,
    CLTk,
    Hierarchical,
    LowBit,
    NonFiniteError,
    Reduction,
    SparseVector,
    select,
    simulate,
)
from sparsecoll.torch import COMPRESSORS, DistributedOptimizer, WarmUp
from sparsecoll.torch.compressors import ErrorFeedback, StepContext, TopKCompressor, as_compressor, dgc, gaussiank
from sparsecoll.torch.tensors.layout import Layout


def test_presets_are_top_k_with_other_defaults():
    for name in ("nesterovtopk", "oktopk", "densestream", "dgc", "gaussiank"):
        assert (
            isinstance(as_compressor(name), TopKCompressor) and COMPRESSORS[name](0.5, momentum=0.25).momentum == 0.25
        )


class SelectsByItself(CLTk):
    """An algorithm of the user's that takes no selector."""

    def __post_init__(self):
        if self.selector is not None:
            raise ValueError(f"selector: expected None with an algorithm, which selects by itself, got {self.selector}")


@pytest.mark.parametrize("algo", ["dense", LowBit(), SelectsByItself()], ids=str)
def test_a_selector_without_effect_is_refused(algo):
    for make in (lambda: TopKCompressor(algo=algo, selector=select.GaussianK()), lambda: gaussiank(algo=algo)):
        with pytest.raises(ValueError, match=r"selector: expected None with .*, which .*, got GaussianK"):
            make()
    dgc(algo=algo, selector=None)


def test_warm_up_selects_what_it_says():
    schedule = WarmUp(0.01, 8)
    results, _ = one(TopKCompressor(schedule), normal(1, 1000), steps=10)[0]
    assert [np.count_nonzero(r) for r in results] == [round(schedule.at(step) * 1000) for step in range(10)]


@pytest.mark.parametrize("algo", ["allgather", "oktopk", "spardl", "densestream", "gtopk"])
@pytest.mark.parametrize("value_dtype", [None, "float16"])
def test_momentum_is_cleared_only_where_this_rank_sent(algo, value_dtype):
    """A rank that sums holds what it cut and rounded of others' sums in its share; that is no reason to forget."""

    def program(comm):
        own = TopKCompressor(0.01, algo=algo, momentum=0.9, value_dtype=value_dtype)
        own.bind(Layout(0, (20_000,), ("p",), ((20_000,),), np.dtype(np.float32)), comm.transport, StepContext())
        sent, compress = [], own.compress
        own.compress = lambda acc: sent.append(compress(acc)) or sent[-1]
        gradient = np.random.default_rng(comm.rank).standard_normal(20_000).astype(np.float32)
        step(own, comm.transport, gradient)
        cleared = np.flatnonzero(own.state()["velocity"]["p"].numpy() == 0)
        return cleared.size, np.isin(cleared, sent[0].indices).all()

    for count, all_sent in simulate(8, program).results:
        assert count > 0 and all_sent


def test_dgc_at_density_1_is_momentum_and_masks_what_it_sends():
    """With everything sent, u is masked each time: the sum of gradients, no momentum. With nothing of a coordinate
    sent, it gathers momentum-corrected gradient."""
    g = [np.array([1, 0.5, 0, 0], np.float32)] * 2
    results, own = one(dgc(0.25, momentum=0.5), g, steps=2)[0]
    # step 1: u = v = (1, .5); coordinate 0 is sent and masked. Step 2: u = (1, .75), v = (1, 1.25): coordinate 1
    np.testing.assert_allclose(results[0], [1, 0, 0, 0])
    np.testing.assert_allclose(results[1], [0, 1.25, 0, 0])
    np.testing.assert_allclose(own.state()["residual"]["p0"].numpy(), [1, 0, 0, 0])


@pytest.mark.parametrize("options", [{}, {"nesterov": True}], ids=["heavy ball", "nesterov"])
@pytest.mark.parametrize("dense_below", [0, 10**6], ids=["dense", "small"])
def test_momentum_of_values_that_are_all_sent_is_that_of_sgd(dense_below, options):
    """Parameters too small to be compressed, or all with algo="dense": nothing waits, and nothing is masked."""

    def program(comm):
        params = [torch.nn.Parameter(torch.ones(50)) for _ in range(2)]
        algo = "oktopk" if dense_below else "dense"
        ours = DistributedOptimizer(
            torch.optim.SGD(params[:1], 0.1),
            [("p", params[0])],
            comm,
            TopKCompressor(0.1, algo, momentum=0.9, **options),
            dense_below=dense_below,
        )
        plain = torch.optim.SGD(params[1:], 0.1, momentum=0.9, **options)
        for count in range(4):
            for p, ranks in zip(params, ([comm.rank], range(comm.size)), strict=True):
                p.grad = None
                sum((p * torch.from_numpy(normal(3, 50)[r]) * (count + 1)).sum() for r in ranks).backward()
            params[1].grad /= comm.size
            ours.step()
            plain.step()
        return (params[0] - params[1]).abs().max().item()

    assert max(simulate(3, program).results) < 1e-5


def test_nesterov_momentum_is_corrected_as_in_dgc():
    """u = m (u + g), v = v + u + g; both are cleared where v is sent."""
    g = [np.array([2, 1, 0, 0], np.float32)] * 2
    results, _ = one(dgc(0.25, momentum=0.5, nesterov=True), g, steps=3)[0]
    # step 1: u = (1, .5), v = (3, 1.5): coordinate 0 is sent. Step 2: u = (1, .75), v = (3, 3.25): coordinate 1 is.
    # Step 3: u = (1.5, .5), v = (3 + 3.5, 1.5): coordinate 0 is.
    np.testing.assert_array_equal(results[0], [3, 0, 0, 0])
    np.testing.assert_array_equal(results[1], [0, 3.25, 0, 0])
    np.testing.assert_array_equal(results[2], [6.5, 0, 0, 0])
    with pytest.raises(ValueError, match="nesterov"):
        dgc(momentum=0, nesterov=True)


def test_dgc_clips_each_parameter_by_the_root_of_the_ranks():
    g = [np.array([3, 4, 0.1, 0], np.float32)] * 4
    results, _ = one(dgc(1.0, momentum=0, clip=1.0), g, shapes=((2,), (2,)))[0]
    np.testing.assert_allclose(results[0], [0.3, 0.4, 0.1, 0], rtol=1e-6)  # norm 1 / sqrt(4)


def test_dgc_clips_by_the_norm_of_the_bucket():
    g = [np.array([3, 4, 0, 12], np.float32)] * 4
    results, _ = one(dgc(1.0, momentum=0, clip=6.5, clip_by="bucket"), g, shapes=((2,), (2,)))[0]
    np.testing.assert_allclose(results[0], np.array([3, 4, 0, 12]) / 13 * 3.25, rtol=1e-6)
    with pytest.raises(ValueError, match="clip_by: expected 'parameter' or 'bucket'"):
        dgc(clip_by="model")


def test_densestream_fills_its_blocks_with_true_values():
    g = normal(3, 4000)
    results, _ = one(COMPRESSORS["densestream"](0.3), g)[0]
    kept = np.count_nonzero(results[0])
    bare, _ = one(COMPRESSORS["densestream"](0.3, algo="densestream"), g)[0]
    assert kept > 1.05 * np.count_nonzero(bare[0])


@dataclass
class Elsewhere(Algorithm):
    """An algorithm of the user's whose `contributed` is a vector of another length."""

    name = "elsewhere"
    semantics = "exact_sum"
    sends_sums = False
    later: bool = False

    def __call__(self, channel, x, k):
        other = SparseVector([2**39], np.ones(1, x.dtype), 2**40)
        return Reduction(channel.merge(channel.allgather(x)), (lambda: other) if self.later else other)


@pytest.mark.parametrize("later", [False, True])
def test_what_contributed_has_the_length_of_the_bucket(later):
    """The residual is memory, in which kernels write where an index says."""
    with pytest.raises(ValueError, match="contributed: expected length 1000, got 1099511627776"):
        one(TopKCompressor(0.1, algo=Elsewhere(later=later)), normal(2, 1000))


@dataclass
class Cut(ErrorFeedback):
    """A compressor of the user's that subtracts a vector of another length."""

    name = "cut"

    def compress(self, acc):
        return acc.topk(5)

    def communicate(self, transport, message):
        return message

    def update(self, out, message, reduced):
        self.contributed(SparseVector(message.indices, message.values, 2**40))


def test_a_compressors_residual_refuses_entries_of_another_length():
    with pytest.raises(ValueError, match="contributed: expected length 1000, got 1099511627776"):
        one(Cut(), normal(1, 1000))


@dataclass
class Everything(select.Selector):
    """Returns all entries, in the memory of the vector that it is given."""

    name = "everything"

    def select(self, x, k):
        return SparseVector(np.arange(x.length, dtype=np.uint32), x.values, x.length)


@pytest.mark.parametrize("algo", ["allgather", "sparcml"])
def test_entries_that_share_memory_with_what_is_left_of_them_enter_the_mean(algo):
    def program(comm):
        model = torch.nn.Linear(8, 4, bias=False)
        torch.nn.init.zeros_(model.weight)
        compressor = TopKCompressor(1.0, algo, selector=Everything())
        inner = torch.optim.SGD(model.parameters(), 1.0)
        optimizer = DistributedOptimizer(inner, model, comm, compressor, dense_below=0)
        (model.weight.sum() * (comm.rank + 1)).backward()
        optimizer.step()
        return model.weight.unique().tolist()

    assert simulate(3, program).results == [[-2.0]] * 3


class First(Allgather):
    """An algorithm of a user's, which selects the first entries."""

    def select(self, x, k, ranks=1):
        return SparseVector(np.arange(k), np.array(x.flush().values[:k]), x.length)


@pytest.mark.parametrize("algo", [Hierarchical(inner=Allgather(selector=select.RandomK())), First()], ids=str)
def test_nan_enters_no_residual_behind_a_selector_that_may_leave_it(algo):
    def program(comm):
        model, compressor = torch.nn.Linear(40, 40), TopKCompressor(0.01, algo=copy.deepcopy(algo))
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = DistributedOptimizer(inner, model, comm, compressor, dense_below=0)
        model(torch.ones(2, 40)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.weight.register_hook(lambda grad: grad.clone().index_fill_(0, torch.tensor([39]), float("nan")))
        model(torch.ones(2, 40)).sum().backward()
        with pytest.raises(NonFiniteError):
            optimizer.step()
        return all(t.isfinite().all() for t in optimizer.state_dict()["sparsecoll"]["tensors"]["residual"].values())

    assert simulate(2, program).results == [True, True]
