// How the gradient of a convolution by its weights is divided among thread blocks, and how its
// operands come into shared memory.
//
// Positions are walked in slabs. Of a slab, dy is a stage: a row for each position, 64 out channels
// in 128 bytes, zeros where the position lies in a halo. The taps of a set read x from the slab's
// own rows on and some rows further, which are the next slab's: x lies in a ring of rows, and only
// what is new in a slab is converted.
#pragma once

#include "convolution/convolution_sizes.cuh"
#include "sm90/isa/sm90_launch.cuh"
#include "sm90/convolution/sm90_convolution_convert.cuh"
#include "convolution/taps.cuh"

namespace fw {

constexpr int kSlabStages = 2;

// Named barriers of the warps that convert x and dy.
constexpr int kBarrierOfX = 1, kBarrierOfDy = 2;

// Two warpgroups multiply; the warps of a third convert x, and as many dy.
constexpr int kGradientThreads = 384, kGradientWarps = 2;

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
  uint32_t band, place;  // of the first position
  int slabs;
};

struct GradientSizes : WindowSizes {
  TapSet set[kMostSets];
  int sets = 0, parts = 1;
  bool dy_by_channels = false;

  using WindowSizes::WindowSizes;
  FW_FN int slabs() const { return int(tiles_p.divisor); }

  // Warpgroups have 64 out channels each, or share the taps of 64.
  FW_FN bool shares_taps() const { return tile_channels == 64; }
  FW_FN int work_units() const { return shape.groups * tiles_q * blocks() * sets; }
  FW_FN int shift(const TapSet& of, int tap) const {
    return shape.shift[of.first + tap] - shape.shift[of.first];
  }
  FW_FN int reach(const TapSet& of) const { return shift(of, of.taps - 1); }

  // Blocks that run together read the same positions.
  __device__ __forceinline__ GradientWork work(int index) const {
    const int part = index / work_units();
    int rest = index - part * work_units();
    const int group = rest / (tiles_q * blocks() * sets);
    rest -= group * tiles_q * blocks() * sets;
    const int tile = rest / (blocks() * sets);
    rest -= tile * blocks() * sets;
    const int64_t slab = int64_t(slabs()) * part / parts, end = int64_t(slabs()) * (part + 1) / parts;
    uint32_t band, place;
    all_of_plane.divide(slab * tile_positions, band, place);
    return {part, group, tile * tile_channels, rest / sets * 64, set[rest % sets], band, place,
            int(end - slab)};
  }
};

// The ring of x and the stages of dy follow.
template <int kTerms>
struct alignas(1024) GradientShared {
  static constexpr int kHalves = kTerms == 3 ? 2 : 1;
  static constexpr int kChunkBytes = kSlabPositions<kTerms> * 128;  // 64 out channels of a slab
  GradientWork work;
  float scale_x[kSlabStages], scale_dy[kSlabStages][2];  // of each 64 out channels
  uint32_t found_x[2][kGradientWarps], found_dy[2][kGradientWarps];
  uint64_t loaded[kSlabStages], done[kSlabStages];
  uint64_t arrived;  // a slab from lines, which has yet to be evened out

  __device__ __forceinline__ char* ring() { return reinterpret_cast<char*>(this + 1); }
  // 64 out channels of a stage of dy; their lower halves lie kChunkBytes behind them.
  __device__ __forceinline__ char* dy(const GradientSizes& sizes, int stage, int chunk) {
    const int chunks = sizes.tile_channels / 64;
    return ring() + kHalves * sizes.ring_bytes() +
           (stage * chunks + chunk) * kHalves * kChunkBytes;
  }
  static int64_t bytes(const GradientSizes& sizes) {
    const int stages = kSlabStages * (sizes.tile_channels / 64) * kChunkBytes;
    return sizeof(GradientShared) + int64_t(kHalves) * (sizes.ring_bytes() + stages);
  }
};

// The slabs of a thread block, one after the other.
struct Slabs {
  uint32_t band, place;  // of the slab's first position
  int left;
  uint32_t count = 0;
  int row = 0;  // where in the ring the slab's own rows begin

  __device__ __forceinline__ int stage() const { return count % kSlabStages; }
  __device__ __forceinline__ int parity() const { return count / kSlabStages % 2; }
  __device__ __forceinline__ void advance(const GradientSizes& sizes) {
    uint32_t bands;
    sizes.plane.divide(place + sizes.tile_positions, bands, place);
    band += bands, --left, ++count;
    row += sizes.tile_positions;
    if (row >= sizes.ring_rows) row -= sizes.ring_rows;
  }
};

// A slab's rows of dy, `channels` from `channel` on.
struct SlabOfDy {
  uint32_t band, place;  // of the first position
  int channel, channels;
  int first, rows;

  template <class Input>
  __device__ __forceinline__ auto at(const WindowSizes& sizes, const Input& dy, int row,
                                     bool& inside) const {
    const WindowPosition position = sizes.position(band, place, row);
    inside = (row < rows) & position.in_band & (position.image < sizes.shape.images) &
             (position.column < sizes.shape.x.out);
    return dy.place(position.image, channel, position.z, position.y, position.column);
  }
};

// The warps that convert x: of a slab the rows that the last did not read.
template <bool kByChannels, int kTerms, class X>
__device__ __forceinline__ void convert_x(GradientShared<kTerms>& shared, const X& x,
                                          const GradientSizes& sizes) {
  const GradientWork& work = shared.work;
  const WindowShape& shape = sizes.shape;
  const auto source_of = [&](const Slabs& at, bool all) -> WindowSource {
    const int reach = sizes.reach(work.set);
    return {at.band, at.place + shape.shift[work.set.first], work.group * shape.channels + work.in,
            min(64, shape.channels - work.in), work.set.phase, all ? 0 : reach,
            at.left > 0 ? sizes.tile_positions + reach : 0};
  };
  WindowConverter<kTerms, kByChannels, kGradientWarps, X> converter = {
      sizes, x, shared.found_x, kBarrierOfX, int(threadIdx.x / 32 % kGradientWarps),
      int(x.channel_stride)};
  Slabs slabs = {work.band, work.place, work.slabs};
  WindowSource source = source_of(slabs, true);
  float scale = 2048.f;  // normal numbers'
  converter.begin(source);
#pragma unroll 1
  while (slabs.left > 0) {
    const Slabs here = slabs;
    const RingRows rows = {shared_address(shared.ring()), here.row, sizes.ring_rows, sizes.overlap,
                           sizes.ring_bytes()};
    wait(&shared.done[here.stage()], here.parity() ^ 1);
    scale = converter.convert(
        rows, source, scale,
        [&] {
          slabs.advance(sizes);
          return source_of(slabs, false);
        },
        [&] { return source_of(here, true); },
        [&] {
          // The last slab reads some of what this one does.
          const uint32_t last = here.count - 1;
          if (here.count > 0) wait(&shared.done[last % kSlabStages], last / kSlabStages % 2);
        });
    if (threadIdx.x % (32 * kGradientWarps) == 0) {
      shared.scale_x[here.stage()] = scale;
      arrive(&shared.loaded[here.stage()]);
    }
  }
}

// The warps that convert dy: of a slab 64 out channels after the other.
template <bool kByChannels, int kTerms, class Input>
__device__ __forceinline__ void convert_dy(GradientShared<kTerms>& shared, const Input& dy,
                                           const GradientSizes& sizes) {
  const GradientWork& work = shared.work;
  const WindowShape& shape = sizes.shape;
  const auto source_of = [&](const Slabs& at, int chunk) -> SlabOfDy {
    const int out = work.out + 64 * chunk;
    return {at.band, at.place, work.group * shape.channels_out + out,
            min(64, shape.channels_out - out), 0, at.left > 0 ? sizes.tile_positions : 0};
  };
  WindowConverter<kTerms, kByChannels, kGradientWarps, Input> converter = {
      sizes, dy, shared.found_dy, kBarrierOfDy, int(threadIdx.x / 32 % kGradientWarps),
      int(dy.channel_stride)};
  Slabs slabs = {work.band, work.place, work.slabs};
  SlabOfDy source = source_of(slabs, 0);
  float scale = 2048.f;  // normal numbers'
  int chunk = 0;
  converter.begin(source);
#pragma unroll 1
  while (slabs.left > 0) {
    const Slabs here = slabs;
    const int this_chunk = chunk;
    const RingRows rows = {shared_address(shared.dy(sizes, here.stage(), chunk)), 0,
                           sizes.tile_positions, 0, GradientShared<kTerms>::kChunkBytes};
    if (chunk == 0) wait(&shared.done[here.stage()], here.parity() ^ 1);
    scale = converter.convert(
        rows, source, scale,
        [&] {
          if (64 * ++chunk == sizes.tile_channels) chunk = 0, slabs.advance(sizes);
          return source_of(slabs, chunk);
        },
        [&] { return source_of(here, this_chunk); }, [] {});
    if (threadIdx.x % (32 * kGradientWarps) == 0) {
      shared.scale_dy[here.stage()][this_chunk] = scale;
      if (chunk == 0) arrive(&shared.loaded[here.stage()]);
    }
  }
}

}  // namespace fw
