// y[n, q, oy, ox] = epilogue(Σ x[n, c, oy·sy − top + ky·dy, ox·sx − left + kx·dx]·w[q, 0, ky, kx]),
// where a group has a single input channel c: plain fp32 sums, one plane at a time. `Gathered`
// computes the transpose of such a convolution: x[n, c, iy, ix] adds to positions iy·sy − top +
// ky·dy of y.
//
// Neighbouring positions share only what they read, and the cache holds that. So there are no
// tiles, no shared memory and no barriers. A thread computes several positions of one column
// (`Gathered`: of as many neighbouring columns as the stride). The threads of a plane are numbered
// row by row, and several planes are concatenated so that few threads are idle.
#pragma once

#include "convolution/direct_convolution.cuh"

namespace fw {

constexpr int kDepthwiseThreads = 256;

struct DepthwiseSizes {
  ConvolutionSizes of;
  unsigned planes, together;   // of all images; how many are concatenated
  unsigned positions, across;  // threads of a plane; threads of a row of it
  unsigned blocks;             // thread blocks for `together` planes
};

template <int kTerms>
FW_DEVICE float depthwise_number(bool wanted, const float* at) {
  const float number = wanted ? *at : 0.f;
  return kTerms == 1 ? nearest_tf32(number) : number;
}

// A thread's plane and the first of its positions.
struct DepthwisePosition {
  int image, channel, group, y, x;
  bool inside;

  FW_DEVICE DepthwisePosition(const DepthwiseSizes& sizes, int rows, int columns) {
    const ConvolutionSizes& of = sizes.of;
    const unsigned first = blockIdx.x / sizes.blocks * sizes.together;
    const unsigned thread = blockIdx.x % sizes.blocks * kDepthwiseThreads + threadIdx.x;
    const unsigned beside = thread / sizes.positions, plane = first + beside;
    const unsigned position = thread - beside * sizes.positions, below = position / sizes.across;
    const unsigned channels = unsigned(of.groups * of.channels_out);
    inside = beside < sizes.together && plane < sizes.planes;
    image = int(plane / channels), channel = int(plane % channels);
    group = channel / of.channels_out;
    y = int(below) * rows, x = int(position - below * sizes.across) * columns;
  }
};

// Reads each element that kRows positions from (y, x) downwards need, once, and calls add(element,
// position, tap's row, tap's column) for each of its uses.
template <int kTerms, class Taps, int kRows, class Add>
FW_DEVICE void read_taps(int y, int x, const float* plane, const ConvInput& input,
                         const ConvolutionSizes& of, const Add& add) {
#pragma unroll
  for (int i = 0; i < Taps::across_y(kRows); ++i) {
    const int row = y * Taps::kStepY - of.y.padding + i;
#pragma unroll
    for (int tap = 0; tap < Taps::kX; ++tap) {
      const int column = x * Taps::kStepX - of.x.padding + tap * Taps::kSpreadX;
      const bool there = unsigned(row) < unsigned(of.y.in) && unsigned(column) < unsigned(of.x.in);
      const float number =
          depthwise_number<kTerms>(there, plane + row * input.y_stride + column * input.x_stride);
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
  FW_DEVICE static void add(float (&sum)[1][kRows], const DepthwisePosition& here,
                            const float* from, const ConvInput& x,
                            const float (&w)[Taps::kY][Taps::kX], const ConvolutionSizes& of) {
    read_taps<kTerms, Taps, kRows>(here.y, here.x, from, x, of,
                                   [&](float number, int at, int tap_y, int tap_x) {
                                     sum[0][at] = __fmaf_rn(number, w[tap_y][tap_x], sum[0][at]);
                                   });
  }
};

// One axis of a transposed convolution, for a thread whose positions begin at a multiple of the
// stride. `given` returns which of the elements that the thread reads is multiplied by tap `tap`
// for position `at`, or −1. kReach is the number of elements before the first position's own;
// kPhase is the padding modulo the stride.
template <int kTaps, int kStep, int kSpread, int kPhase>
struct GatheredAxis {
  static constexpr int kReach = (kTaps - 1) * kSpread / kStep;
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
  FW_DEVICE static void add(float (&sum)[kColumns][kRows], const DepthwisePosition& here,
                            const float* from, const ConvInput& x,
                            const float (&w)[Taps::kY][Taps::kX], const ConvolutionSizes& of) {
    constexpr int kDown = Y::numbers(kRows), kAcross = X::numbers(kColumns);
    const int top = (here.y + of.y.padding) / Taps::kStepY - Y::kReach;
    const int left = (here.x + of.x.padding) / Taps::kStepX - X::kReach;
    float numbers[kDown][kAcross];
#pragma unroll
    for (int i = 0; i < kDown * kAcross; ++i) {
      const int row = top + i / kAcross, column = left + i % kAcross;
      const bool there = unsigned(row) < unsigned(of.y.in) && unsigned(column) < unsigned(of.x.in);
      numbers[i / kAcross][i % kAcross] =
          depthwise_number<kTerms>(there, from + row * x.y_stride + column * x.x_stride);
    }
#pragma unroll
    for (int tap = 0; tap < Taps::kAll; ++tap) {
#pragma unroll
      for (int i = 0; i < kRows * kColumns; ++i) {
        const int row = i / kColumns, column = i % kColumns;
        const int y = Y::given(row, tap / Taps::kX), x_at = X::given(column, tap % Taps::kX);
        if (y >= 0 && x_at >= 0) {
          sum[column][row] =
              __fmaf_rn(numbers[y][x_at], w[tap / Taps::kX][tap % Taps::kX], sum[column][row]);
        }
      }
    }
  }
};

template <int kTerms, class Taps, int kWanted, class Way, class Epilogue>
__global__ void __launch_bounds__(kDepthwiseThreads)
    depthwise_kernel(const Epilogue end, const ConvInput x, const ConvFilter w,
                     const DepthwiseSizes sizes) {
  constexpr int kRows = Way::rows(kWanted), kColumns = Way::kColumns;
  const ConvolutionSizes& of = sizes.of;
  const DepthwisePosition here(sizes, kRows, kColumns);
  if (!here.inside) return;
  const float* const from = x.data + here.image * x.image_stride + here.group * x.channel_stride;
  const float* const by = w.data + here.group * w.group_stride +
                          (here.channel - here.group * of.channels_out) * w.out_stride;
  float weights[Taps::kY][Taps::kX];
#pragma unroll
  for (int tap = 0; tap < Taps::kAll; ++tap) {
    weights[tap / Taps::kX][tap % Taps::kX] = depthwise_number<kTerms>(
        true, by + tap / Taps::kX * w.y_stride + tap % Taps::kX * w.x_stride);
  }
  float sum[kColumns][kRows] = {};
  Way::add(sum, here, from, x, weights, of);
  const DirectPosition output = {0, 0, 0, here.group, here.image};
#pragma unroll
  for (int column = 0; column < kColumns; ++column) {
    const float (&one)[1][kRows] = reinterpret_cast<const float (&)[1][kRows]>(sum[column]);
    end_sums(one, end, here.channel, 1, output, here.y, here.x + column, of);
  }
}

template <int kTerms, class Taps, int kWanted, class Way, class Epilogue>
static int run_depthwise(const Epilogue& end, const ConvInput& x, const ConvFilter& w,
                         const ConvolutionSizes& of, int device, void* stream) {
  static_assert(!Epilogue::kReduces, "planes reduce nothing");
  if (!of.has_outputs()) return 0;
  constexpr int kRows = Way::rows(kWanted), kColumns = Way::kColumns, kThreads = kDepthwiseThreads;
  const int64_t planes = of.images * of.groups * of.channels_out;
  const int64_t across = (of.x.out + kColumns - 1) / kColumns;
  const int64_t positions = (of.y.out + kRows - 1) / kRows * across;
  if (of.channels != 1 || !of.z.is_single() || planes > 0x7fffffff || positions > 0x3fffffff) {
    return static_cast<int>(cudaErrorInvalidValue);
  }
  // Enough planes that an under-filled last thread block is one of sixteen.
  const int64_t wanted = (16 * kThreads + positions - 1) / positions;
  DepthwiseSizes sizes = {of, unsigned(planes), unsigned(wanted < planes ? wanted : planes)};
  sizes.positions = unsigned(positions), sizes.across = unsigned(across);
  sizes.blocks = unsigned((sizes.together * positions + kThreads - 1) / kThreads);
  const int64_t all = (planes + sizes.together - 1) / sizes.together * sizes.blocks;
  if (all > 0x7fffffff) return static_cast<int>(cudaErrorInvalidValue);
  const OnDevice here(device);
  const auto kernel = depthwise_kernel<kTerms, Taps, kWanted, Way, Epilogue>;
  const unsigned grid = unsigned(all);
  kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(end, x, w, sizes);
  return static_cast<int>(cudaGetLastError());
}

// kRows: about how many rows a thread computes.
template <int kTerms, class Taps, int kRows, class Epilogue>
static int depthwise_convolution(const Epilogue& end, const ConvInput& x, ConvFilter w,
                                 ConvolutionSizes of, int device, void* stream) {
  if (of.transposed) flip_taps<Taps>(of, w);
  return run_depthwise<kTerms, Taps, kRows, Sliding<kTerms, Taps>>(end, x, w, of, device, stream);
}

template <int kTerms, class Taps, int kRows, int kPhaseY, int kPhaseX, class Epilogue>
static int depthwise_transposed(const Epilogue& end, const ConvInput& x, const ConvFilter& w,
                                const ConvolutionSizes& of, int device, void* stream) {
  using Way = Gathered<kTerms, Taps, kPhaseY, kPhaseX>;
  const bool fits =
      of.y.padding % Taps::kStepY == kPhaseY && of.x.padding % Taps::kStepX == kPhaseX;
  if (!of.transposed || !fits) return static_cast<int>(cudaErrorInvalidValue);
  return run_depthwise<kTerms, Taps, kRows, Way>(end, x, w, of, device, stream);
}

}  // namespace fw
