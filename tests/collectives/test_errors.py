"""What is wrong on some rank raises the same error on all ranks, and the communicator goes on."""

import numpy as np
import pytest
from cases import N, case

import sparsecoll
from sparsecoll import CommunicationError, SparseVector, simulate

X = case("random", 0, 3)
NAN = X.with_values(X.values * np.nan)
ROOTS = {
    "root": (lambda rank: {"x": X, "root": 3}, "root: expected a rank from 0 to 2, got 3"),
    "roots differ": (lambda rank: {"x": X, "root": rank}, "root: expected the same value on all ranks"),
}
WRONG = {  # call -> name -> (arguments of a rank, text); 3 ranks
    "gather": {
        **ROOTS,
        "lengths differ": (lambda rank: {"x": X[: 100 + rank]}, "length: expected the same value on all ranks"),
        "dense": (
            lambda rank: {"x": X.to_dense() if rank else X},
            "x: expected the same value on all ranks, got 'a vector' on rank 0, 'an array'",
        ),
    },
    "reduce": {
        **ROOTS,
        "lossy format": (lambda rank: {"x": X, "format": "slots"}, "expected one that loses nothing with partial sums"),
        "NaN": (lambda rank: {"x": NAN if rank == 2 else X}, "rank 2: x: expected finite values"),
        "dense": (lambda rank: {"x": X.to_dense()}, "x: expected a sparse one, or k or density, got a dense one and"),
    },
    "scatter": {
        "root": (lambda rank: {"x": [X] * 3, "root": -1}, "root: expected a rank from 0 to 2, got -1"),
        "too few": (lambda rank: {"x": [X, X]}, "rank 0: x: expected a list of 3 vectors, one for each rank, got 2"),
        "a wrong one": (lambda rank: {"x": [X, X, "no"]}, r"rank 0: x\[2\]: expected a SparseVector"),
        "dense": (
            lambda rank: {"x": X.to_dense()},
            "rank 0: x: expected a sparse one to split, or a list such as np.array",
        ),
        "rows": (lambda rank: {"x": sparsecoll.RowSparse([1], np.ones((1, 2)), 5)}, r"RowSparse.*scatter: a list"),
        "boundaries": (lambda rank: {"x": X, "boundaries": [0, 9, 5, N]}, "boundaries: expected 4 ascending ones"),
        "both": (lambda rank: {"x": [X] * 3, "boundaries": [0, 1, 2, N]}, "boundaries: expected None for a list"),
    },
    "bcast": {"no vector": (lambda rank: {"x": "no"}, "x: expected a SparseVector")},
    "alltoall": {
        "too few": (lambda rank: {"x": [X] * (1 if rank == 1 else 3)}, "rank 1: x: expected"),
        "no list": (lambda rank: {"x": X if rank == 1 else [X] * 3}, "rank 1: x: expected"),
        "a wrong one": (lambda rank: {"x": [X, X, None if rank == 1 else X]}, r"rank 1: x\[2\]: expected"),
        "formats differ": (
            lambda rank: {"x": [X] * 3, "format": "coo" if rank else "auto"},
            "format: expected the same value on all ranks",
        ),
    },
    "alltoallv": {
        f"to {wrong!r}"[:30]: (
            lambda rank, wrong=wrong: {"x": wrong if rank == 1 else {}},
            r"rank 1: x(\[2\])?: expected",
        )
        for wrong in ({3: X}, {-1: X}, {"a": X}, {True: X}, [X], {0: X, 2: [1.0]})
    },
}


@pytest.mark.parametrize(("call", "name"), [(call, name) for call, names in WRONG.items() for name in names])
def test_what_is_wrong_is_the_same_error_on_all_ranks(call, name):
    arguments, text = WRONG[call][name]

    def program(comm):
        given = arguments(comm.rank)
        if call in ("scatter", "bcast") and comm.rank:
            given["x"] = None  # the root has it
        with pytest.raises((ValueError, TypeError, CommunicationError), match=text) as caught:
            getattr(sparsecoll, call)(comm, **given)
        return str(caught.value), sparsecoll.allreduce(comm, SparseVector([1], np.ones(1), 9)).nnz

    assert len(set(simulate(3, program).results)) == 1


@pytest.mark.parametrize("empty", [SparseVector.empty, lambda n, dtype: sparsecoll.RowSparse.empty(n, 1, dtype)])
def test_a_length_of_numpy_is_one_of_python(empty):
    """It could be put in no report, so that the other ranks waited."""
    assert type(empty(np.prod((10, 10)), np.float64).length) is int
    with pytest.raises(ValueError, match="expected 0 <= "):
        empty(np.int64(-1), np.float64)


def test_arguments_that_json_has_no_name_for_are_compared_and_reported():
    def program(comm):
        x = SparseVector.from_sorted_unchecked(X.indices, X.values, np.int64(N) if comm.rank else N)
        with pytest.raises(CommunicationError, match=r"length: expected the same value on all ranks, got \d+ on"):
            sparsecoll.allreduce(comm, x if comm.rank < 2 else X[:100], check=np.True_ if comm.rank else True)
        return sparsecoll.allreduce(comm, x, check=np.True_).nnz

    assert len(set(simulate(3, program).results)) == 1
