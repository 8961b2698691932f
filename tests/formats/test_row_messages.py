"""Messages of rows, in the format packed: round trips of every dtype, exact sizes, rounding, and damaged messages."""

import numpy as np
import pytest

from sparsecoll import CommunicationError, RowSparse, SparseVector, formats
from sparsecoll.vector import VALUE_DTYPES

PACKED = formats.FORMATS["packed"]


def rows_of(dtype="float32", n=5000, d=3, count=300):
    rng = np.random.default_rng(1)
    rows = np.sort(rng.choice(min(n, 4000), count, replace=False))
    return RowSparse(rows, (rng.standard_normal((count, d)) * 9).astype(dtype), n)


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
@pytest.mark.parametrize("count", [0, 1, 300])
def test_round_trips(dtype, count):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    for n in (5000, 2**40):
        x = rows_of(dtype, n, count=count)
        assert formats.decode(PACKED.encode(x), n, 3).astype(dtype) == x


def test_a_message_has_one_index_for_each_row():
    x = rows_of(np.float64, d=64)
    values, flat = x.values.nbytes, x.to_dense().reshape(-1)
    assert values < PACKED.encode(x).size < values + 2 * x.nnz
    assert formats.encode(SparseVector.from_dense(flat), "coo").size > 1.4 * values
    with pytest.raises(ValueError, match="format: expected 'packed' for rows, got 'auto'"):
        formats.encode(x)


def test_some_rows_and_room_for_the_caller():
    x = rows_of().take(np.array([2, 5, 299]))
    for value_dtype in (None, "float16"):
        message = PACKED.encode(x, value_dtype, room=9)
        assert formats.decode(message[:-9], x.n, 3).astype(x.dtype) == formats.rounded(x, value_dtype)


@pytest.mark.parametrize("value_dtype, largest", [("float16", 65504.0), ("bfloat16", 3.3895314e38)])
def test_values_beyond_the_range_become_the_largest_finite_one(value_dtype, largest):
    x = RowSparse([3], np.array([[3.4e38, -3.4e38, 1.0]], np.float32), 9)
    y = formats.rounded(x, value_dtype)
    assert np.allclose(y.values, [[largest, -largest, 1.0]], rtol=1e-6)
    assert formats.decode(PACKED.encode(x, value_dtype), 9, 3).astype(np.float32) == y


def test_damaged_messages_are_refused():
    """An error or valid rows, nothing else."""
    x, rng, refused = rows_of(), np.random.default_rng(0), 0
    good = PACKED.encode(x)
    for trial in range(600):
        message = good.copy()
        if trial % 3 == 0:
            message = message[: rng.integers(0, message.size)]
        elif trial % 3 == 1:
            message = np.concatenate([message, rng.integers(0, 256, rng.integers(1, 20), np.uint8)])
        else:
            places = [rng.integers(0, 24), rng.integers(good.size - 400, good.size)][trial % 2]
            message[places] ^= 1 << rng.integers(0, 8)
        try:
            y = formats.decode(message, x.n, 3)
        except CommunicationError:
            refused += 1
        else:
            RowSparse(y.rows, y.values, y.n)
            assert y.shape == x.shape
    assert refused > 400


@pytest.mark.parametrize("n, d", [(5000, 4), (5000, 0), (100, 3), (2**40, 3)])
def test_messages_of_another_table_are_refused(n, d):
    with pytest.raises(CommunicationError, match="message"):
        formats.decode(PACKED.encode(rows_of()), n, d)


@pytest.mark.parametrize("name", [name for name, form in formats.FORMATS.items() if form.id])
def test_messages_of_vectors_are_not_rows(name):
    x = SparseVector.from_dense(np.arange(9, dtype=np.float32))
    for width in (1, 3):
        with pytest.raises(CommunicationError, match=r"message: (not a|expected rows)"):
            formats.decode(formats.encode(x, name), 9, width)
