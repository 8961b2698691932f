"""What every algorithm of the registry promises, on the simulator."""

import numpy as np
import pytest
from cases import DISTRIBUTIONS, RANKS, case, same_bits
from oracles import oracle_of

import sparsecoll
from sparsecoll import ALGORITHMS, SparseVector, simulate


def run(P, algo, name, dtype="float32", **options):
    """(inputs, reductions) of one call on P virtual ranks; checks that inputs are left alone."""
    inputs = [case(name, rank, P, dtype) for rank in range(P)]
    before = [(x.indices.tobytes(), x.values.tobytes()) for x in inputs]
    simulation = simulate(
        P, lambda comm: sparsecoll.allreduce(comm, inputs[comm.rank], algo, return_reduction=True, **options)
    )
    assert before == [(x.indices.tobytes(), x.values.tobytes()) for x in inputs]
    return inputs, simulation.results


def check(P, algo, name, dtype="float32", k=None, **options):
    inputs, reductions = run(P, algo, name, dtype, **({} if k is None else {"k": k}), **options)
    values = [r.value for r in reductions]
    assert all(same_bits(values[0], v) for v in values[1:])
    used = max(x.nnz for x in inputs) if k is None else k
    oracle = oracle_of(algo)
    if k is not None and oracle.selects_top_k:
        inputs = [x.topk(k) for x in inputs]
    expected = oracle.expected(inputs, used)
    np.testing.assert_array_equal(values[0].to_dense(), expected)
    entered = np.sum([r.contributed.to_dense() for r in reductions], axis=0)
    np.testing.assert_array_equal(entered, expected)
    for x, r in zip(inputs, reductions, strict=True):
        assert not oracle.keeps_to_own_indices or np.isin(r.contributed.indices, x.indices).all()
    return reductions


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_equals_the_oracle_with_the_same_bits_on_all_ranks(algo, name, P):
    check(P, algo, name)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "int64"])
@pytest.mark.parametrize("name", ["random", "ties", "one_region", "empty_ranks"])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_dtype(algo, name, dtype):
    check(5, algo, name, dtype)


@pytest.mark.parametrize("k", [0, 1, 7, 59, 5000])
@pytest.mark.parametrize("name", ["random", "ties", "disjoint", "nnz_below_P"])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_k_smaller_and_larger_than_what_is_held(algo, name, k):
    check(6, algo, name, k=k)


@pytest.mark.parametrize("format", [name for name, form in sparsecoll.formats.FORMATS.items() if not form.lossy])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_format_gives_the_same_result(algo, format):
    check(5, algo, "random", format=format)


EXACT = [name for name, kind in ALGORITHMS.items() if kind().semantics == "exact_sum"]
LOSSLESS = [name for name, form in sparsecoll.formats.FORMATS.items() if not form.lossy]


@pytest.mark.parametrize("P", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("format", LOSSLESS)
def test_an_exact_sum_holds_every_index_that_some_rank_holds(format, P):
    """Explicit zeros of both signs, sums that cancel, and values that become zero on the wire."""
    algos = [*EXACT, sparsecoll.SparCML(variant="recursive_double"), sparsecoll.SparCML(variant="dynamic")]
    algos += [sparsecoll.Hierarchical(), sparsecoll.DenseStream(repartition="even")]

    def program(comm):
        indices = np.array([3, 7, 8, 9, 11 + comm.rank, 60])
        values = np.array([1 - 2 * (comm.rank % 2) if comm.rank < P - P % 2 else 0, 0, -0.0, 1e-9, 2, 0], np.float32)
        x, found = SparseVector(indices, values, 64), []
        options = {"format": format, "value_dtype": "float16"}
        for algo in algos:
            y = sparsecoll.allreduce(comm, x, algo, return_reduction=True, **options)
            found.append(y.value.indices.tolist())
        reduced = sparsecoll.reduce(comm, x, P - 1, **options)
        part = sparsecoll.reduce_scatter(comm, x, **options)
        gathered = [y.indices.tolist() for y in sparsecoll.allgather(comm, x, **options)]
        sent = sparsecoll.bcast(comm, x, **options)
        at_root = None if reduced is None else reduced.indices.tolist()
        return found, at_root, part.indices.tolist(), gathered, sent.indices.tolist()

    union = [3, 7, 8, 9, *range(11, 11 + P), 60]
    results = simulate(P, program, ranks_per_node=2).results
    own = [[3, 7, 8, 9, 11 + rank, 60] for rank in range(P)]
    for found, reduced, _, gathered, sent in results:
        assert found == [union] * len(algos)
        assert reduced in (None, union) and gathered == own and sent == own[0]
    assert results[-1][1] == union and [i for _, _, part, _, _ in results for i in part] == union


@pytest.mark.parametrize("value_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_rounding_on_the_wire_is_part_of_what_did_not_contribute(algo, value_dtype):
    """Multiples of 1/512 near 32 need 14 bits: both wire dtypes round them, and nothing is lost."""
    P, n = 5, 400

    def values(rank):
        rng = np.random.default_rng(rank)
        support = np.sort(rng.choice(n, 80, replace=False))
        return SparseVector(support, (rng.integers(-(2**14), 2**14, 80) / 512).astype(np.float32), n)

    reductions = simulate(
        P,
        lambda comm: sparsecoll.allreduce(
            comm, values(comm.rank), algo, k=60, value_dtype=value_dtype, return_reduction=True
        ),
    ).results
    assert all(same_bits(reductions[0].value, r.value) for r in reductions)
    entered = np.sum([r.contributed.to_dense().astype(np.float64) for r in reductions], axis=0)
    np.testing.assert_array_equal(entered, reductions[0].value.to_dense())
    assert any((r.contributed.to_dense() != values(i).topk(60).to_dense()).any() for i, r in enumerate(reductions))


@pytest.mark.parametrize(("P", "on_node"), [(1, 1), (5, 2), (6, 3)])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("algo", [*ALGORITHMS, "hitopk"])
def test_of_bool_the_entries_at_the_indices_of_the_result_contribute(algo, dense, P, on_node):
    """The sum is the logical or, from which nothing can be subtracted."""
    inputs = [case("random", rank, P, "float32").astype(np.bool_) for rank in range(P)]

    def program(comm):
        x = inputs[comm.rank].to_dense() if dense else inputs[comm.rank]
        algorithm = sparsecoll.HiTopK() if algo == "hitopk" else algo
        return sparsecoll.allreduce(comm, x, algorithm, k=40, return_reduction=True)

    reductions = simulate(P, program, ranks_per_node=on_node).results
    value = reductions[0].value
    assert value.dtype == np.bool_ and value.nnz and all(same_bits(value, r.value) for r in reductions)
    entered = np.any([r.contributed.to_dense() for r in reductions], axis=0)
    np.testing.assert_array_equal(entered, value.to_dense())
    assert all((r.contributed.to_dense() <= x.to_dense()).all() for r, x in zip(reductions, inputs, strict=True))


@pytest.mark.parametrize("P", [1, 3, 8])
@pytest.mark.parametrize("algo", [name for name in ALGORITHMS if name not in ("dense", "arctopk")])
def test_lengths_above_2_to_the_32(algo, P):
    """Indices next to 2^33 survive, sums of boundaries too; nothing of size n is ever allocated."""
    n = 2**40
    rng = np.random.default_rng(1)
    indices = [np.sort(rng.choice(1000, 50, replace=False)) + np.array([2**33]) * (r + 1) for r in range(P)]
    inputs = [SparseVector(p, np.arange(1, 51, dtype=np.float32), n) for p in indices]
    reductions = simulate(
        P, lambda comm: sparsecoll.allreduce(comm, inputs[comm.rank], algo, return_reduction=True)
    ).results
    union, inverse = np.unique(np.concatenate(indices), return_inverse=True)
    sums, entered = np.zeros((2, union.size), np.float32)
    np.add.at(sums, inverse, np.tile(np.arange(1, 51, dtype=np.float32), P))
    for r in reductions:
        np.add.at(entered, np.searchsorted(union, r.contributed.indices), r.contributed.values)
    kept = union[entered != 0]
    if ALGORITHMS[algo]().semantics == "exact_sum":
        assert kept.size == union.size and (entered == sums).all()
    elif ALGORITHMS[algo]().semantics == "top_k_of_sum":
        np.testing.assert_array_equal(kept, union[np.sort(np.lexsort((union, -sums))[:50])])
    assert kept.size > 0
    for r in reductions:
        assert r.value.indices.dtype == np.uint64
        np.testing.assert_array_equal(r.value.indices, kept.astype(np.uint64))
        np.testing.assert_array_equal(r.value.values, entered[entered != 0])


@pytest.mark.parametrize("P", [1, 2, 5, 12])
@pytest.mark.parametrize("n", [0, 1, 2, 4, 11])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_tiny_lengths(algo, n, P):
    inputs = [np.arange(1, n + 1, dtype=np.float32) * (r + 1) for r in range(P)]
    results = simulate(P, lambda comm: sparsecoll.allreduce(comm, inputs[comm.rank], algo, k=n)).results
    for y in results:
        np.testing.assert_array_equal(y.to_dense(), np.sum(inputs, axis=0, dtype=np.float32))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_float16_is_summed_in_float32_and_infinity_passes(algo):
    """Eight times 16000 overflows float16: the sum is cut to its largest finite value; infinity stays infinity."""
    x = SparseVector([3, 9], np.array([16000, np.inf], np.float16), 20)
    for y in simulate(8, lambda comm: sparsecoll.allreduce(comm, x, algo, k=20, nonfinite="pass")).results:
        np.testing.assert_array_equal(y.values, np.array([65504, np.inf], np.float16))


@pytest.mark.parametrize(("n", "k"), [(60, 2), (203, 9), (200, 50)])
@pytest.mark.parametrize("algo", [*ALGORITHMS, "hitopk"])
def test_no_coordinate_waits_for_ever(algo, n, k):
    """With error feedback and a constant gradient, every coordinate is sent again and again, also with k < P."""
    gradient, turns = np.random.default_rng(n + k).uniform(0.5, 1.5, n), 12 * n // k

    def program(comm):
        algorithm = sparsecoll.HiTopK() if algo == "hitopk" else ALGORITHMS[algo]()
        residual, late = np.zeros(n), np.zeros(n, bool)
        for turn in range(turns):
            residual += gradient
            reduction = sparsecoll.allreduce(comm, residual, algorithm, k=k, return_reduction=True)
            residual -= reduction.contributed.to_dense()
            if turn >= turns // 2:
                late |= reduction.value.to_dense() != 0
        return late.sum(), residual.max()

    for sent, waiting in simulate(3, program, ranks_per_node=3).results:
        assert sent == n and waiting < 1.5 * turns / 2


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_repeats_give_the_same_bits(algo):
    """Random floats, whose sums depend on the order of addition."""

    def program(comm):
        rng = np.random.default_rng(comm.rank)
        x = rng.standard_normal(3000).astype(np.float32)
        return [sparsecoll.allreduce(comm, x, algo, k=200) for _ in range(2)]

    first = simulate(7, program).results
    assert all(same_bits(first[0][0], y) for pair in first for y in pair)
    dense = np.sum([np.random.default_rng(r).standard_normal(3000).astype(np.float32) for r in range(7)], axis=0)
    if ALGORITHMS[algo]().semantics != "exact_sum":
        assert first[0][0].nnz == 200
    else:
        assert np.abs(first[0][0].to_dense()).sum() <= np.abs(dense).sum() * 7


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_simulator_reports_time_and_balanced_books(algo):
    def program(comm):
        sparsecoll.allreduce(comm, case("random", comm.rank, 6), algo)

    simulation = simulate(6, program)
    assert simulation.seconds > 0
    totals = [t.total for t in simulation.traffic]
    assert sum(t.bytes_sent for t in totals) == sum(t.bytes_received for t in totals) > 0
    for t in simulation.traffic:
        assert t.total.bytes_received == sum(c.bytes_received for c in t.phases.values())
