// What the wire formats compute.

#ifndef FROM
#define FROM 4
#endif
// out[positions[i]] = values[i].
extern "C" __global__ void put(BITS* out, const i64* positions, const BITS* values, u64 count) {
  EVERY(i, count) out[positions[i]] = values[i];
}

// step[i]: how far entry i lies behind the one before in the row of all blocks (0 for the first); head[i]: whether a
// block begins with it.
extern "C" __global__ void block_steps(const INDEX* indices, u64 count, u64 gap, i64* step, u8* head) {
  EVERY(i, count) {
    u64 far = i ? (u64)indices[i] - indices[i - 1] : 0;
    int begins = i == 0 || far > gap + 1;
    head[i] = (u8)begins;
    if (step) step[i] = i == 0 ? 0 : begins ? 1 : (i64)far;
  }
}

// The index at each ascending position in the concatenation of all blocks. ends: of the blocks in it.
extern "C" __global__ void block_indices(const u64* starts, const u64* lengths, const i64* ends, u64 blocks,
                                         const i64* positions, u64 count, u64* out) {
  EVERY(i, count) {
    i64 position = positions[i];
    u64 low = 0, high = blocks;
    while (low < high) {  // the first block that ends beyond the position
      u64 middle = (low + high) >> 1;
      if (ends[middle] <= position)
        low = middle + 1;
      else
        high = middle;
    }
    out[i] = starts[low] + (u64)(position - (ends[low] - (i64)lengths[low]));
  }
}

extern "C" __global__ void bitmap_write(const INDEX* indices, u64 count, u64 first, u32* words) {
  EVERY(i, count) {
    u64 position = (u64)indices[i] - first;
    atomicOr(&words[position >> 5], 1u << (position & 31));
  }
}

extern "C" __global__ void popcounts(const u32* words, u64 count, i64* out) {
  EVERY(i, count) out[i] = __popc(words[i]);
}

// The indices of the bits set; ends[w]: how many bits are set in words 0 ... w.
extern "C" __global__ void bitmap_read(const u32* words, const i64* ends, u64 count, u64 first, INDEX* out) {
  EVERY(w, count) {
    u64 position = (u64)ends[w] - __popc(words[w]);
    for (u32 rest = words[w]; rest; rest &= rest - 1) out[position++] = (INDEX)(first + 32 * w + (__ffs(rest) - 1));
  }
}

extern "C" __global__ void hash_slots(const INDEX* indices, u64 count, u64 slots, u64 a, u64 b, u64 c, i64* out) {
  EVERY(i, count) {
    u64 x = indices[i], mixed = a * (x & 0xffffffffull) + b * (x >> 32) + c;
    out[i] = (i64)((mixed >> 32) * slots >> 32);
  }
}

// The last entry that meets a slot keeps it. out: 0 before; 1 + the entry's number after.
extern "C" __global__ void slots_write(const i64* slots, u64 count, u64* out) {
  EVERY(i, count) atomicMax(&out[slots[i]], i + 1);
}

extern "C" __global__ void to_bfloat16(const u32* values, u64 count, u16* out) {
  EVERY(i, count) {
    u32 x = values[i];
    u16 narrow = (u16)(((u64)x + 0x7fff + (x >> 16 & 1)) >> 16);
    if ((x & 0x7f800000) == 0x7f800000)
      narrow = (u16)(x >> 16) | (u16)((x & 0xffff) != 0);
    else if ((narrow & 0x7fff) == 0x7f80)
      narrow--;
    out[i] = narrow;
  }
}

extern "C" __global__ void to_float16(const void* values, u64 count, u16* out) {
  EVERY(i, count) {
    double x = (double)READ_AS(FROM, values, i);
    u16 narrow = to_half(x);
    if ((narrow & 0x7fff) == 0x7c00 && x - x == 0) narrow--;  // finite: the largest finite value
    out[i] = narrow;
  }
}

extern "C" __global__ void from_float16(const u16* stored, u64 count, float* out) {
  EVERY(i, count) out[i] = half_to_float(stored[i]);
}
