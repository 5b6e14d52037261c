/* The hollow device's memory, shared by all processes that use it through one file. */
#pragma once
#include <stdint.h>

#define SLOTS 1024

typedef struct {
    int32_t pid;
    int64_t used;
} Slot;

long long hollow_setting(const char *name, long long otherwise);
int hollow_take(int64_t bytes);  /* 1 when the card is full, else 0 */
void hollow_give(int64_t bytes);
int64_t hollow_used(void);       /* bytes of all living processes, and what a driver keeps for itself */
int64_t hollow_total(void);
void hollow_context(void);       /* this process' context, once */
int hollow_slots(Slot *out);     /* living processes that hold memory */
