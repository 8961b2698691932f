"""A threshold from a sample (Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression", ICLR 2018, section 5)."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsecoll.errors import check_integer, check_number
from sparsecoll.kernels.sampling import stride_for
from sparsecoll.select.base import Selector, Vector, checked
from sparsecoll.vector import SMALLEST, SparseVector


@dataclass
class SampledThreshold(Selector):
    """Select all entries above the top-k threshold of a sample, with an exact selection if their number is far from k.

    1. Sample every (1/share)-th value, from an offset that changes with each call (the paper's random ones cost a pass
       over memory with cache misses); t is the magnitude of rank k * share in the sample.
    2. Take all entries of magnitude >= t.
    3. If these are more than (1 + tolerance) k, take the exact top k of them (the paper's hierarchical selection). If
       they are fewer than k / (1 + tolerance), take the exact top k of x.

    Args:
        share: fraction of the values to sample, in (0, 1] (default: 0.01); at least 1,024 values are sampled.
        tolerance: relative deviation of the number selected from k that is accepted (default: 0.25).

    Raises:
        ValueError: `share` or `tolerance` is out of range.
    """

    name = "dgc"

    share: float = 0.01
    tolerance: float = 0.25
    _calls: int = field(default=0, init=False, repr=False)

    LEAST = 1024  # size of the smallest sample

    def __post_init__(self) -> None:
        check_number("share", self.share, "(0, 1]")
        check_number("tolerance", self.tolerance, "[0, inf]")

    def select(self, x: Vector, k: int) -> SparseVector:
        k = check_integer("k", k, 0)
        if x.nnz <= k or k == 0:
            return checked(x.topk(k))
        stride = stride_for(x.nnz, min(max(self.LEAST, round(self.share * x.nnz)), x.nnz))
        sample = x.sample(stride, self._calls % stride)
        self._calls += 1
        t = max(sample.kth_magnitude(max(1, round(k / x.nnz * sample.nnz))), SMALLEST)
        chosen = x.threshold(t, k)
        if chosen.nnz > k * (1 + self.tolerance):
            chosen = chosen.topk(k)
        elif chosen.nnz * (1 + self.tolerance) < k and t > SMALLEST:  # else it has all nonzeros
            chosen = checked(x.topk(k))
        return checked(chosen)
