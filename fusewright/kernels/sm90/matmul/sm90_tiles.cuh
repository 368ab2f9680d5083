// What all product kernels share: how a result is cut into tiles, and the stages that blocks of the
// operands go through.
#pragma once

#include "sm90/matmul/matmul_operands.cuh"
#include "sm90/matmul/sm90_epilogue.cuh"

namespace fw {

constexpr int kTileDepth = 64;     // contracted indices of a block, four steps of 16
constexpr int kTileColumns = 128;  // of the result: 64 for each warpgroup that multiplies
constexpr int kProductThreads = 384;
constexpr int kLoadThreads = 128;
constexpr int kTileGroup = 8;  // tiles along q whose b is shared by the blocks that run together

struct ProductSizes {
  int columns, rows, contracted, batches;  // of p, q, r and the products side by side
  int tiles_p, tiles_q, blocks, tile_rows;
  bool gather;   // a's layout is not one that the copy engine takes
  bool vectors;  // the epilogue may take four columns at a time

  __device__ __forceinline__ int tiles() const { return batches * tiles_p * tiles_q; }
  // What a thread block takes at once: a tile, of which it has all blocks (or a part: SharedSizes).
  static constexpr int parts = 1;
  __device__ __forceinline__ int items() const { return tiles(); }
  __device__ __forceinline__ int first_block(int) const { return 0; }
  __device__ __forceinline__ int blocks_of(int) const { return blocks; }
  // The batch, first column and row of a tile. Tiles that run together share few rows of a and b.
  __device__ __forceinline__ void place(int tile, int& batch, int& p, int& q) const {
    batch = tile / (tiles_p * tiles_q);
    tile -= batch * tiles_p * tiles_q;
    const int group = tile / (tiles_p * kTileGroup);
    const int first = group * kTileGroup, rest = tile - first * tiles_p;
    const int width = max(1, min(kTileGroup, tiles_q - first));
    p = rest / width * kTileColumns;
    q = (first + rest % width) * tile_rows;
  }
  // The number of a tile among those of its columns.
  __device__ __forceinline__ int line(int batch, int q) const {
    return batch * tiles_q + q / tile_rows;
  }
};

// How many parts a reduction of the result is left in.
template <class End>
int lines_of(const ProductSizes& sizes) {
  const int across = sizes.vectors ? FinishShape<4>::kRowPart : FinishShape<1>::kRowPart;
  return End::kByRow ? (sizes.columns + across - 1) / across : sizes.batches * sizes.tiles_q;
}

// The stages that blocks go through, round and round.
template <int kStages>
struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

}  // namespace fw
