// The fp32 operand of a matmul on its way from shared memory to the tensor cores: read in the order
// of wgmma's fragments and split into two fp16 parts, hi = fp16(x·s) and lo = fp16(x·s − hi), which
// together hold 22 bits of x. The scale s is a power of two, one for each row within a block of 64
// contracted indices, and brings the row's largest magnitude to about 2^14.
#pragma once

#include "sm90/matmul/sm90_tiles.cuh"

namespace fw {

constexpr int kRawBytes = kTileColumns * kTileDepth * 4;

// The high and low parts of a thread's share of a step: two rows, four contracted indices of each.
struct Fragment {
  uint32_t hi[4], lo[4];

  FW_DEVICE void split(int at, float x, float y) {
    hi[at] = fp16_pair(x, y);
    lo[at] = fp16_pair(x - half_to_float(hi[at] & 0xffffu), y - half_to_float(hi[at] >> 16));
  }
};

// The scale for a row with this largest magnitude. Both the scale and its inverse are normal
// numbers.
FW_DEVICE float scale_for(float largest) {
  const uint32_t exponent = min(max(__float_as_uint(largest) >> 23, 15u), 254u);
  return __uint_as_float((268u - exponent) << 23);
}
FW_DEVICE float inverse_of(float scale) {
  return __uint_as_float((254u << 23) - __float_as_uint(scale));
}

// Where a thread of a multiplying warpgroup finds its share of a block of `a`.
template <bool kFreeMajor>
struct FragmentReader {
  uint32_t offset;  // of the first element of step 0
  int row;          // the first row within the tile; the second is eight further

  FW_DEVICE FragmentReader() {
    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, part = threadIdx.x % 4;
    if constexpr (kFreeMajor) {
      // Chunks of 32 rows × 64 contracted indices; a contracted index takes 128 bytes of a chunk.
      row = 16 * warp + group;
      const int column = warp % 2 * 4 + group / 4;
      offset = warp / 2 * 8192 + 2 * part * 128 + ((column ^ 2 * part) << 4) + group % 4 * 4;
    } else {
      // Chunks of 32 contracted indices; a row takes 128 bytes of a chunk. The order of the rows
      // avoids bank conflicts.
      row = 16 * warp + (group % 4 * 2 | group / 4);
      offset = row * 128 + ((part / 2 ^ row % 8) << 4) + part % 2 * 8;
    }
  }

  // Elements in the order of the fragment: (row 0, row 1) × (lower, upper contracted indices) × 2.
  FW_DEVICE void read(const char* block, int step, float (&x)[8]) const {
    if constexpr (kFreeMajor) {
      const char* from = block + step * 2048;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t row_of = i / 2 % 2, next = i % 2;
        const uint32_t at = (offset + next * 128) ^ (next * 16) ^ (row_of * 32);
        x[i] = *reinterpret_cast<const float*>(from + at + i / 4 * 1024);
      }
    } else {
      const char* from = block + step / 2 * (kRawBytes / 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t at = offset ^ (step % 2 * 64) ^ (i / 2 * 32);
        const float2 two = *reinterpret_cast<const float2*>(from + at + i % 2 * 1024);
        x[2 * i] = two.x, x[2 * i + 1] = two.y;
      }
    }
  }
};

constexpr float kFp16Reach = 16384.f;  // to which scales bring the largest magnitudes

FW_DEVICE float2 times(const float2& x, float s) { return {x.x * s, x.y * s}; }

// A thread's share of a block: four steps of 16 contracted indices each, two rows.
template <bool kFreeMajor>
struct BlockFragments {
  float x[4][8];
  Fragment high_low[4];
  float inverse[2];  // of the rows' scales

  template <int kFrom, int kTo>
  FW_DEVICE void read(const FragmentReader<kFreeMajor>& reader, const char* block) {
#pragma unroll
    for (int step = kFrom; step < kTo; ++step) reader.read(block, step, x[step]);
  }
  // Multiplies by the factors of the contracted indices, which are the inverse scales of b's rows,
  // and by 2^14, to which those scales brought b's largest magnitudes. The folded elements are then
  // about as large as a·b can be.
  FW_DEVICE void fold(const float* factors) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const float* from = factors + step * 16 + threadIdx.x % 4 * 2;
      const float2 lower = times(*reinterpret_cast<const float2*>(from), kFp16Reach);
      const float2 upper = times(*reinterpret_cast<const float2*>(from + 8), kFp16Reach);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[step][i] *= i / 4 ? (i % 2 ? upper.y : upper.x) : (i % 2 ? lower.y : lower.x);
      }
    }
  }
  // The largest magnitude in row 0 or 1 of this block.
  FW_DEVICE float largest(int row) const {
    float of_step[4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const float* here = x[step] + 2 * row;
      of_step[step] =
          fmaxf(fmaxf(fabsf(here[0]), fabsf(here[1])), fmaxf(fabsf(here[4]), fabsf(here[5])));
    }
    float most = fmaxf(fmaxf(of_step[0], of_step[1]), fmaxf(of_step[2], of_step[3]));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));  // four threads share a row
    return fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
  }
  // High parts alone.
  FW_DEVICE void round(const float (&scale)[2], uint32_t (&to)[4][4]) const {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float s = scale[i % 2];
        to[step][i] = fp16_pair(x[step][2 * i] * s, x[step][2 * i + 1] * s);
      }
    }
  }
  // `folded`: whether fold() was called before.
  FW_DEVICE void split(bool folded) {
    float scale[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      scale[row] = scale_for(largest(row));
      inverse[row] = inverse_of(scale[row]) * (folded ? 1.f / kFp16Reach : 1.f);
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        high_low[step].split(i, x[step][2 * i] * scale[i % 2], x[step][2 * i + 1] * scale[i % 2]);
      }
    }
  }
};

}  // namespace fw
