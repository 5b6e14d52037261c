/* NVML: who holds the card's memory, and steady clocks. Structures are those of nvml.h, version by version. */
#include <stdio.h>
#include <stdlib.h>

#include "device.h"

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, INSUFFICIENT_SIZE = 7 };

typedef struct { unsigned long long total, unused, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, unused, used; } MemoryV2;
typedef struct { unsigned pid; unsigned long long used; } Process;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } ProcessV2;

const char *nvmlErrorString(int error) { return error ? "an error of the hollow device" : "Success"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return SUCCESS;
}

int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)1;
    return index ? INVALID_ARGUMENT : SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { return nvmlDeviceGetHandleByIndex_v2(0, device); }

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { return nvmlDeviceGetHandleByIndex_v2(0, device); }

int nvmlDeviceGetIndex(void *device, unsigned *index) {
    *index = 0;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, Memory *out) {
    *out = (Memory){hollow_total(), hollow_total() - hollow_used(), hollow_used()};
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, MemoryV2 *out) {
    *out = (MemoryV2){out->version, hollow_total(), 0, hollow_total() - hollow_used(), hollow_used()};
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, Process *out) {
    static Slot slots[SLOTS];
    unsigned room = *count;
    *count = hollow_slots(slots);
    for (unsigned i = 0; out && i < room && i < *count; i++) out[i] = (Process){slots[i].pid, slots[i].used};
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, ProcessV2 *out) {
    static Slot slots[SLOTS];
    unsigned room = *count;
    *count = hollow_slots(slots);
    for (unsigned i = 0; out && i < room && i < *count; i++) out[i] = (ProcessV2){slots[i].pid, slots[i].used, -1, -1};
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetName(void *device, char *out, unsigned size) {
    const char *name = getenv("HOLLOW_NAME");
    snprintf(out, size, "Hollow %s", name ? name : "card");
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *out, unsigned size) {
    snprintf(out, size, "GPU-01020304-0506-0708-090a-0b0c0d0e0f10");
    return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    snprintf(out, size, "hollow");
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(void *device, int clock, unsigned *mhz) {
    *mhz = 1000;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
    *celsius = 40;
    return SUCCESS;
}
