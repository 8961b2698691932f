"""The contract of algorithms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecoll.algorithms import Algorithm, Reduction
from sparsecoll.algorithms.base import SEMANTICS
from sparsecoll.collectives.allreduce import allreduce
from sparsecoll.formats import FORMATS
from sparsecoll.testing.cases import DISTRIBUTIONS, RANKS, case, case_of, check_class, expect, same_bits
from sparsecoll.transport import simulate
from sparsecoll.vector import SparseVector, accumulator_dtype

Expected = Callable[[list[SparseVector], int], NDArray[Any]]


def check_algorithm(algorithm: Algorithm, expected: Expected | None = None, long: bool = True) -> None:
    """Check the contract of algorithms on the simulator, on 1 to 12 ranks; takes some seconds.

    All ranks get the same bits, also in a run with another order of messages; inputs are not changed; what contributed
    adds up to the result, also if values are rounded on the wire; no coordinate waits for ever with error feedback;
    floats, integers, bool, lossless formats and any number of entries are taken, and vectors that are empty, tiny or
    longer than 2^32. An exact sum and the top k of a sum, as `semantics` says, are compared with those of NumPy.

    Args:
        algorithm: an object of the class; each call gets a copy.
        expected: returns the dense result for the vectors of all ranks and k, for other `semantics`; None, the default,
            compares it with nothing.
        long: whether vectors of length 2^40 are summed (default: True); False for an algorithm that needs memory for
            the whole length.

    Raises:
        AssertionError: The contract is broken; the text names the case.
        TypeError: The class has no name, or its options are not the fields of a dataclass.
        ValueError: `semantics` is unknown.
    """
    expect(isinstance(algorithm, Algorithm), f"algo: expected an Algorithm object, got {algorithm!r}")
    check_class("algo", algorithm)
    if algorithm.semantics not in SEMANTICS:
        raise ValueError(f"algo: expected `semantics` to be one of {SEMANTICS}, got {algorithm.semantics!r}")
    if expected is None and type(algorithm).select is Algorithm.select and algorithm.selector is None:
        expected = {"exact_sum": exact_sum, "top_k_of_sum": top_k_of_sum}.get(algorithm.semantics)
    for name, P in product(DISTRIBUTIONS, RANKS):
        _check(algorithm, expected, name, P)
    for name in ("random", "ties", "one_region", "empty_ranks"):
        for dtype in ("float16", "float64", "int32", "int64"):
            _check(algorithm, expected, name, 5, dtype)
    for name, k in product(("random", "ties", "disjoint", "nnz_below_P"), (0, 1, 7, 59, 5000)):
        _check(algorithm, expected, name, 6, k=k)
    for name, form in FORMATS.items():
        if not form.lossy:
            _check(algorithm, expected, "random", 5, format=name)
    for check in (_rounding, _bools, _tiny_lengths, _half_precision, _feedback, _repeats, _explicit_zeros):
        with case_of(check.__name__[1:].replace("_", " ")):
            check(algorithm)
    if long:
        with case_of("lengths above 2^32"):
            _long(algorithm)


def oracle_top(dense: NDArray[Any], k: int) -> NDArray[Any]:
    """Return the vector with all but its k largest magnitudes set to zero; ties by lower index."""
    order = np.lexsort((np.arange(dense.size), -np.abs(dense.astype(np.float64))))
    kept = np.zeros_like(dense)
    kept[order[:k]] = dense[order[:k]]
    return kept


def exact_sum(inputs: list[SparseVector], k: int) -> NDArray[Any]:
    """Return the sum of the k largest entries of each vector."""
    return np.sum([oracle_top(x.to_dense(), k) for x in inputs], axis=0, dtype=inputs[0].dtype)  # type: ignore[no-any-return]


def top_k_of_sum(inputs: list[SparseVector], k: int) -> NDArray[Any]:
    """Return the k largest entries of `exact_sum`."""
    return oracle_top(exact_sum(inputs, k), k)


def _reduced(algorithm: Algorithm, inputs: Sequence[Any], on_node: int = 1, **options: Any) -> list[Reduction]:
    """Return the Reductions of all ranks, whose values must have the same bits."""
    before, order = copy.deepcopy(inputs), options.pop("order", None)

    def program(comm: Any) -> Reduction:
        call = {"return_reduction": True, **options}
        return allreduce(comm, inputs[comm.rank], copy.deepcopy(algorithm), **call)  # type: ignore[no-any-return]

    results: list[Reduction] = simulate(len(inputs), program, ranks_per_node=on_node, schedule=order).results
    for x, own, r in zip(inputs, before, results, strict=True):
        expect(_bits(x) == _bits(own), "expected x to be left alone, it was changed")
        expect(same_bits(r.value, results[0].value), "expected the same bits on all ranks")  # type: ignore[arg-type]
        for part, kinds in ((r.value, (x.dtype,)), (r.contributed, (x.dtype, accumulator_dtype(x.dtype)))):
            expect(part.dtype in kinds, f"expected values and `contributed` of {x.dtype}, got {part.dtype}")
    return results


def _bits(x: Any) -> bytes:
    return b"".join(part.tobytes() for part in ([x.indices, x.values] if isinstance(x, SparseVector) else [x]))


def _check(
    algorithm: Algorithm,
    expected: Expected | None,
    name: str,
    P: int,
    dtype: str = "float32",
    k: int | None = None,
    **options: Any,
) -> None:
    with case_of(f"entries {name!r} of {dtype} on {P} ranks, k={k}, {options}"):
        inputs = [case(name, rank, P, dtype) for rank in range(P)]
        reductions = _reduced(algorithm, inputs, k=k, **options)
        value = reductions[0].value.to_dense()
        entered = np.sum([r.contributed.to_dense() for r in reductions], axis=0)
        np.testing.assert_array_equal(entered, value, err_msg="what contributed does not add up to the result")
        if expected is not None:
            most = max(x.nnz for x in inputs) if k is None else k
            np.testing.assert_array_equal(value, expected(inputs, most), err_msg="another result than expected")


def _rounding(algorithm: Algorithm) -> None:
    """Check that nothing is lost where both wire dtypes round: multiples of 1/512 near 32 need 14 bits."""
    for wire in ("float16", "bfloat16"):
        drawn = [np.random.default_rng(rank) for rank in range(5)]
        values = [(rng.integers(-(2**14), 2**14, 80) / 512).astype(np.float32) for rng in drawn]
        supports = [np.sort(rng.choice(400, 80, replace=False)) for rng in drawn]
        inputs = [SparseVector(*pair, 400) for pair in zip(supports, values, strict=True)]
        reductions = _reduced(algorithm, inputs, k=60, value_dtype=wire)
        contributed = [r.contributed.to_dense().astype(np.float64) for r in reductions]
        np.testing.assert_array_equal(np.sum(contributed, axis=0), reductions[0].value.to_dense())
        expect(any((y != x.topk(60).to_dense()).any() for x, y in zip(inputs, contributed, strict=True)), "not rounded")


def _bools(algorithm: Algorithm) -> None:
    """Check bool, whose sum is the logical or, from which nothing can be subtracted."""
    for P, on_node in ((1, 1), (5, 2), (6, 3)):
        vectors = [case("random", rank, P).astype(np.dtype(bool)) for rank in range(P)]
        for inputs in (vectors, [x.to_dense() for x in vectors]):
            reductions = _reduced(algorithm, inputs, on_node, k=40)
            value = reductions[0].value.to_dense()
            entered = [r.contributed.to_dense() for r in reductions]
            np.testing.assert_array_equal(np.any(entered, axis=0), value)
            own = all((y <= x.to_dense()).all() for x, y in zip(vectors, entered, strict=True))
            expect(own and value.any(), "expected a result, and contributions among the entries of x")


def _long(algorithm: Algorithm) -> None:
    """Check that indices next to 2^33 survive, sums of boundaries too, and nothing of the length is allocated."""
    rng, n = np.random.default_rng(1), 2**40
    for P in (1, 3, 8):
        indices = [np.sort(rng.choice(1000, 50, replace=False)) + 2**33 * (rank + 1) for rank in range(P)]
        values = np.arange(1, 51, dtype=np.float32)
        reductions = _reduced(algorithm, [SparseVector(own, values, n) for own in indices])
        value, union = reductions[0].value.to_sparse(), np.unique(np.concatenate(indices))
        sums, entered = np.zeros((2, union.size), np.float32)
        np.add.at(sums, np.searchsorted(union, np.concatenate(indices)), np.tile(values, P))
        for r in reductions:
            part = r.contributed.to_sparse()
            np.add.at(entered, np.searchsorted(union, part.indices.astype(np.int64)), part.values)
        kept = union[entered != 0]
        if algorithm.semantics == "exact_sum":
            np.testing.assert_array_equal(entered, sums)
        elif algorithm.semantics == "top_k_of_sum":
            np.testing.assert_array_equal(kept, union[np.sort(np.lexsort((union, -sums))[:50])])
        expect(kept.size and value.indices.dtype == np.uint64, "expected entries, with indices of uint64")
        np.testing.assert_array_equal(value.indices, kept.astype(np.uint64))
        np.testing.assert_array_equal(value.values, entered[entered != 0])


def _tiny_lengths(algorithm: Algorithm) -> None:
    for n, P in product((0, 1, 2, 4, 11), (1, 2, 5, 12)):
        inputs = [np.arange(1, n + 1, dtype=np.float32) * (rank + 1) for rank in range(P)]
        value = _reduced(algorithm, inputs, k=n)[0].value
        np.testing.assert_array_equal(value.to_dense(), np.sum(inputs, axis=0, dtype=np.float32))


def _half_precision(algorithm: Algorithm) -> None:
    """Check that a sum beyond float16 (8 * 16000) becomes its largest finite value, and infinity stays infinity."""
    x = SparseVector([3, 9], np.array([16000, np.inf], np.float16), 20)
    results = simulate(8, lambda comm: allreduce(comm, x, copy.deepcopy(algorithm), k=20, nonfinite="pass")).results
    for y in results:
        np.testing.assert_array_equal(y.values, np.array([65504, np.inf], np.float16))


def _feedback(algorithm: Algorithm) -> None:
    """Check that every coordinate of a constant gradient is sent again and again, also with k < P."""
    for n, k in ((30, 2), (101, 9), (200, 50)):
        gradient, turns = np.random.default_rng(n + k).uniform(0.5, 1.5, n), 12 * n // k

        def program(comm: Any, gradient: Any = gradient, k: int = k, turns: int = turns) -> tuple[int, float]:
            own, residual, late = copy.deepcopy(algorithm), np.zeros(gradient.size), np.zeros(gradient.size, bool)
            for turn in range(turns):
                residual += gradient
                reduction = allreduce(comm, residual, own, k=k, return_reduction=True)
                residual -= reduction.contributed.to_dense()
                if turn >= turns // 2:
                    late |= reduction.value.to_dense() != 0
            return int(late.sum()), float(residual.max())

        for sent, waiting in simulate(3, program, ranks_per_node=3).results:
            expect(sent == n and waiting < 1.5 * turns / 2, f"k={k}: {n - sent} of {n} coordinates wait")


def _repeats(algorithm: Algorithm) -> None:
    """Check that random floats, whose sums depend on the order, give the same bits, and that all bytes sent arrive."""
    inputs = [np.random.default_rng(rank).standard_normal(3000).astype(np.float32) for rank in range(7)]
    orders = None, lambda steps: len(steps) - 1
    first, again = (_reduced(algorithm, inputs, order=order, k=200)[0].value.to_sparse() for order in orders)
    expect(same_bits(first, again), "expected the same bits in every run, whatever the order of messages")
    expect(algorithm.semantics != "top_k_of_sum" or first.nnz == 200, "expected 200 entries")
    simulation = simulate(7, lambda comm: allreduce(comm, inputs[comm.rank], copy.deepcopy(algorithm), k=200))
    totals = [counts.total for counts in simulation.traffic]
    sent, received = sum(t.bytes_sent for t in totals), sum(t.bytes_received for t in totals)
    expect(simulation.seconds > 0 and sent == received > 0, f"{sent} bytes were sent and {received} received")


def _explicit_zeros(algorithm: Algorithm) -> None:
    """Check that an exact sum has all ranks' indices: zeros of both signs, sums that cancel, zeros on the wire."""
    for P in RANKS if algorithm.semantics == "exact_sum" else ():
        inputs = []
        for rank in range(P):
            first = 1 - 2 * (rank % 2) if rank < P - P % 2 else 0
            indices = np.array([3, 7, 8, 9, 11 + rank, 60])
            inputs.append(SparseVector(indices, np.array([first, 0, -0.0, 1e-9, 2, 0], np.float32), 64))
        for name in (name for name, form in FORMATS.items() if not form.lossy):
            value = _reduced(algorithm, inputs, 2, format=name, value_dtype="float16")[0].value
            np.testing.assert_array_equal(value.to_sparse().indices, [3, 7, 8, 9, *range(11, 11 + P), 60])
