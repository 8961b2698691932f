// What the sources of this folder share. They are compiled once for each combination of types, given by macros:
//   BITS    unsigned type of a value's bit pattern (u16, u32, u64)     FLOATS  1 for floats, 0 for signed integers
//   INDEX   type of indices (u32, u64)
// No source adds floats by atomics: the order of every sum is fixed, and is that of sparsecoll.kernels.reference.
// Compile with --fmad=false: a product is rounded before it is added.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define THREADS 256  // in every block
#define WARPS 8
#define EVERY(i, n) for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < (n); i += (u64)gridDim.x * THREADS)
#define ALL 0xffffffffu

#ifndef BITS
#define BITS u32
#endif
#ifndef FLOATS
#define FLOATS 1
#endif
#ifndef INDEX
#define INDEX u32
#endif

#define SIGN ((BITS)((BITS)1 << (8 * sizeof(BITS) - 1)))

// The magnitude of a value as an unsigned number that orders like it; NaN above infinity.
__device__ BITS key_of(BITS x) {
#if FLOATS
  return x & (BITS)~SIGN;
#else
  return x & SIGN ? (BITS)(0 - x) : x;
#endif
}

__device__ float half_to_float(u16 h) {
  u32 sign = (u32)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0);
  } else if (exponent) {
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  } else {
    float magnitude = (float)fraction * 5.9604644775390625e-8f;  // 2^-24: exact
    return sign ? -magnitude : magnitude;
  }
  return __uint_as_float(bits);
}

// Rounds to nearest even, once, from float or double.
__device__ u16 to_half(double x) {
  u64 bits = (u64)__double_as_longlong(x);
  u16 sign = (u16)(bits >> 48 & 0x8000);
  u64 magnitude = bits & 0x7fffffffffffffffull;
  if (magnitude > 0x7ff0000000000000ull) return sign | 0x7e00 | (u16)(magnitude >> 42 & 0x1ff);
  if (magnitude >= 0x40effe0000000000ull) return sign | 0x7c00;  // 65520 and above
  int exponent = (int)(magnitude >> 52) - 1023;
  if (exponent < -25) return sign;
  u64 fraction = (magnitude & 0xfffffffffffffull) | 0x10000000000000ull;  // 53 bits
  int drop = exponent < -14 ? 42 - 14 - exponent : 42;                   // subnormal halves have fewer bits
  u64 kept = fraction >> drop, rest = fraction & ((1ull << drop) - 1), middle = 1ull << (drop - 1);
  kept += rest > middle || (rest == middle && (kept & 1));
  if (exponent < -14) return sign | (u16)kept;
  return sign | (u16)(((u64)(exponent + 14) << 10) + kept);  // the leading bit adds one to the exponent
}

// Values of one type as another: CODE is 2 (float16), 4 (float32), 8 (float64), 14 (int32), 18 (int64).
#define READ_2(p, i) half_to_float(((const u16*)(p))[i])
#define READ_4(p, i) ((const float*)(p))[i]
#define READ_8(p, i) ((const double*)(p))[i]
#define READ_14(p, i) ((const int*)(p))[i]
#define READ_18(p, i) ((const i64*)(p))[i]
#define GLUE(a, b) a##b
#define READ_AS(code, p, i) GLUE(READ_, code)(p, i)

// Arithmetic of values of the type VALUE, each operation rounded to that type.
#ifndef VALUE
#define VALUE 4
#endif
#if VALUE == 2
typedef float number;  // the sum and the product of two halves, rounded to float and then to half, are rounded right
#define ROUND(x) half_to_float(to_half(x))
#define FROM_BITS(x) half_to_float(x)
#define TO_BITS(x) to_half(x)
#elif VALUE == 4
typedef float number;
#define ROUND(x) ((float)(x))
#define FROM_BITS(x) __uint_as_float(x)
#define TO_BITS(x) __float_as_uint(x)
#elif VALUE == 8
typedef double number;
#define ROUND(x) ((double)(x))
#define FROM_BITS(x) __longlong_as_double((i64)(x))
#define TO_BITS(x) ((u64)__double_as_longlong(x))
#elif VALUE == 14
typedef int number;
#define ROUND(x) ((int)(x))
#define FROM_BITS(x) ((int)(x))
#define TO_BITS(x) ((u32)(x))
#elif VALUE == 18
typedef i64 number;
#define ROUND(x) ((i64)(x))
#define FROM_BITS(x) ((i64)(x))
#define TO_BITS(x) ((u64)(x))
#endif

// Sum over the block of one number a thread; every thread gets it.
__device__ u64 block_sum(u64 x) {
  __shared__ u64 parts[WARPS];
  for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(ALL, x, d);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int w = 0; w < WARPS; w++) x += parts[w];
  return x;
}

// Sum of the numbers of the threads before this one in the block, and of all of them.
__device__ u64 block_scan(u64 x, u64* total) {
  __shared__ u64 ends[WARPS];
  u64 own = x;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int d = 1; d < 32; d <<= 1) {
    u64 before = __shfl_up_sync(ALL, x, d);
    if (lane >= d) x += before;
  }
  __syncthreads();
  if (lane == 31) ends[warp] = x;
  __syncthreads();
  u64 base = 0, sum = 0;
  for (int w = 0; w < WARPS; w++) {
    if (w < warp) base += ends[w];
    sum += ends[w];
  }
  *total = sum;
  return base + x - own;
}
