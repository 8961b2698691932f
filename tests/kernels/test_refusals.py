"""Every set of kernels takes and refuses the same dtypes in methods of vectors; each set runs in its own process."""

import hashlib
import json
import os
import random
import sys

import numpy as np
import pytest
from launching import python

from sparsecoll.kernels import CHOICES
from sparsecoll.kernels.keys import Pass
from sparsecoll.residual import LazyAccumulator
from sparsecoll.vector import VALUE_DTYPES, DenseVector, SparseVector, dtype_of
from sparsecoll.vector.operation import OPERATIONS, Operation

EVERY = list(map(dtype_of, VALUE_DTYPES))
PAIRED = int(os.environ.get("SPARSECOLL_FUZZ", "2"))  # other dtypes with which each dtype meets: all with make fuzz


def partners(dtype):
    """This dtype, and a few that it can be cast to."""
    others = [other for other in EVERY if other != dtype and np.can_cast(dtype, other, "same_kind")]
    return [dtype, *random.Random(str(dtype)).sample(others, min(PAIRED, len(others)))]


def outcomes():
    """What each call returns, as a checksum, or raises, as the name of the exception."""
    found = {}

    def note(name, call):
        try:
            y = call()
        except Exception as error:
            found[name] = type(error).__name__
            return
        arrays = [y.indices, y.values] if isinstance(y, SparseVector) else [y]
        found[name] = hashlib.md5(b"".join(np.asarray(a).tobytes() for a in arrays)).hexdigest()

    def merged(x, y, dtype, op):
        return SparseVector.merge([x, y], dtype, Operation(op))

    def changed(dense, change):
        change(dense)
        return dense

    for dtype in EVERY:
        values = np.arange(1, 41).astype(dtype)
        x, y = SparseVector(np.arange(0, 80, 2), values, 90), SparseVector(np.arange(0, 120, 3)[:30], values[:30], 90)
        for name in ("topk", "threshold", "count_at_least", "kth_magnitude", "sample", "random_entries"):
            arguments = {"sample": (3, 1), "random_entries": (9, 1)}.get(name, (7,))
            note(f"{name} {dtype}", lambda x=x, name=name, a=arguments: getattr(x, name)(*a))
            if hasattr(DenseVector, name):
                dense = DenseVector(values)
                note(f"dense {name} {dtype}", lambda x=dense, name=name, a=arguments: getattr(x, name)(*a))
        note(f"stats {dtype}", lambda v=values: DenseVector(v).magnitude_stats(5)[0])
        note(f"from_dense {dtype}", lambda v=values: SparseVector.from_dense(v))
        note(f"to_dense {dtype}", x.to_dense)
        note(f"pairs {dtype}", lambda v=values: SparseVector.from_pairs(np.arange(40) % 7, v, 9))
        for other in partners(dtype):
            for op in ("sum", "max", "logical_xor") if other != dtype else OPERATIONS:
                note(f"{op} {dtype} {other}", lambda x=x, y=y, d=other, op=op: merged(x, y, d, op))
            dense = DenseVector(np.ones(90, other))
            note(f"add {dtype} {other}", lambda d=dense, x=x: changed(d, lambda d: d.add_at(x)))
            note(f"subtract {dtype} {other}", lambda d=dense, x=x: changed(d, lambda d: d.subtract_at(x)))
            acc = LazyAccumulator(np.ones(40, other))
            note(f"later {dtype} {other}", lambda a=acc, v=values: changed(a, lambda a: a.add_later(v, 1.0)))
        note(f"mean {dtype}", lambda x=x, d=dtype: changed(DenseVector(np.ones(90, d)), lambda d: d.copy_entries(x, 3)))
        note(f"form {dtype}", lambda v=values: LazyAccumulator(np.empty(40, v.dtype), v).flush())
        assert Pass(values).source is values
    return found


@pytest.mark.slow  # it may compile the portable set
def test_every_set_takes_and_refuses_the_same_dtypes():
    pytest.importorskip("numba")
    pytest.importorskip("ml_dtypes")
    found = {}
    for choice in ("reference", "portable", ""):
        assert choice in ("", *CHOICES)
        run = python(__file__, variables={"SPARSECOLL_KERNELS": choice, "PYTHONPATH": os.pathsep.join(sys.path)})
        assert run.returncode == 0, run.stderr
        found[choice] = json.loads(run.stdout)
    differing = {
        name: [kinds.get(name) for kinds in found.values()]
        for name in found[""]
        if len({kinds.get(name) for kinds in found.values()}) > 1
    }
    assert not differing


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        json.dump(outcomes(), sys.stdout)
