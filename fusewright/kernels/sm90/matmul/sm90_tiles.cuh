// What all matmul kernels share: how a result is divided into tiles, and the ring of stages that
// holds blocks of the operands.
#pragma once

#include "sm90/matmul/matmul_operands.cuh"
#include "sm90/matmul/sm90_epilogue.cuh"

namespace fw {

constexpr int kTileDepth = 64;     // contracted indices of a block, four steps of 16
constexpr int kTileColumns = 128;  // of the result: 64 for each warpgroup that multiplies
constexpr int kMatmulThreads = 384;
constexpr int kLoadThreads = 128;
constexpr int kTileGroup = 8;  // tiles along q whose b is shared by thread blocks that run together

struct MatmulSizes {
  int columns, rows, contracted, batches;  // of p, q and r; matmuls of the batch
  int tiles_p, tiles_q, blocks, tile_rows;
  bool gather;   // TMA cannot read a's layout
  bool vectors;  // the epilogue may process four columns at a time

  FW_DEVICE int tiles() const { return batches * tiles_p * tiles_q; }
  // What a thread block takes at once: a tile with all of its blocks (or a part of them:
  // SharedSizes).
  static constexpr int parts = 1;
  FW_DEVICE int items() const { return tiles(); }
  FW_DEVICE int first_block(int) const { return 0; }
  FW_DEVICE int blocks_of(int) const { return blocks; }
  // The batch, first column and row of a tile. Tiles that run together read few rows of a and b.
  FW_DEVICE void locate(int tile, int& batch, int& p, int& q) const {
    batch = tile / (tiles_p * tiles_q);
    tile -= batch * tiles_p * tiles_q;
    const int group = tile / (tiles_p * kTileGroup);
    const int first = group * kTileGroup, rest = tile - first * tiles_p;
    const int width = max(1, min(kTileGroup, tiles_q - first));
    p = rest / width * kTileColumns;
    q = (first + rest % width) * tile_rows;
  }
  // The index of a tile among those of its columns.
  FW_DEVICE int partial(int batch, int q) const { return batch * tiles_q + q / tile_rows; }
};

// How many partials a reduction of the result leaves.
template <class Epilogue>
int partials_of(const MatmulSizes& sizes) {
  const int across = sizes.vectors ? FinishShape<4>::kRowPart : FinishShape<1>::kRowPart;
  return Epilogue::kByRow ? (sizes.columns + across - 1) / across : sizes.batches * sizes.tiles_q;
}

// A ring of stages.
template <int kStages>
struct Ring {
  int stage = 0, parity = 0;
  FW_DEVICE void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

}  // namespace fw
