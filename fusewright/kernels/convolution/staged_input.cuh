// Stages a convolution's input: writes it to device memory as fp16, in the layout from which TMA
// fills the stages in shared memory. There is a row for each position, 64 channels in 128 bytes,
// zeros outside of the input. Each group, 64 of its channels and plane have such rows.
//
// The channels of a group share one scale in an image. It is chosen from a sample of the elements:
// it leaves room for elements 16 times larger than the largest of the sample, and is a power of 16,
// so that neighbouring images mostly have the same. An element that does not fit becomes Inf,
// and the sums that it enters are recomputed; this includes the few elements that are far larger
// than most. If many do not fit, or if all have become very small, the last thread block of the
// image finds the largest one and stages the image again.
//
// If the weight gradient reads the staged input, too (sm90_staged_weight_gradient.cuh), a single
// Inf is too many: each weight's gradient is a sum over all images. Then one lost element is enough
// to stage its image again, unless the new scale would leave nothing of the others.
#pragma once

#include "scalar/fp16_scale.hpp"
#include "sm90/convolution/sm90_convolution_convert.cuh"

namespace fw {

// What is known of a group of an image while it is staged.
struct StagedCounts {
  uint32_t done;     // thread blocks that have finished
  uint32_t largest;  // magnitude, as fp16 bits; at least 1 if an element is not zero
  uint32_t lost;     // elements that were finite and are Inf as fp16
};

struct StagedInput {
  half* rows;
  float* scales;         // of each image and group
  StagedCounts* counts;  // of each image and group
  bool keep_all;         // no element should become Inf: many sums would be recomputed
};

// A part of a sample, or all of it: the largest finite magnitude, how many elements are not zero,
// and the sum of their exponents.
struct InputSample {
  float largest, count, exponents;

  FW_DEVICE void add(float x) {
    const float size = finite_magnitude(x);
    largest = fmaxf(largest, size);
    count += size > 0.f;
    exponents += size > 0.f ? float(exponent(size)) : 0.f;
  }
  FW_DEVICE static InputSample joined(const InputSample& a, const InputSample& b) {
    return {fmaxf(a.largest, b.largest), a.count + b.count, a.exponents + b.exponents};
  }
  FW_DEVICE static int exponent(float size) { return int(__float_as_uint(size) >> 23) - 127; }
  // Brings the largest magnitude to [2^8, 2^12), or 2^14 times the typical magnitude, if that is
  // less.
  FW_DEVICE float scale() const {
    if (count == 0.f) return 256.f;
    const int most = min(exponent(largest), int(exponents / count) + 14);
    const int steps = min(max((11 - most) >> 2, -30), 30);
    return __uint_as_float(uint32_t(127 + 4 * steps) << 23);
  }
};

// The i-th of a sequence of integers that are spread evenly over [0, below): `step` is 2^32 times
// an irrational number.
FW_DEVICE uint32_t spread(uint32_t i, uint32_t step, uint32_t below) {
  return uint32_t(uint64_t(i * step) * below >> 32);
}

// A thread's part of a sample of a group of an image: equally many elements of each channel, spread
// over the image (by powers of the root of x³ = x + 1, which leave the smallest gaps, and by
// another number for z).
template <class Input>
FW_DEVICE InputSample sampled(const Input& x, const ConvShape& shape, int image, int group) {
  constexpr uint32_t kBits = 10, kStepZ = 2654435769u, kStepY = 3242174889u, kStepX = 2447445414u,
                     kTogether = 4;
  InputSample sample = {};
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < 1u << kBits; first += kTogether * blockDim.x) {
#pragma unroll
    for (uint32_t k = 0; k < kTogether; ++k) {
      const uint32_t i = first + k * blockDim.x;
      const uint32_t channel = uint32_t(uint64_t(i) * shape.channels >> kBits);
      const uint32_t z = spread(i, kStepZ, shape.z.in), y = spread(i, kStepY, shape.y.in);
      const uint32_t column = spread(i, kStepX, shape.x.in);
      if (i < 1u << kBits) {
        sample.add(x.at(x.location(image, group * shape.channels + channel, z, y, column)));
      }
    }
  }
  return sample;
}

// An image is staged again if more than one element of kLostOf is lost. For the sake of a few lost
// ones, the scale may shrink to kLeastScale times itself: elements as large as the sample's then
// keep all bits of fp16.
constexpr int kLostOf = 16384;
constexpr float kLeastScale = 0x1p-16f;

// How an image is divided among thread blocks.
struct StagedSizes {
  static constexpr int kWarps = 8, kMostRows = 256;  // of a thread block
  int rows;                        // of a thread block: what its warps load at once
  int image_rows, chunks, planes;  // positions of an image; blocks for them; planes of a group
  int64_t staged_rows;

  explicit StagedSizes(const ConvTiling& sizes)
      : rows(sizes.by_channels || sizes.shape.channels > 32 ? 128 : kMostRows),
        image_rows(int(sizes.plane.divisor * sizes.bands.divisor)),
        chunks((image_rows + rows - 1) / rows),
        planes(sizes.shape.channel_blocks() * sizes.shape.planes),
        staged_rows(int64_t(image_rows) * sizes.shape.images) {}
};

// A ConvRowSource whose `phase` is the index of a plane.
struct StagedRowSource : ConvRowSource {
  template <class Input>
  FW_DEVICE auto at(const ConvTiling& sizes, const Input& x, int row, bool& inside) const {
    const auto from = input_location(sizes, x, sizes.position(band, in_plane, row), channel,
                                     sizes.shape.plane[phase], inside);
    inside &= row < rows;
    return from;
  }
};

// What the elements of a channel share while they are staged, and the elements of a unit. Elements
// in memory share nothing.
template <bool kByChannels, class Input>
struct StagedParts : FillParts<kByChannels, Input> {
  struct Factors {};

  FW_DEVICE static void find(Factors (&)[64], const Input&, const StagedRowSource&, int) {}
  FW_DEVICE void compute(const Factors (&)[64], const Input&, const FillUnit<kByChannels>&) {}
};
// For a computed input all loads are issued first; while they are in flight, some threads compute
// the factors.
template <bool kByChannels, class Body, bool kByFour>
struct StagedParts<kByChannels, ComputedInput<Body, kByFour>> {
  using Input = ComputedInput<Body, kByFour>;
  using Factors = typename Body::Factors;
  using Unit = FillUnit<kByChannels>;
  static constexpr int kRows = kByChannels ? 4 : 1;  // of a thread
  typename Body::Raw raw[4][8];
  typename Input::Location from[kRows];
  int left[kRows];
  float x[4][8];

  FW_DEVICE static int channel(int k, int i) { return (kByChannels ? 0 : 8 * k) + i; }
  FW_DEVICE void load(int k, const ConvTiling& sizes, const Input& input, int,
                      const StagedRowSource& source, const Unit& unit) {
    const int row = kByChannels ? k : 0, first = 8 * unit.column(0);
    if (kByChannels || k == 0) {
      bool inside;
      from[row] = source.at(sizes, input, unit.row(k), inside) + first;
      left[row] = inside ? max(source.channels - first, 0) : 0;
      if (left[row] == 0) from[row] = {};
    }
    if (__all_sync(0xffffffffu, left[row] >= (kByChannels ? 8 : 32))) {
#pragma unroll
      for (int i = 0; i < 8; ++i) raw[k][i] = input.raw(from[row] + channel(k, i));
    } else {
      const int last = max(left[row] - 1, 0);
#pragma unroll
      for (int i = 0; i < 8; ++i) raw[k][i] = input.raw(from[row] + min(channel(k, i), last));
    }
  }
  FW_DEVICE static void find(Factors (&factors)[64], const Input& input,
                             const StagedRowSource& source, int image) {
    const int channel = threadIdx.x;
    if (channel < source.channels) {
      factors[channel] = input.body.factors(image, source.channel + channel);
    }
    __syncthreads();
  }
  FW_DEVICE void compute(const Factors (&factors)[64], const Input& input, const Unit& unit) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = kByChannels ? k : 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int at = channel(k, i);
        const bool there = at < left[row];
        const float number =
            input.number(raw[k][i], factors[there ? 8 * unit.column(0) + at : 0], from[row] + at);
        x[k][i] = there ? number : 0.f;
      }
    }
  }
};

// Some rows of an image, in one plane of the staged input.
template <bool kByChannels, class Input>
struct StagedChunk {
  using Unit = FillUnit<kByChannels>;
  using Parts = StagedParts<kByChannels, Input>;
  using Table = typename Parts::Factors[64];
  StagedRowSource source;
  half* to;
  int all_columns;  // columns to write at least: a copy may run past one plane into the next
  Parts parts;

  FW_DEVICE StagedChunk(const ConvTiling& sizes, const StagedSizes& of, half* staged, int image,
                        int group, int index) {
    const int plane = index / of.chunks, first = (index - plane * of.chunks) * of.rows;
    const int planes = sizes.shape.planes;
    const int block = plane / planes, channels = sizes.shape.channels;
    source = {{image * sizes.bands.divisor, uint32_t(first), group * channels + 64 * block,
               min(64, channels - 64 * block), plane - block * planes, 0,
               min(of.rows, of.image_rows - first)}};
    const int64_t staged_index = int64_t(group) * of.planes + plane;
    all_columns = channels > 64 ? 8 : 0;
    to = staged + (staged_index * of.staged_rows + int64_t(image) * of.image_rows + first) * 64;
  }
  // Loads a warp's part; false if it has none.
  FW_DEVICE bool load(const ConvTiling& sizes, const Input& x, Table& factors, int image) {
    const int warp = threadIdx.x / 32;
    const bool any = warp < Unit::count(source);
    const Unit unit(source, warp);
    if (any) {
#pragma unroll
      for (int k = 0; k < 4; ++k) parts.load(k, sizes, x, int(x.channel_stride), source, unit);
    }
    Parts::find(factors, x, source, image);
    if (any) parts.compute(factors, x, unit);
    return any;
  }
  // Writes by way of shared memory, so that whole rows are written.
  FW_DEVICE StagedCounts lay_out(char* memory, bool loaded, float scale) {
    uint32_t largest = 0, nonzero = 0;
    if (loaded) {
      const Unit unit(source, threadIdx.x / 32);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const Fragment eight = fp16_parts_of(parts.x[k], scale);
        const int row = unit.row(k);
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = larger_fp16_pair(largest, eight.hi[i]);
#pragma unroll
        for (int i = 0; i < 8; ++i) nonzero |= __float_as_uint(parts.x[k][i]) << 1;
        *reinterpret_cast<uint4*>(memory + row * 128 + ((unit.column(k) ^ row % 8) << 4)) = {
            eight.hi[0], eight.hi[1], eight.hi[2], eight.hi[3]};
      }
    }
    __syncthreads();
    const int columns = (source.channels + 15) / 16 * 2;
#pragma unroll
    for (int i = 0; i < StagedSizes::kMostRows * 8; i += 32 * StagedSizes::kWarps) {
      const int row = (i + threadIdx.x) / 8, column = threadIdx.x % 8;
      if (row >= source.rows || column >= max(columns, all_columns)) continue;
      uint4 eight = {};
      if (column < columns) {
        eight = *reinterpret_cast<const uint4*>(memory + row * 128 + ((column ^ row % 8) << 4));
      }
      reinterpret_cast<uint4*>(to)[row * 8 + column] = eight;
    }
    largest = max(largest & 0xffffu, largest >> 16);
    return {0, max(largest, uint32_t(nonzero != 0)), largest > kFp16Many ? lost(scale) : 0};
  }

 private:
  FW_DEVICE uint32_t lost(float scale) const {
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float x = parts.x[i / 8][i % 8];
      count += isfinite(x) && fabsf(x * scale) >= 65520.f;
    }
    return count;
  }
};

// Combines what all threads have found.
FW_DEVICE StagedCounts joined(StagedCounts (&held)[StagedSizes::kWarps], const StagedCounts& mine) {
  const StagedCounts of_warp = {0, __reduce_max_sync(0xffffffffu, mine.largest),
                                __reduce_add_sync(0xffffffffu, mine.lost)};
  __syncthreads();
  if (threadIdx.x % 32 == 0) held[threadIdx.x / 32] = of_warp;
  __syncthreads();
  StagedCounts all = {};
#pragma unroll
  for (int warp = 0; warp < StagedSizes::kWarps; ++warp) {
    all.largest = max(all.largest, held[warp].largest);
    all.lost += held[warp].lost;
  }
  return all;
}

// Stages an image again whose scale was wrong, by one thread block; rare. The old scale stays if
// the better one is less than `least` times it.
template <bool kByChannels, class Input>
FW_DEVICE void lay_out_again(char* memory, StagedCounts (&held)[StagedSizes::kWarps],
                             typename StagedChunk<kByChannels, Input>::Table& factors,
                             const Input& x, const ConvTiling& sizes, const StagedSizes& of,
                             const StagedInput& staged, int image, int group, float least) {
  using Chunk = StagedChunk<kByChannels, Input>;
  float& scale = staged.scales[image * sizes.shape.groups + group];
  const int all = of.planes * of.chunks;
  float largest = 0.f, better = 0.f;
#pragma unroll 1
  for (int step = 0; step < 2 * all; ++step) {  // first to find the largest, then to stage
    if (step == all) {
      largest = __uint_as_float(joined(held, {0, __float_as_uint(largest), 0}).largest);
      better = scale_for(largest);
      if (largest == 0.f || better == scale || better < least * scale) return;
    }
    Chunk chunk(sizes, of, staged.rows, image, group, step < all ? step : step - all);
    __syncthreads();
    const bool loaded = chunk.load(sizes, x, factors, image);
    if (step >= all) {
      chunk.lay_out(memory, loaded, better);
    } else if (loaded) {
#pragma unroll
      for (int k = 0; k < 4; ++k) largest = fmaxf(largest, largest_finite(chunk.parts.x[k]));
    }
  }
  if (threadIdx.x == 0) scale = better;
}

template <bool kByChannels, class Input>
__global__ void __launch_bounds__(32 * StagedSizes::kWarps, Input::kBlocks)
    lay_out_staged(const __grid_constant__ Input x, const __grid_constant__ ConvTiling sizes,
                   const StagedSizes of, const StagedInput staged) {
  __shared__ __align__(16) char memory[StagedSizes::kMostRows * 128];
  __shared__ StagedCounts held[StagedSizes::kWarps];
  __shared__ bool wrong, all_but_few;
  let_next_begin();
  const int of_image = of.planes * of.chunks, image_group = blockIdx.x / of_image;
  const int image = image_group / sizes.shape.groups,
            group = image_group - image * sizes.shape.groups;
  using Chunk = StagedChunk<kByChannels, Input>;
  __shared__ typename Chunk::Table factors;
  Chunk chunk(sizes, of, staged.rows, image, group, blockIdx.x - image_group * of_image);
  const bool loaded = chunk.load(sizes, x, factors, image);
  await_kernel_before();
  const StagedCounts here = joined(held, chunk.lay_out(memory, loaded, staged.scales[image_group]));
  if (threadIdx.x == 0) {
    StagedCounts& all = staged.counts[image_group];
    wrong = false;
    if (here.largest > 0) atomicMax(&all.largest, here.largest);
    if (here.lost > 0) atomicAdd(&all.lost, here.lost);
    __threadfence();
    if (atomicAdd(&all.done, 1u) + 1 == uint32_t(of_image)) {
      const uint32_t largest = atomicMax(&all.largest, 0u), lost = atomicAdd(&all.lost, 0u);
      const uint32_t many = uint32_t(of_image) * StagedSizes::kMostRows * 64 / kLostOf;
      all_but_few = lost <= max(many, 1u);
      wrong = !all_but_few || (staged.keep_all && lost > 0) || (largest > 0 && largest < kFp16Few);
      __threadfence();
    }
  }
  __syncthreads();
  if (!wrong) return;
  const float least = all_but_few ? kLeastScale : 0.f;
  lay_out_again<kByChannels>(memory, held, factors, x, sizes, of, staged, image, group, least);
}

}  // namespace fw
