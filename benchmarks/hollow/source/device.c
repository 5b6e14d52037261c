#define _GNU_SOURCE
#include "device.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB (1LL << 20)

static Slot *slots;
static int lock_file = -1;
static int opened_by, context_of;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

long long hollow_setting(const char *name, long long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoll(text) : otherwise;
}

static int64_t reserved(void) { return hollow_setting("HOLLOW_RESERVED_MIB", 500) * MIB; }

int64_t hollow_total(void) { return hollow_setting("HOLLOW_TOTAL_MIB", 143156) * MIB; }

/* A lock belongs to an open file, which a fork shares: each process opens its own. */
static void open_state(void) {
    if (opened_by == getpid()) return;
    const char *path = getenv("HOLLOW_STATE");
    if (lock_file >= 0) close(lock_file);
    lock_file = open(path ? path : "/dev/shm/hollow-device", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock_file < 0 || ftruncate(lock_file, sizeof(Slot) * SLOTS)) abort();
    if (!slots) slots = mmap(0, sizeof(Slot) * SLOTS, PROT_READ | PROT_WRITE, MAP_SHARED, lock_file, 0);
    if (slots == MAP_FAILED) abort();
    opened_by = getpid();
}

static void lock(void) {
    pthread_mutex_lock(&mutex);
    open_state();
    flock(lock_file, LOCK_EX);
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].pid && kill(slots[i].pid, 0) && errno == ESRCH) slots[i] = (Slot){0, 0};
}

static void unlock(void) {
    flock(lock_file, LOCK_UN);
    pthread_mutex_unlock(&mutex);
}

static Slot *mine(void) {
    Slot *empty = 0;
    for (int i = 0; i < SLOTS; i++) {
        if (slots[i].pid == opened_by) return &slots[i];
        if (!empty && !slots[i].pid) empty = &slots[i];
    }
    if (!empty) abort();
    *empty = (Slot){opened_by, 0};
    return empty;
}

static int64_t sum(void) {
    int64_t all = reserved();
    for (int i = 0; i < SLOTS; i++) all += slots[i].used;
    return all;
}

int hollow_take(int64_t bytes) {
    lock();
    int full = sum() + bytes > hollow_total();
    if (!full) mine()->used += bytes;
    unlock();
    return full;
}

void hollow_give(int64_t bytes) {
    lock();
    mine()->used -= bytes;
    unlock();
}

int64_t hollow_used(void) {
    lock();
    int64_t all = sum();
    unlock();
    return all;
}

void hollow_context(void) {
    if (context_of == getpid()) return;
    context_of = getpid();
    hollow_take(hollow_setting("HOLLOW_CONTEXT_MIB", 510) * MIB);
}

int hollow_slots(Slot *out) {
    int found = 0;
    lock();
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].pid) out[found++] = slots[i];
    unlock();
    return found;
}
