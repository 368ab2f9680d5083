// y[n, q, oy, ox] = epilogue(Σ x[n, c, oy·sy − top + ky·dy, ox·sx − left + kx·dx]·w[q, 0, ky, kx]), where
// a group has a single channel c: plain fp32 sums, one plane at a time. With kGathers it is the transpose
// of such a convolution: x[n, c, iy, ix] adds to positions iy·sy − top + ky·dy of y.
//
// There is nothing to share but what neighbours read, and the cache has that: no tiles, no shared memory,
// nobody waits. A thread has kRows positions below each other, threads lie in rows as planes do, and some
// planes follow each other so that few threads have nothing to do.
#pragma once

#include "direct_convolution.cuh"

namespace fw {

constexpr int kPlaneThreads = 256;

struct PlaneSizes {
  ConvolutionSizes of;
  unsigned planes, together;   // of all images; of them so many side by side
  unsigned positions, blocks;  // threads of a plane; thread blocks of planes side by side
};

// Where along an axis tap number `tap` of position `at` reads; whether that is inside.
template <bool kGathers, int kStep, int kSpread>
__device__ __forceinline__ bool tap_reads(int& from, int at, int tap, const WindowAxis& axis) {
  const int moved = at + axis.padding - tap * kSpread;
  from = kGathers ? moved / kStep : at * kStep - axis.padding + tap * kSpread;
  return unsigned(from) < unsigned(axis.in) && (!kGathers || (moved >= 0 && moved % kStep == 0));
}

template <int kTerms>
__device__ __forceinline__ float plane_number(bool wanted, const float* at) {
  const float number = wanted ? *at : 0.f;
  return kTerms == 1 ? nearest_tf32(number) : number;
}

template <int kTerms, class Taps, int kRows, bool kGathers, class End>
__global__ void __launch_bounds__(kPlaneThreads)
    plane_kernel(const End end, const WindowInput x, const WindowFilter w, const PlaneSizes sizes) {
  const ConvolutionSizes& of = sizes.of;
  const unsigned first = blockIdx.x / sizes.blocks * sizes.together;
  const unsigned thread = blockIdx.x % sizes.blocks * kPlaneThreads + threadIdx.x;
  const unsigned beside = thread / sizes.positions, plane = first + beside;
  if (beside >= sizes.together || plane >= sizes.planes) return;
  const unsigned position = thread - beside * sizes.positions, below = position / unsigned(of.x.out);
  const int across = int(position - below * of.x.out), y = int(below) * kRows;
  const int channels = of.groups * of.channels_out, image = int(plane / unsigned(channels));
  const int channel = int(plane - unsigned(image) * channels), group = channel / of.channels_out;
  const float* const from = x.data + image * x.image_stride + group * x.channel_stride;
  const float* const by = w.data + group * w.group_stride +
                          (channel - group * of.channels_out) * w.out_stride;
  float weights[Taps::kY][Taps::kX];
  int column[Taps::kX];
  bool inside[Taps::kX];
#pragma unroll
  for (int tap = 0; tap < Taps::kX; ++tap) {
    inside[tap] = tap_reads<kGathers, Taps::kStepX, Taps::kSpreadX>(column[tap], across, tap, of.x);
#pragma unroll
    for (int tap_y = 0; tap_y < Taps::kY; ++tap_y) {
      weights[tap_y][tap] = plane_number<kTerms>(true, by + tap_y * w.y_stride + tap * w.x_stride);
    }
  }
  float sum[1][kRows] = {};
  const auto number = [&](bool there, int row, int tap) {
    const float* const at = from + row * x.y_stride + column[tap] * x.x_stride;
    return plane_number<kTerms>(there && inside[tap], at);
  };
  if constexpr (kGathers) {
#pragma unroll
    for (int i = 0; i < kRows * Taps::kY; ++i) {
      int row;
      const int at = i / Taps::kY, tap_y = i % Taps::kY;
      const bool there = tap_reads<true, Taps::kStepY, Taps::kSpreadY>(row, y + at, tap_y, of.y);
#pragma unroll
      for (int tap = 0; tap < Taps::kX; ++tap) {
        sum[0][at] = __fmaf_rn(number(there, row, tap), weights[tap_y][tap], sum[0][at]);
      }
    }
  } else {
    // Each number once, for all rows and taps that it belongs to.
#pragma unroll
    for (int i = 0; i < Taps::across_y(kRows); ++i) {
      const int row = y * Taps::kStepY - of.y.padding + i;
      const bool there = unsigned(row) < unsigned(of.y.in);
#pragma unroll
      for (int tap = 0; tap < Taps::kX; ++tap) {
        const float one = number(there, row, tap);
#pragma unroll
        for (int at = 0; at < kRows; ++at) {
          const int tap_y = (i - at * Taps::kStepY) / Taps::kSpreadY;
          if (tap_y * Taps::kSpreadY == i - at * Taps::kStepY && tap_y >= 0 && tap_y < Taps::kY) {
            sum[0][at] = __fmaf_rn(one, weights[tap_y][tap], sum[0][at]);
          }
        }
      }
    }
  }
  const DirectPlace place = {0, 0, 0, group, image};
  end_sums(sum, end, channel, 1, place, y, across, of);
}

template <int kTerms, class Taps, int kRows, bool kGathers, class End>
static int plane_convolution(const End& end, const WindowInput& x, WindowFilter w,
                             ConvolutionSizes of, int device, void* stream) {
  static_assert(!End::kReduces, "planes reduce nothing");
  if (!of.has_outputs()) return 0;
  const int64_t planes = of.images * of.groups * of.channels_out;
  const int64_t positions = int64_t(of.y.out + kRows - 1) / kRows * of.x.out;
  const bool is_plane = of.channels == 1 && of.z.is_single() && (of.transposed || !kGathers);
  if (!is_plane || planes > 0x7fffffff || positions > 0x3fffffff) {
    return static_cast<int>(cudaErrorInvalidValue);
  }
  if (of.transposed && !kGathers) turn_round<Taps>(of, w);
  // Together as many that a last thread block with little to do is one of sixteen.
  constexpr int kThreads = kPlaneThreads;
  const int64_t wanted = (16 * kThreads + positions - 1) / positions;
  PlaneSizes sizes = {of, unsigned(planes), unsigned(wanted < planes ? wanted : planes)};
  sizes.positions = unsigned(positions);
  sizes.blocks = unsigned((sizes.together * positions + kThreads - 1) / kThreads);
  const int64_t all = (planes + sizes.together - 1) / sizes.together * sizes.blocks;
  if (all > 0x7fffffff) return static_cast<int>(cudaErrorInvalidValue);
  const OnDevice here(device);
  const auto kernel = plane_kernel<kTerms, Taps, kRows, kGathers, End>;
  const unsigned grid = unsigned(all);
  kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(end, x, w, sizes);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
