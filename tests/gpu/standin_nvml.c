/* A stand-in for NVML, for tests of what calls it: names and types of nvml.h of CUDA 13.0.

   STANDIN_NVML in the environment has what it answers, read with each call: "pid,pid,..." names processes on every
   device; "error N" makes the call for processes answer N. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId;
    unsigned int computeInstanceId;
} Process;

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

static int started;

int nvmlInit_v2(void) {
    started = 1;
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (!started) return UNINITIALIZED;
    if (strncmp(uuid, "GPU-", 4)) return NOT_FOUND;
    *device = &started;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, Process *found) {
    const char *said = getenv("STANDIN_NVML");
    if (!started || device != &started) return INVALID_ARGUMENT;
    if (said && !strncmp(said, "error ", 6)) return atoi(said + 6);
    unsigned int n = 0;
    while (said && *said) {
        char *end;
        unsigned int pid = (unsigned int)strtoul(said, &end, 10);
        if (end == said) break;
        if (n == *count) return INSUFFICIENT_SIZE;
        memset(&found[n], 0xff, sizeof *found);
        found[n++].pid = pid;
        said = *end == ',' ? end + 1 : end;
    }
    *count = n;
    return SUCCESS;
}
