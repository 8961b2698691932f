// Selection in one pass over memory. ADD is the type code of an addend (0: none), see common.cu.

#ifndef ADD
#define ADD 0
#endif
#define ROWS 16  // items of a thread: item r * THREADS + thread of the tile, so that warps read whole lines
#define TILE (ROWS * THREADS)
#define GROUP 32           // tiles whose entries a block of `gather` writes
#define UNSTAGED ~0u       // in place of a tile's position among the staged entries
#define SAMES 0x7fffffffu  // of counts: 31 bits of entries above the key, 31 bits of entries equal to it

#if MOMENTS  // see reference.moments_of: the columns of a line, added by halves
__device__ double block_tree(double x, int largest) {
  __shared__ double column[THREADS];
  __syncthreads();
  column[threadIdx.x] = x;
  for (int half = THREADS / 2; half; half >>= 1) {
    __syncthreads();
    if ((int)threadIdx.x < half) {
      double a = column[threadIdx.x], b = column[threadIdx.x + half];
      column[threadIdx.x] = largest ? (b > a ? b : a) : a + b;
    }
  }
  __syncthreads();
  return column[0];
}

// The tile's line: sum of x, of x^2, of |x|, the largest |x|. `first`: the item of row 0.
__device__ void write_moments(const BITS* items, u64 first, u64 n, double* line) {
  double x1 = 0, x2 = 0, absolute = 0, largest = 0;
  for (int r = 0; r < ROWS; r++)
    if (first + (u64)r * THREADS + threadIdx.x < n) {
      double x = (double)FROM_BITS(items[r]), m = x < 0 ? -x : x;
      x1 += x;
      x2 += x * x;
      absolute += m;
      if (m > largest) largest = m;
    }
  x1 = block_tree(x1, 0), x2 = block_tree(x2, 0), absolute = block_tree(absolute, 0);
  largest = block_tree(largest, 1);
  if (threadIdx.x == 0) line[0] = x1, line[1] = x2, line[2] = absolute, line[3] = largest;
}

// One block: the lines, added as the rows of a line are.
extern "C" __global__ void fold_moments(const double* lines, u64 count, double* out) {
  double x1 = 0, x2 = 0, absolute = 0, largest = 0;
  for (u64 i = threadIdx.x; i < count; i += THREADS) {
    const double* line = lines + 4 * i;
    x1 += line[0], x2 += line[1], absolute += line[2];
    if (line[3] > largest) largest = line[3];
  }
  x1 = block_tree(x1, 0), x2 = block_tree(x2, 0), absolute = block_tree(absolute, 0);
  largest = block_tree(largest, 1);
  if (threadIdx.x == 0) out[0] = x1, out[1] = x2, out[2] = absolute, out[3] = largest;
}
#endif

// Entries with a key > `above` (all: every entry), and the first `ties` of those == `above`, in order: `stage` reads each
// tile once and puts the tile's entries where there is room in `places` (their positions in the tile) and `staged`;
// `gather` then knows the counts of all tiles, and moves the entries to where they belong. No tile waits for another. A
// tile for which there is no room is read again by `gather`.
//
// tiles: of each, its position among the staged entries (32 bits), and how many entries are == and > `above` (16 each).
// scratch: 0 room taken; 1 how many entries there are; 2 how many of them are ties; then the counts of each group of
// tiles. All zero before.
#if VALUE == 8 || VALUE == 18
#define RESIDENT 3  // blocks per multiprocessor at least, so that enough loads are under way
#elif ADD || MOMENTS
#define RESIDENT 4
#else
#define RESIDENT 6
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    stage(BITS* values, u64 n, BITS above, u32 all, u64 ties, const void* addend, double scale, u16* places,
          BITS* staged, u64 room, double* moments, u64* tiles, u64* scratch) {
  __shared__ u32 counts[ROWS * WARPS];
  __shared__ u32 shared_base;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 start = (u64)blockIdx.x * TILE, left = n - start;
  BITS items[ROWS];
  u32 hits = 0;  // one bit a row
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    u32 place = (u32)r * THREADS + threadIdx.x;
    items[r] = place < left ? values[start + place] : 0;
  }
#if ADD
  number factor = ROUND(scale), addends[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {  // all loads before the first store, which might change what they read
    u32 place = (u32)r * THREADS + threadIdx.x;
    addends[r] = place < left ? ROUND(READ_AS(ADD, addend, start + place)) : 0;
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    u32 place = (u32)r * THREADS + threadIdx.x;
    items[r] = (BITS)TO_BITS(FROM_BITS(items[r]) + ROUND(factor * addends[r]));
    if (place < left) values[start + place] = items[r];
  }
#endif
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    u32 place = (u32)r * THREADS + threadIdx.x;
    BITS key = key_of(items[r]);
    int is_same = place < left && !all && ties && key == above;
    int is_hit = is_same || (place < left && (key > above || all));
    u32 hit = __ballot_sync(ALL, is_hit), sames = __ballot_sync(ALL, is_same);
    hits |= (u32)is_hit << r;
    if (lane == 0) counts[r * WARPS + warp] = __popc(hit) | __popc(sames) << 16;
  }
#if MOMENTS
  write_moments(items, start, n, moments + 4 * blockIdx.x);
#endif
  __syncthreads();
  if (warp == 0) {  // counts of rows and warps become positions in the tile
    u32 own[4], sum = 0;
    for (int j = 0; j < 4; j++) own[j] = counts[4 * lane + j], sum += own[j];
    u32 scanned = sum;
    for (int d = 1; d < 32; d <<= 1) {
      u32 before = __shfl_up_sync(ALL, scanned, d);
      if (lane >= d) scanned += before;
    }
    u32 base = scanned - sum;
    for (int j = 0; j < 4; j++) counts[4 * lane + j] = base, base += own[j];
    if (lane == 31) {
      u32 entries = scanned & 0xffff, sames = scanned >> 16;
      u64 taken = entries ? atomicAdd(&scratch[0], (u64)entries) : 0;
      shared_base = taken + entries <= room ? (u32)taken : UNSTAGED;
      tiles[blockIdx.x] = (u64)shared_base << 32 | sames << 16 | (entries - sames);
      if (entries) atomicAdd(&scratch[3 + blockIdx.x / GROUP], (u64)(entries - sames) << 31 | sames);
    }
  }
  __syncthreads();
  u32 base = shared_base, lower = (1u << lane) - 1;
  if (base == UNSTAGED) return;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int is_hit = hits >> r & 1;
    u32 hit = __ballot_sync(ALL, is_hit);
    if (is_hit) {
      u64 position = base + (u64)(counts[r * WARPS + warp] & 0xffff) + __popc(hit & lower);
      places[position] = (u16)(r * THREADS + threadIdx.x);
      staged[position] = items[r];
    }
  }
}

// `parts` blocks for each group of tiles: with WIDE of them each warp has a tile of its own, with GROUP of them each block.
// If there are more than `room` entries, nothing is written.
#define WIDE (GROUP / WARPS)

extern "C" __global__ void gather(BITS* values, u64 n, BITS above, u32 all, u64 ties, const INDEX* indices, u64 first,
                                  u32 clear, const u16* places, const BITS* staged, const u64* tiles, u64 groups,
                                  u32 parts, INDEX* out_i, BITS* out_v, u64 room, u64* scratch) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, alone = parts == WIDE;
  u64 group = blockIdx.x / parts, before = 0, whole = 0;
  for (u64 g = threadIdx.x; g < groups; g += THREADS) {
    u64 counts = scratch[3 + g];
    whole += counts;
    if (g < group) before += counts;
  }
  before = block_sum(before), whole = block_sum(whole);
  u64 tied = (whole & SAMES) < ties ? whole & SAMES : ties, count = (whole >> 31) + tied;
  if (blockIdx.x == 0 && threadIdx.x == 0) scratch[1] = count, scratch[2] = tied;
  if (count > room) return;
  u64 record = (group * GROUP + lane) * TILE < n ? tiles[group * GROUP + lane] : 0;
  u64 own = (record & 0xffff) << 31 | (record >> 16 & 0xffff), scanned = own;
  for (int d = 1; d < 32; d <<= 1) {
    u64 ahead = __shfl_up_sync(ALL, scanned, d);
    if (lane >= d) scanned += ahead;
  }
  scanned += before - own;
  int tile = blockIdx.x % parts * (alone ? WARPS : 1) + (alone ? warp : 0);
  record = __shfl_sync(ALL, record, tile), scanned = __shfl_sync(ALL, scanned, tile);
  u64 start = (group * GROUP + tile) * TILE, o = scanned >> 31, s = scanned & SAMES;
  u32 base = (u32)(record >> 32), over = (u32)(record & 0xffff), same = (u32)(record >> 16 & 0xffff);
  if (over + same == 0) return;
  if (base != UNSTAGED && (same == 0 || s + same <= ties)) {  // all staged entries are taken
    u64 position = o + (s < ties ? s : ties);
#pragma unroll 4
    for (u32 e = alone ? lane : threadIdx.x; e < over + same; e += alone ? 32 : THREADS) {
      u64 i = start + places[(u64)base + e];
      out_i[position + e] = indices ? indices[i] : (INDEX)(first + i);
      out_v[position + e] = staged[(u64)base + e];
      if (clear) values[i] = 0;
    }
    return;
  }
  if (!alone && warp) return;
  u32 entries = base != UNSTAGED ? over + same : n - start < TILE ? (u32)(n - start) : TILE;
  u32 lower = (1u << lane) - 1;
  for (u32 e = lane; e - lane < entries; e += 32) {
    int inside = e < entries;
    u32 place = e;
    BITS item = 0;
    if (inside && base != UNSTAGED) place = places[(u64)base + e], item = staged[(u64)base + e];
    if (inside && base == UNSTAGED) item = values[start + e];
    BITS key = key_of(item);
    int is_over = inside && (key > above || all), is_same = inside && !all && ties && key == above;
    u32 overs = __ballot_sync(ALL, is_over), sames = __ballot_sync(ALL, is_same);
    u64 ahead = s + __popc(sames & lower), position = o + __popc(overs & lower) + (ahead < ties ? ahead : ties);
    if (is_over || (is_same && ahead < ties)) {
      u64 i = start + place;
      out_i[position] = indices ? indices[i] : (INDEX)(first + i);
      out_v[position] = item;
      if (clear) values[i] = 0;
    }
    o += __popc(overs), s += __popc(sames);
  }
}

// values[positions[i]] = 0.
extern "C" __global__ void clear(BITS* values, const INDEX* positions, u64 count) {
  EVERY(i, count) values[positions[i]] = 0;
}

// values += scale * addend.
#if ADD
extern "C" __global__ void accumulate(BITS* values, u64 n, const void* addend, double scale) {
  number factor = ROUND(scale);
  EVERY(i, n) {
    number a = ROUND(READ_AS(ADD, addend, i));
    values[i] = (BITS)TO_BITS(FROM_BITS(values[i]) + ROUND(factor * a));
  }
}
#endif

// Into result[0]: how many keys are >= least.
extern "C" __global__ void count(const BITS* values, u64 n, BITS least, u64* result) {
  u64 own = 0;
  EVERY(i, n) own += key_of(values[i]) >= least;
  own = block_sum(own);
  if (threadIdx.x == 0) atomicAdd(result, own);
}

// Into result[0], result[1]: ~0 - smallest key, largest key. Zero before.
extern "C" __global__ void key_range(const BITS* values, u64 n, u64* result) {
  u64 low = ~0ull, high = 0;
  EVERY(i, n) {
    u64 key = key_of(values[i]);
    if (key < low) low = key;
    if (key > high) high = key;
  }
  for (int d = 16; d; d >>= 1) {
    u64 l = __shfl_xor_sync(ALL, low, d), h = __shfl_xor_sync(ALL, high, d);
    if (l < low) low = l;
    if (h > high) high = h;
  }
  if (threadIdx.x % 32 == 0) {
    atomicMax(&result[0], ~low);
    atomicMax(&result[1], high);
  }
}

// The k-th largest key, one digit of at most DIGIT bits a launch, from the leading one on. state: 0 the low end of the
// range that holds it; 1 bits of the range's width; 2 its rank in the range; 3 blocks that are done; then the bins. All
// zero before the first launch, whose `bits` and `k` are the width in bits of all keys and the rank; later ones give 0.
#define DIGIT 11
#define BINS (1 << DIGIT)

extern "C" __global__ void kth_digit(const BITS* values, u64 n, u64 bits, u64 k, u64* state) {
  __shared__ u32 own[BINS];
  __shared__ u64 chosen[2];
  __shared__ int is_last;
  u64 low = state[0], width = bits ? bits : state[1], rank = bits ? k : state[2], *bins = state + 4;
  u64 shift = width > DIGIT ? width - DIGIT : 0;
  for (int b = threadIdx.x; b < BINS; b += THREADS) own[b] = 0;
  __syncthreads();
  EVERY(i, n) {
    u64 key = key_of(values[i]);
    if (key >= low && (width == 64 || (key - low) >> width == 0)) atomicAdd(&own[(key - low) >> shift], 1u);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += THREADS)
    if (own[b]) atomicAdd(&bins[b], (u64)own[b]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(&state[3], 1ull) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  u64 counts[BINS / THREADS], sum = 0, total;  // the last block: the range becomes the bin that holds the k-th key
  for (int j = 0; j < BINS / THREADS; j++) {   // bins from the largest keys down
    volatile u64* bin = &bins[BINS - 1 - (int)(threadIdx.x * (BINS / THREADS) + j)];
    counts[j] = *bin, *bin = 0, sum += counts[j];
  }
  u64 above = block_scan(sum, &total);
  for (int j = 0; j < BINS / THREADS; above += counts[j], j++)
    if (above < rank && rank <= above + counts[j]) {
      chosen[0] = BINS - 1 - (threadIdx.x * (BINS / THREADS) + j);
      chosen[1] = above;
    }
  __syncthreads();
  if (threadIdx.x == 0) {
    state[0] = low + (chosen[0] << shift);
    state[1] = shift;
    state[2] = rank - chosen[1];
    state[3] = 0;
  }
}

// What 0 ... n-1 become by a keyed permutation of numbers below `length`, see reference.random_indices.
extern "C" __global__ void permuted(u64 length, u32 half, u64 key, u32 rounds, INDEX* out, u64 n) {
  u64 mask = (1ull << half) - 1;
  EVERY(i, n) {
    u64 x = i;
    do {
      u64 left = x >> half, right = x & mask;
      for (u32 number = 0; number < rounds; number++) {
        u64 z = (right + key + number * 0xD1B54A32D192ED03ull) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        u64 next = left ^ ((z ^ (z >> 31)) & mask);
        left = right, right = next;
      }
      x = left << half | right;
    } while (x >= length);
    out[i] = (INDEX)x;
  }
}
