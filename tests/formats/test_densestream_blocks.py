"""DenseStream: Figure 2 and equation (3) of the paper, and its remark on the zeros inside blocks."""

import numpy as np
import pytest

from sparsecoll import CommunicationError, DenseVector, SparseVector, formats
from sparsecoll.formats import DenseStreamFormat, wire_dtype
from sparsecoll.formats.densestream import number_bytes

FORM = DenseStreamFormat()
LENGTH = 2**25  # 4 bytes a start, 4 a length, as in the figure


def vector(indices, dtype=np.float32, length=LENGTH):
    return SparseVector(indices, np.ones(len(indices), dtype), length)


def body(x, value_dtype=None):
    """Bytes without the header and the number of blocks."""
    return FORM.size(x, value_dtype) - 24


def test_zeros_in_a_row_part_blocks_as_in_figure_2():
    """Block 1 without a zero, block 2 with one, block 3 with two in a row; three in a row part blocks 4 and 5."""
    assert body(vector([0, 1, 2])) == 8 + 3 * 4
    assert body(vector([0, 1, 3])) == 8 + 4 * 4
    assert body(vector([0, 3, 4])) == 8 + 5 * 4
    assert body(vector([0, 1, 5])) == 2 * 8 + 3 * 4


@pytest.mark.parametrize(
    ("length", "width"), [(1, 1), (2, 1), (256, 1), (257, 2), (2**16, 2), (2**16 + 1, 3), (2**32, 4), (2**40, 5)]
)
def test_bytes_of_a_place_and_the_longest_gap(length, width):
    """ceil(log2(N) / 8) bytes; 2 * that / K zeros."""
    assert number_bytes(length) == width
    for dtype, item in (("float16", 2), ("float32", 4), ("float64", 8)):
        assert FORM.gap(length, wire_dtype(np.dtype(dtype), None)) == 2 * width // item


def test_a_gap_is_filled_exactly_as_long_as_it_costs_no_more():
    for length in (200, 2**20, 2**30, 2**40):
        for dtype in (np.float16, np.float32, np.float64):
            item, width = np.dtype(dtype).itemsize, number_bytes(length)
            for zeros in range(0, 12):
                x = vector([3, 4 + zeros], dtype, length)
                assert body(x) == min(2 * width + item * (2 + zeros), 2 * 2 * width + item * 2)


def test_size_lies_between_the_bounds_of_equation_3():
    """All entries apart: (2 ceil(log2(N)/8) + K) nnz. One block: 2 ceil(log2(N)/8) + K nnz. (The paper swaps them.)"""
    apart, together = vector(np.arange(0, 10**5, 100)), vector(np.arange(1000))
    assert body(apart) == (2 * 4 + 4) * 1000 and body(together) == 2 * 4 + 4 * 1000
    rng = np.random.default_rng(0)
    for density in (0.01, 0.1, 0.5):
        x = vector(np.flatnonzero(rng.random(10**5) < density))
        assert body(together) / 1000 * x.nnz < body(x) <= (2 * 4 + 4) * x.nnz


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_size_that_a_sample_of_neighbours_suggests_is_near_that_of_the_plan(dtype):
    rng, wire = np.random.default_rng(2), wire_dtype(np.dtype(dtype), None)
    for length in (10**6, 2**40):
        for share in (0.003, 0.1, 0.6):
            spread = vector(np.flatnonzero(rng.random(10**6) < share), dtype, length)
            runs = vector(np.flatnonzero(np.repeat(rng.random(10**4) < share, 100)), dtype, length)
            for x in (spread, runs):
                assert FORM.estimate(x, wire, 512) == pytest.approx(FORM.size(x), rel=0.1)
    few = vector([3, 5], dtype)
    assert FORM.estimate(few, wire, 512) == FORM.size(few)


def test_zeros_inside_blocks_carry_their_true_values_at_no_cost():
    rng = np.random.default_rng(1)
    dense = rng.standard_normal(20_000).astype(np.float32)
    dense[::7] = 0
    source = DenseVector(dense)
    chosen = source.threshold(1.0)
    filled = FORM.filled(chosen, source)
    assert filled.nnz > chosen.nnz and FORM.size(filled) == FORM.size(chosen)
    assert (dense[filled.indices] == filled.values).all() and (filled.values != 0).all()
    assert np.isin(chosen.indices, filled.indices).all()
    arrived = formats.decode(formats.encode(filled, "densestream"), dense.size)
    assert arrived.indices.tolist() == filled.indices.tolist() and arrived.values.tolist() == filled.values.tolist()
    assert FORM.filled(SparseVector.empty(20_000, np.float32), source).nnz == 0


@pytest.mark.parametrize(("length", "dtype"), [(256, np.float32), (2**16, np.float64), (2**16, np.int8)])
def test_a_block_of_all_coordinates(length, dtype):
    """Its length does not fit into the bytes of a start."""
    ones = np.ones(length, dtype)
    for x in (SparseVector.from_dense(ones), SparseVector([0, length - 1], ones[:2], length)):
        y = formats.decode(formats.encode(x, "densestream"), length)
        assert y.nnz == x.nnz and (y.to_dense() == x.to_dense()).all()


def test_a_message_that_has_lost_a_value_is_refused():
    message = formats.encode(SparseVector([3, 4, 9], np.ones(3), 20), "densestream")
    message[24:32] = 0
    with pytest.raises(CommunicationError, match="expected 3 dense values other than zero, got 2"):
        formats.decode(message, 20)
