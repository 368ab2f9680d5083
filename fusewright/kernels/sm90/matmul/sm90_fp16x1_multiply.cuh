// A matmul of high parts alone, with TF32's accuracy: used where PyTorch may use TF32.
//
// There are no low parts to compute and no totals beside the tensor cores' sums. So a tile may have
// 256 rows, and a block of a is read and rounded while the one before is multiplied. A row of a
// keeps its scale from block to block; if a block has elements too large for it, the sums so far
// are rescaled.
#pragma once

#include "sm90/matmul/sm90_load.cuh"

namespace fw {

constexpr float kMostFp16 = 61440.f;  // a little less than the largest fp16 number

// The rows' scales for the block that was read last, and the factors for sums with the old scales.
template <bool kFreeMajorA>
FW_DEVICE void rescale(const BlockFragments<kFreeMajorA>& fragments, bool first, float (&scale)[2],
                       float (&factor)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float most = fragments.largest(row), old = scale[row];
    const bool fits = most * old <= kMostFp16;
    if (first || !fits) scale[row] = scale_for(most);
    factor[row] = first || fits ? 1.f : scale[row] * inverse_of(old);
  }
}

// A warpgroup that multiplies. `finish(sum, row, item)` takes the sums of a tile, or of a part of
// it.
template <bool kFreeMajorA, bool kContractedRowsB, int kTileRows, class Sizes, class Finish>
FW_DEVICE void multiply_once(MatmulShared<1, kTileRows>& shared, const Sizes& sizes,
                             const Finish& finish) {
  constexpr int kSums = kTileRows / 2, kStep = kContractedRowsB ? 128 : 2;
  const bool speaks = threadIdx.x % 32 == 0;
  const FragmentReader<kFreeMajorA> reader;
  Ring<shared.kStagesA> from_a;
  Ring<shared.kStagesB> from_b;
  BlockFragments<kFreeMajorA> fragments;
  float sum[kSums], scale[2] = {1.f, 1.f}, factor[2];
  uint32_t fp16[4][4], next_fp16[4][4];
  const auto read_block = [&] {
    wait(&shared.loaded_a[from_a.stage], from_a.parity);
    fragments.template read<0, 4>(reader, shared.a[from_a.stage]);
    if constexpr (kContractedRowsB) fragments.fold(shared.factors[from_a.stage]);
    publish_reads();
    __syncwarp();
    if (speaks) arrive(&shared.read_a[from_a.stage]);
    from_a.advance();
  };
  read_block();
  rescale(fragments, true, scale, factor);
  fragments.round(scale, fp16);
#pragma unroll 1
  for (int item = blockIdx.x; item < sizes.items(); item += gridDim.x) {
    const int blocks = sizes.blocks_of(item);
    float next_scale[2] = {scale[0], scale[1]};
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i] = 0.f;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, from_b.advance()) {
      scale[0] = next_scale[0], scale[1] = next_scale[1];
      wait(&shared.loaded_b[from_b.stage], from_b.parity);
      const uint64_t b =
          tile_descriptor(shared.b[from_b.stage][0], kContractedRowsB ? 64 * kTileDepth * 2 : 0);
      begin_wgmma();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        multiply<kContractedRowsB>(sum, fp16[step], b + step * kStep, 1);
      }
      commit_wgmma();
      // While wgmma runs: the next block, which may be the first of another tile.
      read_block();
      rescale(fragments, block + 1 == blocks, next_scale, factor);
      fragments.round(next_scale, next_fp16);
      await_wgmma<0>();
      settle(sum);
      if (speaks) arrive(&shared.done_b[from_b.stage]);
      if (factor[0] != 1.f || factor[1] != 1.f) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sum[i] *= factor[i / 2 % 2];
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 16; ++i) move_after(fp16[i / 4][i % 4], next_fp16[i / 4][i % 4]);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sum[i] *= inverse_of(scale[i / 2 % 2]) * (kContractedRowsB ? 1.f / kFp16Reach : 1.f);
    }
    finish(sum, reader.row, item);
    scale[0] = next_scale[0], scale[1] = next_scale[1];
  }
}

}  // namespace fw
