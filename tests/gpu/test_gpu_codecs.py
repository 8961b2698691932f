"""Codecs on a GPU write and read the bytes of the reference; without a GPU they run on the host, see fake_cupy.py."""

import numpy as np
import pytest
from gpu_cases import FEW, all_same, index_dtypes, indices, same, seeds, sizes, values
from hypothesis import given, strategies as st

from sparsecoll.kernels import reference
from sparsecoll.kernels.keys import Code
from sparsecoll.kernels.reference.quantization import code_bytes
from sparsecoll.kernels.reference.rice import RICE_BLOCKS, RICE_PAD


@FEW
@given(size=sizes, seed=seeds, own=index_dtypes, gap=st.integers(0, 9), far=st.sampled_from([1, 3, 40]))
def test_blocks_equal_the_reference(cp, gpu, size, seed, own, gap, far):
    i = indices(size, seed, own, max(1, far * size))
    v = values(np.dtype(np.float32), i.size, seed, special=False)
    starts, lengths = reference.block_ranges(i, gap)
    for mine, theirs in zip(gpu.block_ranges(cp.asarray(i), gap), (starts, lengths), strict=True):
        same(mine, theirs)
    out, mine = np.empty(int(lengths.sum()), np.float32), cp.empty(int(lengths.sum()), np.float32)
    reference.block_write(i, v, gap, out)
    gpu.block_write(cp.asarray(i), cp.asarray(v), gap, mine)
    same(mine, out)
    positions = np.arange(0, out.size, 2)
    on = (cp.asarray(starts), cp.asarray(lengths), cp.asarray(positions))
    same(gpu.block_indices(*on), reference.block_indices(starts, lengths, positions))


@FEW
@given(size=sizes, seed=seeds, own=index_dtypes)
def test_bitmaps_equal_the_reference_and_come_back(cp, gpu, size, seed, own):
    i = indices(size, seed, own)
    first = int(i[0]) if i.size else 0
    words = np.empty(-(-(int(i[-1]) - first + 1) // 64) if i.size else 0, np.uint64)
    reference.bitmap_write(i, first, words)
    mine = cp.empty(words.size, np.uint64)
    gpu.bitmap_write(cp.asarray(i), first, mine)
    same(mine, words)
    same(gpu.bitmap_read(mine, first, i.size, own), i)
    assert gpu.bitmap_read(mine, first, i.size + 1, own) is None


@FEW
@given(size=sizes, seed=seeds, own=index_dtypes)
def test_hashed_slots_equal_the_reference(cp, gpu, size, seed, own):
    i, multipliers = indices(size, seed, own), (seed * 2**31 + 1, 2**63 + seed, 12345)
    slots = reference.hash_slots(i, 2 * size + 1, multipliers)
    same(gpu.hash_slots(cp.asarray(i), 2 * size + 1, multipliers), slots)
    held, mine = np.empty(2 * size + 1, np.int64), cp.empty(2 * size + 1, np.int64)
    reference.slots_write(slots, held)
    gpu.slots_write(cp.asarray(slots), mine)
    same(mine, held)


def test_narrow_floats_equal_the_reference(cp, gpu):
    rng = np.random.default_rng(3)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = halves[~np.isnan(halves)].astype(np.float32)
    between = (finite + np.float32(2**-12) * finite).astype(np.float32)  # half way, or nearly
    wild = rng.integers(0, 2**32, 30_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    for x in (finite, between, wild[~np.isnan(wild)], np.float32([np.inf, -np.inf, np.nan, 65519, 65520, -7e4, 2e-8])):
        same(gpu.to_float16(cp.asarray(x)), reference.to_float16(x))
        same(gpu.to_bfloat16(cp.asarray(x)), reference.to_bfloat16(x))
    doubles = np.concatenate([between.astype(np.float64) * (1 + 1e-12), between.astype(np.float64)])
    same(gpu.to_float16(cp.asarray(doubles)), reference.to_float16(doubles))
    same(gpu.from_float16(cp.asarray(halves)), reference.from_float16(halves))
    stored = np.arange(1 << 16, dtype=np.uint16)
    same(gpu.from_bfloat16(cp.asarray(stored)), reference.from_bfloat16(stored))


@pytest.mark.parametrize(
    "kind", [(8, "linear"), (2, "linear"), (8, "float"), (4, "float"), (2, "mean"), (1, "mean")], ids=str
)
@FEW
@given(
    size=sizes,
    seed=seeds,
    first=st.integers(0, 10**6),
    bucket=st.sampled_from([8, 50, 512]),
    keep=st.booleans(),
    nearest=st.booleans(),
)
def test_quantised_values_equal_the_reference(cp, gpu, size, seed, kind, first, bucket, keep, nearest):
    v, drawn = values(np.dtype(np.float32), size, seed), None if nearest else seed
    buckets = (first + size - 1) // bucket - first // bucket + 1 if size else 0
    scales, codes = np.empty(buckets, np.float32), np.empty(code_bytes(first, size, kind[0], bucket), np.uint8)
    mine = cp.asarray(v), cp.empty(buckets, np.float32), cp.empty(codes.size, np.uint8)
    gpu.quantize(mine[0], first, Code(*kind, bucket), drawn, *mine[1:], keep)
    with np.errstate(all="ignore"):
        reference.quantize(v, first, Code(*kind, bucket), drawn, scales, codes, keep)
    all_same(mine, (v, scales, codes))
    for add in (False, True):
        out, theirs = np.ones(size, np.float32), cp.asarray(np.ones(size, np.float32))
        reference.dequantize(codes, first, Code(*kind, bucket), scales, out, add)
        gpu.dequantize(mine[2], first, Code(*kind, bucket), mine[1], theirs, add)
        same(theirs, out)


@FEW
@given(size=sizes, seed=seeds, own=index_dtypes, far=st.sampled_from([1, 30, 50_000]), data=st.data())
def test_rice_codes_equal_the_reference_and_come_back(cp, gpu, size, seed, own, far, data):
    i = indices(size, seed, own, max(1, far * size))
    on = cp.asarray(i)
    block = reference.rice_block(i)
    assert gpu.rice_block(on) == block
    for block in RICE_BLOCKS:
        table = reference.rice_table(i, block)
        same(gpu.rice_table(on, block), table)
        offsets = reference.rice_offsets(table, i.size, block)
        same(gpu.rice_offsets(cp.asarray(table), i.size, block), offsets)
        coded = int(offsets[-1])
        out, mine = np.empty(coded + RICE_PAD, np.uint8), cp.empty(coded + RICE_PAD, np.uint8)
        reference.rice_encode(i, table, block, out)
        gpu.rice_encode(on, cp.asarray(table), block, mine)
        same(mine, out)
        first, limit = int(i[0]) if i.size else 0, int(i[-1]) + 1 if i.size else 1
        arguments = (block, first, i.size, limit, i.dtype)
        same(gpu.rice_decode(cp.asarray(table), mine, *arguments), i)
        if i.size:
            assert gpu.rice_decode(cp.asarray(table), mine, block, first, i.size, limit - 1, i.dtype) is None
            damaged = out.copy()
            damaged[data.draw(st.integers(0, max(coded - 1, 0)))] ^= 1 << data.draw(st.integers(0, 7))
            wanted = reference.rice_decode(table, damaged, *arguments)
            found = gpu.rice_decode(cp.asarray(table), cp.asarray(damaged), *arguments)
            assert (found is None) == (wanted is None)
            if wanted is not None:
                same(found, wanted)


@FEW
@given(size=sizes, seed=seeds, kind=st.sampled_from([("float32", 8), ("float16", 5), ("float16", 8)]), data=st.data())
def test_exponents_equal_the_reference_and_come_back(cp, gpu, size, seed, kind, data):
    dtype, bits = kind
    stored = values(np.dtype(dtype), size, seed).view(f"u{np.dtype(dtype).itemsize}")
    table = reference.exponent_table(stored, bits)
    on, table_on = cp.asarray(stored), cp.asarray(table)
    same(gpu.exponent_table(on, bits), table)
    offsets = reference.exponent_offsets(table, size, bits, stored.itemsize)
    same(gpu.exponent_offsets(table_on, size, bits, stored.itemsize), offsets)
    out, mine = np.empty(int(offsets[-1]), np.uint8), cp.empty(int(offsets[-1]), np.uint8)
    reference.exponent_encode(stored, bits, table, out)
    gpu.exponent_encode(on, bits, table_on, mine)
    same(mine, out)
    back = cp.empty(size, stored.dtype)
    assert gpu.exponent_decode(mine, bits, table_on, back)
    same(back, stored)
    if size:
        out[data.draw(st.integers(0, out.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
        wanted = reference.exponent_decode(out, bits, table, stored)
        assert gpu.exponent_decode(cp.asarray(out), bits, table_on, back) == wanted
        if wanted:
            same(back, stored)


@pytest.mark.parametrize("blocks", [1, 16, 4096, 4097, 9000])
def test_offsets_of_many_rice_blocks(cp, gpu, blocks):
    rng = np.random.default_rng(blocks)
    table = (rng.integers(0, 57, blocks) << 10 | rng.integers(0, 1024, blocks)).astype(np.uint16)
    count = 128 * blocks - 5
    same(gpu.rice_offsets(cp.asarray(table), count, 128), reference.rice_offsets(table, count, 128))
