"""Cases of the tests of GPU kernels, and what is the same as the reference."""

import os

import numpy as np
from hypothesis import HealthCheck, settings, strategies as st

from sparsecoll.kernels.keys import COMPILED_DTYPES

EXAMPLES = 40 if os.environ.get("SPARSECOLL_GPU_TESTS") == "all" else 4
FEW = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
dtypes = st.sampled_from(COMPILED_DTYPES)
index_dtypes = st.sampled_from([np.uint32, np.uint64])
seeds = st.integers(0, 2**32 - 1)
sizes = st.sampled_from([0, 1, 2, 33, 300, 2049, 4096, 9001])
SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-7, 65504.0]


def values(dtype, size, seed, special=True):
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal(size) ** 3 * 10.0 ** rng.integers(-3, 3)
    kind = rng.integers(0, 3)
    if kind == 0:
        drawn = np.round(drawn)
    if kind == 1 and special:
        drawn = np.where(rng.random(size) < 0.3, rng.choice(SPECIAL, size), drawn)
    if dtype.kind != "f":
        drawn = np.nan_to_num(drawn, posinf=9, neginf=-9) * 7
    with np.errstate(all="ignore"):
        return drawn.astype(dtype)


def indices(size, seed, dtype=np.uint32, top=None):
    rng = np.random.default_rng(seed)
    return np.unique(rng.integers(0, top or max(1, 3 * size), size, dtype=np.uint64)).astype(dtype)


def same(mine, theirs):
    """Bit for bit; NaN only as NaN, since processors differ in the NaN that arithmetic makes."""
    mine = mine.get() if hasattr(mine, "get") else np.asarray(mine)
    theirs = np.asarray(theirs)
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    if mine.dtype.kind == "f":
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
        mine, theirs = np.nan_to_num(mine, nan=1), np.nan_to_num(theirs, nan=1)
    assert mine.tobytes() == theirs.tobytes()


def all_same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        same(a, b)
