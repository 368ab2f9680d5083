// A convolution as a model gives it: the weights are split into halves in the order in which the
// window kernel reads them, and the taps laid out over the phases of the stride.
#pragma once

#include "convolution_operands.cuh"
#include "halves.hpp"
#include "sm90_window.cuh"
#include "window_taps.cuh"

namespace fw {

constexpr int kSplitThreads = 128;

// Boxes of 64 numbers for each out channel that the taps of a phase fill, with so many channels.
FW_FN int boxes_of(const WindowPhase& phase, int channels) {
  return (phase.taps * ((channels + 15) / 16) + 3) / 4;
}

FW_FN int boxes_of(const WindowShape& shape, int channels) {
  int boxes = channels / 64 * shape.taps;
  for (int at = 0; channels % 64 > 0 && at < shape.phases; ++at) {
    boxes += boxes_of(shape.phase[at], channels % 64);
  }
  return boxes;
}

// A block for each out channel of all groups.
__global__ void __launch_bounds__(kSplitThreads)
    split_filter(const WindowFilter filter, const WindowShape shape, const TapOrder order, half* hi,
                 half* lo, float* inverse) {
  __shared__ float largest_of[kSplitThreads / 32];
  const int thread = threadIdx.x, out = blockIdx.x;
  const float* from = filter.data + out * filter.out_stride;
  const int numbers = shape.channels * shape.taps;
  const auto number = [&](int channel, int tap) {
    return from[channel * filter.in_stride + order.y[tap] * filter.y_stride +
                order.x[tap] * filter.x_stride];
  };
  float largest = 0.f;
  for (int i = thread; i < numbers; i += kSplitThreads) {
    largest = fmaxf(largest, finite_magnitude(number(i / shape.taps, i % shape.taps)));
  }
#pragma unroll
  for (int by = 16; by > 0; by /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, by));
  }
  if (thread % 32 == 0) largest_of[thread / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kSplitThreads / 32; ++warp) largest = fmaxf(largest, largest_of[warp]);
  const float scale = half_scale(largest);
  if (thread == 0) inverse[out] = 1.f / scale;
  const int64_t group = out / shape.channels_out;
  int64_t box = group * boxes_of(shape, shape.channels);
  for (int from_channel = 0; from_channel < shape.channels; from_channel += 64) {
    const int channels = min(64, shape.channels - from_channel), steps = (channels + 15) / 16;
    for (int at = 0, first = 0; at < shape.phases; first += shape.phase[at++].taps) {
      const int numbers_here = boxes_of(shape.phase[at], channels) * 64;
      for (int i = thread; i < numbers_here; i += kSplitThreads) {
        const int tap = i / 16 / steps, channel = i / 16 % steps * 16 + i % 16;
        const bool there = tap < shape.phase[at].taps && channel < channels;
        const float x = there ? number(from_channel + channel, first + tap) * scale : 0.f;
        const int64_t row = (box + i / 64) * shape.channels_out + out % shape.channels_out;
        const uint32_t high = two_halves(x, 0.f) & 0xffffu;
        const uint32_t low = two_halves(x - half_to_float(high), 0.f) & 0xffffu;
        hi[row * 64 + i % 64] = half{static_cast<uint16_t>(high)};
        lo[row * 64 + i % 64] = half{static_cast<uint16_t>(low)};
      }
      box += numbers_here / 64;
    }
  }
}

// `workspace` has room for both halves and the scales of all weights.
template <int kTerms, int kTileChannels, class End>
int convolution(const End& end, bool vectors, const WindowInput& x, const WindowFilter& filter,
                const ConvolutionSizes& of, void* workspace, int device, void* stream) {
  WindowShape shape{};
  shape.images = int(of.images), shape.groups = of.groups;
  shape.channels = of.channels, shape.channels_out = of.channels_out;
  shape.y = of.y, shape.x = of.x;
  shape.band_width = of.band_width;
  shape.pitch = (of.band_width + of.x.halo() + 3) / 4 * 4;
  TapOrder order{};
  if (!lay_out_taps(shape, order)) return static_cast<int>(cudaErrorInvalidValue);
  int reach = 0;
  for (int phase = 0; phase < shape.phases; ++phase) reach = max(reach, shape.phase[phase].reach);
  shape.stage_rows = (kTilePositions<kTerms> + reach + 7) / 8 * 8;

  const OnDevice here(device);
  const int outs = of.groups * of.channels_out;
  const int64_t numbers = int64_t(outs) * boxes_of(shape, of.channels) * 64;
  half* const hi = static_cast<half*>(workspace);
  half* const lo = hi + numbers;
  float* const inverse = reinterpret_cast<float*>(lo + numbers);
  if (outs > 0) {
    const auto kernel = split_filter;
    kernel<<<outs, kSplitThreads, 0, static_cast<cudaStream_t>(stream)>>>(filter, shape, order, hi,
                                                                          lo, inverse);
  }
  const WindowWeights w = {hi, lo, inverse, filter.data, filter.out_stride, filter.in_stride,
                           filter.y_stride, filter.x_stride};
  return window<kTerms, kTileChannels>(end, vectors, x, w, shape, device, stream);
}

}  // namespace fw
