// The shared memory of a float32 matmul, and the warpgroup that loads its blocks.
#pragma once

#include "sm90/isa/sm90_fp16_split.cuh"

namespace fw {

// With three terms b has high and low parts, with one only high parts.
template <int kTerms, int kTileRows>
struct MatmulShared {
  static constexpr int kParts = kTerms == 3 ? 2 : 1;
  static constexpr int kChunks = (kTileRows + 63) / 64;  // of b, where its free index is contiguous
  static constexpr int kSplitBytes = kChunks * 64 * kTileDepth * 2;
  static constexpr int kStagesA = kTerms == 3 ? 2 : 3, kStagesB = 3;
  char a[kStagesA][kRawBytes];
  char b[kStagesB][kParts][kSplitBytes];
  float factors[kStagesA][kTileDepth];
  FinishRows<32> finished[2];
  uint64_t loaded_a[kStagesA], read_a[kStagesA], loaded_b[kStagesB], done_b[kStagesB];
};

// Copies a block of a in chunks whose rows are 128 bytes, swizzled; called by one thread.
template <bool kFreeMajorA>
FW_DEVICE void copy_raw(char* to, const CUtensorMap* map, uint64_t* loaded, int p, int r,
                        int layer) {
  constexpr int kChunks = kFreeMajorA ? 4 : 2, kChunkBytes = kRawBytes / kChunks;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    copy_box(to + chunk * kChunkBytes, map, loaded, kFreeMajorA ? p + 32 * chunk : r + 32 * chunk,
             kFreeMajorA ? r : p, layer);
  }
}

// The same from any layout, element by element; called by all threads that load. A warp takes every
// fourth row of each chunk.
template <bool kFreeMajorA>
FW_DEVICE void gather_raw(char* to, const RawOperand& a, const MatmulSizes& sizes, int p, int r,
                          int batch) {
  constexpr int kChunks = kFreeMajorA ? 4 : 2, kRows = kFreeMajorA ? kTileDepth : kTileColumns;
  constexpr int kWarps = kLoadThreads / 32;
  const int warp = threadIdx.x / 32 % kWarps, lane = threadIdx.x % 32;
  const int64_t inner_stride = kFreeMajorA ? a.free_stride : a.contracted_stride;
  const int64_t outer_stride = kFreeMajorA ? a.contracted_stride : a.free_stride;
  const int outer = (kFreeMajorA ? r : p) + warp;
  const int outer_end = kFreeMajorA ? sizes.contracted : sizes.columns;
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int inner = (kFreeMajorA ? p : r) + chunk * 32 + lane;
    const bool inside = inner < (kFreeMajorA ? sizes.columns : sizes.contracted);
    const float* from =
        a.data + batch * a.batch_stride + inner * inner_stride + outer * outer_stride;
    const uint32_t row = shared_address(to) + (chunk * kRows + warp) * 128 + lane % 4 * 4;
#pragma unroll 2
    for (int i = 0; i < kRows / kWarps; ++i, from += kWarps * outer_stride) {
      const bool here = inside && outer + i * kWarps < outer_end;
      const int column = lane / 4 ^ (warp + i * kWarps) % 8;
      copy_word(row + i * kWarps * 128 + column * 16, here ? from : a.data, here);
    }
  }
}

template <bool kContractedRowsB, int kTerms, int kTileRows>
FW_DEVICE void copy_split(MatmulShared<kTerms, kTileRows>& shared, int stage, const CUtensorMap* hi,
                          const CUtensorMap* lo, int q, int r, int batch) {
  constexpr int kBytes = kContractedRowsB ? shared.kSplitBytes : kTileRows * kTileDepth * 2;
  uint64_t* loaded = &shared.loaded_b[stage];
  arrive_expecting(loaded, shared.kParts * kBytes);
  for (int part = 0; part < shared.kParts; ++part) {
    const CUtensorMap* map = part ? lo : hi;
    char* to = shared.b[stage][part];
    if constexpr (kContractedRowsB) {
      for (int chunk = 0; chunk < shared.kChunks; ++chunk) {
        copy_box(to + chunk * 64 * kTileDepth * 2, map, loaded, q + 64 * chunk, r, batch);
      }
    } else {
      copy_box(to, map, loaded, r, q, batch);
    }
  }
}

// The warpgroup that loads. If b's rows are contracted indices, their factors come with a's blocks.
template <bool kFreeMajorA, bool kContractedRowsB, int kTerms, int kTileRows, class Sizes>
FW_DEVICE void load_blocks(MatmulShared<kTerms, kTileRows>& shared, const RawOperand& a,
                           const float* inverse_b, const CUtensorMap* map_a,
                           const CUtensorMap* map_hi, const CUtensorMap* map_lo,
                           const Sizes& sizes) {
  const int thread = threadIdx.x % kLoadThreads;
  // A thread that does not load must not wait either: a barrier may be two phases ahead of it.
  if (thread != 0 && !kContractedRowsB && !sizes.gather) return;
  Ring<shared.kStagesA> to_a;
  Ring<shared.kStagesB> to_b;
  for (int item = blockIdx.x; item < sizes.items(); item += gridDim.x) {
    int batch, p, q;
    sizes.locate(item / sizes.parts, batch, p, q);
    const int first = sizes.first_block(item) * kTileDepth;
    const int end = min(sizes.contracted, first + sizes.blocks * kTileDepth);
    const int layer = a.batch_stride == 0 ? 0 : batch;
    const float* factors = inverse_b + int64_t(batch) * sizes.contracted;
    for (int r = first; r < end; r += kTileDepth, to_a.advance(), to_b.advance()) {
      wait(&shared.done_b[to_b.stage], to_b.parity ^ 1);
      if (thread == 0) {
        copy_split<kContractedRowsB>(shared, to_b.stage, map_hi, map_lo, q, r, batch);
      }
      char* block = shared.a[to_a.stage];
      uint64_t* loaded = &shared.loaded_a[to_a.stage];
      wait(&shared.read_a[to_a.stage], to_a.parity ^ 1);
      if (thread == 0) {
        arrive_expecting(loaded, sizes.gather ? 0 : kRawBytes);
        if (!sizes.gather) copy_raw<kFreeMajorA>(block, map_a, loaded, p, r, layer);
      }
      if (sizes.gather) gather_raw<kFreeMajorA>(block, a, sizes, p, r, batch);
      if (kContractedRowsB && thread < kTileDepth) {
        const bool inside = r + thread < sizes.contracted;
        copy_word(shared_address(&shared.factors[to_a.stage][thread]),
                  factors + (inside ? r + thread : 0), inside);
      }
      if (kContractedRowsB || sizes.gather) arrive_after_copies(loaded);
    }
  }
  // The warpgroups that multiply read one block ahead, even after the last: that one is never
  // loaded.
  wait(&shared.read_a[to_a.stage], to_a.parity ^ 1);
  if (thread == 0) arrive(&shared.loaded_a[to_a.stage]);
  if (kContractedRowsB || sizes.gather) arrive(&shared.loaded_a[to_a.stage]);
}

}  // namespace fw
