"""CPU kernels in Numba: nogil, cached on disk, one thread. Each equals its namesake in `reference` bit for bit.

Floats are handled as bit patterns wherever only their order matters, so float16 needs no arithmetic here; sums of
float16 are formed in float32 (see `vector.accumulator`).
"""

from sparsecoll.kernels.cpu.codecs import (
    bitmap_read,
    bitmap_write,
    block_heads,
    block_indices,
    block_write,
    from_bfloat16,
    from_float16,
    hash_slots,
    rice_block,
    rice_decode,
    rice_encode,
    rice_table,
    scatter_add_marked,
    slots_write,
    to_bfloat16,
    to_float16,
)
from sparsecoll.kernels.cpu.selection import (
    count_at_least,
    extremes,
    kth_key,
    select_at_least,
    take_top,
    topk,
)
from sparsecoll.kernels.cpu.sums import (
    first_disorder,
    intersect,
    merge_sum,
    scatter_add,
    scatter_subtract,
)
from sparsecoll.kernels.reference import (
    RICE_BLOCKS,
    RICE_PAD,
    bits_and_mask,
    index_dtype,
    key_of,
    magnitude_keys,
    magnitude_of,
    nan_key,
    rice_sizes,
)

__all__ = [
    "RICE_BLOCKS",
    "RICE_PAD",
    "bitmap_read",
    "bitmap_write",
    "bits_and_mask",
    "block_heads",
    "block_indices",
    "block_write",
    "count_at_least",
    "extremes",
    "first_disorder",
    "from_bfloat16",
    "from_float16",
    "hash_slots",
    "index_dtype",
    "intersect",
    "key_of",
    "kth_key",
    "magnitude_keys",
    "magnitude_of",
    "merge_sum",
    "nan_key",
    "rice_block",
    "rice_decode",
    "rice_encode",
    "rice_sizes",
    "rice_table",
    "scatter_add",
    "scatter_add_marked",
    "scatter_subtract",
    "select_at_least",
    "slots_write",
    "take_top",
    "to_bfloat16",
    "to_float16",
    "topk",
]
