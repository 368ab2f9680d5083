// Multiplies a weight gradient's slabs: output channels are wgmma's rows, input channels its
// columns; positions are contracted, 16 in a step, each a row of both operands.
//
// With one term the tensor cores add up slab after slab, as long as the scales stay. With three, a
// slab of a tap is dy_lo·x_hi + dy_hi·x_lo + dy_hi·x_hi, the small terms first; tensor cores
// truncate when they add, so it starts from zero and is added to the total in fp32.
#pragma once

#include "sm90/gradient/sm90_weight_gradient_load.cuh"

namespace fw {

// Slabs that tensor cores add up at most. They truncate: after these 8192 positions 3e-5 of a sum
// is lost (H200, 2026-11-15), ten times less than by rounding to fp16.
constexpr int kMostSlabs = 64;

// The taps of one of the multiplying warpgroups, from index `first` of the set on, and its chunk of
// the output channels.
struct TapShare {
  int first, taps, chunk;

  FW_FN TapShare(const GradientTiling& sizes, int taps_of_set, int warpgroup)
      : first(0), taps(taps_of_set), chunk(warpgroup) {
    if (!sizes.shares_taps()) return;
    const int half = (taps + 1) / 2;
    first = warpgroup * half, taps = warpgroup == 0 ? half : taps - half, chunk = 0;
  }
};

// The numbers of taps that warpgroups may have.
template <int... kCounts>
struct TapCounts {
  FW_FN static constexpr bool has(int taps) { return ((taps == kCounts) || ...); }
};
using AnyTaps = TapCounts<1, 2, 3, 4, 5>;

// Whether there is code for all numbers of taps that occur.
template <class Taps>
bool has_all_taps(const GradientTiling& sizes) {
  for (int at = 0; at < 2 * sizes.sets; ++at) {
    const TapShare share(sizes, sizes.set[at / 2].taps, at % 2);
    if (share.taps > 0 && !Taps::has(share.taps)) return false;
  }
  return true;
}

// A warpgroup that multiplies, for up to kTaps taps: 64 output channels by 64 input channels each.
template <int kTerms, int kTaps>
struct GradientMultiplier {
  using Shared = GradientShared<kTerms>;
  static constexpr int kSteps = kSlabPositions<kTerms> / 16, kRowStep = 128 / 16;
  Shared& shared;
  const GradientTiling& sizes;
  const TapShare share;
  float total[kTaps][32];
  uint32_t at[kTaps];  // where in the ring the taps' next steps begin, in a descriptor's units
  float scale_x = 1.f, scale_dy = 1.f;

  FW_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kTaps * 32; ++i) total[i / 32][i % 32] = 0.f;
  }
  // Where a tap's next 16 rows of x are.
  FW_DEVICE uint32_t step(int k) {
    const uint32_t here = at[k], next = here + 16 * kRowStep, ring = sizes.ring_rows * kRowStep;
    at[k] = next < ring ? next : next - ring;
    return here;
  }

  // Tensor cores add slab after slab to the totals.
  FW_DEVICE void add_slab(uint32_t x, uint32_t dy) {
    begin_wgmma();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        multiply_shared<half, true, true>(total[k], rows_descriptor(dy + i * 16 * kRowStep),
                                          rows_descriptor(x + step(k)), 1);
      }
    }
    commit_wgmma();
    await_wgmma<0>();
#pragma unroll
    for (int k = 0; k < kTaps; ++k) settle(total[k]);
  }
  // High and low parts of each operand, the small terms first, from zero, tap after tap: while this
  // warpgroup adds one up, the other multiplies.
  FW_DEVICE void add_slab_exactly(uint32_t x, uint32_t dy) {
    const uint32_t lower_x = sizes.ring_bytes() / 16, lower_dy = Shared::kChunkBytes / 16;
    const float small = min(inverse_of(scale_x), inverse_of(scale_dy));
    const float large = max(inverse_of(scale_x), inverse_of(scale_dy));
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      if (k == share.taps) break;
      float sum[32];
      uint32_t here[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) here[i] = step(k);
      const auto add = [&](uint32_t of_dy, uint32_t of_x, int to_sum) {
        multiply_shared<half, true, true>(sum, rows_descriptor(of_dy), rows_descriptor(of_x),
                                          to_sum);
      };
      begin_wgmma();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const uint32_t of_dy = dy + i * 16 * kRowStep, of_x = x + here[i];
        add(of_dy + lower_dy, of_x, i > 0);
        add(of_dy, of_x + lower_x, 1);
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) add(dy + i * 16 * kRowStep, x + here[i], 1);
      commit_wgmma();
      await_wgmma<0>();
      settle(sum);
#pragma unroll
      for (int i = 0; i < 32; ++i) total[k][i] = __fmaf_rn(sum[i] * small, large, total[k][i]);
    }
  }

  // Writes the totals, times two powers of two, to the workspace, or adds them to what is there.
  FW_DEVICE void deliver(float* workspace, float by, float then_by, bool onto) {
    const ConvShape& shape = sizes.shape;
    const GradientWork& work = shared.work;
    const int out =
        work.out + 64 * share.chunk + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int in = work.in + threadIdx.x % 4 * 2;
    const int64_t tap = int64_t(work.part) * shape.taps + work.set.first + share.first;
    const int64_t row = (tap * shape.groups + work.group) * shape.channels_out + out;
    float* to = workspace + row * shape.channels + in;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      if (k == share.taps) break;
      const auto each = [&](const auto& visit) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int down = i / 2 % 2 * 8, across = i / 4 * 8 + i % 2;
          if (out + down < shape.channels_out && in + across < shape.channels) {
            visit(total[k][i], to[down * shape.channels + across]);
          }
        }
      };
#pragma unroll
      for (int i = 0; i < 32; ++i) total[k][i] = total[k][i] * by * then_by;
      if (onto) each([](float& sum, const float& there) { sum += there; });
      each([](const float& sum, float& there) { there = sum; });
      to += int64_t(shape.groups) * shape.channels_out * shape.channels;
    }
  }

  FW_DEVICE void add_part(float* workspace) {
    const uint32_t ring = tile_address(shared.ring());
    int left = shared.work.slabs;
    uint32_t count = 0;
    bool onto = false;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      const int tap = share.first + min(k, share.taps - 1);
      at[k] = sizes.shift(shared.work.set, tap) * kRowStep;
    }
#pragma unroll 1
    do {
      clear();
#pragma unroll 1
      for (int slabs = 0; left > 0 && (kTerms == 3 || slabs < kMostSlabs); ++slabs) {
        const int stage = count % kSlabStages;
        wait(&shared.loaded[stage], count / kSlabStages % 2);
        const float of_x = shared.scale_x[stage], of_dy = shared.scale_dy[stage][share.chunk];
        if (kTerms == 1 && slabs > 0 && (of_x != scale_x || of_dy != scale_dy)) break;
        scale_x = of_x, scale_dy = of_dy;
        const uint32_t dy = tile_address(shared.dy(sizes, stage, share.chunk));
        if constexpr (kTerms == 1) {
          add_slab(ring, dy);
        } else {
          add_slab_exactly(ring, dy);
        }
        if (threadIdx.x % 32 == 0) arrive(&shared.done[stage]);
        --left, ++count;
      }
      // The product of both inverses may be too large: multiply by the smaller one first.
      const float of_x = inverse_of(scale_x), of_dy = inverse_of(scale_dy);
      if (kTerms == 1) deliver(workspace, min(of_x, of_dy), max(of_x, of_dy), onto);
      if (kTerms == 3) deliver(workspace, 1.f, 1.f, false);
      onto = true;
    } while (left > 0);
  }
};

// With one term all taps are multiplied together: there is code for each number of taps that
// occurs. With three they are multiplied one after another, and the same code serves any number.
template <class Taps, int kTerms, int kTaps = kTapsEach<kTerms>>
FW_DEVICE void multiply_slabs(GradientShared<kTerms>& shared, float* workspace,
                              const GradientTiling& sizes, const TapShare& share) {
  if constexpr (kTerms == 1 && kTaps > 1) {
    if (share.taps < kTaps) {
      return multiply_slabs<Taps, kTerms, kTaps - 1>(shared, workspace, sizes, share);
    }
  }
  if constexpr (kTerms == 3 || Taps::has(kTaps)) {
    GradientMultiplier<kTerms, kTaps> multiplier = {shared, sizes, share};
    multiplier.add_part(workspace);
  }
}

}  // namespace fw
