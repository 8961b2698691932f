"""The contracts of algorithms, formats, selectors and compressors, checked for a class of your own on the simulator.

The library's tests run the same functions over its own classes. Each raises AssertionError, with the case that failed,
or TypeError or ValueError if the class is not what the calls expect, such as a dataclass of its options.

>>> check_selector(TopK())
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsecoll.testing.algorithms import check_algorithm
from sparsecoll.testing.formats import check_format
from sparsecoll.testing.selectors import check_selector

if TYPE_CHECKING:
    from sparsecoll.torch.compressors import Compressor

__all__ = ["check_algorithm", "check_compressor", "check_format", "check_selector"]


def check_compressor(compressor: Compressor, conserves: bool | None = None) -> None:
    """Check the contract of compressors in `DistributedOptimizer`, on the simulator; takes some seconds.

    All replicas keep the same bits and the loss falls; gradients that are not sent wait in the residual; a resumed run
    gives the bits of one that was not interrupted; a NaN on one rank raises on all ranks or reaches all.

    Args:
        compressor: an object of the class, which is copied.
        conserves: whether gradients and residuals must add up; None, the default, for a compressor that keeps a
            residual. A compressor with momentum, for one, sends more than the gradients.

    Raises:
        AssertionError: The contract is broken; the text names the case.
        TypeError: The class has no name, or its options are not the fields of a dataclass.
    """
    from sparsecoll.testing.compressors import check

    check(compressor, conserves)
