"""CPU kernels in Numba: they release the GIL, are cached on disk and run on one thread. Each equals its namesake in
`reference` bit for bit.

Floats are handled as bit patterns wherever only their order matters, so float16 needs no arithmetic here; sums of
float16 are formed in float32 (see `vector.accumulator_dtype`).
"""

from sparsecoll.kernels.cpu.chunks import *
from sparsecoll.kernels.cpu.codecs import *
from sparsecoll.kernels.cpu.exponents import *
from sparsecoll.kernels.cpu.merge import *
from sparsecoll.kernels.cpu.quantization import *
from sparsecoll.kernels.cpu.rice import *
from sparsecoll.kernels.cpu.rows import *
from sparsecoll.kernels.cpu.selection import *
from sparsecoll.kernels.cpu.steps import *
from sparsecoll.kernels.cpu.sums import *
from sparsecoll.kernels.cpu.words import *
from sparsecoll.kernels.reference.codecs import from_bfloat16 as from_bfloat16, slots_write as slots_write
from sparsecoll.kernels.reference.exponents import exponent_offsets as exponent_offsets
from sparsecoll.kernels.reference.folds import *
from sparsecoll.kernels.reference.rows import take_rows as take_rows
from sparsecoll.kernels.reference.selection import magnitude_keys as magnitude_keys, random_indices as random_indices
