// Selection in one pass over memory. ADD is the type code of an addend (0: none), see common.cu.

#ifndef ADD
#define ADD 0
#endif
#define ROWS 16  // items of a thread: item r * THREADS + thread of the tile, so that warps read whole lines
#define TILE (ROWS * THREADS)
#define FLAG_OWN (1ull << 62)
#define FLAG_ALL (2ull << 62)
#define COUNTS ((1ull << 62) - 1)  // of a state: 31 bits of entries above the key, 31 bits of entries equal to it

#if ADD
__device__ BITS with_addend(BITS x, const void* addend, u64 i, number scale) {
  number a = ROUND(READ_AS(ADD, addend, i));
  return (BITS)TO_BITS(FROM_BITS(x) + ROUND(scale * a));
}
#endif

// The counts of all tiles before `tile` (Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled
// Look-back", 2016). Called by one whole warp; tiles are numbered in the order in which blocks start.
__device__ u64 look_back(volatile u64* states, u64 tile, u64 own) {
  int lane = threadIdx.x % 32;
  if (tile == 0) {
    if (lane == 0) states[0] = FLAG_ALL | own;
    return 0;
  }
  if (lane == 0) states[tile] = FLAG_OWN | own;
  u64 before = 0;
  for (i64 last = (i64)tile - 1;; last -= 32) {
    u64 state = FLAG_ALL;  // in front of the first tile
    if (last >= lane)
      do state = states[last - lane];
      while (state >> 62 == 0);
    u32 whole = __ballot_sync(ALL, state >> 63);
    int stop = whole ? __ffs(whole) - 1 : 31;
    u64 part = lane <= stop ? state & COUNTS : 0;
    for (int d = 16; d; d >>= 1) part += __shfl_xor_sync(ALL, part, d);
    before += part;
    if (whole) break;
  }
  if (lane == 0) states[tile] = FLAG_ALL | (before + own);
  return before;
}

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

// Entries with a key > `above`, and the first `ties` of those == `above` (all > and none == if `ties` is 0), in order,
// into out_*[offset ...], as long as there is room. scratch: 0 tiles begun; 1 how many entries there are; 2 how many of
// them are ties; then a state for each tile. All zero before.
extern "C" __global__ void take(BITS* values, u64 n, BITS above, u32 all, u64 ties, const INDEX* indices, u64 first,
                                const void* addend, double scale, u32 clear, INDEX* out_i, BITS* out_v, u64 offset,
                                u64 room, double* moments, u64* scratch) {
  __shared__ u32 counts[ROWS * WARPS];
  __shared__ u64 shared[2];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) shared[0] = atomicAdd(&scratch[0], 1ull);
  __syncthreads();
  u64 tile = shared[0], start = tile * TILE;
  BITS items[ROWS];
  u32 over = 0, same = 0;  // one bit a row
  for (int r = 0; r < ROWS; r++) {
    u64 i = start + (u64)r * THREADS + threadIdx.x;
    items[r] = i < n ? values[i] : 0;
  }
  for (int r = 0; r < ROWS; r++) {
    u64 i = start + (u64)r * THREADS + threadIdx.x;
#if ADD
    if (i < n) items[r] = with_addend(items[r], addend, i, ROUND(scale));
#endif
    BITS key = key_of(items[r]);
    int is_over = i < n && (key > above || all), is_same = i < n && !all && ties && key == above;
    u32 overs = __ballot_sync(ALL, is_over), sames = __ballot_sync(ALL, is_same);
    over |= (u32)is_over << r;
    same |= (u32)is_same << r;
    if (lane == 0) counts[r * WARPS + warp] = __popc(overs) | __popc(sames) << 16;
  }
#if MOMENTS
  write_moments(items, start, n, moments + 4 * tile);
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
    u32 total = __shfl_sync(ALL, scanned, 31), base = scanned - sum;
    for (int j = 0; j < 4; j++) counts[4 * lane + j] = base, base += own[j];
    u64 mine = (u64)(total & 0xffff) << 31 | total >> 16;
    u64 before = look_back(scratch + 3, tile, mine);
    if (lane == 0) {
      shared[1] = before;
      if (start + TILE >= n) {
        u64 end = before + mine, tied = end & 0x7fffffff;
        scratch[2] = tied < ties ? tied : ties;
        scratch[1] = (end >> 31) + scratch[2];
      }
    }
  }
  __syncthreads();
  u64 overs_before = shared[1] >> 31, sames_before = shared[1] & 0x7fffffff;
  u32 lower = (1u << lane) - 1;
  for (int r = 0; r < ROWS; r++) {
    u32 overs = __ballot_sync(ALL, over >> r & 1), sames = __ballot_sync(ALL, same >> r & 1);
    u64 i = start + (u64)r * THREADS + threadIdx.x;
    int taken = 0;
    if (i < n) {
      u32 base = counts[r * WARPS + warp];
      u64 o = overs_before + (base & 0xffff) + __popc(overs & lower);
      u64 s = sames_before + (base >> 16) + __popc(sames & lower);
      u64 position = o + (s < ties ? s : ties);
      taken = ((over >> r & 1) || ((same >> r & 1) && s < ties)) && position < room;
      if (taken) {
        out_i[offset + position] = indices ? indices[i] : (INDEX)(first + i);
        out_v[offset + position] = items[r];
      }
#if ADD
      values[i] = taken && clear ? 0 : items[r];
#else
      if (taken && clear) values[i] = 0;
#endif
    }
  }
}

// values[positions[i]] = 0.
extern "C" __global__ void clear(BITS* values, const INDEX* positions, u64 count) {
  EVERY(i, count) values[positions[i]] = 0;
}

// values[positions[i]] = taken[i].
extern "C" __global__ void put_back(BITS* values, const INDEX* positions, const BITS* taken, u64 count) {
  EVERY(i, count) values[positions[i]] = taken[i];
}

// values += scale * addend.
#if ADD
extern "C" __global__ void accumulate(BITS* values, u64 n, const void* addend, double scale) {
  EVERY(i, n) values[i] = with_addend(values[i], addend, i, ROUND(scale));
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

// The k-th largest key by digits of DIGIT bits. state: 0 ~smallest key, 1 largest key (as `key_range` leaves them),
// 2 low end of the range that holds it, 3 bits of the range's width, 4 its rank in the range.
#define DIGIT 11
#define BINS (1 << DIGIT)

__device__ u64 range_width(const u64* state) { return state[3] > DIGIT ? state[3] - DIGIT : 0; }

extern "C" __global__ void kth_begin(u64* state, u64 k) {
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    u64 width = state[1] - ~state[0];
    state[2] = ~state[0];
    state[3] = width ? 64 - __clzll((i64)width) : 0;
    state[4] = k;
  }
}

extern "C" __global__ void kth_count(const BITS* values, u64 n, const u64* state, u64* bins) {
  __shared__ u32 own[BINS];
  if (state[3] == 0) return;  // found
  u64 low = state[2], width = state[3], shift = range_width(state);
  for (int b = threadIdx.x; b < BINS; b += THREADS) own[b] = 0;
  __syncthreads();
  EVERY(i, n) {
    u64 key = key_of(values[i]);
    if (key >= low && (width == 64 || (key - low) >> width == 0)) atomicAdd(&own[(key - low) >> shift], 1u);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += THREADS)
    if (own[b]) atomicAdd(&bins[b], (u64)own[b]);
}

// One block: the range becomes the bin with the k-th key in it, and the bins zero.
extern "C" __global__ void kth_choose(u64* state, u64* bins) {
  __shared__ u64 chosen[2];
  if (state[3] == 0) return;
  u64 shift = range_width(state), rank = state[4], own[BINS / THREADS], sum = 0, total;
  for (int j = 0; j < BINS / THREADS; j++) {  // bins from the largest keys down
    int b = BINS - 1 - (int)(threadIdx.x * (BINS / THREADS) + j);
    own[j] = bins[b], bins[b] = 0, sum += own[j];
  }
  u64 above = block_scan(sum, &total);
  for (int j = 0; j < BINS / THREADS; above += own[j], j++)
    if (above < rank && rank <= above + own[j]) {
      chosen[0] = BINS - 1 - (threadIdx.x * (BINS / THREADS) + j);
      chosen[1] = above;
    }
  __syncthreads();
  if (threadIdx.x == 0) {
    state[2] += chosen[0] << shift;
    state[3] = shift;
    state[4] = rank - chosen[1];
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
