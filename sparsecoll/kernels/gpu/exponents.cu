// Codes of floats' exponents, see sparsecoll.kernels.reference.exponents. One block of threads works on one block of
// values, whose exponents have `bits` bits; BITS is their type on the wire.

#define VALUES 1024
#define SAMPLE 8
#define SIZE (8 * (u32)sizeof(BITS))

__device__ u32 exponent_of(BITS x, u32 bits) { return (u32)(x >> (SIZE - 1 - bits)) & ((1u << bits) - 1); }

// least exponent | width << 8 of the shortest code of so many exponents
__device__ u32 shortest(const u32* counts, u32 sampled, u32 bits) {
  u32 low = 0, high = (1u << bits) - 1, best = bits * sampled, found = bits << 8;
  while (!counts[low]) low++;
  while (!counts[high]) high--;
  for (u32 width = 1; width < bits; width++) {
    u32 span = (1u << width) - 1, inside = 0;
    for (u32 e = low; e < low + span && e <= high; e++) inside += counts[e];
    for (u32 e = low; e <= high; e++) {
      u32 length = width * sampled + 8 * (sampled - inside);
      if (length < best) best = length, found = e | width << 8;
      inside -= counts[e];
      if (e + span <= high) inside += counts[e + span];
    }
  }
  return found;
}

extern "C" __global__ void exponent_table(const BITS* stored, u64 count, u32 bits, u32* table) {
  __shared__ u32 counts[256], entry;
  u64 start = (u64)blockIdx.x * VALUES, stop = start + VALUES < count ? start + VALUES : count;
  counts[threadIdx.x] = 0;
  __syncthreads();
  u64 sampled = start + threadIdx.x * SAMPLE;
  if (sampled < stop) atomicAdd(&counts[exponent_of(stored[sampled], bits)], 1u);
  __syncthreads();
  if (threadIdx.x == 0) entry = shortest(counts, (u32)((stop - start + SAMPLE - 1) / SAMPLE), bits);
  __syncthreads();
  u32 least = entry & 255, width = entry >> 8, mask = (1u << bits) - 1;
  u64 escapes = 0;
  for (u64 j = start + threadIdx.x; j < stop && width < bits; j += THREADS)
    escapes += ((exponent_of(stored[j], bits) - least) & mask) >= (1u << width) - 1;
  escapes = block_sum(escapes);
  if (threadIdx.x == 0)
    table[blockIdx.x] = width * (stop - start) + 8 * escapes >= bits * (stop - start) ? bits << 8 : entry | (u32)escapes << 16;
}

// offsets: the byte offset of each block.
extern "C" __global__ void exponent_encode(const BITS* stored, u64 count, u32 bits, const u32* table, const i64* offsets,
                                           u8* out) {
  __shared__ u8 codes[VALUES];
  u64 start = (u64)blockIdx.x * VALUES, size = count - start < VALUES ? count - start : VALUES, total;
  u32 least = table[blockIdx.x] & 255, width = table[blockIdx.x] >> 8 & 255, mask = (1u << bits) - 1;
  u32 escape = (1u << width) - 1, eighth = (u32)(size + 63) / 64 * 8;
  u8* to = out + offsets[blockIdx.x];
  for (u32 j = threadIdx.x; j < VALUES; j += THREADS) {
    BITS x = j < size ? stored[start + j] : 0, turned = (BITS)(x << 1 | x >> (SIZE - 1));
    u32 code = (exponent_of(x, bits) - least) & mask, rest = bits < 8 ? (u32)turned >> 8 << bits : 0;
    codes[j] = j < size ? (u8)((code < escape ? code : escape) | rest) : 0;
    for (u32 byte = 0; byte + 1 < sizeof(BITS) && j < size; byte++) to[byte * size + j] = (u8)(turned >> (8 * byte));
  }
  __syncthreads();
  to += (sizeof(BITS) - 1) * size;
  for (u32 bit = 0; bit < 8; bit++) {
    if (width <= bit && bit < bits) continue;
    for (u32 i = threadIdx.x; i < eighth; i += THREADS) {
      u32 byte = 0;
      for (u32 t = 0; t < 8; t++) byte |= (u32)(codes[t * eighth + i] >> bit & 1) << t;
      to[i] = (u8)byte;
    }
    to += eighth;
  }
  for (u32 round = 0; round < size && width < bits; round += THREADS, to += total) {
    u32 j = round + threadIdx.x;
    bool escapes = j < size && (codes[j] & mask) == escape;
    u64 ahead = block_scan(escapes, &total);
    if (escapes) to[ahead] = (u8)exponent_of(stored[start + j], bits);
  }
}

// damaged[0] becomes 1 where a block has not as many escapes as its entry of the table says.
extern "C" __global__ void exponent_decode(const u8* coded, u32 bits, const u32* table, const i64* offsets, u64 count,
                                           BITS* out, u32* damaged) {
  u64 start = (u64)blockIdx.x * VALUES, size = count - start < VALUES ? count - start : VALUES, total, before = 0;
  u32 least = table[blockIdx.x] & 255, width = table[blockIdx.x] >> 8 & 255, mask = (1u << bits) - 1;
  u32 escapes = table[blockIdx.x] >> 16, escape = (1u << width) - 1, eighth = (u32)(size + 63) / 64 * 8;
  const u8 *bytes = coded + offsets[blockIdx.x], *planes = bytes + (sizeof(BITS) - 1) * size;
  const u8* rest = planes + (u64)eighth * (width + 8 - bits);
  for (u32 round = 0; round < size; round += THREADS, before += total) {
    u32 j = round + threadIdx.x, code = 0, plane = 0;
    for (u32 bit = 0; bit < 8 && j < size; bit++) {
      if (width <= bit && bit < bits) continue;
      code |= (u32)(planes[plane++ * eighth + j % eighth] >> (j / eighth) & 1) << bit;
    }
    bool escaped = j < size && width < bits && (code & mask) == escape;
    u64 ahead = before + block_scan(escaped, &total);
    u32 exponent = escaped && ahead < escapes ? rest[ahead] & mask : ((code & mask) + least) & mask;
    BITS turned = (BITS)((BITS)exponent << (SIZE - bits));
    if (bits < 8) turned |= (BITS)((code >> bits) << 8);
    for (u32 byte = 0; byte + 1 < sizeof(BITS) && j < size; byte++) turned |= (BITS)((BITS)bytes[byte * size + j] << (8 * byte));
    if (j < size) out[start + j] = (BITS)(turned >> 1 | turned << (SIZE - 1));
  }
  if (threadIdx.x == 0 && before != escapes) atomicMax(damaged, 1u);
}
