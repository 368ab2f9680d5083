// Writes the fp32 operand `a` of a matmul to memory as fp16: fp16(x·s) with a scale s, a power of
// two, for each free index. A matmul of two such operands has nothing to round on the way and runs
// like one of 16-bit matrices; that must be worth reading a once more and writing it.
//
// The fp16 copy has a's layout, [p][r] or [r][p], with rows padded to 16 bytes. If b's scales
// belong to contracted indices, they are folded into a here, as BlockFragments::fold does it.
#pragma once

#include "sm90/isa/sm90_fp16_split.cuh"

namespace fw {

constexpr int kHeldVectors = 8;  // of a row, in a thread's registers
constexpr int kStripColumns = 128;
constexpr int kStripWarps = 8;  // that share the rows of a strip
constexpr int kPartRows = 128;  // at least, of a part of a strip
constexpr int kMostRoundParts = 16;

// The layers of a, and where they go as fp16.
struct Rounding {
  RawOperand a;
  const float* factors;  // of the contracted indices, layer after layer, or null
  half* to;
  float* inverse;  // of the scales of the free indices, layer after layer
  float* most;     // [layer][part][p]: the largest magnitudes of a part of the contracted indices
  int64_t row_stride;
  int layers, free, contracted;
  int strips, parts, part_rows;  // of a layer whose free index is contiguous
  bool vectors;                  // a and the factors are aligned for four elements at a time

  // Reads four elements of a row from `at` on; zeros from `end` on.
  FW_DEVICE void read(float (&x)[4], const float* row, int64_t stride, int at, int end) const {
    if (vectors) return load_four_if(x, row + at, at < end);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = load_if(row + (at + i) * stride, at + i < end);
  }
};

FW_DEVICE float larger(float most, const float (&x)[4]) {
  return fmaxf(fmaxf(most, fmaxf(fabsf(x[0]), fabsf(x[1]))), fmaxf(fabsf(x[2]), fabsf(x[3])));
}

FW_DEVICE void store_fp16(half* to, const float (&x)[4], const float (&s)[4]) {
  const uint2 word = {fp16_pair(x[0] * s[0], x[1] * s[1]), fp16_pair(x[2] * s[2], x[3] * s[3])};
  store_whole(true, reinterpret_cast<uint2*>(to), word);
}

// [p][r]: a thread block for each row. If a row is longer than its threads can hold, the rest is
// read twice.
template <int kThreads, bool kFactors>
__global__ void __launch_bounds__(kThreads) round_rows(const Rounding of) {
  __shared__ float most_of[kThreads / 32];
  let_next_begin();
  constexpr int kStep = 4 * kThreads;
  const int thread = threadIdx.x, layer = blockIdx.x / of.free, p = blockIdx.x % of.free;
  const float* const row = of.a.data + layer * of.a.batch_stride + p * of.a.free_stride;
  const float* const factors = of.factors + (kFactors ? int64_t(layer) * of.contracted : 0);
  half* const to = of.to + int64_t(blockIdx.x) * of.row_stride;
  const auto read = [&](float (&x)[4], int at) {
    of.read(x, row, of.a.contracted_stride, at, of.contracted);
    if constexpr (kFactors) {
      float factor[4];
      of.read(factor, factors, 1, at, of.contracted);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] *= factor[i] * kFp16Reach;
    }
  };
  float held[kHeldVectors][4], most = 0.f;
#pragma unroll
  for (int i = 0; i < kHeldVectors; ++i) read(held[i], 4 * thread + i * kStep);
#pragma unroll
  for (int i = 0; i < kHeldVectors; ++i) most = larger(most, held[i]);
  const int beyond = 4 * thread + kHeldVectors * kStep;
#pragma unroll 4
  for (int at = beyond; at < of.contracted; at += kStep) {
    float x[4];
    read(x, at);
    most = larger(most, x);
  }
#pragma unroll
  for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, by));
  if (thread % 32 == 0) most_of[thread / 32] = most;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) most = fmaxf(most, most_of[warp]);
  const float s = scale_for(most);
  const float scale[4] = {s, s, s, s};
  if (thread == 0) of.inverse[blockIdx.x] = inverse_of(s) * (kFactors ? 1.f / kFp16Reach : 1.f);
#pragma unroll
  for (int i = 0; i < kHeldVectors; ++i) {
    const int at = 4 * thread + i * kStep;
    if (at < of.contracted) store_fp16(to + at, held[i], scale);
  }
#pragma unroll 4
  for (int at = beyond; at < of.contracted; at += kStep) {
    float x[4];
    read(x, at);
    store_fp16(to + at, x, scale);
  }
}

// A thread block's part of [r][p]: a strip of columns, and some of its rows. A warp takes every
// kStripWarps-th row, its threads four neighbouring columns each.
struct StripPosition {
  int strip, part, layer, column, row, end;

  FW_DEVICE explicit StripPosition(const Rounding& of) {
    strip = blockIdx.x % of.strips;
    part = blockIdx.x / of.strips % of.parts;
    layer = blockIdx.x / (of.strips * of.parts);
    column = strip * kStripColumns + threadIdx.x % 32 * 4;
    row = part * of.part_rows + threadIdx.x / 32;
    end = min((part + 1) * of.part_rows, of.contracted);
  }
  // Reads kRows rows of a thread from r on, all in flight together; zeros outside.
  template <bool kFactors, int kRows>
  FW_DEVICE void read(float (&x)[kRows][4], const Rounding& of, int r) const {
    const float* const first = of.a.data + layer * of.a.batch_stride;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int at = r + i * kStripWarps;
      of.read(x[i], first + at * of.a.contracted_stride, of.a.free_stride, column,
              at < end ? of.free : 0);
    }
    if constexpr (kFactors) {
      const float* const factors = of.factors + int64_t(layer) * of.contracted;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int at = r + i * kStripWarps;
        const float factor = load_if(factors + at, at < end) * kFp16Reach;
#pragma unroll
        for (int k = 0; k < 4; ++k) x[i][k] *= factor;
      }
    }
  }
};

constexpr int kStripTogether = 8;

// Finds the largest magnitude of each column of a part.
template <int kThreads, bool kFactors>
__global__ void __launch_bounds__(kThreads) measure_columns(const Rounding of) {
  static_assert(kThreads == 32 * kStripWarps, "a warp for each row that is read at once");
  __shared__ float most_of[kStripWarps][kStripColumns];
  let_next_begin();
  const StripPosition here(of);
  float most[4] = {};
#pragma unroll 1
  for (int r = here.row; r < here.end; r += kStripTogether * kStripWarps) {
    float x[kStripTogether][4];
    here.read<kFactors>(x, of, r);
#pragma unroll
    for (int i = 0; i < 4 * kStripTogether; ++i) {
      most[i % 4] = fmaxf(most[i % 4], fabsf(x[i / 4][i % 4]));
    }
  }
  const int thread = threadIdx.x;
#pragma unroll
  for (int i = 0; i < 4; ++i) most_of[thread / 32][thread % 32 * 4 + i] = most[i];
  __syncthreads();
  const int column = here.strip * kStripColumns + thread;
  if (thread >= kStripColumns || column >= of.free) return;
  float largest = 0.f;
#pragma unroll
  for (int warp = 0; warp < kStripWarps; ++warp) largest = fmaxf(largest, most_of[warp][thread]);
  of.most[(int64_t(here.layer) * of.parts + here.part) * of.free + column] = largest;
}

// Rounds [r][p], once its columns are measured.
template <int kThreads, bool kFactors>
__global__ void __launch_bounds__(kThreads) round_columns(const Rounding of) {
  __shared__ float scale_of[kStripColumns];
  let_next_begin();
  const StripPosition here(of);
  await_kernel_before();
  const int thread = threadIdx.x, mine = here.strip * kStripColumns + thread;
  if (thread < kStripColumns) {
    const float* const from = of.most + int64_t(here.layer) * of.parts * of.free + mine;
    float most = 0.f;
#pragma unroll 4
    for (int part = 0; part < of.parts; ++part) {
      most = fmaxf(most, load_if(from + int64_t(part) * of.free, mine < of.free));
    }
    const float s = scale_for(most);
    scale_of[thread] = s;
    if (here.part == 0 && mine < of.free) {
      const float inverse = inverse_of(s) * (kFactors ? 1.f / kFp16Reach : 1.f);
      of.inverse[int64_t(here.layer) * of.free + mine] = inverse;
    }
  }
  __syncthreads();
  float scale[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) scale[i] = scale_of[thread % 32 * 4 + i];
  half* const to = of.to + int64_t(here.layer) * of.contracted * of.row_stride + here.column;
#pragma unroll 1
  for (int r = here.row; r < here.end; r += kStripTogether * kStripWarps) {
    float x[kStripTogether][4];
    here.read<kFactors>(x, of, r);
#pragma unroll
    for (int i = 0; i < kStripTogether; ++i) {
      const int at = r + i * kStripWarps;
      const bool inside = at < here.end && here.column < of.free;
      if (inside) store_fp16(to + at * of.row_stride, x[i], scale);
    }
  }
}

// Whether all batches share one fp16 copy of a. They do not if each folds factors of its own into
// it.
template <bool kFactors>
bool shares_rounding(const RawOperand& a) {
  return a.batch_stride == 0 && !kFactors;
}

// The layout of the fp16 copy, in memory that begins at a multiple of 16 bytes.
template <bool kFreeMajor, bool kFactors>
Rounding rounding(const RawOperand& a, const float* factors, const MatmulExtents& of,
                  void* memory) {
  const int64_t inner = kFreeMajor ? of.columns : of.contracted;
  const int64_t outer = kFreeMajor ? of.contracted : of.columns;
  const int64_t outer_stride = kFreeMajor ? a.contracted_stride : a.free_stride;
  const int64_t inner_stride = kFreeMajor ? a.free_stride : a.contracted_stride;
  Rounding made = {a, factors};
  made.layers = shares_rounding<kFactors>(a) ? 1 : int(of.batches);
  made.free = int(of.columns), made.contracted = int(of.contracted);
  made.row_stride = (inner + 7) / 8 * 8;
  made.strips = (made.free + kStripColumns - 1) / kStripColumns;
  made.parts = min(kMostRoundParts, (made.contracted + kPartRows - 1) / kPartRows);
  made.part_rows = (made.contracted + made.parts - 1) / made.parts;
  made.vectors = inner_stride == 1 && inner % 4 == 0 && outer_stride % 4 == 0 &&
                 a.batch_stride % 4 == 0 && aligned<float, 4>(a.data, 0) &&
                 aligned<float, 4>(factors, 0);
  made.to = static_cast<half*>(memory);
  made.inverse = reinterpret_cast<float*>(made.to + made.layers * outer * made.row_stride);
  made.most = made.inverse + int64_t(made.layers) * made.free;
  return made;
}

// Writes the fp16 copy; `factors` are those of the contracted indices, if there are any.
template <bool kFreeMajor, bool kFactors>
HalfOperand<half> rounded_operand(const RawOperand& a, const float* factors,
                                  const MatmulExtents& of, void* memory, void* stream) {
  const Rounding made = rounding<kFreeMajor, kFactors>(a, factors, of, memory);
  const auto on = static_cast<cudaStream_t>(stream);
  if constexpr (kFreeMajor) {
    constexpr int kThreads = 32 * kStripWarps;
    const int blocks = made.layers * made.parts * made.strips;
    {
      const auto kernel = measure_columns<kThreads, kFactors>;
      kernel<<<blocks, kThreads, 0, on>>>(made);
    }
    const auto kernel = round_columns<kThreads, kFactors>;
    launch_behind(kernel, blocks, kThreads, 0, stream, made);
  } else {
    const int blocks = made.layers * made.free;
    const auto round = [&](auto threads) {
      constexpr int kThreads = decltype(threads)::value;
      const auto kernel = round_rows<kThreads, kFactors>;
      kernel<<<blocks, kThreads, 0, on>>>(made);
    };
    if (made.contracted <= 64 * 4 * kHeldVectors) {
      round(std::integral_constant<int, 64>());
    } else {
      round(std::integral_constant<int, 256>());
    }
  }
  const int64_t layer = (kFreeMajor ? of.contracted : of.columns) * made.row_stride;
  return {made.to, made.row_stride, shares_rounding<kFactors>(a) ? 0 : layer, made.inverse};
}

}  // namespace fw
