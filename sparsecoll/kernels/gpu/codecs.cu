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

extern "C" __global__ void from_bfloat16(const u16* stored, u64 count, u32* out) {
  EVERY(i, count) out[i] = (u32)stored[i] << 16;
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

// One block of threads for each bucket of values whose index // size is the same: scale = the largest magnitude.
extern "C" __global__ void bucket_scales(const float* values, u64 count, u64 first, u64 size, u64 buckets,
                                         float* scales) {
  __shared__ u32 largest;
  for (u64 b = blockIdx.x; b < buckets; b += gridDim.x) {
    u64 bucket = first / size + b, start = bucket * size, stop = start + size;
    start = start > first ? start - first : 0;
    stop = stop - first < count ? stop - first : count;
    __syncthreads();
    if (threadIdx.x == 0) largest = 0;
    __syncthreads();
    u32 own = 0;
    for (u64 i = start + threadIdx.x; i < stop; i += THREADS) {
      u32 key = __float_as_uint(values[i]) & 0x7fffffff;
      if (key > 0x7f800000) key = 0x7f800000;
      if (key > own) own = key;
    }
    atomicMax(&largest, own);
    __syncthreads();
    if (threadIdx.x == 0) scales[b] = __uint_as_float(largest);
  }
}

// One thread for each byte of codes.
extern "C" __global__ void quantize(const float* values, u64 count, u64 first, u32 bits, u64 size, u64 seed,
                                    const float* scales, u8* out, u64 bytes) {
  u32 per = 8 / bits;
  float levels = (float)((1 << (bits - 1)) - 1);
  EVERY(byte, bytes) {
    u32 codes = 0;
    for (u32 position = 0; position < per && byte * per + position < count; position++) {
      u64 i = byte * per + position, index = first + i;
      float value = values[i], scale = scales[index / size - first / size], magnitude = value < 0 ? -value : value;
      float level = levels;
      if (__float_as_uint(scale) < 0x7f800000) {
        float exact = scale > 0 ? magnitude / scale * levels : 0.0f, near = rintf(exact), off = exact - near;
        u64 z = (index + seed) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        float drawn = floorf(exact + (float)(z >> 40) * 5.9604644775390625e-8f);
        level = (off < 0 ? -off : off) < 0.000244140625f ? near : drawn;
        if (level > levels) level = levels;
      }
      codes |= ((u32)level | (__float_as_uint(value) >> 31) << (bits - 1)) << (position * bits);
    }
    out[byte] = (u8)codes;
  }
}

extern "C" __global__ void dequantize(const u8* codes, u64 count, u64 first, u32 bits, u64 size, const float* scales,
                                      float* out) {
  u32 per = 8 / bits, top = 1u << (bits - 1);
  float levels = (float)(top - 1);
  EVERY(i, count) {
    u32 code = codes[i / per] >> (i % per * bits) & (2 * top - 1);
    float value = (float)(code & (top - 1)) / levels * scales[(first + i) / size - first / size];
    out[i] = code & top ? -value : value;
  }
}

// out[i] += step where bit start + i is set (the highest of a byte first), else out[i] -= step.
extern "C" __global__ void add_signs(BITS* out, u64 count, const u8* bits, u64 start, double step) {
  EVERY(i, count) {
    u64 bit = start + i;
    number own = FROM_BITS(out[i]), add = ROUND(step);
    out[i] = (BITS)TO_BITS(bits[bit >> 3] >> (7 - (bit & 7)) & 1 ? own + add : own - add);
  }
}
