"""The contracts of algorithms, formats, selectors and compressors, checked for a class of your own on the simulator.

The library's tests run the same functions over its own classes. Each raises AssertionError, with the case that failed,
or TypeError or ValueError if the class is not what the calls expect, such as a dataclass of its options.

>>> check_selector(TopK())
"""

from sparsecoll.testing.algorithms import check_algorithm
from sparsecoll.testing.compressors import check_compressor
from sparsecoll.testing.formats import check_format
from sparsecoll.testing.selectors import check_selector

__all__ = ["check_algorithm", "check_compressor", "check_format", "check_selector"]
