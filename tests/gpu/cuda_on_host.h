// Runs CUDA C on the host: blocks one after the other, the threads of a block as coroutines that change over at barriers
// and at warp operations. ORDER (environment variable SPARSECOLL_THREAD_ORDER=1) runs threads from the last to the
// first, so that a missing barrier shows. No model of speed, of memory ordering between blocks, or of divergence.
#undef _FORTIFY_SOURCE
#include <setjmp.h>
#include <string.h>
#include <ucontext.h>
extern "C" {  // the standard library's headers would take longer to compile than the kernels
char* getenv(const char*);
void* malloc(unsigned long);
float rintf(float);
float floorf(float);
double frexp(double, int*);
double ldexp(double, int);
}

#define __global__
#define __device__ static inline
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)

struct Place { unsigned x, y, z; };
static Place threadIdx, blockIdx, blockDim, gridDim;

namespace host {
static const unsigned STACK = 1 << 16;
static const unsigned MOST = 1024;  // threads of a block
static ucontext_t contexts[MOST];
static struct Jump { jmp_buf place; } jumps[MOST];  // to change over without system calls, once a thread has begun
static jmp_buf home;
static char* stacks[MOST];
static char begun[MOST], finished[MOST];
static unsigned current, living, arrived, generation;
static unsigned warp_arrived[32], warp_generation[32];
static unsigned long long slots[1024];
static void (*entry)(void**);
static void** arguments;

static void run() {
  entry(arguments);
  finished[current] = 1;
  living--;
  _longjmp(home, 1);
}
static void yield() {
  unsigned me = current;
  if (!_setjmp(jumps[me].place)) _longjmp(home, 1);
}
static void barrier() {
  unsigned mine = generation;
  if (++arrived == living) {
    arrived = 0;
    generation++;
  } else
    while (generation == mine) yield();
}
static void warp_barrier() {  // whole warps alone
  unsigned w = current / 32, mine = warp_generation[w];
  if (++warp_arrived[w] == 32) {
    warp_arrived[w] = 0;
    warp_generation[w]++;
  } else
    while (warp_generation[w] == mine) yield();
}
template <class T> T exchange(T x, unsigned from) {  // the x of lane `from` of the own warp
  static_assert(sizeof(T) <= 8, "");
  unsigned base = current / 32 * 32;
  memcpy(&slots[current], &x, sizeof(T));
  warp_barrier();
  T y;
  memcpy(&y, &slots[base + from % 32], sizeof(T));
  warp_barrier();
  return y;
}
static int launch(void (*kernel)(void**), void** args, unsigned grid, unsigned block) {
  const char* order = getenv("SPARSECOLL_THREAD_ORDER");
  bool backwards = order && *order == '1';
  entry = kernel, arguments = args;
  gridDim = {grid, 1, 1}, blockDim = {block, 1, 1};
  for (unsigned t = 0; t < block; t++)
    if (!stacks[t]) stacks[t] = (char*)malloc(STACK);
  for (volatile unsigned b = 0; b < grid; b = b + 1) {
    blockIdx = {b, 0, 0};
    living = block, arrived = 0;
    memset(warp_arrived, 0, sizeof warp_arrived);
    for (unsigned t = 0; t < block; t++) {
      begun[t] = finished[t] = 0;
      getcontext(&contexts[t]);
      contexts[t].uc_stack.ss_sp = stacks[t];
      contexts[t].uc_stack.ss_size = STACK;
      contexts[t].uc_link = 0;
      makecontext(&contexts[t], run, 0);
    }
    volatile unsigned idle = 0;
    while (living) {
      volatile unsigned before = living, seen = generation;
      volatile unsigned long long warps = 0, after = 0;
      for (unsigned w = 0; w < 32; w++) warps = warps + warp_generation[w] * 31ull + warp_arrived[w];
      warps = warps + arrived;
      for (volatile unsigned j = 0; j < block; j = j + 1) {
        unsigned t = backwards ? block - 1 - j : j;
        if (finished[t]) continue;
        current = t;
        threadIdx = {t, 0, 0};
        if (_setjmp(home)) continue;
        if (begun[t]) _longjmp(jumps[t].place, 1);
        begun[t] = 1;
        setcontext(&contexts[t]);
      }
      for (unsigned w = 0; w < 32; w++) after = after + warp_generation[w] * 31ull + warp_arrived[w];
      after = after + arrived;
      idle = living == before && seen == generation && warps == after ? idle + 1 : 0;
      if (idle > 3) return 1;  // threads wait for one another for ever: a barrier that not all reach
    }
    if (arrived) return 2;
  }
  return 0;
}
}  // namespace host

#define __syncthreads() host::barrier()
#define __syncwarp(...) host::warp_barrier()
#define __threadfence() ((void)0)
template <class T> static T __shfl_sync(unsigned, T x, int lane) { return host::exchange(x, (unsigned)lane); }
template <class T> static T __shfl_xor_sync(unsigned, T x, int d) { return host::exchange(x, (host::current % 32) ^ d); }
template <class T> static T __shfl_up_sync(unsigned, T x, int d) {
  int lane = (int)(host::current % 32);
  return host::exchange(x, (unsigned)(lane < d ? lane : lane - d));
}
static unsigned __ballot_sync(unsigned, unsigned long long predicate) {
  unsigned bits = 0, base = host::current / 32 * 32;
  host::slots[host::current] = predicate != 0;
  host::warp_barrier();
  for (unsigned l = 0; l < 32; l++) bits |= (unsigned)host::slots[base + l] << l;
  host::warp_barrier();
  return bits;
}
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __ffs(int x) { return __builtin_ffs(x); }
static int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
template <class A, class B> static A cast(B b) {
  static_assert(sizeof(A) == sizeof(B), "");
  A a;
  memcpy(&a, &b, sizeof a);
  return a;
}
static float __uint_as_float(unsigned x) { return cast<float>(x); }
static unsigned __float_as_uint(float x) { return cast<unsigned>(x); }
static double __longlong_as_double(long long x) { return cast<double>(x); }
static long long __double_as_longlong(double x) { return cast<long long>(x); }
template <class T> static T atomicAdd(T* p, T x) { T old = *p; *p += x; return old; }
template <class T> static T atomicOr(T* p, T x) { T old = *p; *p |= x; return old; }
template <class T> static T atomicMax(T* p, T x) { T old = *p; if (x > old) *p = x; return old; }
