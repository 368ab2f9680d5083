// The 16-bit operands of a matmul in shared memory, and the warpgroup that loads them.
#pragma once

#include "sm90/matmul/sm90_tiles.cuh"

namespace fw {

// The layout of a block of an operand in shared memory, as wgmma reads it: kFree free indices by
// kTileDepth contracted ones, in swizzled rows of 128 bytes. If the free index is contiguous, a row
// has 64 of it, and the block consists of chunks; otherwise a row has 64 contracted indices.
template <class T, bool kFreeMajor, int kFree>
struct HalfBlock {
  static constexpr int kBytes = kFree * kTileDepth * 2;
  static constexpr int kChunks = kFreeMajor ? kFree / 64 : 1;
  static constexpr int kRows = kFreeMajor ? kTileDepth : kFree;  // of a chunk
  static constexpr int kChunkBytes = kRows * 128;
  static constexpr int kStep = (kFreeMajor ? 16 * 128 : 16 * 2) / 16;  // of a descriptor, 16 deep

  // 64 free indices take as many bytes either way.
  static FW_DEVICE uint64_t descriptor(const char* block, int free) {
    return tile_descriptor(block + free / 64 * (64 * kTileDepth * 2), kFreeMajor ? kChunkBytes : 0);
  }

  static bool map(CUtensorMap& map, const HalfOperand<T>& of, int64_t free, int64_t contracted,
                  int64_t batches) {
    const Matrices stored = {kFreeMajor ? free : contracted, kFreeMajor ? contracted : free,
                             of.row_stride, of.batch_stride == 0 ? 1 : batches, of.batch_stride};
    return matrix_map(map, of.data, stored, 64, kRows);
  }

  // Called by one thread.
  static FW_DEVICE void copy(char* to, const CUtensorMap* map, uint64_t* loaded, int free, int r,
                             int layer) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      copy_box(to + chunk * kChunkBytes, map, loaded, kFreeMajor ? free + 64 * chunk : r,
               kFreeMajor ? r : free, layer);
    }
  }

  // The same at any alignment, called by all threads that load, two elements at a time. `free_end`
  // and `contracted` are the matrix's extents. A warp takes every fourth row, some of them
  // together.
  static FW_DEVICE void gather(char* to, const HalfOperand<T>& from, int free_end, int contracted,
                               int free, int r, int layer) {
    constexpr int kWarps = kLoadThreads / 32, kTogether = 8;
    const int warp = threadIdx.x / 32 % kWarps, lane = threadIdx.x % 32;
    const int outer = (kFreeMajor ? r : free) + warp;
    const int outer_end = kFreeMajor ? contracted : free_end;
    const int inner_end = kFreeMajor ? free_end : contracted;
#pragma unroll 1
    for (int done = 0; done < kChunks * kRows / kWarps; done += kTogether) {
      const int chunk = done * kWarps / kRows, first = done * kWarps % kRows;
      const int inner = (kFreeMajor ? free : r) + 64 * chunk + 2 * lane;
      const uint32_t base = shared_address(to) + chunk * kChunkBytes + lane % 4 * 4;
      const T* source =
          from.data + layer * from.batch_stride + (outer + first) * from.row_stride + inner;
      uint32_t pairs[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i, source += kWarps * from.row_stride) {
        const bool here = outer + first + i * kWarps < outer_end;
        const uint32_t low = here && inner < inner_end ? source[0].raw : 0;
        const uint32_t high = here && inner + 1 < inner_end ? source[1].raw : 0;
        pairs[i] = low | high << 16;
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int row = first + warp + i * kWarps, column = lane / 4 ^ row % 8;
        store_pair(base + row * 128 + column * 16, pairs[i]);
      }
    }
  }
};

template <class T, int kTileRows, bool kFreeMajorA, bool kFreeMajorB>
struct HalfShared {
  using BlockA = HalfBlock<T, kFreeMajorA, kTileColumns>;
  using BlockB = HalfBlock<T, kFreeMajorB, kTileRows>;
  // Four of 48 KB or six of 32 KB.
  static constexpr int kStages = 192 * 1024 / (BlockA::kBytes + BlockB::kBytes);
  char a[kStages][BlockA::kBytes];
  char b[kStages][BlockB::kBytes];
  FinishRows<32> finished[2];
  uint64_t loaded[kStages], done[kStages];
};

// `gather` is for a, `gather_b` for b.
struct HalfSizes : MatmulSizes {
  bool gather_b;
};

// The warpgroup that loads.
template <class T, int kTileRows, bool kFreeMajorA, bool kFreeMajorB>
FW_DEVICE void load_half_blocks(HalfShared<T, kTileRows, kFreeMajorA, kFreeMajorB>& shared,
                                const HalfOperand<T>& a, const HalfOperand<T>& b,
                                const CUtensorMap* map_a, const CUtensorMap* map_b,
                                const HalfSizes& sizes) {
  using Shared = HalfShared<T, kTileRows, kFreeMajorA, kFreeMajorB>;
  using BlockA = typename Shared::BlockA;
  using BlockB = typename Shared::BlockB;
  const bool copies = threadIdx.x % kLoadThreads == 0, gathers = sizes.gather || sizes.gather_b;
  // A thread that does not load must not wait either: a barrier may be two phases ahead of it.
  if (!copies && !gathers) return;
  const int bytes = (sizes.gather ? 0 : BlockA::kBytes) + (sizes.gather_b ? 0 : BlockB::kBytes);
  Ring<Shared::kStages> to;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < sizes.tiles(); tile += gridDim.x) {
    int batch, p, q;
    sizes.locate(tile, batch, p, q);
    const int layer_a = a.batch_stride == 0 ? 0 : batch, layer_b = b.batch_stride == 0 ? 0 : batch;
#pragma unroll 1
    for (int block = 0; block < sizes.blocks; ++block, to.advance()) {
      const int r = block * kTileDepth;
      uint64_t* loaded = &shared.loaded[to.stage];
      wait(&shared.done[to.stage], to.parity ^ 1);
      if (copies) {
        arrive_expecting(loaded, bytes);
        if (!sizes.gather) BlockA::copy(shared.a[to.stage], map_a, loaded, p, r, layer_a);
        if (!sizes.gather_b) BlockB::copy(shared.b[to.stage], map_b, loaded, q, r, layer_b);
      }
      if (sizes.gather) {
        BlockA::gather(shared.a[to.stage], a, sizes.columns, sizes.contracted, p, r, layer_a);
      }
      if (sizes.gather_b) {
        BlockB::gather(shared.b[to.stage], b, sizes.rows, sizes.contracted, q, r, layer_b);
      }
      if (gathers) {
        publish_stores();
        arrive(loaded);
      }
    }
  }
}

}  // namespace fw
