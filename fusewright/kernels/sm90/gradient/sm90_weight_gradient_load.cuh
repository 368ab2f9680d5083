// How a weight gradient is divided among thread blocks, and how its operands are loaded into shared
// memory.
//
// Positions are processed in slabs. dy's part of a slab is a stage: a row for each position, 64
// output channels in 128 bytes, zeros for positions in a halo. The taps of a set read x from the
// slab's own rows on and some rows further, which are the next slab's. So x is in a ring of rows,
// and only the new rows of a slab are converted.
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

// Taps for whose sums a warpgroup has registers. One more would leave the converting warps too few
// for the loads that they need in flight.
template <int kTerms>
constexpr int kTapsEach = kTerms == 1 ? 5 : 4;
constexpr int kMostSets = kMostTaps / (2 * kTapsEach<3>) + kMostPhases;

// With three terms, the tensor cores add up no more than a slab.
template <int kTerms>
constexpr int kSlabPositions = kTerms == 1 ? 128 : 64;

// wgmma reads 16 rows in a row: as many of the ring's first ones are stored again after its last.
constexpr int kRingOverlap = 16;

// Taps of one phase that a thread block takes: `taps` of them, from index `first` on.
struct TapSet {
  int phase, first, taps;
};

// What a thread block sums: a set's taps for 64 input channels, over some slabs.
struct GradientWork {
  int part, group, out, in;  // out, in: the first channels, within the group
  TapSet set;
  uint32_t band, in_plane;  // of the first position
  int slabs;
};

struct GradientTiling : ConvTiling {
  TapSet set[kMostSets];
  int sets = 0, parts = 1;
  bool dy_by_channels = false;

  using ConvTiling::ConvTiling;
  FW_FN int slabs() const { return int(tiles_p.divisor); }

  // Warpgroups have 64 output channels each, or share the taps of 64.
  FW_FN bool shares_taps() const { return tile_channels == 64; }
  FW_FN int work_units() const { return shape.groups * tiles_q * blocks() * sets; }
  FW_FN int shift(const TapSet& of, int tap) const {
    return shape.shift[of.first + tap] - shape.shift[of.first];
  }
  FW_FN int reach(const TapSet& of) const { return shift(of, of.taps - 1); }

  // Thread blocks that run together read the same positions.
  FW_DEVICE GradientWork work(int index) const {
    const int part = index / work_units();
    int rest = index - part * work_units();
    const int group = rest / (tiles_q * blocks() * sets);
    rest -= group * tiles_q * blocks() * sets;
    const int tile = rest / (blocks() * sets);
    rest -= tile * blocks() * sets;
    const int64_t slab = int64_t(slabs()) * part / parts,
                  end = int64_t(slabs()) * (part + 1) / parts;
    uint32_t band, in_plane;
    all_of_plane.divide(slab * tile_positions, band, in_plane);
    return {part, group,    tile * tile_channels, rest / sets * 64, set[rest % sets],
            band, in_plane, int(end - slab)};
  }
};

// The ring of x and the stages of dy follow it in memory.
template <int kTerms>
struct alignas(1024) GradientShared {
  static constexpr int kParts = kTerms == 3 ? 2 : 1;
  static constexpr int kChunkBytes = kSlabPositions<kTerms> * 128;  // 64 output channels of a slab
  GradientWork work;
  float scale_x[kSlabStages], scale_dy[kSlabStages][2];  // of each 64 output channels
  uint32_t found_x[2][kGradientWarps], found_dy[2][kGradientWarps];
  uint64_t loaded[kSlabStages], done[kSlabStages];
  uint64_t arrived;  // a staged slab, which has yet to be evened out

  FW_DEVICE char* ring() { return reinterpret_cast<char*>(this + 1); }
  // 64 output channels of a stage of dy; their low parts are stored kChunkBytes after them.
  FW_DEVICE char* dy(const GradientTiling& sizes, int stage, int chunk) {
    const int chunks = sizes.tile_channels / 64;
    return ring() + kParts * sizes.ring_bytes() + (stage * chunks + chunk) * kParts * kChunkBytes;
  }
  static int64_t bytes(const GradientTiling& sizes) {
    const int stages = kSlabStages * (sizes.tile_channels / 64) * kChunkBytes;
    return sizeof(GradientShared) + int64_t(kParts) * (sizes.ring_bytes() + stages);
  }
};

// The slabs of a thread block, one after the other.
struct Slabs {
  uint32_t band, in_plane;  // of the slab's first position
  int left;
  uint32_t count = 0;
  int row = 0;  // where in the ring the slab's own rows begin

  FW_DEVICE int stage() const { return count % kSlabStages; }
  FW_DEVICE int parity() const { return count / kSlabStages % 2; }
  FW_DEVICE void advance(const GradientTiling& sizes) {
    uint32_t bands;
    sizes.plane.divide(in_plane + sizes.tile_positions, bands, in_plane);
    band += bands, --left, ++count;
    row += sizes.tile_positions;
    if (row >= sizes.ring_rows) row -= sizes.ring_rows;
  }
};

// A slab's rows of dy: `channels` channels from `channel` on.
struct SlabOfDy {
  uint32_t band, in_plane;  // of the first position
  int channel, channels;
  int first, rows;

  template <class Input>
  FW_DEVICE auto at(const ConvTiling& sizes, const Input& dy, int row, bool& inside) const {
    const ConvPosition position = sizes.position(band, in_plane, row);
    inside = (row < rows) & position.in_band & (position.image < sizes.shape.images) &
             (position.column < sizes.shape.x.out);
    return dy.location(position.image, channel, position.z, position.y, position.column);
  }
};

// The warps that convert x: of a slab the rows that the previous one did not read.
template <bool kByChannels, int kTerms, class X>
FW_DEVICE void convert_x(GradientShared<kTerms>& shared, const X& x, const GradientTiling& sizes) {
  const GradientWork& work = shared.work;
  const ConvShape& shape = sizes.shape;
  const auto source_of = [&](const Slabs& at, bool all) -> ConvRowSource {
    const int reach = sizes.reach(work.set);
    return {at.band,
            at.in_plane + shape.shift[work.set.first],
            work.group * shape.channels + work.in,
            min(64, shape.channels - work.in),
            work.set.phase,
            all ? 0 : reach,
            at.left > 0 ? sizes.tile_positions + reach : 0};
  };
  InputConverter<kTerms, kByChannels, kGradientWarps, X> converter = {
      sizes,
      x,
      shared.found_x,
      kBarrierOfX,
      int(threadIdx.x / 32 % kGradientWarps),
      int(x.channel_stride)};
  Slabs slabs = {work.band, work.in_plane, work.slabs};
  ConvRowSource source = source_of(slabs, true);
  float scale = 2048.f;  // suits N(0, 1) elements
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
          // The previous slab reads some of what this one does.
          const uint32_t last = here.count - 1;
          if (here.count > 0) wait(&shared.done[last % kSlabStages], last / kSlabStages % 2);
        });
    if (threadIdx.x % (32 * kGradientWarps) == 0) {
      shared.scale_x[here.stage()] = scale;
      arrive(&shared.loaded[here.stage()]);
    }
  }
}

// The warps that convert dy: of a slab 64 output channels after the other.
template <bool kByChannels, int kTerms, class Input>
FW_DEVICE void convert_dy(GradientShared<kTerms>& shared, const Input& dy,
                          const GradientTiling& sizes) {
  const GradientWork& work = shared.work;
  const ConvShape& shape = sizes.shape;
  const auto source_of = [&](const Slabs& at, int chunk) -> SlabOfDy {
    const int out = work.out + 64 * chunk;
    return {at.band,
            at.in_plane,
            work.group * shape.channels_out + out,
            min(64, shape.channels_out - out),
            0,
            at.left > 0 ? sizes.tile_positions : 0};
  };
  InputConverter<kTerms, kByChannels, kGradientWarps, Input> converter = {
      sizes,
      dy,
      shared.found_dy,
      kBarrierOfDy,
      int(threadIdx.x / 32 % kGradientWarps),
      int(dy.channel_stride)};
  Slabs slabs = {work.band, work.in_plane, work.slabs};
  SlabOfDy source = source_of(slabs, 0);
  float scale = 2048.f;  // suits N(0, 1) elements
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
