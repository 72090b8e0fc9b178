/* A stand-in for CUDA's driver, for tests of what calls it: names, types and order of arguments, contexts, codes.

   Device memory is memfds, a handle names one of the exporter's (pid, descriptor, inode), copies are done when the
   call returns. Calls that want a current context answer 201 without one, as the driver does. standin_block makes
   cuIpcCloseMemHandle and cuMemUnmap block for so many seconds. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };
enum { PLACES = 4096, TOTAL = 1 << 30 };

typedef struct { char bytes[64]; } Token;
typedef struct { int pid, fd; uint64_t inode, size; } Name;
typedef struct { char *at; size_t size; int fd, opened; } Place;
typedef struct { uint64_t recorded; int fd, crosses; } Event;

static Place places[PLACES];
static size_t used;
static int retained, started;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread void *stack[16];
static __thread int depth;

static int current(void) { return depth > 0 && stack[depth - 1] == (void *)0xC0DE; }
int standin_depth(void) { return depth; }
int standin_retained(void) { return retained; }

static Place *place_of(uint64_t address) {
  for (int i = 0; i < PLACES; i++)
    if (places[i].at && (uint64_t)places[i].at <= address && address < (uint64_t)places[i].at + places[i].size)
      return &places[i];
  return NULL;
}

static int put(char *at, size_t size, int fd, int opened) {
  for (int i = 0; i < PLACES; i++)
    if (!places[i].at) {
      places[i] = (Place){at, size, fd, opened};
      return OK;
    }
  return OUT_OF_MEMORY;
}

static int name_of(int fd, size_t size, Token *token) {
  struct stat found;
  memset(token, 0, sizeof *token);
  fstat(fd, &found);
  Name name = {getpid(), fd, found.st_ino, size};
  memcpy(token, &name, sizeof name);
  return OK;
}

static int open_named(const Token *token, Name *name) {
  char path[64];
  struct stat found;
  memcpy(name, token, sizeof *name);
  snprintf(path, sizeof path, "/proc/%d/fd/%d", name->pid, name->fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd >= 0 && (fstat(fd, &found) || found.st_ino != name->inode)) {
    close(fd);
    return -1;
  }
  return fd;
}

int cuInit(unsigned flags) { started = 1; return flags ? INVALID_VALUE : OK; }
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuDeviceGetCount(int *count) { *count = 1; return started ? OK : 3; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? INVALID_DEVICE : OK; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Stand-in"); return device; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  for (int i = 0; i < 16; i++) uuid[i] = i % 4 ? 0xA0 + i : 0; /* zero bytes, where a C string would end */
  return device;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = TOTAL; return device; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 99 || which == 113; return device; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0xC0DE; retained++; return device; }
int cuDevicePrimaryCtxRelease_v2(int device) { retained--; return device; }
int cuCtxPushCurrent_v2(void *context) { if (depth == 16) abort(); stack[depth++] = context; return OK; }
int cuCtxPopCurrent_v2(void **context) { if (!depth) return INVALID_CONTEXT; *context = stack[--depth]; return OK; }
int cuMemGetInfo_v2(size_t *left, size_t *total) {
  *total = TOTAL;
  *left = TOTAL - used;
  return current() ? OK : INVALID_CONTEXT;
}

int standin_malloc(uint64_t *address, size_t size) {
  if (!current()) return INVALID_CONTEXT;
  pthread_mutex_lock(&lock);
  int code = used + size > TOTAL ? OUT_OF_MEMORY : OK;
  if (!code) {
    int fd = memfd_create("stand-in", MFD_CLOEXEC);
    if (ftruncate(fd, size)) abort();
    char *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    memset(at, 0xEE, size); /* nobody may count on zeros */
    code = put(at, size, fd, 0);
    used += size;
    *address = (uint64_t)at;
  }
  pthread_mutex_unlock(&lock);
  return code;
}

static int end(uint64_t address, int opened) {
  pthread_mutex_lock(&lock);
  Place *place = place_of(address);
  int code = place && (uint64_t)place->at == address && place->opened == opened ? OK : INVALID_VALUE;
  if (!code) {
    munmap(place->at, place->size);
    close(place->fd);
    if (!opened) used -= place->size;
    place->at = NULL;
  }
  pthread_mutex_unlock(&lock);
  return code;
}

int standin_free(uint64_t address) { return current() ? end(address, 0) : INVALID_CONTEXT; }

int cuIpcGetMemHandle(Token *token, uint64_t address) {
  Place *place = place_of(address);
  if (!current()) return INVALID_CONTEXT;
  return place && !place->opened ? name_of(place->fd, place->size, token) : INVALID_VALUE;
}
int cuIpcOpenMemHandle_v2(uint64_t *address, Token token, unsigned flags) {
  Name name;
  if (!current()) return INVALID_CONTEXT;
  if (flags != 1) return INVALID_VALUE;
  int fd = open_named(&token, &name);
  if (fd < 0) return INVALID_HANDLE;
  if (name.pid == getpid()) return INVALID_CONTEXT;
  char *at = mmap(NULL, name.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  pthread_mutex_lock(&lock);
  int code = put(at, name.size, fd, 1);
  pthread_mutex_unlock(&lock);
  *address = (uint64_t)at;
  return code;
}
static volatile double block_s;
void standin_block(double seconds) { block_s = seconds; }
static void block(void) {
  double s = block_s;
  struct timespec pause = {(time_t)s, (long)((s - (time_t)s) * 1e9)};
  if (s > 0) nanosleep(&pause, NULL);
}
int cuIpcCloseMemHandle(uint64_t address) {
  if (!current()) return INVALID_CONTEXT;
  block();
  return end(address, 1);
}

static Event *new_event(int fd, int crosses) {
  Event *event = malloc(sizeof *event);
  *event = (Event){0, fd, crosses};
  return event;
}
int cuEventCreate(void **event, unsigned flags) {
  if (!current()) return INVALID_CONTEXT;
  if (flags != 6 && flags != 2) return INVALID_VALUE;
  int fd = memfd_create("event", MFD_CLOEXEC);
  *event = new_event(fd, flags == 6);
  return OK;
}
int cuEventDestroy_v2(Event *event) {
  if (!current()) return INVALID_CONTEXT;
  close(event->fd);
  free(event);
  return OK;
}
int cuEventRecord(Event *event, void *stream) { (void)stream; event->recorded++; return current() ? OK : INVALID_CONTEXT; }
int cuEventQuery(Event *event) { return current() ? (event ? OK : INVALID_HANDLE) : INVALID_CONTEXT; }
int cuIpcGetEventHandle(Token *token, Event *event) {
  if (!current()) return INVALID_CONTEXT;
  return event->crosses ? name_of(event->fd, 0, token) : INVALID_HANDLE;
}
int cuIpcOpenEventHandle(void **event, Token token) {
  Name name;
  if (!current()) return INVALID_CONTEXT;
  int fd = open_named(&token, &name);
  if (fd < 0) return INVALID_HANDLE;
  *event = new_event(fd, 0);
  return name.pid == getpid() ? INVALID_CONTEXT : OK;
}

int cuStreamCreate(void **stream, unsigned flags) { *stream = malloc(1); return current() && flags == 1 ? OK : INVALID_VALUE; }
int cuStreamDestroy_v2(void *stream) { free(stream); return current() ? OK : INVALID_CONTEXT; }
int cuStreamQuery(void *stream) { (void)stream; return current() ? OK : INVALID_CONTEXT; }

int standin_copy(uint64_t to, uint64_t from, size_t size, int kind) {
  if (!current()) return INVALID_CONTEXT;
  if (kind < 1 || kind > 3) return INVALID_VALUE;
  Place *target = place_of(to), *source = place_of(from);
  if (kind != 2 && (!target || to + size > (uint64_t)target->at + target->size)) return INVALID_VALUE;
  if (kind != 1 && (!source || from + size > (uint64_t)source->at + source->size)) return INVALID_VALUE;
  memmove((void *)to, (void *)from, size);
  return OK;
}
int standin_set(uint64_t to, int value, size_t size) {
  Place *target = place_of(to);
  if (!current() || !target || to + size > (uint64_t)target->at + target->size) return INVALID_VALUE;
  memset((void *)to, value, size);
  return OK;
}
int standin_current(void) { return current() ? OK : INVALID_CONTEXT; }

/* Memory as descriptors, as cuda-bindings asks for it. */
typedef struct { int fd; size_t size; } Physical;
typedef struct { int type, handle_types, location_type, location_id; } Properties;
typedef struct { int location_type, location_id, flags; } Access;

int cuMemGetAllocationGranularity(size_t *size, const Properties *wanted, int option) {
  *size = 2 << 20;
  return wanted->type == 1 && wanted->handle_types == 1 && wanted->location_type == 1 ? option : INVALID_VALUE;
}
int cuMemCreate(Physical **memory, size_t size, const Properties *wanted, unsigned long long flags) {
  if (flags || wanted->location_id || size % (2 << 20)) return INVALID_VALUE;
  *memory = malloc(sizeof **memory);
  **memory = (Physical){memfd_create("physical", MFD_CLOEXEC), size};
  return ftruncate((*memory)->fd, size) ? OUT_OF_MEMORY : OK;
}
int cuMemExportToShareableHandle(void *descriptor, Physical *memory, int type, unsigned long long flags) {
  *(int *)descriptor = dup(memory->fd);
  return type == 1 && !flags ? OK : INVALID_VALUE;
}
int cuMemImportFromShareableHandle(Physical **memory, void *descriptor, int type) {
  struct stat found;
  if (type != 1 || fstat((int)(intptr_t)descriptor, &found)) return INVALID_VALUE;
  *memory = malloc(sizeof **memory);
  **memory = (Physical){dup((int)(intptr_t)descriptor), found.st_size};
  return OK;
}
int cuMemRelease(Physical *memory) { close(memory->fd); free(memory); return OK; }
int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t wanted, unsigned long long flags) {
  if (alignment || wanted || flags) return INVALID_VALUE;
  *address = (uint64_t)mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return OK;
}
int cuMemAddressFree(uint64_t address, size_t size) { return munmap((void *)address, size) ? INVALID_VALUE : OK; }
int cuMemMap(uint64_t address, size_t size, size_t offset, Physical *memory, unsigned long long flags) {
  if (offset || flags || size > memory->size) return INVALID_VALUE;
  mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0);
  pthread_mutex_lock(&lock);
  int code = put((char *)address, size, -1, 2);
  pthread_mutex_unlock(&lock);
  return code;
}
int cuMemSetAccess(uint64_t address, size_t size, const Access *access, size_t count) {
  if (count != 1 || access->flags != 3 || access->location_type != 1) return INVALID_VALUE;
  return mprotect((void *)address, size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK;
}
int cuMemUnmap(uint64_t address, size_t size) {
  block();
  pthread_mutex_lock(&lock);
  Place *place = place_of(address);
  int code = place && place->size == size && place->opened == 2 ? OK : INVALID_VALUE;
  if (!code) {
    mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    place->at = NULL;
  }
  pthread_mutex_unlock(&lock);
  return code;
}

/* How cuda-bindings finds them. */
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
  (void)version, (void)flags;
  *function = dlsym(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), symbol);
  if (status) *status = *function ? 0 : 1;
  return *function ? OK : 500;
}
