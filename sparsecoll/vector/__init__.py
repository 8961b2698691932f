"""SparseVector and DenseVector: the data that algorithms compute with, as NumPy or CuPy arrays.

Both have `length` (number of coordinates), `nnz` (number of stored entries), `dtype`, `topk`, `threshold` and
`to_dense`. An algorithm calls these methods and the transport, and never touches an array.
"""

from sparsecoll.vector.dense import DenseVector as DenseVector
from sparsecoll.vector.rows import RowSparse as RowSparse
from sparsecoll.vector.sparse import SparseVector as SparseVector
from sparsecoll.vector.values import (
    SMALLEST as SMALLEST,
    VALUE_DTYPES as VALUE_DTYPES,
    accumulator_dtype as accumulator_dtype,
    check_value_dtype as check_value_dtype,
    dtype_of as dtype_of,
    saturating_cast as saturating_cast,
)
