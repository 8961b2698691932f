"""The caller's types: into vectors, through an allreduce, and back as the same kind, shape and values."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import sparsecoll
from sparsecoll import SparseVector, as_vector, like, simulate

FEW = settings(max_examples=40, deadline=None)


def matrix(seed, shape, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return (rng.integers(-9, 9, shape) * (rng.random(shape) < 0.3)).astype(dtype)


def round_trip(x, dense):
    """x's kind holds `dense`: as a vector, back, and summed over 3 ranks."""
    vector = as_vector(x)
    np.testing.assert_array_equal(vector.to_dense(), dense.reshape(-1))
    back = like(x, vector)
    assert type(back) is type(x)
    total = simulate(3, lambda comm: sparsecoll.allreduce(comm, x)).results[2]
    assert type(total) is type(x)
    return back, total


@pytest.mark.parametrize("kind", ["array", "matrix"])
@pytest.mark.parametrize("form", ["coo", "csr", "csc", "bsr", "lil", "dok", "dia"])
@pytest.mark.parametrize("shape", [(7, 11), (1, 20), (20, 1), (3, 0)])
def test_scipy_matrices_come_back_in_their_format(kind, form, shape):
    sparse = pytest.importorskip("scipy.sparse")
    dense = matrix(1, shape)
    x = getattr(sparse, f"{form}_{kind}")(dense)
    for result, factor in zip(round_trip(x, dense), (1, 3), strict=True):
        assert result.shape == shape and result.format == form and result.dtype == np.float32
        np.testing.assert_array_equal(result.toarray(), factor * dense)


def test_scipy_arrays_of_one_dimension():
    sparse = pytest.importorskip("scipy.sparse")
    dense = matrix(2, 30)
    x = sparse.coo_array(dense)
    if x.ndim != 1:
        pytest.skip("this SciPy has no arrays of one dimension")
    for result, factor in zip(round_trip(x, dense), (1, 3), strict=True):
        assert result.shape == (30,)
        np.testing.assert_array_equal(result.toarray(), factor * dense)


@FEW
@given(seed=st.integers(0, 1000), size=st.integers(0, 60), dtype=st.sampled_from([np.float32, np.float64, np.int64]))
def test_duplicates_are_summed_in_their_order(seed, size, dtype):
    sparse = pytest.importorskip("scipy.sparse")
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(0, 4, size), rng.integers(0, 5, size)
    values = (rng.integers(-9, 9, size) / 2).astype(dtype)
    x = sparse.coo_matrix((values, (rows, columns)), shape=(4, 5))
    vector = as_vector(x)
    np.testing.assert_array_equal(vector.to_dense().reshape(4, 5), x.toarray())
    assert vector.nnz == len(set(zip(rows.tolist(), columns.tolist(), strict=True)))


def test_matrices_of_up_to_2_to_the_63_coordinates_are_taken():
    sparse = pytest.importorskip("scipy.sparse")
    shape = (2**31, 2**20)
    x = sparse.coo_array((np.ones(2), ([5, 2**31 - 1], [7, 2**20 - 1])), shape=shape)
    vector = as_vector(x)
    assert vector.length == 2**51 and vector.indices.tolist() == [5 * 2**20 + 7, 2**51 - 1]
    back = like(x, vector)
    assert back.shape == shape and [c.tolist() for c in back.coords] == [[5, 2**31 - 1], [7, 2**20 - 1]]
    with pytest.raises(ValueError, match=r"fewer than 2\^63 coordinates"):
        as_vector(sparse.coo_array((np.ones(1), ([0], [0])), shape=(2**62, 2)))


def canonical(x):
    """Whether a matrix is in canonical form by what it holds, not by its flags."""
    if x.format in ("csr", "csc"):
        pairs = np.diff(x.indices.astype(np.int64) + np.repeat(np.arange(x.indptr.size - 1), np.diff(x.indptr)) * 2**31)
        return bool((pairs > 0).all())
    return (
        SparseVector(x.coords[0].astype(np.int64) * x.shape[1] + x.coords[1], x.data, x.shape[0] * x.shape[1]).nnz >= 0
    )


@pytest.mark.parametrize("shape", [(1, 500), (500, 1), (20, 30), (3, 4000), (4000, 3), (2**16, 2**16), (2**17, 2**16)])
@pytest.mark.parametrize("form", ["coo", "csr", "csc"])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_canonical_form_and_index_dtype_are_kept(form, shape, index):
    sparse = pytest.importorskip("scipy.sparse")
    rng = np.random.default_rng(0)
    rows, columns = (rng.integers(0, size, 200) for size in shape)
    x = sparse.coo_array((np.ones(200), (rows, columns)), shape=shape).asformat(form)
    if form == "coo":
        x.coords = tuple(c.astype(index) for c in x.coords)
    else:
        x.indices, x.indptr = x.indices.astype(index), x.indptr.astype(index)
    x.data[:] = rng.integers(1, 9, x.data.size)
    vector = as_vector(x)
    y = like(x, vector)
    assert abs(x - y).sum() == 0 and y.has_canonical_format and canonical(y)
    assert {i.dtype for i in (y.coords if form == "coo" else (y.indices, y.indptr))} == {np.dtype(index)}
    assert vector == as_vector(x.tocoo()) == as_vector(y)


@pytest.mark.parametrize("form", ["csr", "csc"])
def test_compressed_matrices_that_are_not_canonical(form):
    sparse = pytest.importorskip("scipy.sparse")
    starts, indices = np.array([0, 3, 3, 5]), np.array([2, 0, 2, 1, 0])
    x = getattr(sparse, f"{form}_array")((np.array([1.0, 2, 4, 8, 16]), indices, starts), shape=(3, 3))
    dense = x.toarray()
    vector = as_vector(x)
    np.testing.assert_array_equal(vector.to_dense().reshape(3, 3), dense)
    assert vector.nnz == 4 and like(x, vector).has_canonical_format
    assert x.indices.tolist() == [2, 0, 2, 1, 0]  # the caller's matrix is not sorted in place
    for whole in (dense, np.eye(9)[:, :3]):  # which has fewer entries than rows
        roomy = getattr(sparse, f"{form}_array")(whole)
        roomy.data, roomy.indices = np.append(roomy.data, 7.0), np.append(roomy.indices, 0).astype(roomy.indices.dtype)
        np.testing.assert_array_equal(as_vector(roomy).to_dense().reshape(whole.shape), whole)


@pytest.mark.parametrize("form", ["csr", "csc"])
@pytest.mark.parametrize("wrong", [3, -1])
def test_compressed_matrices_that_are_broken(form, wrong):
    sparse = pytest.importorskip("scipy.sparse")
    x = getattr(sparse, f"{form}_array")(np.eye(3))
    x.indices[1] = wrong
    with pytest.raises(
        ValueError, match=f"x: expected indices of at least 0 and below 3 in {form} format, got {wrong}"
    ):
        as_vector(x)


@pytest.mark.parametrize("form", ["csr", "csc", "bsr"])
@pytest.mark.parametrize(("position", "wrong"), [(0, 1), (1, 2**30), (1, -1), (-1, 2**30), (-1, -1)])
def test_starts_of_compressed_matrices_that_are_broken(form, position, wrong):
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.csr_array(np.kron(np.eye(3), np.ones((2, 2)))).asformat(form)
    x.indptr[position] = wrong
    for convert in (as_vector, lambda x: sparsecoll.allreduce(None, x)):
        with pytest.raises(ValueError, match="x: expected indptr to ascend from 0 to at most"):
            convert(x)


def test_starts_are_as_many_as_rows_and_entries_as_many_as_indices():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.csr_array(np.eye(3))
    x.indptr = np.array([0, 3], np.int32)
    with pytest.raises(ValueError, match="x: expected indptr to ascend from 0 to at most 3 stored entries, in 4 items"):
        as_vector(x)
    x = sparse.csr_array(np.eye(3))
    x.data = x.data[:2]
    with pytest.raises(ValueError, match="x: expected indptr to ascend from 0 to at most 2 stored entries"):
        as_vector(x)
    x = sparse.coo_array(np.eye(3))
    x.data = x.data[:1]
    with pytest.raises(ValueError, match="x: expected as many values as indices, got 1 for 3"):
        as_vector(x)
    x = sparse.coo_array(np.eye(3))
    x.coords = (x.coords[0], x.coords[1][:1])
    with pytest.raises(ValueError, match=r"x: expected as many indices in each dimension, got \[3, 1\]"):
        as_vector(x)
    x = sparse.lil_array(np.eye(3))
    x.rows[1] = [0, 1, 2]
    with pytest.raises(ValueError, match="x: expected as many values as indices in each row in lil format"):
        as_vector(x)


@pytest.mark.parametrize(("dimension", "size"), [(0, 3), (1, 4), (2, 5)])
@pytest.mark.parametrize("wrong", ["size", -1, 2**29])
def test_coordinates_that_are_out_of_range(dimension, size, wrong):
    wrong = size if wrong == "size" else wrong
    sparse, pydata, torch = (pytest.importorskip(name) for name in ("scipy.sparse", "sparse", "torch"))
    shape, coords, values = (3, 4, 5), [[0, 1], [1, 2], [2, 3]], np.ones(2)
    x, y = sparse.coo_array((values, coords), shape=shape), pydata.COO(coords, values, shape=shape)
    z = torch.sparse_coo_tensor(coords, torch.ones(2), shape, is_coalesced=True, check_invariants=False)
    hybrid = torch.sparse_coo_tensor(coords, torch.ones(2, 7), (*shape, 7), check_invariants=False)
    for arrays in (x.coords, y.coords, z._indices(), hybrid._indices()):
        arrays[dimension][1] = wrong
    message = f"x: expected indices of at least 0 and below {size} in dimension {dimension}, got {wrong}"
    for broken in (x, y, z, hybrid):
        for convert in (as_vector, lambda x: sparsecoll.allreduce(None, x)):
            with pytest.raises(ValueError, match=message):
                convert(broken)


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4)])
@pytest.mark.parametrize("axes", [(0,), (1,)])
def test_compressed_arrays_of_pydata_that_are_broken(shape, axes):
    sparse = pytest.importorskip("sparse")
    x = sparse.GCXS.from_numpy(np.ones(shape), compressed_axes=axes)
    x.indices[3] = -1
    with pytest.raises(ValueError, match="in gcxs format, got -1"):
        as_vector(x)
    x.indptr[1] = 2**30
    with pytest.raises(ValueError, match="x: expected indptr to ascend"):
        as_vector(x)


def test_all_ranks_raise_for_a_broken_matrix():
    sparse = pytest.importorskip("scipy.sparse")

    def program(comm):
        x = sparse.coo_array(np.eye(3))
        x.coords[0][1] += 5 * (comm.rank == 1)
        with pytest.raises((ValueError, sparsecoll.CommunicationError)) as error:
            sparsecoll.allreduce(comm, x)
        return str(error.value), sparsecoll.allreduce(comm, np.ones(1), "dense").values.tolist()

    for message, total in simulate(3, program).results:
        assert "below 3 in dimension 0, got 6" in message and total == [3.0]


def test_rows_in_csr_format_with_spare_room():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.csr_array(np.array([0.0, 2.0, 0.0]))
    if x.ndim != 1:
        pytest.skip("this SciPy has no arrays of one dimension")
    x.data, x.indices = np.append(x.data, 7.0), np.append(x.indices, 0).astype(x.indices.dtype)
    assert as_vector(x) == SparseVector([1], np.array([2.0]), 3)


def test_blocks_keep_their_size():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.bsr_array(np.kron(np.eye(3), np.ones((2, 4))), blocksize=(2, 4))
    assert like(x, as_vector(x)).blocksize == (2, 4)


def test_values_are_not_copied():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.random_array((30, 40), density=0.1, format="csr", rng=np.random.default_rng(0))
    assert np.shares_memory(as_vector(x).values, x.data)
    assert np.shares_memory(like(x, as_vector(x)).data, x.data)
    y = simulate(1, lambda comm: sparsecoll.allreduce(comm, x)).results[0]
    assert not np.shares_memory(y.data, x.data) and not np.shares_memory(y.indices, x.indices)


@pytest.mark.parametrize("shape", [(40,), (5, 8), (3, 4, 5)])
def test_arrays_of_pydata_come_back_in_their_format(shape):
    sparse = pytest.importorskip("sparse")
    dense = matrix(3, shape)
    for form in ("coo", "gcxs", "dok"):
        x = sparse.COO.from_numpy(dense).asformat(form)
        for result, factor in zip(round_trip(x, dense), (1, 3), strict=True):
            assert result.shape == shape
            np.testing.assert_array_equal(result.todense(), factor * dense)
    with pytest.raises(ValueError, match="expected a fill value of 0, got 1"):
        as_vector(sparse.COO.from_numpy(dense + 1, fill_value=1.0))
    with pytest.raises(ValueError, match="x: expected at least one dimension, got a number"):
        as_vector(sparse.COO(np.array(5.0)))


@pytest.mark.parametrize("axes", [(0,), (1,)])
def test_pydata_compressed_matrices(axes):
    sparse = pytest.importorskip("sparse")
    dense = matrix(3, (5, 8))
    x = sparse.GCXS.from_numpy(dense, compressed_axes=axes)
    for result, factor in zip(round_trip(x, dense), (1, 3), strict=True):
        assert tuple(result.compressed_axes) == axes
        np.testing.assert_array_equal(result.todense(), factor * dense)


@pytest.mark.parametrize("shape", [(40,), (5, 8), (3, 4, 5)])
def test_sparse_tensors_of_torch_come_back_coalesced(shape):
    torch = pytest.importorskip("torch")
    dense = matrix(4, shape)
    x = torch.from_numpy(dense).to_sparse()
    for result, factor in zip(round_trip(x, dense), (1, 3), strict=True):
        assert result.is_coalesced() and result.dtype == torch.float32
        np.testing.assert_array_equal(result.to_dense().numpy(), factor * dense)


@pytest.mark.parametrize("sparse_dim", [1, 2])
def test_torch_hybrid_rows_of_an_embedding(sparse_dim):
    torch = pytest.importorskip("torch")
    dense = matrix(5, (6, 3, 4))
    dense[[0, 2]] = 0
    x = torch.from_numpy(dense).to_sparse(sparse_dim)
    for result, factor in zip(round_trip(x, dense), (1, 3), strict=True):
        assert result.sparse_dim() == sparse_dim and result.is_coalesced()
        np.testing.assert_array_equal(result.to_dense().numpy(), factor * dense)
    top = simulate(2, lambda comm: sparsecoll.allreduce(comm, x, k=3)).results[0]
    assert top.sparse_dim() == sparse_dim and int((top.to_dense() != 0).sum()) <= 3


def test_torch_hybrid_rows_of_no_values():
    torch = pytest.importorskip("torch")
    for shape in ((4, 0), (4, 2, 0), (4, 0, 3)):
        x = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, *shape[1:]), shape, check_invariants=False)

        def program(comm, x=x):
            return [call(comm, x) for call in (sparsecoll.allreduce, sparsecoll.reduce)]

        for y in (like(x, as_vector(x)), *simulate(2, program).results[0]):
            assert y.is_sparse and y.shape == x.shape and (y.sparse_dim(), y.dense_dim()) == (1, len(shape) - 1)


def test_torch_tensors_without_a_sparse_dimension_are_refused():
    torch = pytest.importorskip("torch")
    row = torch.sparse_coo_tensor(torch.empty(0, 1), torch.ones(1, 5), (5,), check_invariants=False)
    for x in (torch.tensor(3.0).to_sparse(), row):
        with pytest.raises(ValueError, match="rank 0: x: expected a tensor with a sparse dimension, got shape"):
            simulate(2, lambda comm, x=x: sparsecoll.allreduce(comm, x))


@pytest.mark.parametrize("format", ["auto", "coo", "packed"])
@pytest.mark.parametrize("sparse_dim", [1, 2])
def test_torch_complex128_begins_at_a_multiple_of_16(sparse_dim, format):
    """Elsewhere torch crashes; in a message, values begin at a multiple of 8."""
    torch = pytest.importorskip("torch")

    def program(comm):
        for entries in range(1, 6):
            dense = np.zeros((5, 7), np.complex128)
            dense[:entries, 1] = 1 + 2j
            x = torch.from_numpy(dense).to_sparse(sparse_dim)
            for y in (sparsecoll.bcast(comm, x, 0, format=format), *sparsecoll.allgather(comm, x, format=format)):
                assert y._values().data_ptr() % 16 == 0
                assert torch.equal(y.to_dense(), x.to_dense())

    simulate(2, program)


def test_torch_tensors_that_were_never_coalesced():
    torch = pytest.importorskip("torch")
    x = torch.sparse_coo_tensor([[3, 1, 3]], [1.0, 2.0, 4.0], (5,))
    assert as_vector(x).to_dense().tolist() == [0, 2, 0, 5, 0]
    with pytest.raises(TypeError, match=r"got torch\.sparse_csr on cpu"):
        as_vector(torch.eye(3).to_sparse_csr())


def test_dense_arrays_of_any_shape():
    dense = matrix(6, (4, 3, 5))
    assert as_vector(dense).length == 60
    np.testing.assert_array_equal(as_vector(np.asfortranarray(dense)).to_dense(), dense.reshape(-1))
    assert np.shares_memory(as_vector(dense).values, dense)
    y = sparsecoll.simulate(2, lambda comm: sparsecoll.allreduce(comm, dense, "dense")).results[0]
    assert isinstance(y, SparseVector)
    np.testing.assert_array_equal(y.to_dense().reshape(dense.shape), 2 * dense)


def test_any_library_by_dlpack():
    class Exporting:
        """An array of a library that we do not know."""

        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    dense = matrix(7, (5, 2))
    x = as_vector(Exporting(dense))
    np.testing.assert_array_equal(x.to_dense(), dense.reshape(-1))
    assert np.shares_memory(x.values, dense)


def test_torch_tensors_that_are_conjugated_or_negated_lazily():
    torch = pytest.importorskip("torch")
    x = torch.tensor([0, 1 + 2j])
    assert as_vector(x.conj()).to_dense().tolist() == [0, 1 - 2j]
    assert as_vector(x.conj().imag).to_dense().tolist() == [0, -2]
    assert as_vector(x.to_sparse().conj()).values.tolist() == [1 - 2j]


def test_what_is_no_vector():
    for wrong in ([1.0, 2.0], "text", None, {1, 2}):
        with pytest.raises(TypeError, match="x: expected a SparseVector"):
            as_vector(wrong)
    with pytest.raises(ValueError, match="expected length 3, got 4"):
        like(np.zeros(3), SparseVector.empty(4, np.float64))


def test_torch_bfloat16_where_ml_dtypes_is_installed(monkeypatch):
    torch = pytest.importorskip("torch")
    dense = torch.tensor([1.5, 0, -2, 256], dtype=torch.bfloat16)
    with monkeypatch.context() as patch, pytest.raises(TypeError, match="ml_dtypes"):
        patch.setitem(sys.modules, "ml_dtypes", None)
        as_vector(dense)
    pytest.importorskip("ml_dtypes")

    def program(comm):
        summed = sparsecoll.allreduce(comm, dense, k=2)
        return summed.to_dense().astype(float).tolist(), sparsecoll.allreduce(comm, dense.to_sparse())

    for values, y in simulate(3, program).results:
        assert values == [0, 0, -6, 768] and y.dtype == torch.bfloat16
        assert y.to_dense().tolist() == [4.5, 0, -6, 768]


def test_histograms_are_refused_with_the_conversion():
    Histogram = type("Histogram", (), {})
    with pytest.raises(TypeError, match=r"from_dense\(x\.view\(flow=True\)"):
        as_vector(Histogram())
