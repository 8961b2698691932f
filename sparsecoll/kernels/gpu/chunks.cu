// The largest values of each chunk of a vector, see sparsecoll.kernels.reference.chunks.

#define CLASSES 256  // one for each thread
#define STEP_BITS 4
#define DIGITS 30
#define LARGEST 1.7014117331926443e38
#define FRACTION (sizeof(BITS) == 2 ? 10 : sizeof(BITS) == 4 ? 23 : 52)
#define INFINITE ((BITS)((SIGN - 1) >> FRACTION << FRACTION))

// How many of the values from `start` on have a key >= `key`, by the threads of a block.
__device__ u64 reaching(const BITS* values, u64 start, u64 stop, BITS key) {
  u64 count = 0;
  for (u64 j = start + threadIdx.x; j < stop; j += THREADS) count += key_of(values[j]) >= key;
  return block_sum(count);
}

// A block of threads for each chunk: forms its values, and writes the positions of its largest ones from
// places[slots[chunk]] on, ascending, and their number. ~wrong[0]: the first value that is NaN or infinite.
extern "C" __global__ void chunk_select(BITS* values, const BITS* source, const BITS* addend, double scale,
                                        const i64* edges, const i64* slots, u64 chunks, INDEX* places, u64* found,
                                        u64* wrong) {
  for (u64 c = blockIdx.x; c < chunks; c += gridDim.x) {
    u64 start = edges[c], stop = edges[c + 1], wanted = slots[c + 1] - slots[c], above = 0, total;
    for (u64 j = start + threadIdx.x; j < stop; j += THREADS) {
      BITS x = source ? source[j] : values[j];
      if (addend) x = TO_BITS(ROUND(FROM_BITS(x) + ROUND((number)scale * FROM_BITS(addend[j]))));
      values[j] = x;
      if (key_of(x) >= INFINITE) atomicMax(wrong, ~j);
    }
    __syncthreads();
    BITS low = 1, high = INFINITE;
    u64 count = reaching(values, start, stop, low);
    while (count > wanted && high - low > 1) {
      BITS middle = low + (high - low) / 2;
      u64 reach = reaching(values, start, stop, middle);
      if (reach >= wanted) low = middle, count = reach;
      else high = middle, above = reach;
    }
    u64 left = count > wanted ? wanted - above : wanted, taken = 0;
    for (u64 first = start; first < stop; first += THREADS) {
      u64 j = first + threadIdx.x;
      BITS key = j < stop ? key_of(values[j]) : 0;
      u64 before = block_scan(key == low, &total);
      bool chosen = key > low || (key == low && before < left);
      left -= left < total ? left : total;
      u64 place = block_scan(chosen, &total);
      if (chosen && taken + place < wanted) places[slots[c] + taken + place] = (INDEX)j;
      taken += total;
    }
    if (threadIdx.x == 0) found[c] = taken;
  }
}

// A block of threads for each block of chunks, whose values become the errors; ends[c]: values taken of chunks 0 ... c.
extern "C" __global__ void chunk_quantize(BITS* values, const i64* blocks, u64 count, const i64* slots,
                                          const u64* found, const i64* ends, const INDEX* places, INDEX* indices,
                                          u8* codes, float* levels) {
  __shared__ u64 members[CLASSES], sums[CLASSES], largest, boundary;
  for (u64 b = blockIdx.x; b < count; b += gridDim.x) {
    if (threadIdx.x == 0) largest = 0;
    members[threadIdx.x] = sums[threadIdx.x] = 0;
    __syncthreads();
    for (i64 c = blocks[b]; c < blocks[b + 1]; c++)
      for (u64 i = threadIdx.x; i < found[c]; i += THREADS) atomicMax(&largest, (u64)key_of(values[places[slots[c] + i]]));
    __syncthreads();
    int exponent = 0;
    frexp((double)FROM_BITS((BITS)largest), &exponent);
    exponent = DIGITS - exponent < 1000 ? DIGITS - exponent : 1000;
    double factor = ldexp(1.0, exponent), unit = ldexp(1.0, -exponent);
    i64 first = (i64)(largest >> (FRACTION - STEP_BITS)) - (CLASSES - 1);
    for (i64 c = blocks[b]; c < blocks[b + 1]; c++)
      for (u64 i = threadIdx.x; i < found[c]; i += THREADS) {
        BITS key = key_of(values[places[slots[c] + i]]);
        i64 own = (i64)(key >> (FRACTION - STEP_BITS)) - first;
        atomicAdd(&members[own > 0 ? own : 0], 1ull);
        atomicAdd(&sums[own > 0 ? own : 0], (u64)((double)FROM_BITS(key) * factor));
      }
    __syncthreads();
    if (threadIdx.x == 0) {
      u64 n = 0, s = 0, lower = 0, below = 0;
      for (int j = 0; j < CLASSES; j++) n += members[j], s += sums[j];
      double low = 0, high = n ? (double)s / n : 0, best = n ? (double)s * (double)s / n : 0;
      boundary = 0;
      for (int j = 1; j < CLASSES; j++) {
        lower += members[j - 1], below += sums[j - 1];
        if (lower == 0 || lower == n) continue;
        double x = (double)below, y = (double)(s - below), explained = x * x / lower + y * y / (n - lower);
        if (explained > best) best = explained, boundary = j, low = x / lower, high = y / (n - lower);
      }
      levels[2 * b] = (float)(low * unit < LARGEST ? low * unit : LARGEST);
      levels[2 * b + 1] = (float)(high * unit < LARGEST ? high * unit : LARGEST);
    }
    __syncthreads();
    for (i64 c = blocks[b]; c < blocks[b + 1]; c++)
      for (u64 i = threadIdx.x; i < found[c]; i += THREADS) {
        u64 at = places[slots[c] + i], to = ends[c] - found[c] + i;
        BITS x = values[at];
        bool upper = !boundary || (i64)(key_of(x) >> (FRACTION - STEP_BITS)) - first >= (i64)boundary;
        number level = (number)levels[2 * b + upper], old = FROM_BITS(x);
        values[at] = TO_BITS(ROUND(x & SIGN ? old + level : old - level));
        indices[to] = (INDEX)at;
        codes[to] = (u8)(upper | (x & SIGN ? 2 : 0));
      }
    __syncthreads();
  }
}

extern "C" __global__ void chunk_pack(const u8* codes, u64 count, u8* packed) {
  EVERY(i, (count + 3) / 4) {
    u32 byte = 0;
    for (u64 j = 4 * i; j < 4 * i + 4 && j < count; j++) byte |= (u32)codes[j] << (2 * (j & 3));
    packed[i] = (u8)byte;
  }
}

extern "C" __global__ void chunk_add(const INDEX* indices, const u8* codes, const float* levels, u64 count,
                                     const i64* starts, u64 blocks, double divisor, BITS* out) {
  EVERY(i, count) {
    u64 low = 0, high = blocks;
    while (high - low > 1) {
      u64 middle = (low + high) / 2;
      if ((u64)starts[middle] <= indices[i]) low = middle;
      else high = middle;
    }
    u32 code = codes[i >> 2] >> (2 * (i & 3)) & 3;
    number x = ROUND((number)levels[2 * low + (code & 1)] / (number)divisor);
    out[indices[i]] = TO_BITS(ROUND(FROM_BITS(out[indices[i]]) + (code & 2 ? -x : x)));
  }
}
