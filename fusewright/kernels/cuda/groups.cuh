// Reductions across the threads that share a row, in a fixed order and without atomics.
#pragma once

#include <atomic>

#include "cuda/lanes.cuh"

namespace fw {

// Moves a value between threads: `move` brings one 32-bit word of it.
template <class T, class Move>
FW_DEVICE T word_by_word(const T& x, const Move& move) {
  constexpr int kWords = (sizeof(T) + 3) / 4;
  uint32_t words[kWords] = {};
  memcpy(words, &x, sizeof(T));
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = move(words[w]);
  T y;
  memcpy(&y, words, sizeof(T));
  return y;
}

template <class T>
FW_DEVICE T shuffled_down(const T& x, int by, int width) {
  return word_by_word(x, [&](uint32_t w) { return __shfl_down_sync(~0u, w, by, width); });
}

template <class T>
FW_DEVICE T shuffled_up(const T& x, int by, int width) {
  return word_by_word(x, [&](uint32_t w) { return __shfl_up_sync(~0u, w, by, width); });
}

template <class T>
FW_DEVICE T from_lane(const T& x, int lane, int width) {
  return word_by_word(x, [&](uint32_t w) { return __shfl_sync(~0u, w, lane, width); });
}

// first ? x : y, word by word and without a branch.
template <class T>
FW_DEVICE T chosen(bool first, const T& x, const T& y) {
  constexpr int kWords = (sizeof(T) + 3) / 4;
  uint32_t words[kWords] = {}, others[kWords] = {};
  memcpy(words, &x, sizeof(T));
  memcpy(others, &y, sizeof(T));
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = first ? words[w] : others[w];
  T z;
  memcpy(&z, words, sizeof(T));
  return z;
}

// The maximum over kWidth neighbouring threads, returned to all of them; NaN loses.
template <int kWidth, class T>
FW_DEVICE T warp_most(T x) {
#pragma unroll
  for (int by = kWidth / 2; by > 0; by /= 2) x = fw::fmax(x, shuffled_down(x, by, kWidth));
  return from_lane(x, 0, kWidth);
}

// The combined accumulators of kWidth <= 32 neighbouring threads, valid in the first of them. Every
// thread of the warp must call it.
template <int kWidth, class Acc>
FW_DEVICE Acc warp_joined(Acc acc) {
  if constexpr (Acc::kMeets) {
    acc.meet([](auto x) { return warp_most<kWidth>(x); });
#pragma unroll
    for (int by = kWidth / 2; by > 0; by /= 2) acc.combine_met(shuffled_down(acc, by, kWidth));
  } else {
#pragma unroll
    for (int by = kWidth / 2; by > 0; by /= 2) acc.combine(shuffled_down(acc, by, kWidth));
  }
  return acc;
}

// The same, valid in all of them. Not a butterfly: Welford's combine rounds differently when its
// operands are exchanged.
template <int kWidth, class Acc>
FW_DEVICE Acc warp_total(Acc acc) {
  return from_lane(warp_joined<kWidth>(acc), 0, kWidth);
}

// The same over kGroup threads; above 32 the group is the whole block. Each kUse has shared
// memory of its own, which a block does not use again, so one barrier is enough: a warp that is
// ahead in the next sweep must not write where another one still reads.
template <int kGroup, int kUse = 0, class Acc>
FW_DEVICE Acc group_total(Acc acc) {
  if constexpr (kGroup <= 32) {
    return warp_total<kGroup>(acc);
  } else {
    constexpr int kWarps = kGroup / 32;
    __shared__ __align__(16) unsigned char memory[kWarps * sizeof(Acc)];
    Acc* parts = reinterpret_cast<Acc*>(memory);
    const Acc mine = warp_joined<32>(acc);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
    __syncthreads();
    return warp_total<kWarps>(parts[threadIdx.x % kWarps]);
  }
}

// How many blocks of a kernel run at once. Only the driver knows, and it is asked once per device.
// Each kernel has one of these objects, in the function that launches it. That function is static:
// otherwise the linker would share the object among all modules of a process.
class Waves {
 public:
  // As many parts, at most `splits`, as fill whole waves of blocks: a half-empty last wave leaves
  // half of the multiprocessors idle.
  template <class Kernel>
  int whole(Kernel kernel, int threads, unsigned blocks, int splits, int device) {
    const bool kept = device >= 0 && device < kMostDevices;
    int64_t at_once = kept ? at_once_[device].load(std::memory_order_relaxed) : 0;
    if (at_once == 0) {
      int processors = 0, each = 0;
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, 0);
      at_once = static_cast<int64_t>(processors) * each;
      if (kept) at_once_[device].store(at_once, std::memory_order_relaxed);
    }
    const int64_t waves = at_once == 0 ? 0 : blocks * static_cast<int64_t>(splits) / at_once;
    const int64_t fitting = waves * at_once / blocks;
    return fitting == 0 ? splits : static_cast<int>(fitting);
  }

 private:
  std::atomic<int64_t> at_once_[kMostDevices] = {};
};

// Allows a kernel this much dynamic shared memory. The driver is told once per device. Each kernel
// has one of these objects, as it has one of `Waves`.
class Roomy {
 public:
  template <class Kernel>
  int ready(Kernel kernel, int bytes, int device) {
    const bool kept = device >= 0 && device < kMostDevices;
    if (kept && ready_[device].load(std::memory_order_relaxed)) return 0;
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
    const int code =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (kept && code == 0) ready_[device].store(true, std::memory_order_relaxed);
    return code;
  }

 private:
  std::atomic<bool> ready_[kMostDevices] = {};
};

// Joins the partial results [splits][outer] of a split reduction and finishes each row.
template <class Body, typename I, int kGroup, class Part>
__global__ void __launch_bounds__(128)
    combine_kernel(const Body body, const Part* parts, int splits) {
  const I outer = body.outer_extent();
  const I index = (static_cast<I>(blockIdx.x) * 128 + threadIdx.x) / kGroup;
  const I p = index < outer ? index : outer - 1;
  const int member = threadIdx.x % kGroup;
  auto acc = body.template accumulators<1>(Phase<0>{});
  // Eight partial results are loaded at once: one after the other, their latencies would add up.
  constexpr int kFlight = 8;
  for (int base = member; base < splits; base += kGroup * kFlight) {
    Part part[kFlight];
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      const int s = base + u * kGroup;
      if (s < splits) part[u] = parts[s * static_cast<int64_t>(outer) + p];
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (base + u * kGroup < splits) acc.combine(part[u]);
    }
  }
  if constexpr (kGroup > 1) acc = group_total<kGroup>(acc);
  typename Body::template Row<1> row;
  I q, l;
  locate<Body::kOuterRest>(p, body.outer_lane_extent(), q, l);
  body.begin(row, q, l, 1);
  body.finish(Phase<0>{}, row, acc, 1);
  if (member == 0 && index < outer) body.store(row, 1);
}

template <typename I, int kGroup, class Body, class Part>
void combine(const Body& body, const Part* parts, int splits, void* stream) {
  const unsigned blocks = blocks_for<I>(body.outer_extent(), 128 / kGroup);
  combine_kernel<Body, I, kGroup>
      <<<blocks, 128, 0, static_cast<cudaStream_t>(stream)>>>(body, parts, splits);
}

}  // namespace fw
