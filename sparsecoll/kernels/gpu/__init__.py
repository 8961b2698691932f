"""GPU kernels: CUDA C (the .cu files) through CuPy, on the current stream. Each equals its namesake in `reference` bit
for bit, except inside a NaN that arithmetic makes. Arrays are CuPy's and contiguous; no sum uses atomic operations.
"""

from sparsecoll.kernels.gpu.chunks import *
from sparsecoll.kernels.gpu.codecs import *
from sparsecoll.kernels.gpu.exponents import *
from sparsecoll.kernels.gpu.quantization import *
from sparsecoll.kernels.gpu.rice import *
from sparsecoll.kernels.gpu.selection import *
from sparsecoll.kernels.gpu.sums import *
from sparsecoll.kernels.reference.codecs import (
    blocks_fit as blocks_fit,
    from_bfloat16 as from_bfloat16,
    numbers_read as numbers_read,
    numbers_write as numbers_write,
)
from sparsecoll.kernels.reference.selection import magnitude_keys as magnitude_keys
