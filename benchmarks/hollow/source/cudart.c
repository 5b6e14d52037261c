/* The CUDA runtime, as far as PyTorch and bitsandbytes look at its answers; every other function of it answers 0 (see build.py).
 *
 * Device memory is host memory that nobody writes, so that the pages of large blocks never exist. Copies from the host are made up to COPIED bytes: larger
 * ones are weights or batches, which nothing reads. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "device.h"

#define PAGE (2UL << 20)
#define ADDRESSES (1UL << 43)
#define COPIED (1UL << 20)
#define BUCKETS 4096

static __thread cudaError_t last_error;
static int begun_by; /* CUDA does not survive a fork */

static cudaError_t fail(cudaError_t error) { return last_error = error; }

static cudaError_t begin(void) {
    if (!begun_by) begun_by = getpid();
    if (begun_by != getpid()) return fail(cudaErrorInitializationError);
    hollow_context();
    return cudaSuccess;
}

static int visible(void) {
    const char *devices = getenv("CUDA_VISIBLE_DEVICES");
    return !(devices && (!*devices || !strcmp(devices, "-1")));
}

/* --- memory */

typedef struct Block {
    char *start;
    size_t size;
    struct Block *next;
} Block;

static Block *blocks[BUCKETS];
static pthread_mutex_t blocks_mutex = PTHREAD_MUTEX_INITIALIZER;

static Block **bucket(const void *p) { return &blocks[((uintptr_t)p >> 21) % BUCKETS]; }

static size_t pages(size_t size) { return (size + PAGE - 1) / PAGE * PAGE; }

/* What the driver takes for a block: whole pages of 2 MiB, or a share of one. */
static size_t taken(size_t size) { return size >= PAGE / 2 ? pages(size) : (size + 511) / 512 * 512; }

/* Addresses rise, as a card's do: the caching allocator takes the lowest of equal blocks. None is given twice. */
static char *map_pages(size_t size) {
    static char *next;
    pthread_mutex_lock(&blocks_mutex);
    if (!next) {
        char *space = mmap(0, ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (space != MAP_FAILED) next = (char *)(((uintptr_t)space + PAGE - 1) / PAGE * PAGE);
    }
    char *start = next;
    if (start) next += size;
    pthread_mutex_unlock(&blocks_mutex);
    if (!start || mprotect(start, size, PROT_READ | PROT_WRITE)) return 0;
    madvise(start, size, MADV_NOHUGEPAGE);
    return start;
}

cudaError_t cudaMalloc(void **out, size_t size) {
    *out = 0;
    cudaError_t error = begin();
    if (error) return error;
    if (hollow_take(taken(size))) return fail(cudaErrorMemoryAllocation);
    char *start = map_pages(pages(size));
    if (!start) {
        hollow_give(taken(size));
        return fail(cudaErrorMemoryAllocation);
    }
    Block *block = malloc(sizeof *block);
    pthread_mutex_lock(&blocks_mutex);
    *block = (Block){start, size, *bucket(start)};
    *bucket(start) = block;
    pthread_mutex_unlock(&blocks_mutex);
    *out = start;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p) {
    cudaError_t error = begin();
    if (error || !p) return error;
    pthread_mutex_lock(&blocks_mutex);
    Block **link = bucket(p);
    while (*link && (*link)->start != p) link = &(*link)->next;
    Block *block = *link;
    if (block) *link = block->next;
    pthread_mutex_unlock(&blocks_mutex);
    if (!block) return fail(cudaErrorInvalidValue);
    madvise(p, pages(block->size), MADV_DONTNEED);
    mprotect(p, pages(block->size), PROT_NONE);
    hollow_give(taken(block->size));
    free(block);
    return cudaSuccess;
}

static int on_device(const void *p) {
    int found = 0;
    pthread_mutex_lock(&blocks_mutex);
    for (int i = 0; i < BUCKETS && !found; i++)
        for (Block *b = blocks[i]; b && !found; b = b->next) found = (char *)p >= b->start && (char *)p < b->start + pages(b->size);
    pthread_mutex_unlock(&blocks_mutex);
    return found;
}

cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t stream) { return cudaMalloc(out, size); }

cudaError_t cudaFreeAsync(void *p, cudaStream_t stream) { return cudaFree(p); }

cudaError_t cudaMallocManaged(void **out, size_t size, unsigned flags) { return cudaMalloc(out, size); }

cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags) {
    cudaError_t error = begin();
    if (error) return error;
    return posix_memalign(out, 4096, size ? size : 1) ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaFreeHost(void *p) {
    free(p);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    cudaError_t error = begin();
    if (error) return error;
    *total = hollow_total();
    *unused = *total - hollow_used();
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    cudaError_t error = begin();
    if (error || kind == cudaMemcpyDeviceToDevice) return error;
    if (on_device(to) && (size > COPIED || on_device(from))) return cudaSuccess;
    memcpy(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return cudaMemcpy(to, from, size, kind);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream) {
    for (size_t row = 0; row < height; row++) {
        cudaError_t error = cudaMemcpy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind);
        if (error) return error;
    }
    return cudaSuccess;
}

cudaError_t cudaMemset(void *p, int value, size_t size) {
    if (size <= COPIED) memset(p, value, size);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t size, cudaStream_t stream) { return cudaMemset(p, value, size); }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p) {
    memset(out, 0, sizeof *out);
    out->type = on_device(p) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    out->devicePointer = out->type == cudaMemoryTypeDevice ? (void *)p : 0;
    return cudaSuccess;
}

/* --- device */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 0;
    if (!visible()) return fail(cudaErrorNoDevice);
    if (begun_by && begun_by != getpid()) return fail(cudaErrorInitializationError);
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return visible() ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) { return device ? fail(cudaErrorInvalidDevice) : begin(); }

cudaError_t cudaDeviceSynchronize(void) { return begin(); }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    const char *name = getenv("HOLLOW_NAME");
    int capability = hollow_setting("HOLLOW_CAPABILITY", 90), large = capability != 80 && capability >= 90 && capability < 120;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "Hollow %s", name ? name : "card");
    out->major = capability / 10;
    out->minor = capability % 10;
    out->totalGlobalMem = hollow_total();
    out->multiProcessorCount = hollow_setting("HOLLOW_MULTIPROCESSORS", 132);
    out->sharedMemPerBlock = 48 << 10;
    out->sharedMemPerMultiprocessor = (large ? 228 : capability == 80 ? 164 : 100) << 10;
    out->sharedMemPerBlockOptin = out->sharedMemPerMultiprocessor - 1024;
    out->regsPerBlock = out->regsPerMultiprocessor = 65536;
    out->warpSize = 32;
    out->maxThreadsPerBlock = 1024;
    out->maxThreadsPerMultiProcessor = capability == 75 ? 1024 : capability == 86 || capability == 89 || capability >= 120 ? 1536 : 2048;
    out->maxBlocksPerMultiProcessor = 32;
    for (int i = 0; i < 3; i++) {
        out->maxThreadsDim[i] = i < 2 ? 1024 : 64;
        out->maxGridSize[i] = i ? 65535 : 2147483647;
    }
    out->totalConstMem = 65536;
    out->textureAlignment = 512;
    out->l2CacheSize = 50 << 20;
    out->memoryBusWidth = 5120;
    out->memPitch = 2147483647;
    out->unifiedAddressing = out->canMapHostMemory = out->concurrentKernels = out->pciBusID = 1;
    for (int i = 0; i < 16; i++) out->uuid.bytes[i] = i + 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp all;
    cudaGetDeviceProperties(&all, device);
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount: *value = all.multiProcessorCount; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = all.maxThreadsPerBlock; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = all.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrWarpSize: *value = all.warpSize; break;
        case cudaDevAttrComputeCapabilityMajor: *value = all.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = all.minor; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = all.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = all.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = all.sharedMemPerMultiprocessor; break;
        case cudaDevAttrMaxGridDimX: *value = all.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: *value = all.maxGridSize[1]; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = all.regsPerBlock; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = all.maxBlocksPerMultiProcessor; break;
        case cudaDevAttrL2CacheSize: *value = all.l2CacheSize; break;
        case cudaDevAttrClockRate: *value = 1980000; break;
        default: *value = 1;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *out, int size, int device) {
    snprintf(out, size, "0000:01:00.0");
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInitializationError: return "initialization error";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        default: return "an error of the hollow device";
    }
}

const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInitializationError: return "cudaErrorInitializationError";
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        default: return "cudaErrorUnknown";
    }
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

/* --- streams and events: what is asked for has already been done */

static void *handle(void) {
    static char handles[1 << 16];
    static unsigned next;
    return &handles[__sync_fetch_and_add(&next, 1) % sizeof handles];
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = handle();
    return begin();
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

#if CUDART_VERSION >= 13000
#define EDGES const cudaGraphEdgeData **edges,
#else
#define EDGES
#endif

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies, EDGES size_t *count) {
    if (id) *id = 0;
    return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof(struct timespec));
    return begin();
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    struct timespec *a = (struct timespec *)from, *b = (struct timespec *)to;
    *milliseconds = (b->tv_sec - a->tv_sec) * 1e3f + (b->tv_nsec - a->tv_nsec) / 1e6f;
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned flags) {
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}

/* --- kernels: known, never run */

void **__cudaRegisterFatBinary(void *binary) { return calloc(1, sizeof(void *)); }

cudaError_t __cudaGetKernel(void **kernel, const void *function) {
    *kernel = (void *)function;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->ptxVersion = out->binaryVersion = hollow_setting("HOLLOW_CAPABILITY", 90);
    out->maxDynamicSharedSizeBytes = 48 << 10;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks_, const void *function, int threads, size_t shared, unsigned flags) {
    *blocks_ = threads ? 2048 / threads : 1;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks_, const void *function, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks_, function, threads, shared, 0);
}

cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
    static char symbols[4096];
    *out = symbols;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = handle();
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    static void *driver;
    char second[256];
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    snprintf(second, sizeof second, "%s_v2", name);
    *out = driver ? dlsym(driver, second) : 0;
    if (!*out && driver) *out = dlsym(driver, name);
    if (result) *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
