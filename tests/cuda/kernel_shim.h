// Stands for the few names of CUDA that paged.cu uses, so that g++ compiles it and the CPU runs it: loops over grid
// and block instead of threads. An argument by value is handed on by reference, since it is the same for all.
#pragma once
#include <cstdint>

#define __device__
#define __global__
#define __grid_constant__ &
#define __launch_bounds__(threads, blocks)

struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct alignas(8) uint2 { unsigned int x, y; };
// A GPU faults on an address that a wide access does not divide; this processor does not, so it is counted.
static long misaligned = 0;

template <typename T>
static inline T __ldcs(const T* from) {
    misaligned += reinterpret_cast<std::uintptr_t>(from) % alignof(T) != 0;
    return *from;
}

template <typename T>
static inline void __stwb(T* to, T value) {
    misaligned += reinterpret_cast<std::uintptr_t>(to) % alignof(T) != 0;
    *to = value;
}

struct Dim3 { unsigned int x, y, z; };

static thread_local Dim3 gridDim, blockDim, blockIdx, threadIdx;

#include "paged.cu"

// Runs a kernel, given as its address, for every thread of every block in turn; answers how many accesses a GPU would
// have refused.
extern "C" long shim_launch(void (*kernel)(const void*), const void* call, unsigned int grid, unsigned int threads) {
    misaligned = 0;
    gridDim = {grid, 1, 1};
    blockDim = {threads, 1, 1};
    for (unsigned int block = 0; block < grid; ++block) {
        for (unsigned int thread = 0; thread < threads; ++thread) {
            blockIdx = {block, 0, 0};
            threadIdx = {thread, 0, 0};
            kernel(call);
        }
    }
    return misaligned;
}
