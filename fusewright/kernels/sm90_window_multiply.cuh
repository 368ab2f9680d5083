// The products of a convolution's stages and weights: positions are wgmma's rows, out channels its
// columns, in channels what is contracted, 16 at a step.
//
// With one term the tensor cores add up all of a tile. With three, each box of four steps is
// x_lo·w_hi + x_hi·w_lo + x_hi·w_hi, the small products first; tensor cores truncate when they add,
// so a box starts from zero and is added to the total in fp32.
#pragma once

#include "sm90_window_load.cuh"

namespace fw {

// The steps of a stage's products, 16 channels of a tap each. Weights after the last are zeros: what
// they meet is some tap's.
struct WindowSteps {
  const uint16_t* shift;
  int tap, last, step, steps;
  int row, ring_rows;  // where in its ring the warpgroup's first position lies

  // Where the rows of a block of 64 positions begin, as a distance in wgmma's descriptors.
  __device__ __forceinline__ uint32_t distance(int block) const {
    int at = row + 64 * block + shift[tap];
    if (at >= ring_rows) at -= ring_rows;
    return at * (128 / 16) + step * (32 / 16);
  }
  // The distances of a box's four steps. All of a block of 64 channels are of one tap. (Nothing may
  // branch between the products: the tensor cores would do one after the other.)
  template <int kBlocks>
  __device__ __forceinline__ void take_box(uint32_t (&here)[4][kBlocks]) {
    if (steps == 4) {
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) {
        const int block = i % kBlocks, of_box = i / kBlocks;
        here[of_box][block] = of_box == 0 ? distance(block) : here[0][block] + 2 * of_box;
      }
      tap = min(tap + 1, last);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) here[i][block] = distance(block);
        if (++step == steps) step = 0, tap = min(tap + 1, last);
      }
    }
  }
};

// Starts the products of a box of weights, four steps, for each block of 64 positions.
template <int kBlocks, int kSums>
__device__ __forceinline__ void multiply_box(float (&sum)[kBlocks][kSums], WindowSteps& steps,
                                             uint64_t x, uint64_t w) {
  uint32_t here[4][kBlocks];
  steps.take_box(here);
  begin_products();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      multiply_shared<half, false, false>(sum[block], x + here[step][block], w + 2 * step, 1);
    }
  }
  commit_products();
}

// The same with both halves of each, the lower ones `lower_x` and `lower_w` further: from zero, and
// the small products first.
template <int kSums>
__device__ __forceinline__ void multiply_box_exactly(float (&sum)[kSums], WindowSteps& steps,
                                                     uint64_t x, uint64_t w, int lower_x,
                                                     int lower_w) {
  uint32_t distance[4][1];
  uint64_t here[4];
  steps.take_box(distance);
#pragma unroll
  for (int step = 0; step < 4; ++step) here[step] = x + distance[step][0];
  begin_products();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint64_t weights = w + 2 * step;
    multiply_shared<half, false, false>(sum, here[step] + lower_x, weights, step > 0);
    multiply_shared<half, false, false>(sum, here[step], weights + lower_w, 1);
  }
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    multiply_shared<half, false, false>(sum, here[step], w + 2 * step, 1);
  }
  commit_products();
}

// A warpgroup that multiplies.
template <int kTerms, int kTileChannels>
struct WindowMultiplier {
  using Shared = WindowShared<kTerms, kTileChannels>;
  static constexpr int kBlocks = kTilePositions<kTerms, kTileChannels> / 128, kSums = kTileChannels / 2;
  Shared& shared;
  const WindowSizes& sizes;
  WindowStages from_x;
  WindowRing from_w;
  float total[kBlocks][kSums];
  float scale = 1.f;     // of the last stage; with one term, of the total too
  bool has_sums = false;  // the total is not zero

  // One warpgroup is ahead of the other and stays so: while it finishes a tile, the other has the
  // tensor cores to itself.
  __device__ __forceinline__ WindowMultiplier(Shared& shared, const WindowSizes& sizes)
      : shared(shared), sizes(sizes), from_x{sizes}, from_w(Shared::kWeightStages) {
    if (threadIdx.x >= 128 && sizes.lead > 0) await_turn(kLeadBarrier);
  }

  __device__ __forceinline__ static bool speaks() { return threadIdx.x % 32 == 0; }
  __device__ __forceinline__ static int first_position() {
    return threadIdx.x / 128 * (64 * kBlocks);
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kBlocks * kSums; ++i) total[i / kSums][i % kSums] = 0.f;
    has_sums = false;
  }
  __device__ __forceinline__ void multiply_total(float by) {
#pragma unroll
    for (int i = 0; i < kBlocks * kSums; ++i) total[i / kSums][i % kSums] *= by;
  }
  __device__ __forceinline__ uint64_t await_weights() {
    wait(&shared.loaded_w[from_w.stage()], from_w.parity());
    const uint64_t weights = tile_descriptor(shared.weights[from_w.stage()], 0);
    ++from_w.count;
    return weights;
  }
  // Those of the last box but `later`.
  __device__ __forceinline__ void release_weights(int later) {
    if (speaks()) arrive(&shared.done_w[from_w.stage(1 + later)]);
    if (threadIdx.x < 128 && from_w.count == sizes.lead + later) give_turn(kLeadBarrier);
  }

  // One box is in flight while the next is started.
  __device__ __forceinline__ void add_boxes(WindowSteps steps, uint64_t stage, int boxes) {
    multiply_box(total, steps, stage, await_weights());
#pragma unroll 1
    for (int box = 1; box < boxes; ++box) {
      multiply_box(total, steps, stage, await_weights());
      await_products<1>();
      release_weights(1);
    }
    await_products<0>();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) settle(total[block]);
    release_weights(0);
  }
  // While this warpgroup adds up a box, the other's products run.
  __device__ __forceinline__ void add_boxes_exactly(WindowSteps steps, uint64_t stage, int boxes) {
    const int lower = sizes.ring_bytes() / 16;
    const float inverse = inverse_of(scale);
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
      float sum[kSums];
      multiply_box_exactly(sum, steps, stage, await_weights(), lower, Shared::kWeightBytes / 16);
      await_products<0>();
      settle(sum);
      release_weights(0);
#pragma unroll
      for (int i = 0; i < kSums; ++i) total[0][i] = __fmaf_rn(sum[i], inverse, total[0][i]);
    }
  }
  __device__ __forceinline__ void add_stage(WindowSteps steps, int boxes) {
    wait(&shared.loaded_x[from_x.stage], from_x.parity);
    const float last_scale = scale;
    scale = shared.scales[from_x.stage];
    const uint64_t stage = tile_descriptor(shared.ring(sizes, from_x.ring()), 0);
    if constexpr (kTerms == 1) {
      if (has_sums && scale != last_scale) multiply_total(scale * inverse_of(last_scale));
      has_sums = true;
      add_boxes(steps, stage, boxes);
    } else {
      add_boxes_exactly(steps, stage, boxes);
    }
    if (speaks()) arrive(&shared.done_x[from_x.stage]);
    from_x.advance();
  }
  __device__ __forceinline__ void add_tile(int of_class) {
    const WindowShape& shape = sizes.shape;
    clear();
#pragma unroll 1
    for (int block = 0; block < sizes.blocks(); ++block) {
#pragma unroll 1
      for (int phase = shape.first_phase(of_class); phase < shape.end_phase(of_class); ++phase) {
        const int tap = shape.phase[phase].first, last = tap + shape.phase[phase].taps - 1;
        const int row = from_x.row + first_position();
        add_stage({shape.shift, tap, last, 0, sizes.steps(block), row, sizes.ring_rows},
                  sizes.boxes(block, phase));
      }
    }
    from_x.next_tile();
    if (kTerms == 1) multiply_total(inverse_of(scale));
  }
};

}  // namespace fw
