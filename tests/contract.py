"""The contract of the collectives that combine: every pair of what their arguments may be, and what must come out.

`CASES` covers all pairs of (call, operation, type of values, type of x, format) with few cases, as pairwise testing
does; a case that is not offered must be an error on all ranks.
"""

import functools
import importlib.util
from collections import Counter

import numpy as np
import pytest
from cases import pairwise

import sparsecoll
from sparsecoll import ALGORITHMS, SparseVector
from sparsecoll.formats import FORMATS
from sparsecoll.vector import VALUE_DTYPES, dtype_of
from sparsecoll.vector.operation import OPERATIONS

EXACT = [name for name, kind in ALGORITHMS.items() if kind().semantics == "exact_sum"]
N = 40
UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
UFUNCS |= {"logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor}
UFUNCS |= {"bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor}
UFUNCS |= {"replace": lambda a, b: b}


def offered(op, dtype):
    kind = np.dtype(dtype).kind
    if op == "mean":
        return kind in "fc"
    return kind in "biu" if op.startswith("bitwise") else not (op in ("min", "max") and kind == "c")


def input_of(rank, P, dtype):
    """Two entries that all ranks have, some that some have, one that only this one has; ranks 2 and 5 have none."""
    rng = np.random.default_rng([rank, P])
    if rank in (2, 5):
        return SparseVector.empty(N, dtype)
    indices = np.unique([3, 29, *rng.choice(N - 12, 6), N - 12 + rank])
    drawn = rng.choice([0, 1, 2, 3, -1, -2, 0.5], indices.size)
    drawn = drawn + 1j * rng.choice([0, 1, -2], indices.size) if np.dtype(dtype).kind == "c" else drawn
    if np.dtype(dtype).kind not in "fc":
        drawn = drawn.astype(np.int64)
    return SparseVector(indices, drawn.astype(dtype), N)


def expected_of(inputs, op, missing):
    """The result by a loop over ranks, in a wide dtype."""
    dtype, combine = inputs[0].dtype, UFUNCS[op]
    wide = np.dtype(np.float32) if dtype == np.float16 else dtype
    logical = op.startswith("logical")
    union = np.unique(np.concatenate([x.indices for x in inputs]))
    values = []
    for index in union:
        own = [x.to_dense()[index : index + 1].astype(wide) for x in inputs if missing == "zero" or index in x.indices]
        own = [value != 0 for value in own] if logical else own
        values.append(functools.reduce(combine, own)[0].astype(wide))
    values = np.array(values, wide).astype(dtype)
    return union, (values / len(inputs)).astype(dtype) if op == "mean" else values


def _scipy(form, shape=(5, 8)):
    return lambda x: x.to_scipy(shape, form)


def _pydata(x):
    import sparse

    return sparse.COO(np.array(np.unravel_index(x.indices.astype(np.int64), (2, 4, 5))), x.values, (2, 4, 5))


def _torch(x):
    import torch

    return torch.sparse_coo_tensor(x.indices.astype(np.int64)[None], torch.from_numpy(x.values), (N,))


def _keyed(kind, key):
    return lambda x: kind(zip(map(key, x.indices.tolist()), x.values.tolist(), strict=True))


def _dense(x):
    return x.to_dense().reshape(8, 5)


TYPES = {  # how a vector becomes an x of this type
    "SparseVector": lambda x: x,
    "triple": lambda x: (x.indices, x.values, x.length),
    "big-endian": lambda x: (x.indices, x.values.astype(x.dtype.newbyteorder(">")), x.length),
    "dense": _dense,
    "csr": _scipy("csr"),
    "csc": _scipy("csc"),
    "bsr": _scipy("bsr"),
    "coo, 3-D": _scipy("coo", (2, 4, 5)),
    "COO": _pydata,
    "dict": _keyed(dict, int),
    "Counter of str": _keyed(lambda pairs: Counter(dict(pairs)), str),
    "dict of bytes": _keyed(dict, lambda key: str(key).encode()),
    "torch": _torch,
}
LIBRARIES = {"COO": "sparse", "torch": "torch", "bfloat16": "ml_dtypes"}
KEYED = ("dict", "Counter of str", "dict of bytes")
WIDE = {"b": "bool", "f": "float64", "c": "complex128"}  # what the values of a dict become


def held_by(kind, dtype):
    """The dtype of the values in an x of this type; None if it cannot have values of `dtype`."""
    if kind in ("csr", "csc", "bsr", "coo, 3-D") and dtype.name in ("float16", "bfloat16"):
        return None
    if kind in ("big-endian", "COO") and dtype.name == "bfloat16":
        return None
    if kind == "torch" and dtype.name in ("uint16", "uint32", "uint64", "bfloat16"):
        return None
    if kind in ("dict", "Counter of str", "dict of bytes"):
        return None if dtype.name == "bfloat16" else np.dtype(WIDE.get(dtype.kind, "int64"))
    return dtype


def stored(y, kind):
    """The entries of a result: {index: value}."""
    if kind in KEYED:
        return {int(key): value for key, value in y.items()}
    vector = y if isinstance(y, SparseVector) else sparsecoll.as_vector(y)
    return dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True))


def _installed(names):
    return [name for name in names if name not in LIBRARIES or importlib.util.find_spec(LIBRARIES[name])]


AXES = {
    "call": [*EXACT, "reduce", "reduce_scatter"],
    "op": list(OPERATIONS),
    "dtype": _installed(VALUE_DTYPES),
    "kind": [*_installed(kind for kind in TYPES if kind != "torch"), "torch"],
    "format": [name for name, form in FORMATS.items() if not form.lossy],
    "missing": ["ignore", "zero"],
}


CASES = [dict(zip(AXES, values, strict=True)) for values in pairwise(*AXES.values())]


def check(comm, cases):
    """Make the calls of some cases, and compare what comes with NumPy, or with the rule that it is not offered."""
    rank, P = comm.rank, comm.size
    for case in cases:
        dtype = held_by(case["kind"], dtype_of(case["dtype"]))
        if dtype is None:
            continue
        inputs = [input_of(other, P, dtype) for other in range(P)]
        x = TYPES[case["kind"]](inputs[rank])
        if not offered(case["op"], dtype):
            with pytest.raises((ValueError, TypeError), match="rank 0: "):
                _called(comm, x, case)
            continue
        y = _called(comm, x, case)
        _compare(comm, stored(y, case["kind"]) if y is not None else None, inputs, case)


def _called(comm, x, case):
    options = {"op": case["op"], "missing": case["missing"], "format": case["format"], "timeout": 60}
    if case["kind"] == "dense":
        options["k"] = N
    if case["call"] in EXACT:
        return sparsecoll.allreduce(comm, x, case["call"], **options)
    return getattr(sparsecoll, case["call"])(comm, x, **options)


def _compare(comm, found, inputs, case):
    rank, call = comm.rank, case["call"]
    if case["kind"] == "dense":  # which stores no zeros, so all of them are entries or missing ones
        inputs = [SparseVector.from_dense(x.to_dense()) for x in inputs]
    union, values = expected_of(inputs, case["op"], case["missing"])
    expected = dict(zip(union.tolist(), values.tolist(), strict=True))
    if call == "reduce":
        assert (found is None) == (rank != 0), case
    if call == "reduce_scatter":
        parts = comm.allgather(found)
        assert sum(map(len, parts)) == len(expected), case
        found = {index: value for part in parts for index, value in part.items()}
    assert found is None or found == expected, (case, found, expected)
