// Multiplies a convolution's stages by its weights: 64 output channels are wgmma's rows, positions
// its columns; input channels are contracted, 16 in a step.
//
// With one term the tensor cores add up all of a tile. With three, each box of four steps is
// x_lo·w_hi + x_hi·w_lo + x_hi·w_hi, the small terms first; tensor cores truncate when they add, so
// a box starts from zero and is added to the total in fp32.
#pragma once

#include "sm90/convolution/sm90_convolution_load.cuh"

namespace fw {

// The steps of a stage, 16 channels of a tap each. Weights after the last are zeros; they are
// multiplied by some tap's input.
struct ConvSteps {
  const uint16_t* shift;
  int tap, last, step, steps;
  int row, ring_rows;  // where in its ring the warpgroup's first position is
  uint32_t stage;      // the address of the ring, as in a descriptor

  // Where the rows of the tap begin.
  FW_DEVICE uint32_t address() const {
    int at = row + shift[tap];
    if (at >= ring_rows) at -= ring_rows;
    return stage + at * (128 / 16) + step * (32 / 16);
  }
  // The addresses of a box's four steps. In a block of 64 channels, all four are of one tap. (There
  // must be no branch between the wgmma instructions: the tensor cores would run them one after the
  // other.)
  FW_DEVICE void take_box(uint32_t (&x)[4]) {
    if (steps == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = i == 0 ? address() : x[0] + 2 * i;
      tap = min(tap + 1, last);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = address();
        if (++step == steps) step = 0, tap = min(tap + 1, last);
      }
    }
  }
};

// Starts multiplying by a box of weights, four steps.
template <int kSums>
FW_DEVICE void multiply_box(float (&sum)[kSums], const uint32_t (&x)[4], uint32_t w) {
  begin_wgmma();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    multiply_shared<half, false, false>(sum, rows_descriptor(w + 2 * step),
                                        rows_descriptor(x[step]), 1);
  }
  commit_wgmma();
}

// The same with high and low parts of both, the low ones `lower_x` and `lower_w` further on: from
// zero, the small terms first.
template <int kSums>
FW_DEVICE void multiply_box_exactly(float (&sum)[kSums], const uint32_t (&x)[4], uint32_t w,
                                    int lower_x, int lower_w) {
  const auto add = [&](uint32_t of_w, uint32_t of_x, int to_sum) {
    multiply_shared<half, false, false>(sum, rows_descriptor(of_w), rows_descriptor(of_x), to_sum);
  };
  begin_wgmma();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    add(w + 2 * step, x[step] + lower_x, step > 0);
    add(w + 2 * step + lower_w, x[step], 1);
  }
#pragma unroll
  for (int step = 0; step < 4; ++step) add(w + 2 * step, x[step], 1);
  commit_wgmma();
}

// A warpgroup that multiplies.
template <class Kind>
struct ConvMultiplier {
  static constexpr int kSums = Kind::kPositions / 2;
  ConvShared<Kind>& shared;
  const ConvTiling& sizes;
  int warpgroup;
  TileRun run;            // the tiles
  int part = 0;           // 64 of the tile's channels
  uint32_t job = 0;       // in ping-pong: counts the parts of all tiles
  uint32_t next_box = 0;  // of weights, the first of its tile
  uint32_t weights;       // the warpgroup's in the first box, as a descriptor's address
  ConvStages from_x;
  ConvRing<Kind::kBoxBits> from_w;
  float total[kSums];
  float scale = 1.f;      // of the last stage; with one term, of the total, too
  bool has_sums = false;  // the total is not zero

  // Without ping-pong one warpgroup is ahead of the other and stays so: while it finishes a tile,
  // the other has the tensor cores to itself.
  FW_DEVICE ConvMultiplier(ConvShared<Kind>& shared, const ConvTiling& sizes)
      : shared(shared), sizes(sizes), warpgroup(of_warp(threadIdx.x / 128)), run(sizes.run()),
        weights(tile_address(shared.weights)), from_x{sizes} {
    if constexpr (Kind::kPingPong) {
      skip(warpgroup);
    } else {
      part = Kind::kHasPart ? warpgroup : 0;
      weights += part * (64 * 128 / 16);
      if (warpgroup == 1 && sizes.lead > 0 && !run.ended()) await_turn(kPingPongBarrier + 1);
    }
  }

  // In ping-pong: moves on by so many parts.
  FW_DEVICE void skip(int parts) {
    job += parts;
    part += parts;
#pragma unroll 1
    for (; part >= sizes.parts; part -= sizes.parts) {
      if (!run.ended()) {
        int index = run.index();
        const int of_class = sizes.class_of(index);
        next_box += sizes.parts * sizes.boxes_of(of_class);
        from_x.advance(sizes.shape.stages(of_class));
      }
      ++run.done;
      from_x.next_tile();
    }
  }
  FW_DEVICE void go_on() {
    if constexpr (Kind::kPingPong) {
      skip(Kind::kGroups);
    } else {
      ++run.done;
      from_x.next_tile();
    }
  }
  FW_DEVICE static bool speaks() { return threadIdx.x % 32 == 0; }
  // The warpgroup's first position in the tile.
  FW_DEVICE int first_position() const { return Kind::kHasPart ? 0 : warpgroup * Kind::kPositions; }
  FW_DEVICE int first_channel() const { return 64 * part; }
  FW_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[i] = 0.f;
    has_sums = false;
  }
  FW_DEVICE void multiply_total(float by) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[i] *= by;
  }
  // Only positions from `from` up to `to`.
  FW_DEVICE void multiply_total(float by, int from, int to) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int at = 8 * (i / 4) + threadIdx.x % 4 * 2 + i % 2;
      total[i] *= at >= from && at < to ? by : 1.f;
    }
  }
  FW_DEVICE uint32_t await_weights() {
    const int stage = from_w.stage();
    wait(&shared.loaded_w[stage], from_w.parity());
    ++from_w.count;
    return weights + stage * int(sizeof(shared.weights[0]) / 16);
  }
  // Releases the last box but `later`.
  FW_DEVICE void release_weights(int later) {
    if (speaks()) arrive(&shared.done_w[from_w.stage(1 + later)]);
    if constexpr (!Kind::kPingPong) {
      if (warpgroup == 0 && from_w.count == sizes.lead + later) give_turn(kPingPongBarrier + 1);
    }
  }
  FW_DEVICE void begin_turn(int of_class) {
    from_w.count = next_box + part * sizes.boxes_of(of_class);
    if (job > 0) await_turn(kPingPongBarrier + warpgroup);
  }
  FW_DEVICE void hand_over() {
    const bool last = run.done + 1 == run.count && part + 1 == sizes.parts;
    if (!last) give_turn(kPingPongBarrier + (warpgroup + 1 == Kind::kGroups ? 0 : warpgroup + 1));
  }

  // One box is in flight while the next is started (two: no faster). `started` is called when all
  // are.
  template <class Started>
  FW_DEVICE void add_boxes(ConvSteps steps, int boxes, const Started& started) {
    uint32_t x[4];
    steps.take_box(x);
    multiply_box(total, x, await_weights());
#pragma unroll 1
    for (int box = 1; box < boxes; ++box) {
      steps.take_box(x);
      multiply_box(total, x, await_weights());
      await_wgmma<1>();
      release_weights(1);
    }
    started();
    await_wgmma<0>();
    settle(total);
    release_weights(0);
  }
  // While this warpgroup adds up a box, the other multiplies.
  FW_DEVICE void add_boxes_exactly(ConvSteps steps, int boxes) {
    const int lower = sizes.ring_bytes() / 16;
    const float inverse = inverse_of(scale);
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
      float sum[kSums];
      uint32_t x[4];
      steps.take_box(x);
      multiply_box_exactly(sum, x, await_weights(), lower, Kind::kBoxBytes / 16);
      await_wgmma<0>();
      settle(sum);
      release_weights(0);
#pragma unroll
      for (int i = 0; i < kSums; ++i) total[i] = __fmaf_rn(sum[i], inverse, total[i]);
    }
  }
  template <class Started>
  FW_DEVICE void add_stage(int block, int phase, const Started& started) {
    const TapPhase& of = sizes.shape.phase[phase];
    const ConvSteps steps = {
        sizes.shape.shift,      of.first,
        of.first + of.taps - 1, 0,
        sizes.steps(block),     from_x.row + first_position(),
        sizes.ring_rows,        tile_address(shared.ring(sizes, from_x.ring()))};
    const int boxes = sizes.boxes(block, phase);
    wait(&shared.loaded_x[from_x.stage], from_x.parity);
    const float last_scale = scale;
    if constexpr (!Kind::kStaged) scale = shared.scales[from_x.stage];
    if constexpr (Kind::kTerms == 1) {
      if (has_sums && scale != last_scale) multiply_total(scale * inverse_of(last_scale));
      has_sums = true;
      add_boxes(steps, boxes, started);
    } else {
      add_boxes_exactly(steps, boxes);
    }
    if (speaks()) arrive(&shared.done_x[from_x.stage]);
  }
  FW_DEVICE void add_tile(int of_class) {
    const ConvShape& shape = sizes.shape;
    clear();
    const int first = shape.first_phase(of_class), end = shape.end_phase(of_class);
    const int stage = from_x.stage, parity = from_x.parity;
    if constexpr (Kind::kPingPong) begin_turn(of_class);
#pragma unroll 1
    for (int block = 0; block < sizes.blocks(); ++block) {
#pragma unroll 1
      for (int phase = first; phase < end; ++phase) {
        const bool last = block + 1 == sizes.blocks() && phase + 1 == end;
        add_stage(block, phase, [&] {
          if (Kind::kPingPong && last) hand_over();
        });
        from_x.advance();
      }
    }
    if constexpr (Kind::kPingPong) from_x.stage = stage, from_x.parity = parity;  // for next parts
  }
  // What the total has yet to be multiplied by.
  FW_DEVICE float factor() const { return Kind::kTerms == 1 ? inverse_of(scale) : 1.f; }
};

}  // namespace fw
