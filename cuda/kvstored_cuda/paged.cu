// Copies between an engine's paged KV cache and the slots of the store, all layers of all blocks in one launch.
//
// A plane is one part (K, V, or both in one) of one layer. Of each page of a plane the engine has
// `outer_count * inner_count` runs of contiguous bytes, strides apart; a slot has the same runs one after the other,
// outer first. The host has merged runs that touch, checked every number here and found a width that divides them
// all: nothing is checked again. The same source runs on the CPU in the tests, through a header that stands for the
// few names of CUDA used here; it uses no shared memory and no barrier.
//
// Addresses are 64 bit throughout. Indexes within one page of one plane are 32 bit: the host allows 2^30 bytes there.

typedef long long int64;
typedef unsigned int uint32;

// One row of the table that is on the device for as long as the layout is in use. The same in plans.py: PLANE.
struct Plane {
    int64 base;              // address of page 0
    int64 page_stride;       // bytes from a page to the next
    int64 outer_stride;      // bytes, of the engine's
    int64 inner_stride;      // bytes, of the engine's
    int64 inner_count;       // runs for each step of the outer stride
    int64 run_bytes;         // contiguous in both places
    int64 page_bytes;        // of this plane, in the engine and in the slot
    int64 slot_offset;       // of page 0 of a slot
    int64 slot_page_stride;  // bytes in the slot from one of its pages to the next
};

// The argument of a launch, by value: no table to upload, and none to keep alive until the stream has come so far.
// The same in plans.py: call_type().
template <int ENTRIES>
struct Call {
    const Plane* planes;  // of the first layer that is copied
    int64 num_planes;
    int64 num_slots;
    int64 pages_per_slot;
    int64 tiles;         // that a page of a plane is cut into
    int64 tile_vectors;  // of the copy's width
    int64 items;         // num_slots * pages_per_slot * num_planes * tiles
    int64 table[ENTRIES];  // addresses of the slots; then the pages of the first slot, of the second, ...
};

template <int WIDTH> struct VectorOf;
template <> struct VectorOf<16> { typedef uint4 type; };
template <> struct VectorOf<8> { typedef uint2 type; };
template <> struct VectorOf<4> { typedef unsigned int type; };
template <> struct VectorOf<2> { typedef unsigned short type; };
template <> struct VectorOf<1> { typedef unsigned char type; };

enum Direction { gather, scatter };

// Loads under way for each thread before its first store.
#define UNROLL 4

// Where the vector with this index is in the engine, from the start of the page of its plane.
template <int WIDTH>
__device__ inline int64 engine_offset(const Plane& plane, uint32 run_vectors, uint32 inner_count, uint32 vector) {
    uint32 run = vector / run_vectors;
    uint32 within = vector - run * run_vectors;
    uint32 outer = run / inner_count;
    uint32 inner = run - outer * inner_count;
    return outer * plane.outer_stride + inner * plane.inner_stride + (int64)within * WIDTH;
}

// One tile: vectors begin to end of a page. STRIDED is false where the whole page is one run.
template <int WIDTH, Direction DIRECTION, bool STRIDED>
__device__ inline void copy_tile(const Plane& plane, int64 engine, int64 slot, uint32 begin, uint32 end) {
    typedef typename VectorOf<WIDTH>::type Vector;
    const uint32 run_vectors = (uint32)(plane.run_bytes / WIDTH);
    const uint32 inner_count = (uint32)plane.inner_count;
    const uint32 threads = blockDim.x;
    for (uint32 first = begin + threadIdx.x; first < end; first += UNROLL * threads) {
        Vector held[UNROLL];
        int64 from[UNROLL], to[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            uint32 vector = first + k * threads;  // may lie behind the end: a number like any other
            int64 flat = (int64)vector * WIDTH;
            int64 paged = STRIDED ? engine_offset<WIDTH>(plane, run_vectors, inner_count, vector) : flat;
            from[k] = DIRECTION == gather ? engine + paged : slot + flat;
            to[k] = DIRECTION == gather ? slot + flat : engine + paged;
        }
        // All loads before all stores. What is read is read once: it need not stay in the device's cache.
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            if (first + k * threads < end) {
                held[k] = __ldcs(reinterpret_cast<const Vector*>(from[k]));
            }
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            if (first + k * threads < end) {
                __stwb(reinterpret_cast<Vector*>(to[k]), held[k]);
            }
        }
    }
}

// Every item is one tile of one page of one plane of one slot; slots are the outermost, so that a slot is written in
// its own order. Everything but the vectors' index is the same for all threads of a block.
template <int WIDTH, Direction DIRECTION, int ENTRIES>
__device__ inline void copy_all(const Call<ENTRIES>& call) {
    for (int64 item = blockIdx.x; item < call.items; item += gridDim.x) {
        int64 rest = item / call.tiles;
        int64 tile = item - rest * call.tiles;
        int64 above = rest / call.num_planes;
        const Plane plane = call.planes[rest - above * call.num_planes];  // a copy: else each store may change it
        int64 slot = above / call.pages_per_slot;
        int64 page = above - slot * call.pages_per_slot;
        int64 vectors = plane.page_bytes / WIDTH;
        int64 begin = tile * call.tile_vectors;
        if (begin >= vectors) {
            continue;  // planes of one layout may differ in size; tiles are counted for the largest
        }
        int64 end = begin + call.tile_vectors < vectors ? begin + call.tile_vectors : vectors;
        int64 engine = plane.base + call.table[call.num_slots + above] * plane.page_stride;
        int64 store = call.table[slot] + plane.slot_offset + page * plane.slot_page_stride;
        if (plane.run_bytes == plane.page_bytes) {
            copy_tile<WIDTH, DIRECTION, false>(plane, engine, store, (uint32)begin, (uint32)end);
        } else {
            copy_tile<WIDTH, DIRECTION, true>(plane, engine, store, (uint32)begin, (uint32)end);
        }
    }
}

// 256 threads at most a block, and registers for five such blocks at a time: plans.py counts on both.
#define KERNEL(direction, width, entries)                                                                         \
    extern "C" __global__ void __launch_bounds__(256, 5)                                                          \
        kvstored_##direction##_##width##_##entries(const Call<entries> __grid_constant__ call) {                  \
        copy_all<width, direction, entries>(call);                                                                \
    }

#define KERNELS(entries)                                                                                          \
    KERNEL(gather, 16, entries) KERNEL(gather, 8, entries) KERNEL(gather, 4, entries)                             \
    KERNEL(gather, 2, entries) KERNEL(gather, 1, entries)                                                         \
    KERNEL(scatter, 16, entries) KERNEL(scatter, 8, entries) KERNEL(scatter, 4, entries)                          \
    KERNEL(scatter, 2, entries) KERNEL(scatter, 1, entries)

// 4 KiB of arguments at most, and 32,764 bytes, which CUDA 12.1 and later take.
KERNELS(500)
#ifndef KVSTORED_SMALL_ARGUMENTS
KERNELS(4080)
#endif
