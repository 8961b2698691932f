"""Long messages that travel in chunks: the same bits as in one, and on the simulator less time."""

from functools import partial

import numpy as np
import pytest
from cases import support

import sparsecoll
from sparsecoll import Allgather, Costs, DenseStream, Network, OkTopk, SparCML, SparseVector, formats, simulate
from sparsecoll.algorithms.primitives import pipeline
from sparsecoll.collectives.allreduce import allreduce_vectors
from sparsecoll.collectives.options import CallOptions
from sparsecoll.transport import as_transport
from sparsecoll.vector import DenseVector

N, K = 5000, 400
CHUNK = 100  # bytes
MAKERS = {
    "densestream": DenseStream,
    "densestream, even": lambda: DenseStream(repartition="even"),
    "sparcml, dynamic": lambda: SparCML(variant="dynamic"),
    "sparcml, split": lambda: SparCML(variant="split_allgather"),
    "sparcml, doubling": lambda: SparCML(variant="recursive_double"),
    "allgather": Allgather,
    "oktopk": OkTopk,
    "oktopk, exact": lambda: OkTopk(exact=True),
    "oktopk, small buckets": lambda: OkTopk(bucket=2),
    "oktopk, balanced": lambda: OkTopk(balance_factor=1.0, repartition="even"),
    "oktopk, average": lambda: OkTopk(repartition="average"),
}
OVERLAPPED = ["allgather", "oktopk", "densestream", "sparcml, dynamic", "sparcml, doubling"]


def inputs(name, P, dtype=np.float32):
    for rank in range(P):
        rng = np.random.default_rng([rank, 1])
        indices = support(name, rank, P, K, rng, N)
        yield SparseVector(indices, rng.standard_normal(indices.size).astype(dtype), N)


def outcome(make, name, P, dtype=np.float32, **options):
    vectors = list(inputs(name, P, dtype))

    def program(comm):
        algorithm, bits = make(), []
        for _ in range(2):
            r = sparsecoll.allreduce(comm, vectors[comm.rank], algorithm, k=K, return_reduction=True, **options)
            bits.append((r.value.indices, r.value.values, r.contributed.to_dense()))
        return bits

    return simulate(P, program).results


@pytest.mark.parametrize("P", [2, 5])
@pytest.mark.parametrize("name", ["random", "one_region", "skewed", "one_rank"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_chunks_change_no_bits(make, name, P, monkeypatch):
    form = "packed" if make is DenseStream else "auto"
    whole = outcome(make, name, P, format=form)
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", CHUNK)
    assert pipeline.chunks(K * 5 / P, one_node=False) > 3
    for mine, theirs in zip(outcome(make, name, P, format=form), whole, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("P", [2, 4, 7])
@pytest.mark.parametrize("fill", [False, True])
def test_chunks_of_blocks_change_no_values(fill, P, monkeypatch):
    """DenseStream's blocks store zeros between entries, which other blocks do not store."""
    whole, found = [], []
    for results, chunk_bytes in ((whole, 1 << 18), (found, CHUNK)):
        monkeypatch.setattr(pipeline, "CHUNK_BYTES", chunk_bytes)
        results += outcome(partial(DenseStream, fill=fill), "random", P)
    for mine, theirs in zip(found, whole, strict=True):
        for (*a, mass), (*b, same) in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(*(SparseVector(*entries, N).to_dense() for entries in (a, b)))
            np.testing.assert_array_equal(mass, same)


@pytest.mark.parametrize("P", [2, 3, 5])
@pytest.mark.parametrize("algo", [Allgather, lambda: sparsecoll.Hierarchical(inner="allgather")])
def test_calls_of_a_plan_may_have_more_entries_than_its_example(algo, P, monkeypatch):
    """Their sum, too, has more than k entries for each rank: so has that of the ranks on each node."""
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", CHUNK)

    def program(comm):
        x = [SparseVector(np.arange(comm.rank, N, N // (P * m))[:m], np.ones(m, np.float32), N) for m in (60, 900, 30)]
        plan = sparsecoll.allreduce_init(comm, x[0], algo())
        return [(y.nnz, float(y.values.sum())) for y in map(plan, x)], [sparsecoll.allreduce(comm, v).nnz for v in x]

    for sums, expected in simulate(P, program, ranks_per_node=2).results:
        assert sums == [(nnz, P * m) for nnz, m in zip(expected, (60, 900, 30), strict=True)]


@pytest.mark.parametrize("chunk", [CHUNK, 1 << 18])
@pytest.mark.parametrize("algo", [Allgather, lambda: sparsecoll.Auto(network=Network(alpha=1.0))])  # few rounds
@pytest.mark.parametrize("options", [{}, {"value_dtype": "float16"}], ids=str)
def test_a_sum_that_is_left_to_the_caller_has_the_same_bits(options, algo, chunk, monkeypatch):
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", chunk)
    vectors = list(inputs("skewed", 5))

    def program(comm):
        transport, algorithm, given = as_transport(comm), algo(), CallOptions(k=K, **options)
        for _ in range(3):
            call = partial(allreduce_vectors, transport, vectors[comm.rank], algorithm, given, True)
            formed, left = call(), call(deferred=True)
            assert formed.parts is None and left.parts
            mean = DenseVector(np.ones(N, np.float32))
            mean.copy_sum(left.parts, 5)
            np.testing.assert_array_equal(mean.values, formed.value.to_dense() / np.float32(5))
            np.testing.assert_array_equal(left.value.indices, formed.value.indices)
            np.testing.assert_array_equal(left.value.values, formed.value.values)
            assert left.parts is None

    simulate(5, program)


@pytest.mark.parametrize("make", [Allgather, OkTopk, partial(DenseStream, repartition="histogram"), SparCML])
def test_chunks_change_no_bits_of_rounded_values_and_halves(make, monkeypatch):
    for dtype, options in ((np.float16, {}), (np.float64, {"value_dtype": "float16"}), (np.float32, {"format": "coo"})):
        with monkeypatch.context() as patch:
            whole = outcome(make, "random", 4, dtype, **options)
            patch.setattr(pipeline, "CHUNK_BYTES", CHUNK)
            for mine, theirs in zip(outcome(make, "random", 4, dtype, **options), whole, strict=True):
                for x, y in zip(mine[1], theirs[1], strict=True):
                    np.testing.assert_array_equal(x, y)


def test_messages_on_one_machine_are_not_cut_into_chunks():
    assert pipeline.chunks(10**9, one_node=True) == 1
    assert pipeline.chunks(10**9, one_node=False) == pipeline.MAX_CHUNKS
    assert simulate(4, lambda comm: comm.transport.one_node, ranks_per_node=4).results == [True] * 4
    assert simulate(4, lambda comm: comm.transport.one_node, ranks_per_node=2).results == [False] * 4


@pytest.mark.parametrize(
    "make",
    [MAKERS[name] for name in OVERLAPPED],
    ids=OVERLAPPED,
)
def test_work_overlaps_with_messages(make, monkeypatch):
    """Merging that takes as long as the network would double the time if one waited for the other."""

    def seconds(chunk_bytes):
        monkeypatch.setattr(pipeline, "CHUNK_BYTES", chunk_bytes)
        costs = Costs(merge=4e-8, decode=4e-8)
        return simulate(4, lambda comm: outcome_of(comm, make()), Network(1e-6, 8e-9), costs=costs).seconds

    def outcome_of(comm, algorithm):
        rng = np.random.default_rng(comm.rank)
        x = SparseVector(np.sort(rng.choice(10**6, 20_000, replace=False)), rng.standard_normal(20_000), 10**6)
        sparsecoll.allreduce(comm, x, algorithm)

    assert seconds(4000) < 0.8 * seconds(10**9)


def test_costs_take_virtual_time():
    def program(comm):
        before = comm.transport.now()
        SparseVector.merge([SparseVector([1, 2], np.ones(2), 9)] * 2, np.dtype(float))
        return comm.transport.now() - before

    assert simulate(2, program, costs=Costs(merge=0.5, call=1.0)).results == [3.0, 3.0]
    assert simulate(2, program).results == [0.0, 0.0]


@pytest.mark.parametrize("format", ["slots", formats.SlotsFormat(m=500), "packed_codes"])
def test_lossy_formats_give_the_same_bits_for_long_messages(format, monkeypatch):
    """They stay whole: a part of a rounded message would be rounded by other scales."""
    whole = outcome(Allgather, "random", 3, format=format)
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", CHUNK)
    for mine, theirs in zip(outcome(Allgather, "random", 3, format=format), whole, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_array_equal(x, y)


def test_a_new_seed_of_a_lossy_format_costs_no_message():
    def program(comm):
        x, agreed = SparseVector([comm.rank, 9], np.ones(2, np.float32), 10), []
        for step in range(3):
            form = formats.SlotsFormat(8, seed=step)
            traffic = sparsecoll.allreduce(comm, x, "allgather", k=2, format=form, return_reduction=True).traffic
            agreed.append(traffic.phases["agree"].messages_sent if "agree" in traffic.phases else 0)
        return agreed

    assert simulate(3, program).results == [[2, 0, 0]] * 3
