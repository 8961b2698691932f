// Rice codes of gaps between indices, see sparsecoll.kernels.reference.rice. One block of threads works on one block of
// gaps; `payload` is aligned to 4 bytes and zero where it is to be written.

#define SIZE_BITS 10
#define LARGEST 56

__device__ u64 gap_of(const INDEX* indices, u64 j) { return j ? (u64)indices[j] - indices[j - 1] - 1 : 0; }

// The parameter with the shortest code of gaps start ... stop - 1, and the bytes of their quotients.
__device__ u32 shortest(const INDEX* indices, u64 start, u64 stop, u32* unary) {
  __shared__ u64 bits_of[WARPS];
  u64 widest = 0, least = ~0ull, quotients = 0;
  for (u64 j = start + threadIdx.x; j < stop; j += THREADS) widest |= gap_of(indices, j);
  for (int d = 16; d; d >>= 1) widest |= __shfl_xor_sync(ALL, widest, d);
  if (threadIdx.x % 32 == 0) bits_of[threadIdx.x / 32] = widest;
  __syncthreads();
  for (int w = 0; w < WARPS; w++) widest |= bits_of[w];
  u32 width = widest ? 64 - __clzll((i64)widest) : 0, best = 0;
  for (u32 k = 0; k <= width && k <= LARGEST; k++) {
    u64 sum = 0;
    for (u64 j = start + threadIdx.x; j < stop; j += THREADS) sum += gap_of(indices, j) >> k;
    sum = block_sum(sum);
    u64 length = (stop - start) * k + sum;
    if (length < least) least = length, best = k, quotients = sum;
  }
  *unary = (u32)((stop - start + quotients + 7) / 8);
  return best;
}

extern "C" __global__ void rice_table(const INDEX* indices, u64 count, u32 block, u16* table) {
  u64 start = (u64)blockIdx.x * block, stop = start + block < count ? start + block : count;
  u32 unary, k = shortest(indices, start, stop, &unary);
  if (threadIdx.x == 0) table[blockIdx.x] = (u16)(k << SIZE_BITS | unary);
}

// What a sample of the gaps, RUN at every RUN * stride, takes in blocks of RUN, RUN / 4 and RUN / 8: the bytes are added
// to lengths[0 ... 2]. One block of threads for each block of gaps: SHARES for each run.
#define RUN 1024
#define SHARES 13

extern "C" __global__ void rice_sample(const INDEX* indices, u64 count, u64 stride, u64* lengths) {
  u32 share = blockIdx.x % SHARES, kind = share == 0 ? 0 : share < 5 ? 1 : 2;
  u64 block = kind == 0 ? RUN : kind == 1 ? RUN / 4 : RUN / 8, number = kind == 0 ? 0 : share - (kind == 1 ? 1 : 5);
  u64 start = blockIdx.x / SHARES * stride * RUN + number * block, stop = start + block < count ? start + block : count;
  if (start >= count) return;
  u32 unary, k = shortest(indices, start, stop, &unary);
  if (threadIdx.x == 0) atomicAdd(&lengths[kind], 2 + unary + ((stop - start) * k + 7) / 8);
}

// One block, whose threads take EACH entries of the table at a time. offsets[b]: the byte at which block b of gaps begins
// in the payload; offsets[blocks]: the bytes of all.
#define EACH 16

extern "C" __global__ void rice_offsets(const u16* table, u64 blocks, u64 count, u32 block, i64* offsets) {
  u64 before = 0, total;
  for (u64 round = 0; round < blocks; round += THREADS * EACH, before += total) {
    u64 first = round + (u64)threadIdx.x * EACH, bytes[EACH], sum = 0;
    for (int j = 0; j < EACH; j++) {
      u64 b = first + j, gaps = b + 1 < blocks ? block : count - b * block;
      bytes[j] = b < blocks ? (table[b] & ((1 << SIZE_BITS) - 1)) + (gaps * (table[b] >> SIZE_BITS) + 7) / 8 : 0;
      sum += bytes[j];
    }
    u64 ahead = before + block_scan(sum, &total);
    for (int j = 0; j < EACH; ahead += bytes[j], j++)
      if (first + j < blocks) offsets[first + j] = (i64)ahead;
  }
  if (threadIdx.x == 0) offsets[blocks] = (i64)before;
}

__device__ void set_bits(u32* words, u64 bit, u64 value, u32 width) {  // width <= 56
  for (u64 rest = value; width; ) {
    u32 inside = (u32)(bit & 31), room = 32 - inside, taken = width < room ? width : room;
    u32 part = (u32)(rest & (taken == 32 ? 0xffffffffull : (1ull << taken) - 1));
    if (part) atomicOr(&words[bit >> 5], part << inside);
    rest >>= taken, bit += taken, width -= taken;
  }
}

__device__ u64 get_bits(const u8* bytes, u64 bit, u32 width) {
  u64 value = 0;
  for (u32 have = 0; have < width; ) {
    u32 inside = (u32)(bit & 7), taken = 8 - inside < width - have ? 8 - inside : width - have;
    value |= (u64)(bytes[bit >> 3] >> inside & ((1u << taken) - 1)) << have;
    have += taken, bit += taken;
  }
  return value;
}

// offsets: the byte offset of each block.
extern "C" __global__ void rice_encode(const INDEX* indices, u64 count, u32 block, const u16* table, const i64* offsets,
                                       u32* payload) {
  u64 start = (u64)blockIdx.x * block, stop = start + block < count ? start + block : count;
  u32 k = table[blockIdx.x] >> SIZE_BITS, unary = table[blockIdx.x] & ((1 << SIZE_BITS) - 1);
  u64 first = 8 * (u64)offsets[blockIdx.x], low = first + 8 * unary, before = 0, total;
  for (u64 round = start; round < stop; round += THREADS) {
    u64 j = round + threadIdx.x, gap = j < stop ? gap_of(indices, j) : 0;
    u64 ahead = block_scan(j < stop ? (gap >> k) + 1 : 0, &total);
    if (j < stop) {
      set_bits(payload, first + before + ahead + (gap >> k), 1, 1);
      set_bits(payload, low + (j - start) * k, gap & ((1ull << k) - 1), k);
    }
    before += total;
  }
}

// steps[j] = gap j + 1, to be summed up. damaged[0] becomes 1 where a block has not as many ones as gaps.
extern "C" __global__ void rice_decode(const u16* table, const u8* payload, const i64* offsets, u32 block, u64 count,
                                       u64* steps, u32* damaged) {
  __shared__ u16 ones[1024];  // the bit of each one in the quotients
  u64 start = (u64)blockIdx.x * block, stop = start + block < count ? start + block : count;
  u32 k = table[blockIdx.x] >> SIZE_BITS, unary = table[blockIdx.x] & ((1 << SIZE_BITS) - 1);
  const u8* bytes = payload + offsets[blockIdx.x];
  u64 before = 0, total;
  for (u32 round = 0; round < unary; round += THREADS) {
    u32 b = round + threadIdx.x, byte = b < unary ? bytes[b] : 0;
    u64 position = before + block_scan(__popc(byte), &total);
    for (; byte; byte &= byte - 1, position++)
      if (position < stop - start) ones[position] = (u16)(8 * b + (__ffs(byte) - 1));
    before += total;
  }
  __syncthreads();
  if (before != stop - start || k > LARGEST) {
    if (threadIdx.x == 0) atomicMax(damaged, 1u);
    for (u64 j = start + threadIdx.x; j < stop; j += THREADS) steps[j] = 0;
    return;
  }
  for (u64 j = start + threadIdx.x; j < stop; j += THREADS) {
    u64 here = j - start, quotient = ones[here] - (here ? ones[here - 1] + 1 : 0);
    if (quotient >> (63 - k)) atomicMax(damaged, 1u);  // no index is that large
    steps[j] = (quotient << k) + get_bits(bytes + unary, here * k, k) + 1;
  }
}

// out[j] = first - 1 + ends[j], the sum of the steps up to j. damaged[0] becomes 1 where an index is not below `limit` or
// not above the one before, as when a sum has wrapped around.
extern "C" __global__ void rice_indices(const u64* ends, u64 count, u64 first, u64 limit, INDEX* out, u32* damaged) {
  EVERY(j, count) {
    u64 index = first - 1 + ends[j];
    if (index >= limit || (j && ends[j - 1] >= ends[j])) atomicMax(damaged, 1u);
    out[j] = (INDEX)index;
  }
}
