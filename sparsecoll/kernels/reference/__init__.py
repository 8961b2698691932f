"""The specification of every kernel, in plain NumPy, slow where that is plainer. The kernels are the names in `__all__`
of its modules; `cpu` and `gpu` have the same names with the same parameters and give the same bits.
"""

from sparsecoll.kernels.reference.chunks import *
from sparsecoll.kernels.reference.codecs import *
from sparsecoll.kernels.reference.exponents import *
from sparsecoll.kernels.reference.folds import *
from sparsecoll.kernels.reference.quantization import *
from sparsecoll.kernels.reference.rice import *
from sparsecoll.kernels.reference.rows import *
from sparsecoll.kernels.reference.selection import *
from sparsecoll.kernels.reference.steps import *
from sparsecoll.kernels.reference.sums import *
from sparsecoll.kernels.reference.words import *
