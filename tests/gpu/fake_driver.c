// A pretend libcuda.so.1, for an MPI that was built with CUDA, on a machine without a GPU.
//
// Device memory is mapped twice: at the address handed out nobody may read or write (a touch is a segmentation fault, as on
// a GPU), and at a second one, which only the copies here and tests/gpu/fake_cupy.py (by pretend_alias) use. Streams and
// events are done at once. There is no CUDA IPC: set OMPI_MCA_btl_smcuda_use_cuda_ipc=0.
//
//     gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 fake_driver.c
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_FOUND = 500, NOT_SUPPORTED = 801 };
enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_BUFFER_ID = 7, ATTRIBUTE_MANAGED = 8 };
enum { MEMORY_DEVICE = 2, DEVICE_UNIFIED_ADDRESSING = 41 };

typedef int result;
typedef uint64_t address;

static struct block {
  char *device, *alias;
  size_t size;
  uint64_t id;
} *blocks;
static int count, room;
static uint64_t serial;
static char context;
static __thread void *current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int find(address a) {  // with the lock held
  for (int i = 0; i < count; i++)
    if ((char *)a >= blocks[i].device && (char *)a < blocks[i].device + blocks[i].size) return i;
  return -1;
}

address pretend_alias(address a) {
  pthread_mutex_lock(&lock);
  int i = find(a);
  address found = i < 0 ? a : (address)(blocks[i].alias + ((char *)a - blocks[i].device));
  pthread_mutex_unlock(&lock);
  return found;
}

result cuMemAlloc_v2(address *out, size_t size) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  size = (size + page) / page * page;
  int file = memfd_create("pretend", 0);
  if (file < 0 || ftruncate(file, (off_t)size)) return NO_MEMORY;
  char *device = mmap(0, size, PROT_NONE, MAP_SHARED, file, 0);
  char *alias = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (device == MAP_FAILED || alias == MAP_FAILED) return NO_MEMORY;
  pthread_mutex_lock(&lock);
  if (count == room) blocks = realloc(blocks, (size_t)(room = 2 * room + 64) * sizeof *blocks);
  blocks[count++] = (struct block){device, alias, size, ++serial};
  pthread_mutex_unlock(&lock);
  *out = (address)device;
  return OK;
}

result cuMemFree_v2(address a) {
  pthread_mutex_lock(&lock);
  int i = find(a);
  if (i >= 0) {
    munmap(blocks[i].device, blocks[i].size);
    munmap(blocks[i].alias, blocks[i].size);
    blocks[i] = blocks[--count];
  }
  pthread_mutex_unlock(&lock);
  return i < 0 ? INVALID : OK;
}

result cuMemcpy(address to, address from, size_t size) {
  memmove((void *)pretend_alias(to), (void *)pretend_alias(from), size);
  return OK;
}
result cuMemcpyAsync(address to, address from, size_t size, void *stream) { return cuMemcpy(to, from, size); }

result cuMemGetAddressRange_v2(address *base, size_t *size, address a) {
  pthread_mutex_lock(&lock);
  int i = find(a);
  if (i >= 0) *base = (address)blocks[i].device, *size = blocks[i].size;
  pthread_mutex_unlock(&lock);
  return i < 0 ? NOT_FOUND : OK;
}

static result attribute(void *out, int which, address a) {
  pthread_mutex_lock(&lock);
  int i = find(a);
  result known = OK;
  if (which == ATTRIBUTE_CONTEXT)
    *(void **)out = i < 0 ? 0 : &context;
  else if (which == ATTRIBUTE_MEMORY_TYPE)
    *(unsigned *)out = i < 0 ? 0 : MEMORY_DEVICE;
  else if (which == ATTRIBUTE_BUFFER_ID)
    *(uint64_t *)out = i < 0 ? 0 : blocks[i].id;
  else if (which == ATTRIBUTE_MANAGED)
    *(unsigned *)out = 0;
  else
    known = INVALID;
  pthread_mutex_unlock(&lock);
  return known;
}
result cuPointerGetAttribute(void *out, int which, address a) {
  pthread_mutex_lock(&lock);
  int i = find(a);
  pthread_mutex_unlock(&lock);
  return i < 0 ? INVALID : attribute(out, which, a);
}
result cuPointerGetAttributes(unsigned number, int *which, void **out, address a) {
  for (unsigned i = 0; i < number; i++) attribute(out[i], which[i], a);
  return OK;
}
result cuPointerSetAttribute(const void *value, int which, address a) { return OK; }

result cuInit(unsigned flags) { return OK; }
result cuDriverGetVersion(int *version) { return *version = 13000, OK; }
result cuDeviceGetCount(int *number) { return *number = 1, OK; }
result cuDeviceGet(int *device, int number) { return *device = 0, OK; }
result cuDeviceGetAttribute(int *value, int which, int device) {
  return *value = which == DEVICE_UNIFIED_ADDRESSING, OK;
}
result cuDeviceGetPCIBusId(char *text, int size, int device) { return strncpy(text, "0000:01:00.0", (size_t)size), OK; }
result cuDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 1, OK; }
result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, OK; }
result cuDevicePrimaryCtxRetain(void **out, int device) { return *out = &context, OK; }
result cuCtxGetCurrent(void **out) { return *out = current, OK; }
result cuCtxSetCurrent(void *given) { return current = given, OK; }
result cuCtxPushCurrent_v2(void *given) { return OK; }
result cuCtxPopCurrent_v2(void **out) { return OK; }
result cuCtxGetDevice(int *device) { return *device = 0, OK; }
result cuStreamCreate(void **out, unsigned flags) { return *out = calloc(1, 8), OK; }
result cuStreamDestroy_v2(void *stream) { return free(stream), OK; }
result cuStreamSynchronize(void *stream) { return OK; }
result cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return OK; }
result cuEventCreate(void **out, unsigned flags) { return *out = calloc(1, 8), OK; }
result cuEventDestroy_v2(void *event) { return free(event), OK; }
result cuEventQuery(void *event) { return OK; }
result cuEventRecord(void *event, void *stream) { return OK; }
result cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) { return OK; }
result cuMemHostUnregister(void *memory) { return OK; }

result cuIpcGetMemHandle(void *handle, address a) { return NOT_SUPPORTED; }
result cuIpcOpenMemHandle_v2(address *out, ...) { return NOT_SUPPORTED; }
result cuIpcCloseMemHandle(address a) { return NOT_SUPPORTED; }
result cuIpcGetEventHandle(void *handle, void *event) { return NOT_SUPPORTED; }
result cuIpcOpenEventHandle(void **out, ...) { return NOT_SUPPORTED; }
result cuMemGetAccess(uint64_t *flags, const void *location, address a) { return NOT_SUPPORTED; }
result cuMemRetainAllocationHandle(uint64_t *handle, void *a) { return INVALID; }
result cuMemGetAllocationPropertiesFromHandle(void *properties, uint64_t handle) { return INVALID; }
result cuMemRelease(uint64_t handle) { return OK; }
result cuMemPoolGetAccess(int *flags, void *pool, void *location) { return NOT_SUPPORTED; }
