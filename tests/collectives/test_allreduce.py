"""`sparsecoll.allreduce`: types, options, and the same clear error on every rank."""

import dataclasses

import formulas
import numpy as np
import pytest

import sparsecoll
from sparsecoll import ALGORITHMS, CommunicationError, OkTopk, SparseVector, simulate

N = 50
GOOD = SparseVector([1, 4], np.array([1.0, -2.0]), N)


def errors(P, arguments, exception):
    """The texts that P ranks raise; each rank then makes a good call on the same communicator."""

    def program(comm):
        x, options = arguments(comm.rank)
        with pytest.raises(exception) as info:
            sparsecoll.allreduce(comm, x, **options)
        assert sparsecoll.allreduce(comm, GOOD).values.tolist() == [P, -2.0 * P]
        return str(info.value)

    return simulate(P, program).results


INVALID = {
    "unsorted": (
        ([4, 1], np.ones(2), N),
        {},
        "indices: expected strictly ascending, got unsorted: 4 at position 0, then 1",
    ),
    "duplicate": (
        ([4, 4], np.ones(2), N),
        {},
        "indices: expected strictly ascending, got repeated: 4 at position 0",
    ),
    "out of range": (([4, N], np.ones(2), N), {}, f"indices: expected below length {N}, got {N}"),
    "negative index": (([-1, 4], np.ones(2), N), {}, "indices: expected at least 0, got -1"),
    "sizes": (
        ([1], np.ones(2), N),
        {},
        r"indices, values: expected two 1-D arrays of one size, got shapes \(1,\) and \(2,\)",
    ),
    "negative length": (([1], np.ones(1), -5), {}, "length: expected 0 <= length < 2\\^63, got -5"),
    "negative k": (GOOD, {"k": -3}, "k: expected at least 0, got -3"),
    "density 0": (GOOD, {"density": 0.0}, r"density: expected in \(0, 1\], got 0.0"),
    "density above 1": (GOOD, {"density": 1.5}, r"density: expected in \(0, 1\], got 1.5"),
    "density NaN": (GOOD, {"density": float("nan")}, r"density: expected in \(0, 1\], got nan"),
    "k and density": (GOOD, {"k": 1, "density": 0.5}, "k, density: expected one of them"),
    "dense without k": (np.ones(N), {"algo": "oktopk"}, "k, density: expected one of them for a dense x"),
    "algo": (GOOD, {"algo": "fastest"}, "algo: expected one of .*, got 'fastest'"),
    "format": (GOOD, {"format": "zip"}, "format: expected one of .*, got 'zip'"),
    "op": (GOOD, {"op": "maximum"}, "op: expected one of sum, mean, min, .* got 'maximum'"),
    "value_dtype": (GOOD, {"value_dtype": "int8"}, "value_dtype: expected one of"),
    "2-D": (([[1]], np.ones((1, 1)), N), {}, r"indices, values: expected two 1-D arrays of one size, got shapes"),
    "NaN that top-k would order": (
        SparseVector([1, 2], np.array([np.nan, 1.0]), N),
        {"algo": "oktopk"},
        "expected values that can be ordered by magnitude, got NaN",
    ),
    "NaN in a selection": (
        np.array([1, np.nan, 2.0]),
        {"algo": "allgather", "k": 2},
        "ordered by magnitude, got NaN",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments_on_one_rank_raise_the_same_on_all(name):
    x, options, text = INVALID[name]
    texts = errors(4, lambda rank: (x, options) if rank == 2 else (GOOD, {}), ValueError)
    assert len(set(texts)) == 1
    import re

    assert texts[0].startswith("rank 2: ") and re.search(text, texts[0])


TYPES = {
    "x": ("hello", {}, "x: expected a SparseVector"),
    "k": (GOOD, {"k": 2.5}, "k: expected an integer, got 2.5"),
    "algo": (GOOD, {"algo": 7}, "algo: expected a name or an Algorithm object, got int"),
    "dtype": (([1], np.ones(1, object), N), {}, r"values: expected dtype bool, .* got object: use x.astype"),
    "indices": (([1.5], np.ones(1), N), {}, "indices: expected integers, got float64"),
    "length": (([1], np.ones(1), 5.0), {}, "length: expected an integer, got float"),
    "density": (GOOD, {"density": "a"}, r"density: expected a number in \(0, 1\], got 'a'"),
    "class": (GOOD, {"algo": OkTopk}, r"algo: expected a name or an Algorithm object, got the class: use OkTopk\(\)"),
    "mask": (np.ma.masked_array(np.ones(N), np.arange(N) > 1), {"k": 1}, r"got a masked one: use x.filled\(0\)"),
    "value_dtype": (GOOD, {"value_dtype": 3}, "value_dtype: expected a name or a NumPy dtype, got 3"),
    "mean of integers": (
        SparseVector([1], np.ones(1, int), N),
        {"op": "mean"},
        "op: expected 'sum' for int64",
    ),
}


@pytest.mark.parametrize("name", TYPES)
def test_wrong_types_raise_the_same_on_all(name):
    import re

    x, options, text = TYPES[name]
    texts = errors(3, lambda rank: (x, options) if rank == 0 else (GOOD, {}), TypeError)
    assert len(set(texts)) == 1 and re.search(text, texts[0])


DISAGREEING = {
    "length": lambda r: (SparseVector([1], np.ones(1), N + (r == 1)), {}),
    "dtype": lambda r: (SparseVector([1], np.ones(1, np.float32 if r == 1 else np.float64), N), {}),
    "k": lambda r: (GOOD, {"k": 5 + (r == 1)}),
    "algo": lambda r: (GOOD, {"algo": "dense" if r == 1 else "allgather"}),
    "algo options": lambda r: (GOOD, {"algo": OkTopk(tau=8 if r == 1 else 9)}),
    "format": lambda r: (GOOD, {"format": "coo" if r == 1 else "auto"}),
    "value_dtype": lambda r: (GOOD, {"value_dtype": "float16" if r == 1 else None}),
    "op": lambda r: (GOOD, {"op": "mean" if r == 1 else "sum"}),
    "shape": lambda r: (np.eye(5, 10) if r == 1 else np.eye(10, 5), {"k": 3}),
    "x of other kind": lambda r: (GOOD.to_dense() if r == 1 else GOOD, {"algo": "dense"}),
}


@pytest.mark.parametrize("name", DISAGREEING)
def test_disagreement_raises_the_same_on_all_and_names_ranks_and_values(name):
    texts = errors(4, DISAGREEING[name], CommunicationError)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"{name.split()[0]}: expected the same value on all ranks, got ")
    assert "on ranks 0, 2, 3" in texts[0] and "on rank 1" in texts[0]


def test_an_unexpected_failure_on_one_rank_raises_on_all():
    class Broken(OkTopk):
        def select(self, x, k, ranks=1):
            raise MemoryError("no room")

    texts = errors(3, lambda r: (GOOD, {"k": 1, "algo": Broken() if r == 1 else OkTopk()}), CommunicationError)
    assert set(texts) == {"rank 1 failed: MemoryError: no room"}


def test_kinds_come_back():
    def program(comm):
        triple = sparsecoll.allreduce(comm, (np.array([1]), np.array([2.0]), 9))
        dense = sparsecoll.allreduce(comm, np.array([0, 5, 0, 7], np.int64), "dense")
        empty = sparsecoll.allreduce(comm, ([], np.empty(0, np.float32), 3))
        return triple, dense, empty

    triple, dense, empty = simulate(2, program).results[1]
    assert isinstance(triple, tuple) and triple[1].tolist() == [4.0] and triple[2] == 9
    assert isinstance(dense, SparseVector) and dense.to_dense().tolist() == [0, 10, 0, 14]
    assert empty[0].size == 0 and empty[2] == 3


def test_mean_divides_by_the_number_of_ranks():
    def program(comm):
        x = (
            SparseVector([0, comm.rank], np.array([3.0, 6.0]), 9)
            if comm.rank
            else SparseVector([0], np.array([3.0]), 9)
        )
        return sparsecoll.allreduce(comm, x, op="mean").to_dense()[:3].tolist()

    assert simulate(3, program).results == [[3.0, 2.0, 2.0]] * 3


def test_a_mean_is_rounded_once():
    x = SparseVector([0], np.array([1.0]), 9)
    assert (
        simulate(49, lambda comm: sparsecoll.allreduce(comm, x, "allgather", op="mean").values[0]).results == [1.0] * 49
    )


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("P", [1, 3])
def test_contributed_sums_up_to_the_result_and_no_result_is_the_callers_array(algo, P):
    def program(comm):
        x = SparseVector([1, 3 + comm.rank], np.array([1.0, 4.0], np.float32), 20)
        kept = [x.indices.copy(), x.values.copy()]
        y = sparsecoll.allreduce(comm, x, algo, k=20, op="mean", return_reduction=True)
        z = sparsecoll.allreduce(comm, (x.indices, x.values, 20), algo, k=20)
        value, share = y.value.to_dense(), y.contributed.to_dense()
        for array in (y.value.indices, y.value.values, y.contributed.indices, y.contributed.values, *z[:2]):
            array[...] = 7
        assert (kept[0] == x.indices).all() and (kept[1] == x.values).all()
        return value, share

    results = simulate(P, program).results
    for value, _ in results:
        np.testing.assert_allclose(value, np.mean([share for _, share in results], axis=0), rtol=1e-6)
        assert value[1] == 1.0


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("algo", ["allgather", "oktopk"])
def test_a_residual_keeps_nothing_of_what_was_sent_whole(algo, op):
    def program(comm):
        residual = sparsecoll.Residual(8)
        for _ in range(3):
            acc = residual.compensate(np.arange(8, dtype=np.float32))
            y = sparsecoll.allreduce(comm, acc, algo, k=8, op=op, return_reduction=True)
            residual.update(y.contributed)
        return np.abs(residual.array).max(), y.value.to_dense().tolist()

    scale = 4 if op == "sum" else 1
    assert simulate(4, program).results == [(0.0, [scale * i for i in range(8)])] * 4


def test_kinds_of_numbers_and_arrays_that_numpy_users_have():
    def program(comm):
        narrow = [sparsecoll.allreduce(comm, GOOD, value_dtype=d) for d in (np.float16, np.dtype("float16"), "float16")]
        matrix = sparsecoll.allreduce(comm, np.matrix([[1.0, 0], [0, 2]]), k=2)
        reduced = sparsecoll.reduce(comm, GOOD, root=np.int64(1))
        dense = sparsecoll.reduce(comm, GOOD.to_dense(), k=5)
        sent = sparsecoll.bcast(comm, GOOD, root=np.int32(1)).nnz
        return [y.values.tolist() for y in narrow], matrix.to_dense().tolist(), reduced, dense, sent

    (narrow, matrix, nothing, dense, sent), (_, _, reduced, _, _) = simulate(2, program).results
    assert narrow == [[2.0, -4.0]] * 3 and matrix == [2.0, 0, 0, 4.0] and nothing is None and sent == 2
    assert reduced.values.tolist() == [2.0, -4.0] and dense.nnz == 2


def test_numpy_functions_say_what_to_pass():
    for function in (np.mean, np.sum, np.sort):
        with pytest.raises(TypeError, match=r"to_dense\(\)"):
            function(GOOD)
    reduction = sparsecoll.allreduce(sparsecoll.transport.LocalTransport(), GOOD, return_reduction=True)
    assert repr(reduction).startswith("Reduction(value=SparseVector(length=50, nnz=2")
    assert repr(sparsecoll.Residual(3)) == "Residual(length=3, dtype=float32)"


def test_dense_sums_and_calls_with_k_compare_nothing_by_messages_when_known():
    def program(comm):
        rows = []
        for x, options in ((np.ones(40), {"algo": "dense"}), (GOOD, {"k": 2, "algo": "allgather"})):
            phases = [sparsecoll.allreduce(comm, x, return_reduction=True, **options).traffic.phases for _ in range(2)]
            rows.append(["agree" in phase for phase in phases])
        return rows

    assert simulate(3, program).results == [[[True, False]] * 2] * 3


def test_results_of_virtual_ranks_share_no_memory():
    def program(comm):
        got = [*sparsecoll.allgather(comm, GOOD), sparsecoll.bcast(comm, GOOD), sparsecoll.allreduce(comm, GOOD)]
        for y in got:
            y.values[:] = comm.rank
        return got

    results = simulate(3, program).results
    assert all((y.values == rank).all() for rank, got in enumerate(results) for y in got)


def test_density_takes_at_least_one_and_k_defaults_to_the_algorithms_own():
    def program(comm):
        x = np.arange(10.0) + 1
        few = sparsecoll.allreduce(comm, x, "oktopk", density=1e-6)
        own = sparsecoll.allreduce(comm, x, OkTopk(k=4))
        return few.nnz, own.nnz

    assert simulate(2, program).results == [(1, 4)] * 2


def test_auto_moves_no_more_than_dense_when_vectors_are_full():
    n, P = 40_000, 8

    def traffic(nnz):
        x = SparseVector(np.arange(nnz), np.ones(nnz, np.float32), n)
        run = simulate(P, lambda c: sparsecoll.allreduce(c, x, return_reduction=True))
        phases = run.results[0].traffic.phases
        return sum(c.words_received for name, c in phases.items() if name != "agree"), set(phases)

    assert traffic(n)[0] <= 1.01 * formulas.dense_words(n, P)
    assert "split" not in traffic(10)[1]


def test_only_communicators_are_taken():
    for comm in (3, "world"):
        with pytest.raises(TypeError, match="comm: expected an mpi4py intracommunicator"):
            sparsecoll.allreduce(comm, GOOD)
    assert sparsecoll.allreduce(None, GOOD) == GOOD  # all ranks of the job: here one


def test_one_process_needs_no_mpi():
    from sparsecoll.transport import LocalTransport

    for algo in ALGORITHMS:
        y = sparsecoll.allreduce(LocalTransport(), GOOD, algo)
        assert y.to_dense().tolist() == GOOD.to_dense().tolist()
    with pytest.raises(CommunicationError):
        LocalTransport().isend(0, np.zeros(1, np.uint8))
    with pytest.raises(CommunicationError):
        LocalTransport().recv(0)


def test_valid_arguments_do_not_hide_later_invalid_ones():
    def program(comm):
        x, errors = SparseVector([comm.rank], np.ones(1), 5), []
        for arguments in ({"k": 1}, {"k": True}, {"k": 1.0}, {"density": 1.0}, {"density": True}, {"op": []}, {"k": 1}):
            try:
                sparsecoll.allreduce(comm, x, **arguments)
                errors.append(None)
            except (TypeError, ValueError) as error:
                errors.append(type(error).__name__)
        return errors

    expected = [None, "TypeError", "TypeError", None, "TypeError", "TypeError", None]
    assert simulate(2, program).results == [expected, expected]


@dataclasses.dataclass
class Returning(sparsecoll.Algorithm):
    """An algorithm of the user's that returns something else on rank 0."""

    name = "returning"
    semantics = "exact_sum"
    wrong: object = None

    def __call__(self, channel, x, k):
        return self.wrong if channel.rank == 0 else sparsecoll.Reduction(x, x)


@pytest.mark.parametrize("planned", [False, True])
def test_an_algorithm_that_returns_something_else_fails_on_all_ranks(planned):
    """The ranks that have returned already hear of it in their next call."""

    def program(comm):
        algo = Returning()
        call = sparsecoll.allreduce_init(comm, GOOD, algo) if planned else sparsecoll.allreduce
        with pytest.raises(TypeError, match="rank 0: algo: expected 'returning' to return Reduction"):
            call(GOOD) if planned else call(comm, GOOD, algo)
            sparsecoll.allreduce(comm, GOOD)
        return sparsecoll.allreduce(comm, GOOD).nnz

    assert simulate(3, program).results == [2] * 3


class WithoutOptions(Returning):
    def __call__(self, channel, x, k):
        return sparsecoll.Reduction(channel.merge(channel.allgather(x)), x)


def test_a_subclass_without_options_needs_no_decorator():
    results = simulate(2, lambda comm: sparsecoll.allreduce(comm, GOOD, WithoutOptions()).values.tolist()).results
    assert results == [(2 * GOOD.values).tolist()] * 2


@pytest.mark.parametrize("value", [60000.0, 683.0])
@pytest.mark.parametrize(
    "algo", ["auto", "allgather", "dense", "sparcml", "densestream", "oktopk", "gtopk", "hierarchical"]
)
def test_a_mean_of_float16_is_rounded_once(algo, value):
    """Its sum may exceed the largest float16, 65504, or have more digits."""

    def program(comm):
        x = sparsecoll.SparseVector([2, 30, 70], np.full(3, value, np.float16), 90)
        whole = sparsecoll.allreduce(comm, x, algo, k=3, op="mean", return_reduction=True)
        made = [whole.value, sparsecoll.allreduce(comm, x, algo, k=3, op="mean")]
        plan = sparsecoll.allreduce_init(comm, x, algo, k=3, op="mean")
        made += [plan(x), plan.start(x).wait()]
        if algo == "auto":
            part = sparsecoll.reduce_scatter(comm, x, op="mean")
            assert part.dtype == np.float16 and (part.values == value).all()
            root = sparsecoll.reduce(comm, x, 1, op="mean")
            made += [x if root is None else root]
            rows = sparsecoll.RowSparse([4], np.full((1, 2), value, np.float16), 9)
            mean = sparsecoll.allreduce(comm, rows, op="mean")
            assert mean.dtype == np.float16 and (mean.values == value).all()
        if algo == "dense":
            made.append(sparsecoll.allreduce(comm, x.to_dense(), algo, op="mean"))
        for y in made:
            assert y.dtype == np.float16
            assert np.array_equal(np.asarray(y.to_dense() if hasattr(y, "to_dense") else y), x.to_dense())
        assert whole.contributed.dtype == np.float16 and np.array_equal(whole.contributed.to_dense(), x.to_dense())

    for P in (3, 5):
        simulate(P, program)
