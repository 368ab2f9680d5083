// How the gradient of a convolution by its weights is divided among thread blocks, and how its
// operands come into shared memory.
//
// Positions are walked in slabs. Of a slab, dy is a stage: a row for each position, 64 out channels
// in 128 bytes, zeros where the position lies in a halo. The taps of a set read x from the slab's
// own rows on and some rows further, which are the next slab's: x lies in a ring of rows, and only
// what is new in a slab is converted.
#pragma once

#include "convolution_operands.cuh"
#include "sm90_window_load.cuh"
#include "window_taps.cuh"

namespace fw {

constexpr int kGradientThreads = 384, kGradientWarps = 4;  // the last four convert
constexpr int kSlabStages = 2;

// Taps whose sums a warpgroup has registers for. One more would leave the converting warps too few
// for the loads that they need in flight.
template <int kTerms>
constexpr int kTapsEach = kTerms == 1 ? 5 : 4;
constexpr int kMostSets = kMostTaps / (2 * kTapsEach<3>) + kMostPhases;

// With three terms, tensor cores add up no more than a slab.
template <int kTerms>
constexpr int kSlabPositions = kTerms == 1 ? 128 : 64;

// wgmma reads 16 rows in a row: as many of the ring's first ones lie behind its last again.
constexpr int kRingOverlap = 16;

// Taps of one phase that a thread block takes: `taps` from the `first` of all on.
struct TapSet {
  int phase, first, taps;
};

// What a thread block sums: a set's taps for 64 in channels, over some slabs.
struct GradientWork {
  int part, group, out, in;  // the first channels, of the group's
  TapSet set;
  int64_t position;  // the first
  int slabs;
};

struct GradientSizes : WindowSizes {
  TapSet set[kMostSets];
  int sets, parts, ring_rows;
  bool dy_by_channels;

  // Warpgroups have 64 out channels each, or share the taps of 64.
  FW_FN bool shares_taps() const { return tile_channels == 64; }
  FW_FN int units() const { return shape.groups * tiles_q * blocks() * sets; }
  FW_FN int shift(const TapSet& of, int tap) const {
    return shape.shift[of.first + tap] - shape.shift[of.first];
  }
  FW_FN int reach(const TapSet& of) const { return shift(of, of.taps - 1); }

  // Blocks that run together read the same positions.
  __device__ __forceinline__ GradientWork work(int index) const {
    const int part = index / units();
    int rest = index - part * units();
    const int group = rest / (tiles_q * blocks() * sets);
    rest -= group * tiles_q * blocks() * sets;
    const int tile = rest / (blocks() * sets);
    rest -= tile * blocks() * sets;
    const int64_t slab = tiles * part / parts, end = tiles * (part + 1) / parts;
    return {part, group, tile * tile_channels, rest / sets * 64, set[rest % sets],
            slab * tile_positions, int(end - slab)};
  }
  __device__ __forceinline__ WindowTile from_position(int64_t first) const {
    const int64_t band = first / plane.divisor;
    return {0, 0, uint32_t(band), uint32_t(first - band * plane.divisor)};
  }
};

// The ring of x and the stages of dy follow.
template <int kTerms>
struct alignas(1024) GradientShared {
  static constexpr int kHalves = kTerms == 3 ? 2 : 1;
  static constexpr int kChunkBytes = kSlabPositions<kTerms> * 128;  // 64 out channels of a slab
  GradientWork work;
  float scale_x[kSlabStages], scale_dy[kSlabStages];
  uint32_t largest[2][2][kGradientWarps];  // of x and of dy, the bits of what each warp found
  uint64_t loaded[kSlabStages], done[kSlabStages];

  __device__ __forceinline__ char* ring() { return reinterpret_cast<char*>(this + 1); }
  // 64 out channels of a stage of dy; their lower halves lie kChunkBytes behind them.
  __device__ __forceinline__ char* dy(const GradientSizes& sizes, int stage, int chunk) {
    const int chunks = sizes.tile_channels / 64;
    return ring() + kHalves * ring_bytes(sizes) +
           (stage * chunks + chunk) * kHalves * kChunkBytes;
  }
  FW_FN static int ring_bytes(const GradientSizes& sizes) {
    return (sizes.ring_rows + kRingOverlap) * 128;
  }
  static int64_t bytes(const GradientSizes& sizes) {
    const int stages = kSlabStages * (sizes.tile_channels / 64) * kChunkBytes;
    return sizeof(GradientShared) + int64_t(kHalves) * (ring_bytes(sizes) + stages);
  }
};

// Rows of a ring to be filled, the first of them row `first` of the ring.
struct RingRows {
  StageRows ring;
  int first, rows;

  template <int kTerms>
  __device__ __forceinline__ void put(int row, int column, const Fragment& eight) const {
    const int beyond = first + row - rows, at = beyond < 0 ? first + row : beyond;
    ring.put<kTerms>(at, column, eight);
    if (at < kRingOverlap) ring.put<kTerms>(at + rows, column, eight);
  }
};

// A stage of dy to be filled.
struct GradientSource {
  const WindowSizes& sizes;
  const WindowInput& x;
  WindowTile tile;
  int channel, channels;  // the first, of all; how many
  int rows;

  __device__ __forceinline__ const float* at(int row, bool& inside) const {
    const WindowPosition position = sizes.position(tile, row);
    inside = (row < rows) & position.in_band & (position.image < sizes.shape.images) &
             (position.column < sizes.shape.x.out);
    return x.data + position.image * x.image_stride + position.y * x.y_stride +
           position.column * x.x_stride + channel * x.channel_stride;
  }
};

template <int kTerms, class Rows, class Source>
__device__ __forceinline__ float fill_rows(const Rows& to, const Source& source, bool by_channels,
                                           float scale) {
  const int warp = threadIdx.x / 32 % kGradientWarps;
  return by_channels ? fill_stage<kTerms, true, kGradientWarps>(to, source, warp, scale)
                     : fill_stage<kTerms, false, kGradientWarps>(to, source, warp, scale);
}

// The scale of an operand: it stays until it does not fit.
struct KeptScale {
  float scale = 2048.f;  // normal numbers'
  bool fits = false;

  __device__ __forceinline__ void look_at(float largest) {
    const float better = scale_for(largest);
    fits = fits || scale_fits(scale, largest) || scale == better;
    if (!fits) scale = better;
  }
};

// The warps that convert.
template <int kTerms>
struct GradientConverter {
  using Shared = GradientShared<kTerms>;
  static constexpr int kPositions = kSlabPositions<kTerms>;
  Shared& shared;
  const GradientSizes& sizes;
  int64_t position;  // the slab's first
  WindowRing to{kSlabStages};
  KeptScale of_x, of_dy;
  int ring_row = 0;  // where the slab's own rows begin
  int turn = 0;      // of the two places for what warps find

  // Rows of x: all that the slab reads, or those that the last did not.
  __device__ __forceinline__ float fill_x(const WindowInput& x, bool all) {
    const WindowShape& shape = sizes.shape;
    const GradientWork& work = shared.work;
    const int reach = sizes.reach(work.set), known = all ? 0 : reach;
    const int first = ring_row + known;
    const WindowSource source = {
        sizes, x, sizes.from_position(position + shape.shift[work.set.first] + known),
        shape.phase[work.set.phase], work.group * shape.channels + work.in,
        min(64, shape.channels - work.in), kPositions + reach - known};
    const RingRows rows = {{shared_address(shared.ring()), Shared::ring_bytes(sizes)},
                           first < sizes.ring_rows ? first : first - sizes.ring_rows,
                           sizes.ring_rows};
    return fill_rows<kTerms>(rows, source, sizes.by_channels, of_x.scale);
  }
  __device__ __forceinline__ float fill_dy(const WindowInput& dy) {
    const WindowShape& shape = sizes.shape;
    const GradientWork& work = shared.work;
    float largest = 0.f;
#pragma unroll 1
    for (int chunk = 0; 64 * chunk < sizes.tile_channels; ++chunk) {
      const int out = work.out + 64 * chunk;
      const GradientSource source = {
          sizes, dy, sizes.from_position(position), work.group * shape.channels_out + out,
          min(64, shape.channels_out - out), kPositions};
      const StageRows rows = {shared_address(shared.dy(sizes, to.stage(), chunk)),
                              Shared::kChunkBytes};
      largest = fmaxf(largest, fill_rows<kTerms>(rows, source, sizes.dy_by_channels, of_dy.scale));
    }
    return largest;
  }
  __device__ __forceinline__ void tell(int operand, float mine) {
    const uint32_t of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(mine));
    const int warp = threadIdx.x / 32 % kGradientWarps;
    if (threadIdx.x % 32 == 0) shared.largest[turn][operand][warp] = of_warp;
  }
  __device__ __forceinline__ float told(int operand) const {
    uint32_t most = 0;
    for (const uint32_t each : shared.largest[turn][operand]) most = max(most, each);
    return __uint_as_float(most);
  }

  // Where a scale does not fit, which is rare, rows are filled again: of x all that the slab reads,
  // once no one reads them for the last slab.
  __device__ __forceinline__ void convert_slab(const WindowInput& x, const WindowInput& dy) {
    bool all = to.count == 0;
    of_x.fits = of_dy.fits = false;
    wait(&shared.done[to.stage()], to.parity() ^ 1);
#pragma unroll 1
    while (!of_x.fits || !of_dy.fits) {
      tell(0, of_x.fits ? 0.f : fill_x(x, all));
      tell(1, of_dy.fits ? 0.f : fill_dy(dy));
      publish_stores();
      meet(kConvertBarrier, 32 * kGradientWarps);
      of_x.look_at(told(0));
      of_dy.look_at(told(1));
      turn ^= 1;
      if (!of_x.fits && !all) {
        WindowRing last = to;
        --last.count;
        wait(&shared.done[last.stage()], last.parity());
        all = true;
      }
    }
    if (threadIdx.x % (32 * kGradientWarps) == 0) {
      shared.scale_x[to.stage()] = of_x.scale;
      shared.scale_dy[to.stage()] = of_dy.scale;
      arrive(&shared.loaded[to.stage()]);
    }
    ++to.count;
    position += kPositions;
    ring_row += kPositions;
    if (ring_row >= sizes.ring_rows) ring_row -= sizes.ring_rows;
  }
};

}  // namespace fw
