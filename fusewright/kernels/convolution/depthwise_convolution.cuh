// y[n, q, oy, ox] = epilogue(Σ x[n, c, oy·sy − top + ky·dy, ox·sx − left + kx·dx]·w[q, 0, ky, kx]), where
// a group has a single channel c: plain fp32 sums, one plane at a time. Gathered it is the transpose of
// such a convolution: x[n, c, iy, ix] adds to positions iy·sy − top + ky·dy of y.
//
// There is nothing to share but what neighbours read, and the cache has that: no tiles, no shared memory,
// nobody waits. A thread has positions below each other (gathered, those of a stride beside each other,
// too), threads lie in rows as planes do, and some planes follow each other so that few threads have
// nothing to do.
#pragma once

#include "convolution/direct_convolution.cuh"

namespace fw {

constexpr int kPlaneThreads = 256;

struct PlaneSizes {
  ConvolutionSizes of;
  unsigned planes, together;   // of all images; of them so many side by side
  unsigned positions, across;  // threads of a plane, and of a row of it
  unsigned blocks;             // of planes side by side
};

template <int kTerms>
__device__ __forceinline__ float plane_number(bool wanted, const float* at) {
  const float number = wanted ? *at : 0.f;
  return kTerms == 1 ? nearest_tf32(number) : number;
}

// Where a thread is: its plane, and the first of its positions.
struct PlanePlace {
  int image, channel, group, y, x;
  bool inside;

  __device__ __forceinline__ PlanePlace(const PlaneSizes& sizes, int rows, int columns) {
    const ConvolutionSizes& of = sizes.of;
    const unsigned first = blockIdx.x / sizes.blocks * sizes.together;
    const unsigned thread = blockIdx.x % sizes.blocks * kPlaneThreads + threadIdx.x;
    const unsigned beside = thread / sizes.positions, plane = first + beside;
    const unsigned position = thread - beside * sizes.positions, below = position / sizes.across;
    const unsigned channels = unsigned(of.groups * of.channels_out);
    inside = beside < sizes.together && plane < sizes.planes;
    image = int(plane / channels), channel = int(plane % channels);
    group = channel / of.channels_out;
    y = int(below) * rows, x = int(position - below * sizes.across) * columns;
  }
};

// Each number that kRows positions below (y, x) read, once, and whom it belongs to:
// add(number, position, tap's row, tap's column).
template <int kTerms, class Taps, int kRows, class Add>
__device__ __forceinline__ void read_windows(int y, int x, const float* plane,
                                             const WindowInput& input, const ConvolutionSizes& of,
                                             const Add& add) {
#pragma unroll
  for (int i = 0; i < Taps::across_y(kRows); ++i) {
    const int row = y * Taps::kStepY - of.y.padding + i;
#pragma unroll
    for (int tap = 0; tap < Taps::kX; ++tap) {
      const int column = x * Taps::kStepX - of.x.padding + tap * Taps::kSpreadX;
      const bool there = unsigned(row) < unsigned(of.y.in) && unsigned(column) < unsigned(of.x.in);
      const float number =
          plane_number<kTerms>(there, plane + row * input.y_stride + column * input.x_stride);
#pragma unroll
      for (int at = 0; at < kRows; ++at) {
        const int tap_y = (i - at * Taps::kStepY) / Taps::kSpreadY;
        if (tap_y * Taps::kSpreadY == i - at * Taps::kStepY && tap_y >= 0 && tap_y < Taps::kY) {
          add(number, at, tap_y, tap);
        }
      }
    }
  }
}

template <int kTerms, class Taps>
struct Sliding {
  static constexpr int kColumns = 1;
  FW_FN static constexpr int rows(int wanted) { return wanted; }

  template <int kRows>
  __device__ __forceinline__ static void add(float (&sum)[1][kRows], const PlanePlace& place,
                                             const float* from, const WindowInput& x,
                                             const float (&w)[Taps::kY][Taps::kX],
                                             const ConvolutionSizes& of) {
    read_windows<kTerms, Taps, kRows>(
        place.y, place.x, from, x, of, [&](float number, int at, int tap_y, int tap_x) {
          sum[0][at] = __fmaf_rn(number, w[tap_y][tap_x], sum[0][at]);
        });
  }
};

// Along one axis of a gathered convolution, of the positions from a multiple of the stride on: which of
// the numbers that a thread reads tap `tap` of position `at` is given, or −1. kPhase is what is left of
// the padding, divided by the stride.
template <int kTaps, int kStep, int kSpread, int kPhase>
struct GatheredAxis {
  static constexpr int kReach = (kTaps - 1) * kSpread / kStep;  // numbers before the first position's
  FW_FN static constexpr int numbers(int positions) {
    return kReach + (positions - 1 + kPhase) / kStep + 1;
  }
  FW_FN static constexpr int given(int at, int tap) {
    const int moved = at + kPhase - tap * kSpread + kReach * kStep;
    return moved >= 0 && moved % kStep == 0 ? moved / kStep : -1;
  }
};

template <int kTerms, class Taps, int kPhaseY, int kPhaseX>
struct Gathered {
  using Y = GatheredAxis<Taps::kY, Taps::kStepY, Taps::kSpreadY, kPhaseY>;
  using X = GatheredAxis<Taps::kX, Taps::kStepX, Taps::kSpreadX, kPhaseX>;
  static constexpr int kColumns = Taps::kStepX;
  FW_FN static constexpr int rows(int wanted) {
    return wanted / Taps::kStepY * Taps::kStepY + (wanted < Taps::kStepY ? Taps::kStepY : 0);
  }

  template <int kRows>
  __device__ __forceinline__ static void add(float (&sum)[kColumns][kRows], const PlanePlace& place,
                                             const float* from, const WindowInput& x,
                                             const float (&w)[Taps::kY][Taps::kX],
                                             const ConvolutionSizes& of) {
    constexpr int kDown = Y::numbers(kRows), kAcross = X::numbers(kColumns);
    const int top = (place.y + of.y.padding) / Taps::kStepY - Y::kReach;
    const int left = (place.x + of.x.padding) / Taps::kStepX - X::kReach;
    float numbers[kDown][kAcross];
#pragma unroll
    for (int i = 0; i < kDown * kAcross; ++i) {
      const int row = top + i / kAcross, column = left + i % kAcross;
      const bool there = unsigned(row) < unsigned(of.y.in) && unsigned(column) < unsigned(of.x.in);
      numbers[i / kAcross][i % kAcross] =
          plane_number<kTerms>(there, from + row * x.y_stride + column * x.x_stride);
    }
#pragma unroll
    for (int tap = 0; tap < Taps::kAll; ++tap) {
#pragma unroll
      for (int i = 0; i < kRows * kColumns; ++i) {
        const int row = i / kColumns, column = i % kColumns;
        const int y = Y::given(row, tap / Taps::kX), x_at = X::given(column, tap % Taps::kX);
        if (y >= 0 && x_at >= 0) {
          sum[column][row] = __fmaf_rn(numbers[y][x_at], w[tap / Taps::kX][tap % Taps::kX],
                                       sum[column][row]);
        }
      }
    }
  }
};

template <int kTerms, class Taps, int kWanted, class Way, class End>
__global__ void __launch_bounds__(kPlaneThreads)
    plane_kernel(const End end, const WindowInput x, const WindowFilter w, const PlaneSizes sizes) {
  constexpr int kRows = Way::rows(kWanted), kColumns = Way::kColumns;
  const ConvolutionSizes& of = sizes.of;
  const PlanePlace place(sizes, kRows, kColumns);
  if (!place.inside) return;
  const float* const from = x.data + place.image * x.image_stride + place.group * x.channel_stride;
  const float* const by = w.data + place.group * w.group_stride +
                          (place.channel - place.group * of.channels_out) * w.out_stride;
  float weights[Taps::kY][Taps::kX];
#pragma unroll
  for (int tap = 0; tap < Taps::kAll; ++tap) {
    weights[tap / Taps::kX][tap % Taps::kX] = plane_number<kTerms>(
        true, by + tap / Taps::kX * w.y_stride + tap % Taps::kX * w.x_stride);
  }
  float sum[kColumns][kRows] = {};
  Way::add(sum, place, from, x, weights, of);
  const DirectPlace lies = {0, 0, 0, place.group, place.image};
#pragma unroll
  for (int column = 0; column < kColumns; ++column) {
    const float(&one)[1][kRows] = reinterpret_cast<const float(&)[1][kRows]>(sum[column]);
    end_sums(one, end, place.channel, 1, lies, place.y, place.x + column, of);
  }
}

template <int kTerms, class Taps, int kWanted, class Way, class End>
static int run_planes(const End& end, const WindowInput& x, const WindowFilter& w,
                      const ConvolutionSizes& of, int device, void* stream) {
  static_assert(!End::kReduces, "planes reduce nothing");
  if (!of.has_outputs()) return 0;
  constexpr int kRows = Way::rows(kWanted), kColumns = Way::kColumns, kThreads = kPlaneThreads;
  const int64_t planes = of.images * of.groups * of.channels_out;
  const int64_t across = (of.x.out + kColumns - 1) / kColumns;
  const int64_t positions = (of.y.out + kRows - 1) / kRows * across;
  if (of.channels != 1 || !of.z.is_single() || planes > 0x7fffffff || positions > 0x3fffffff) {
    return static_cast<int>(cudaErrorInvalidValue);
  }
  // Together as many that a last thread block with little to do is one of sixteen.
  const int64_t wanted = (16 * kThreads + positions - 1) / positions;
  PlaneSizes sizes = {of, unsigned(planes), unsigned(wanted < planes ? wanted : planes)};
  sizes.positions = unsigned(positions), sizes.across = unsigned(across);
  sizes.blocks = unsigned((sizes.together * positions + kThreads - 1) / kThreads);
  const int64_t all = (planes + sizes.together - 1) / sizes.together * sizes.blocks;
  if (all > 0x7fffffff) return static_cast<int>(cudaErrorInvalidValue);
  const OnDevice here(device);
  const auto kernel = plane_kernel<kTerms, Taps, kWanted, Way, End>;
  const unsigned grid = unsigned(all);
  kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(end, x, w, sizes);
  return static_cast<int>(cudaGetLastError());
}

// A thread has about so many rows.
template <int kTerms, class Taps, int kRows, class End>
static int plane_convolution(const End& end, const WindowInput& x, WindowFilter w,
                             ConvolutionSizes of, int device, void* stream) {
  if (of.transposed) turn_round<Taps>(of, w);
  return run_planes<kTerms, Taps, kRows, Sliding<kTerms, Taps>>(end, x, w, of, device, stream);
}

template <int kTerms, class Taps, int kRows, int kPhaseY, int kPhaseX, class End>
static int gathered_planes(const End& end, const WindowInput& x, const WindowFilter& w,
                           const ConvolutionSizes& of, int device, void* stream) {
  using Way = Gathered<kTerms, Taps, kPhaseY, kPhaseX>;
  const bool fits = of.y.padding % Taps::kStepY == kPhaseY && of.x.padding % Taps::kStepX == kPhaseX;
  if (!of.transposed || !fits) return static_cast<int>(cudaErrorInvalidValue);
  return run_planes<kTerms, Taps, kRows, Way>(end, x, w, of, device, stream);
}

}  // namespace fw
