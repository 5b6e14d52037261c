/* cuBLAS, cuBLASLt, cuDNN, NVRTC and NCCL: what their callers read from them; all else answers 0. Every plan works, needs no workspace and does nothing. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

enum { CUDNN_TYPE_BACKEND_DESCRIPTOR = 15 };

static void *const anything = (void *)1;

/* One for each thread: PyTorch keeps a workspace for each. */
int cublasCreate_v2(void **handle) {
    *handle = malloc(1);
    return 0;
}

int cublasDestroy_v2(void *handle) {
    free(handle);
    return 0;
}

int cublasGetMathMode(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

int cublasGetPointerMode_v2(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

const char *cublasGetStatusString(int status) { return "a status of the hollow device"; }

size_t cublasLtGetVersion(void) { return 130000; }

int cublasLtMatmulDescCreate(void **out, int compute, int scale) {
    *out = anything;
    return 0;
}

int cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    *out = anything;
    return 0;
}

int cublasLtMatmulPreferenceCreate(void **out) {
    *out = anything;
    return 0;
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted, void *results,
                                   int *found) {
    *found = wanted < 1 ? wanted : 1;
    return 0;
}

static long cudnn_version(void) { return hollow_setting("HOLLOW_CUDNN", 91900); }

size_t cudnnGetVersion(void) { return cudnn_version(); }

size_t cudnnGetCudartVersion(void) { return 13000; }

size_t cudnnGetMaxDeviceVersion(void) { return 1300; }

int cudnnGetProperty(int which, int *value) {
    long version = cudnn_version();
    *value = which == 0 ? version / 10000 : which == 1 ? version / 100 % 100 : version % 100;
    return 0;
}

int cudnnCreate(void **handle) {
    *handle = anything;
    return 0;
}

const char *cudnnGetErrorString(int status) { return "a status of the hollow device"; }

int cudnnBackendCreateDescriptor(int type, void **out) {
    *out = calloc(1, 64);
    return 0;
}

int cudnnBackendDestroyDescriptor(void *descriptor) {
    free(descriptor);
    return 0;
}

/* One engine, one plan, no workspace. Descriptors are made by the caller, and stay as they are. */
int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t wanted, int64_t *found, void *out) {
    if (found) *found = 1;
    if (wanted > 0 && out && type != CUDNN_TYPE_BACKEND_DESCRIPTOR) memset(out, 0, 8);
    return 0;
}

int nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return 0;
}

static int one(size_t *size) {
    *size = 1;
    return 0;
}

int nvrtcGetPTXSize(void *program, size_t *size) { return one(size); }

int nvrtcGetCUBINSize(void *program, size_t *size) { return one(size); }

int nvrtcGetProgramLogSize(void *program, size_t *size) { return one(size); }

const char *nvrtcGetErrorString(int status) { return "a status of the hollow device"; }

int ncclGetVersion(int *version) {
    *version = 22800;
    return 0;
}

const char *ncclGetErrorString(int status) { return "a status of the hollow device"; }
