// Enough of CUDA for g++ to run our loop kernels: one fiber per thread, blocks one after another.
// Slow, but it checks indexing, barriers and shuffles where there is no GPU. A warp whose lanes do
// not all reach a shuffle, or a block that misses a barrier, is reported instead of hanging.
#pragma once

#undef _FORTIFY_SOURCE  // its longjmp refuses to change stacks

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct dim3 {
  unsigned x, y;
  dim3(unsigned x_ = 1, unsigned y_ = 1) : x(x_), y(y_) {}
};
struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
typedef void* cudaStream_t;
typedef int cudaError_t;
constexpr int cudaSuccess = 0;
inline int cudaGetLastError() { return 0; }
inline int cudaGetDevice(int* device) { return *device = 0; }
inline int cudaSetDevice(int) { return 0; }
constexpr int cudaDevAttrMultiProcessorCount = 0, kProcessors = 2;
inline int cudaDeviceGetAttribute(int* value, int, int) { return *value = kProcessors, 0; }
inline int emulated_clusters = 1;  // whether the GPU has them
extern "C" __attribute__((weak)) void emulate_clusters(int wanted) { emulated_clusters = wanted; }
template <class Kernel, class Launch>
int cudaOccupancyMaxActiveClusters(int* at_once, Kernel, const Launch*) {
  return *at_once = emulated_clusters, 0;
}
static int occupancy_asked = 0;
extern "C" __attribute__((weak)) int emulated_occupancy_asked() { return occupancy_asked; }
template <class Kernel>
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, int) {
  ++occupancy_asked;
  return *blocks = 2, 0;
}
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 0;
constexpr int cudaFuncAttributePreferredSharedMemoryCarveout = 1;
constexpr int cudaFuncAttributeNonPortableClusterSizeAllowed = 2;
template <class Kernel>
int cudaFuncSetAttribute(Kernel, int, int) {
  return 0;
}
constexpr size_t kSharedBytes = 227 * 1024, kMostBlocks = 16;
alignas(1024) static char all_shared[kMostBlocks][(kSharedBytes + 1023) / 1024 * 1024];
inline const char* cudaGetErrorString(int) { return "emulated"; }

static dim3 blockIdx, blockDim, threadIdx, gridDim;

namespace emulation {

struct Meeting {
  int arrived = 0, generation = 0;
};
struct Fiber {
  jmp_buf place;
  bool started = false, done = false, waits = false;  // waits: for other blocks of its cluster
  unsigned arrivals = 0;
};
constexpr size_t kStack = 128 * 1024;
static std::vector<Fiber> fibers;
static std::vector<std::unique_ptr<char[]>> stacks;  // reused from block to block
static jmp_buf scheduler;
static unsigned current, progress;
static Meeting block_meeting, warp_meetings[32];
static uint32_t slots[1024];
static unsigned left;                                  // threads of the block that still run
static unsigned rank, in_cluster, arrived_in_cluster;  // of the blocks of a cluster, one runs
static const std::function<void()>* thread_main;

static size_t stack_number() { return rank * fibers.size() + current; }
static char* stack() { return stacks[stack_number()].get(); }

// AddressSanitizer must know which stack is in use. It also reports shared memory that a launch has
// not asked for.
#ifdef __SANITIZE_ADDRESS__
static const void* scheduler_stack;
static size_t scheduler_bytes;
static void to_fiber() { __sanitizer_start_switch_fiber(nullptr, stack(), kStack); }
static void in_fiber() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_bytes);
}
static void to_scheduler() {
  __sanitizer_start_switch_fiber(nullptr, scheduler_stack, scheduler_bytes);
}
static void in_scheduler() { __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr); }
static void allow_shared(size_t bytes) {
  __asan_poison_memory_region(all_shared, sizeof(all_shared));
  for (auto& each : all_shared) __asan_unpoison_memory_region(each, bytes);
}
#else
static void to_fiber() {}
static void in_fiber() {}
static void to_scheduler() {}
static void in_scheduler() {}
static void allow_shared(size_t) {}
#endif

// Lets other fibers run. (swapcontext is used once a fiber: it makes a system call for signals.)
static __attribute__((noinline)) void pause() {
  if (_setjmp(fibers[current].place) == 0) {
    to_scheduler();
    _longjmp(scheduler, 1);
  }
  in_fiber();
}

static void enter() {
  in_fiber();
  (*thread_main)();
  fibers[current].done = true;
  ++progress;
  to_scheduler();
  _longjmp(scheduler, 1);
}

static __attribute__((noinline)) void resume() {
  if (_setjmp(scheduler) != 0) return in_scheduler();
  if (fibers[current].started) {
    to_fiber();
    _longjmp(fibers[current].place, 1);
  }
  static ucontext_t context;
  while (stacks.size() <= stack_number()) stacks.emplace_back(new char[kStack]);
  fibers[current].started = true;
  getcontext(&context);
  context.uc_stack.ss_sp = stack();
  context.uc_stack.ss_size = kStack;
  makecontext(&context, enter, 0);
  to_fiber();
  setcontext(&context);
}

static void meet(Meeting& meeting, int expected) {
  const int generation = meeting.generation;
  ++progress;
  if (++meeting.arrived == expected) {
    meeting.arrived = 0;
    ++meeting.generation;
    return;
  }
  while (meeting.generation == generation) pause();
}

// The same random values in every run.
static unsigned drawn(unsigned below) {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<unsigned>(state >> 33) % below;
}

// Runs the threads of a block until each has ended or waits for other blocks.
static void run_fibers(unsigned threads) {
  // Warps run in random order, and for a while some warpgroups run far more often than others. This
  // finds code that is right only if all of them advance equally.
  const unsigned warps = (threads + 31) / 32;
  unsigned idle = 0;
  left = 0;
  for (const Fiber& each : fibers) left += !each.done && !each.waits;
  for (unsigned turn = 0; left > 0; ++turn) {
    static unsigned slow_group, slow_by;
    if (turn % (16 * warps) == 0) slow_group = drawn(warps / 4 + 1), slow_by = 1 + drawn(24);
    const unsigned warp = drawn(warps), before = progress;
    if (warp / 4 == slow_group && drawn(slow_by) > 0) continue;
    for (current = 32 * warp; current < threads && current < 32 * (warp + 1); ++current) {
      if (fibers[current].done || fibers[current].waits) continue;
      threadIdx = dim3(current);
      resume();
      left -= fibers[current].done || fibers[current].waits;
    }
    idle = progress == before ? idle + 1 : 0;
    if (left > 0 && idle > 64 * warps * 24) {
      std::fprintf(stderr, "emulated CUDA: %u threads wait for others for ever\n", left);
      std::abort();
    }
  }
}

// A cluster is a few blocks of which one runs until all its threads wait for the others. So static
// memory, which all blocks share here, must not be expected to last over such a wait.
static void run_cluster(dim3 first, unsigned blocks, unsigned threads) {
  struct Block {
    std::vector<Fiber> fibers;
    Meeting block_meeting, warp_meetings[32];
  };
  std::vector<Block> all(blocks);
  for (Block& each : all) each.fibers = std::vector<Fiber>(threads);
  blockDim = dim3(threads), in_cluster = blocks, arrived_in_cluster = 0;
  bool more = true;
  while (more) {
    more = false;
    const unsigned before = progress;
    for (rank = 0; rank < blocks; ++rank) {
      std::swap(fibers, all[rank].fibers);
      block_meeting = all[rank].block_meeting;
      std::swap(warp_meetings, all[rank].warp_meetings);
      blockIdx = dim3(first.x + rank, first.y);
      for (Fiber& each : fibers) each.waits = false;
      run_fibers(threads);
      for (const Fiber& each : fibers) more |= !each.done;
      std::swap(fibers, all[rank].fibers);
      all[rank].block_meeting = block_meeting;
      std::swap(warp_meetings, all[rank].warp_meetings);
    }
    if (more && progress == before) {
      std::fprintf(stderr, "emulated CUDA: blocks of a cluster wait for ever\n");
      std::abort();
    }
  }
  rank = 0;
}

static void arrive_in_cluster() {
  ++fibers[current].arrivals, ++arrived_in_cluster, ++progress;
  if (arrived_in_cluster % (in_cluster * fibers.size()) != 0) return;
  for (Fiber& each : fibers) left += each.waits, each.waits = false;
}
// Until each thread has arrived as often as this one.
static void await_cluster() {
  const unsigned wanted = fibers[current].arrivals * in_cluster * fibers.size();
  while (arrived_in_cluster < wanted) {
    fibers[current].waits = true;
    pause();
  }
}
static int rank_in_cluster() { return static_cast<int>(rank); }
template <class T>
T* in_block(T* place, int other) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(place) +
                              (other - static_cast<int>(rank)) * int64_t{sizeof(all_shared[0])});
}

static uint32_t exchanged(uint32_t word, int source_lane) {
  Meeting& warp = warp_meetings[threadIdx.x / 32];
  const unsigned me = threadIdx.x;
  slots[me] = word;
  meet(warp, 32);
  const uint32_t found = slots[me / 32 * 32 + source_lane];
  meet(warp, 32);
  return found;
}

template <class Kernel>
void launch(dim3 grid, unsigned threads, size_t shared_bytes, const Kernel& kernel,
            unsigned cluster = 1) {
  const std::function<void()> main = kernel;
  thread_main = &main;
  if (shared_bytes > kSharedBytes || cluster > kMostBlocks) std::abort();  // more than a GPU has
  if (grid.x % cluster != 0) std::abort();
  gridDim = grid;
  allow_shared(shared_bytes);
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; x += cluster) run_cluster(dim3(x, y), cluster, threads);
  }
  allow_shared(sizeof(all_shared[0]));  // tests fill it
}

}  // namespace emulation

#define emulated_shared all_shared[emulation::rank]

constexpr int cudaLaunchAttributeProgrammaticStreamSerialization = 0;
constexpr int cudaLaunchAttributeClusterDimension = 1;
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  int dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};
template <class Kernel, class... Given>
void cudaLaunchKernelEx(const cudaLaunchConfig_t* config, const Kernel& kernel,
                        const Given&... given) {
  unsigned cluster = 1;
  for (int at = 0; at < config->numAttrs; ++at) {
    const cudaLaunchAttribute& each = config->attrs[at];
    if (each.id == cudaLaunchAttributeClusterDimension) cluster = each.val.clusterDim.x;
  }
  emulation::launch(
      config->gridDim, config->blockDim.x, config->dynamicSmemBytes, [&] { kernel(given...); },
      cluster);
}

// Threads run one at a time.
template <class T>
T atomicMax(T* place, T x) {
  const T before = *place;
  *place = before < x ? x : before;
  return before;
}
template <class T>
T atomicAdd(T* place, T x) {
  const T before = *place;
  *place += x;
  return before;
}
inline void __threadfence() {}
inline void cudaMemsetAsync(void* to, int byte, size_t bytes, void*) {
  std::memset(to, byte, bytes);
}

inline void __syncthreads() {
  emulation::meet(emulation::block_meeting, static_cast<int>(emulation::fibers.size()));
}
inline void __syncwarp() { emulation::meet(emulation::warp_meetings[threadIdx.x / 32], 32); }
inline uint32_t __shfl_down_sync(unsigned, uint32_t word, int by, int width) {
  const int lane = threadIdx.x % 32, within = lane % width;
  return emulation::exchanged(word, within + by < width ? lane + by : lane);
}
inline uint32_t __shfl_up_sync(unsigned, uint32_t word, int by, int width) {
  const int lane = threadIdx.x % 32, within = lane % width;
  return emulation::exchanged(word, within >= by ? lane - by : lane);
}
inline uint32_t __shfl_sync(unsigned, uint32_t word, int source, int width) {
  const int lane = threadIdx.x % 32;
  return emulation::exchanged(word, lane / width * width + source);
}
