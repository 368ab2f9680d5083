// A convolution as a model gives it: the weights are split into halves in the order in which the
// window kernel reads them, and the taps laid out over the phases of the stride.
#pragma once

#include "convolution_operands.cuh"
#include "halves.hpp"
#include "sm90_window.cuh"
#include "window_taps.cuh"

namespace fw {

// A block for each out channel of all groups. `lo` may be null: not wanted.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    split_filter(const WindowFilter filter, const WindowShape shape, const TapOrder order, half* hi,
                 half* lo, float* inverse) {
  __shared__ float largest_of[kThreads / 32];
  const int thread = threadIdx.x, out = blockIdx.x;
  const int group = out / shape.channels_out, of_group = out % shape.channels_out;
  const float* from = filter.data + group * filter.group_stride + of_group * filter.out_stride;
  const int numbers = shape.channels * shape.taps;
  const auto number = [&](int channel, int tap) {
    return from[channel * filter.in_stride + order.y[tap] * filter.y_stride +
                order.x[tap] * filter.x_stride];
  };
  float largest = 0.f;
  int channel = thread / shape.taps, tap = thread % shape.taps;
  const int channels_on = kThreads / shape.taps, taps_on = kThreads % shape.taps;
#pragma unroll 4
  for (int i = thread; i < numbers; i += kThreads) {
    largest = fmaxf(largest, finite_magnitude(number(channel, tap)));
    channel += channels_on, tap += taps_on;
    if (tap >= shape.taps) tap -= shape.taps, ++channel;
  }
#pragma unroll
  for (int by = 16; by > 0; by /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, by));
  }
  if (thread % 32 == 0) largest_of[thread / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) largest = fmaxf(largest, largest_of[warp]);
  const float scale = half_scale(largest);
  if (thread == 0) inverse[out] = 1.f / scale;
  int64_t box = int64_t(group) * shape.boxes_between(0, shape.phases);
  const auto split_phase = [&](const WindowPhase& phase, int from_channel, int boxes) {
    const int channels = min(64, shape.channels - from_channel), steps = (channels + 15) / 16;
#pragma unroll 4
    for (int i = thread; i < boxes * 64; i += kThreads) {
      // With all 64 channels a box is a tap.
      const int tap = steps == 4 ? i / 64 : i / 16 / steps;
      const int channel = steps == 4 ? i % 64 : (i / 16 - tap * steps) * 16 + i % 16;
      const bool there = tap < phase.taps && channel < channels;
      const float x = there ? number(from_channel + channel, phase.first + tap) * scale : 0.f;
      const int64_t row = (box + i / 64) * shape.channels_out + of_group;
      const uint32_t high = two_halves(x, 0.f) & 0xffffu;
      const uint32_t low = two_halves(x - half_to_float(high), 0.f) & 0xffffu;
      hi[row * 64 + i % 64] = half{static_cast<uint16_t>(high)};
      if (lo != nullptr) lo[row * 64 + i % 64] = half{static_cast<uint16_t>(low)};
    }
  };
  for (int of_class = 0; of_class < shape.classes; ++of_class) {
    for (int channel = 0; channel < shape.channels; channel += 64) {
      for (int at = shape.first_phase(of_class); at < shape.end_phase(of_class); ++at) {
        const int boxes = shape.boxes(at, min(64, shape.channels - channel));
        split_phase(shape.phase[at], channel, boxes);
        box += boxes;
      }
    }
  }
}

// `workspace` has room for both halves and the scales of all weights. `kTurns`: with one half of each
// number, warpgroups take turns.
template <int kTerms, int kTileChannels, bool kTurns, int kLanes, class End>
int convolution(const End& end, bool vectors, const WindowInput& x, const WindowFilter& filter,
                const ConvolutionSizes& of, void* workspace, int device, void* stream) {
  using Kind = WindowKind<kTerms, kTileChannels, kTurns && kTerms == 1>;
  if (of.images == 0 || of.y.out == 0 || of.x.out == 0) return end_nothing(end, device, stream);
  WindowShape shape{};
  TapOrder order{};
  if (!lay_out(of, 4, shape, order)) return static_cast<int>(cudaErrorInvalidValue);
  int reach = 0;
  for (int phase = 0; phase < shape.phases; ++phase) reach = max(reach, shape.phase[phase].reach);
  shape.stage_rows = (Kind::kTilePositions + reach + 7) / 8 * 8;

  const OnDevice here(device);
  const int outs = of.groups * of.channels_out;
  const int64_t numbers = int64_t(outs) * shape.boxes_between(0, shape.phases) * 64;
  half* const hi = static_cast<half*>(workspace);
  half* const lo = hi + numbers;
  float* const inverse = reinterpret_cast<float*>(lo + numbers);
  const auto split = [&](auto threads) {
    constexpr int kThreads = decltype(threads)::value;
    const auto kernel = split_filter<kThreads>;
    kernel<<<outs, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        filter, shape, order, hi, kTerms == 1 ? nullptr : lo, inverse);
  };
  if (outs > 0 && of.channels * shape.taps < 1024) {
    split(std::integral_constant<int, 128>());
  } else if (outs > 0) {
    split(std::integral_constant<int, 512>());
  }
  const WindowWeights w = {hi, lo, inverse, filter, order};
  return window<Kind, kLanes>(end, vectors, x, w, shape, device, stream);
}

}  // namespace fw
