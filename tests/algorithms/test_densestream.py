"""DenseStream allreduce: equation (6), 2 ceil(log2 P) messages for any P, blocks on the wire, balanced split."""

import formulas
import numpy as np
import pytest
from cases import SUPPORTS
from volume import HEADER_WORDS, measure

import sparsecoll
from sparsecoll import DenseStream, SparseVector, formats, simulate
from sparsecoll.algorithms.primitives import estimates


@pytest.mark.parametrize("P", [2, 3, 5, 8, 33])
@pytest.mark.parametrize("name", SUPPORTS)
def test_volume_is_between_the_bounds_of_equation_6_in_two_rounds_a_level(name, P):
    k = 2000
    volume = measure(DenseStream, name, P, k)
    lower, upper = formulas.densestream_words(k, P)
    assert volume.messages == 2 * estimates.rounds(P)
    assert volume.received <= upper + 2 * HEADER_WORDS * P
    if name in ("random", "same", "skewed"):
        assert volume.received >= 0.9 * lower
    if name == "same":  # indices overlap fully: the lower bound of equation (6), where regions are equal
        assert lower * 0.99 <= volume.received <= lower * 1.01 + 2 * HEADER_WORDS * P


def test_histogram_boundaries_balance_what_averaged_ones_do_not():
    """Disjoint supports: with averaged boundaries the outer regions get nearly everything."""
    k, P = 4000, 16
    averaged = measure(DenseStream, "disjoint", P, k)
    balanced = measure(lambda: DenseStream(repartition="histogram"), "disjoint", P, k)
    assert balanced.received < 0.9 * averaged.received


def test_blocks_travel_unless_another_format_is_asked_for():
    def program(comm, format):
        rng = np.random.default_rng(7)
        indices = np.flatnonzero(rng.random(50_000) < 0.3)
        x = SparseVector(indices, np.ones(indices.size, np.float32), 50_000)
        y = sparsecoll.allreduce(comm, x, "densestream", format=format, return_reduction=True)
        return y.traffic.total.bytes_received

    received = {
        name: max(simulate(4, lambda comm, f=form: program(comm, f)).results)
        for name, form in (
            ("own", "auto"),
            ("blocks", "densestream"),
            ("coo", "coo"),
            ("smallest", formats.AutoFormat()),
        )
    }
    assert received["own"] == received["blocks"] < received["coo"]
    assert received["smallest"] < received["own"]


def test_algorithm_2_is_one_call():
    """Select, split, reduce, gather, and the residual: gradients in equal results and residuals out."""

    def program(comm):
        residual = sparsecoll.Residual(5000, np.float64)
        gradient = np.random.default_rng(comm.rank).standard_normal(5000)
        acc = residual.compensate(gradient)
        y = sparsecoll.allreduce(comm, acc.values, "densestream", density=0.01, return_reduction=True)
        residual.update(y.contributed)
        return gradient, residual.array.copy(), y.value.to_dense()

    rows = simulate(6, program).results
    np.testing.assert_allclose(sum(r[0] for r in rows), sum(r[1] for r in rows) + rows[0][2], atol=1e-12)


@pytest.mark.parametrize("P", [1, 2, 5])
def test_zeros_inside_blocks_carry_true_values_that_contribute(P):
    """As many bytes leave a rank in its first message, more of the gradient arrives, and nothing is lost."""

    def program(comm, fill):
        residual = sparsecoll.Residual(20_000)
        gradient = (np.random.default_rng(comm.rank).integers(-256, 257, 20_000) / 8).astype(np.float32)
        acc = residual.compensate(gradient)
        y = sparsecoll.allreduce(comm, acc.values, DenseStream(fill=fill), density=0.3, return_reduction=True)
        residual.update(y.contributed)
        size = formats.encode(y.contributed, "densestream").size
        return gradient, residual.array.copy(), y.value.to_dense(), y.contributed.nnz, size

    plain, filled = ([*simulate(P, lambda comm, f=fill: program(comm, f)).results] for fill in (False, True))
    for few, many in zip(plain, filled, strict=True):
        assert few[3] == 6000 < 1.1 * 6000 < many[3] and few[4] == many[4]
    np.testing.assert_array_equal(sum(r[0] for r in filled), sum(r[1] for r in filled) + filled[0][2])


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match=r"repartition: expected one of histogram, average, even, got 'equal'"):
        DenseStream(repartition="equal")
    with pytest.raises(TypeError, match="fill: expected True or False, got 'no'"):
        DenseStream(fill="no")
