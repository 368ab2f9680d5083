// Split-K: if a matmul has fewer tiles than there are SMs, several thread blocks share a tile, and
// each sums a part of the contracted indices. A warpgroup writes its sums to memory, where the same
// threads of another thread block find them. The last one to arrive adds them all, always in the
// order of the parts, and finishes the tile. Results are the same to the bit each time.
#pragma once

#include "sm90/matmul/sm90_tiles.cuh"

namespace fw {

constexpr int kLeastBlocks = 8;    // of a part: fewer do not pay for joining it
constexpr int kMostShared = 1024;  // tiles that may be shared
constexpr int kCountBytes = 8 * kMostShared;

// A matmul whose tiles are divided into parts of `blocks` contracted blocks each.
struct SharedSizes : MatmulSizes {
  int parts = 1;

  FW_DEVICE int items() const { return tiles() * parts; }
  FW_DEVICE int first_block(int item) const { return item % parts * blocks; }
  FW_DEVICE int blocks_of(int item) const {
    const int all = (contracted + kTileDepth - 1) / kTileDepth;
    return parts == 1 ? blocks : min(blocks, all - first_block(item));
  }
};

// A matmul whose tiles are never shared.
struct NoParts {
  struct Sizes : MatmulSizes {};

  template <int kTileRows>
  bool divide(Sizes&, int64_t) const {
    return false;
  }
  void forget(void*) const {}
  template <int kSums, int kRows>
  FW_DEVICE bool join(float (&)[kSums], const Sizes&, int, FinishRows<kRows>&, int) const {
    return true;
  }
};

struct SplitKParts {
  using Sizes = SharedSizes;
  void* memory = nullptr;  // a count for each tile and warpgroup, then sums; see codegen/matmul.py
  int64_t bytes = 0;

  // Divides tiles into parts; false if each has only one.
  template <int kTileRows>
  bool divide(Sizes& sizes, int64_t tiles) const {
    const int64_t room = (bytes - kCountBytes) / (4 * kTileRows * kTileColumns);
    if (bytes < kCountBytes || tiles > kMostShared || 2 * tiles > room) return false;
    const int parts = int(min(room / tiles, int64_t(sizes.blocks / kLeastBlocks)));
    if (parts < 2) return false;
    sizes.blocks = (sizes.blocks + parts - 1) / parts;
    const int64_t depth = int64_t(sizes.blocks) * kTileDepth;
    sizes.parts = int((sizes.contracted + depth - 1) / depth);
    return true;
  }
  void forget(void* stream) const {
    cudaMemsetAsync(memory, 0, kCountBytes, static_cast<cudaStream_t>(stream));
  }

  // Whether `total` has become the tile's. `finished` and `barrier` belong to the warpgroup alone.
  template <int kSums, int kRows>
  FW_DEVICE bool join(float (&total)[kSums], const Sizes& sizes, int item,
                      FinishRows<kRows>& finished, int barrier) const {
    if (sizes.parts == 1) return true;
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
    const int tile = item / sizes.parts, mine = item - tile * sizes.parts;
    uint32_t* const counts = static_cast<uint32_t*>(memory);
    float* const sums = reinterpret_cast<float*>(counts + 2 * kMostShared) + thread;
    const auto sum = [&](int part, int i)->volatile float& {
      const int64_t of_part = (int64_t(tile) * sizes.parts + part) * 2 + group;
      return sums[(of_part * kSums + i) * 128];
    };
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum(mine, i) = total[i];
    __threadfence();
    meet(barrier, 128);
    uint32_t& before = *reinterpret_cast<uint32_t*>(&finished[0][0]);
    if (thread == 0) before = atomicAdd(&counts[2 * tile + group], 1u);
    meet(barrier, 128);
    const bool last = before + 1 == uint32_t(sizes.parts);
    meet(barrier, 128);  // `finished` is free again
    if (!last) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[i] = sum(0, i);
#pragma unroll 1
    for (int part = 1; part < sizes.parts; ++part) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) total[i] += sum(part, i);
    }
    return true;
  }
};

}  // namespace fw
