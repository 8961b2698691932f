"""SparseVector and DenseVector: the data that algorithms compute with, as NumPy or CuPy arrays.

Both have `length` (number of coordinates), `nnz` (number of stored entries), `dtype`, `topk`, `threshold` and
`to_dense`. An algorithm calls these methods and the transport, and never touches an array.
"""

from sparsecoll.vector.dense import DenseVector
from sparsecoll.vector.rows import RowSparse
from sparsecoll.vector.sparse import SparseVector
from sparsecoll.vector.values import (
    SMALLEST,
    VALUE_DTYPES,
    accumulator_dtype,
    check_value_dtype,
    dtype_of,
    saturating_cast,
)

__all__ = [
    "SMALLEST",
    "VALUE_DTYPES",
    "DenseVector",
    "RowSparse",
    "SparseVector",
    "accumulator_dtype",
    "check_value_dtype",
    "dtype_of",
    "saturating_cast",
]
