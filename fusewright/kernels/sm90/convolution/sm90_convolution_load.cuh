// How a convolution's input and weights are loaded into shared memory, tile after tile.
//
// A stage is what the taps of one phase read of 64 input channels. wgmma swizzles by the bits of
// the address, so a tap's operand is the same stage, read from `shift` rows further on. Some warps
// convert the input to stages; another thread streams the weights in boxes of 64 of a phase's input
// channels, tap after tap.
//
// A tile's furthest taps read what the nearest taps of the next tile read. If there is room, a
// thread block therefore goes from a tile to its neighbour, and each block of channels and phase
// has a ring of rows: only new rows are converted. Otherwise there are one or two stages, which are
// filled anew.
#pragma once

#include "sm90/convolution/sm90_convolution_convert.cuh"
#include "sm90/convolution/sm90_convolution_epilogue.cuh"

namespace fw {

// The constants of a kernel. Usually two warpgroups share a tile of kTileChannels. If a tile is one
// stage (`kPingPong`), it has all output channels, and the warpgroups take turns, 64 channels at a
// time: one multiplies while the other stores its results. (Three warpgroups leave registers for
// four warps that convert; H200, 128 channels: 0.84 ms either way, with masks 1.07 instead of
// 1.01.)
//
// Each kind of thread has its own number of registers. In the last warpgroup one thread loads
// weights; it is a whole warpgroup because each quarter of an SM has registers for its own warps.
template <int kTerms_, int kTileChannels, bool kPingPong_ = false, int kBeside_ = 0>
struct ConvKind {
  static constexpr int kTerms = kTerms_, kParts = kTerms == 3 ? 2 : 1, kBeside = kBeside_;
  static constexpr bool kPingPong = kPingPong_, kStaged = false;
  static_assert(kTerms == 1 || !kPingPong, "the registers are for one half of each number");

  static constexpr int kGroups = 2, kConvertWarps = kTerms == 1 ? 8 : 4;
  static constexpr int kFirstConvert = 128 * kGroups,
                       kFirstLoad = kFirstConvert + 32 * kConvertWarps;
  static constexpr int kThreads = kFirstLoad + 128;
  // What each thread begins with. Together they never have more.
  static constexpr int kRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kMultiply = kTerms == 3 ? 184 : 128;
  static constexpr int kConvert = kTerms == 3 ? 120 : 96, kLoad = 24;
  static_assert(kFirstConvert * kMultiply + (kFirstLoad - kFirstConvert) * kConvert + 128 * kLoad <=
                    kThreads * kRegisters,
                "there are no more registers than the block begins with");
  static_assert(kConvert <= kRegisters && kRegisters <= kMultiply,
                "those that convert leave some, those that multiply take them");

  // Whether a warpgroup has all of a tile's positions and 64 of its channels, or half of the
  // positions.
  static constexpr bool kHasPart = kPingPong || kTileChannels == 128;
  // Positions of a tile: as many as a thread has 64 sums for, and with three terms as many again
  // for what the tensor cores add up. More would leave the warps that convert too few registers for
  // the loads that they need in flight (H200: 1.04 ms with these, 1.17 with twice as many).
  static constexpr int kTilePositions = kTerms == 1 && !kHasPart ? 256 : 128;
  static constexpr int kPositions = kTilePositions / (kHasPart ? 1 : 2);  // of a warpgroup

  // Boxes of weights, and how many there is room for.
  static constexpr int kBoxChannels = kPingPong ? 64 : kTileChannels,
                       kBoxBytes = kBoxChannels * 128;
  static constexpr int kBoxBits = kPingPong ? 3 : kParts * kTileChannels == 256 ? 1 : 2;
  static constexpr int kBoxes = 1 << kBoxBits;
};

// Boxes of weights by which one multiplying warpgroup is ahead of the other, without ping-pong.
constexpr int kLead = 1;

// Named barriers: that of the warps that convert, and the turns that the multiplying warpgroups
// wait for, 5 to 7.
constexpr int kConvertBarrier = 4, kPingPongBarrier = 5;

// The stages that a thread block fills: tile after tile, for each tile the blocks of channels, and
// for each of these the phases.
struct ConvFills {
  TileRun run;
  ConvTile tile;
  int block, phase;

  FW_DEVICE static ConvFills first(const ConvTiling& sizes) {
    ConvFills fills = {sizes.run(), {}, 0, 0};
    fills.start_tile(sizes);
    return fills;
  }
  // All rows, or those that the last tile did not have.
  FW_DEVICE ConvRowSource source(const ConvTiling& sizes, bool all) const {
    const ConvShape& shape = sizes.shape;
    const int reach = shape.phase[phase].reach;
    return {tile.band,
            tile.first,
            tile.group * shape.channels + 64 * block,
            min(64, shape.channels - 64 * block),
            phase,
            !all && tile.follows && run.done > 0 ? reach : 0,
            run.ended() ? 0 : sizes.tile_positions + reach};
  }
  // Whether another tile begins.
  FW_DEVICE bool advance(const ConvTiling& sizes) {
    if (++phase < sizes.shape.end_phase(tile.of_class)) return false;
    phase = sizes.shape.first_phase(tile.of_class);
    if (++block < sizes.blocks()) return false;
    block = 0, ++run.done;
    start_tile(sizes);
    return true;
  }

  // A class without taps has no stages.
  FW_DEVICE void start_tile(const ConvTiling& sizes) {
#pragma unroll 1
    for (; !run.ended(); ++run.done) {
      tile = sizes.tile(run.index());
      phase = sizes.shape.first_phase(tile.of_class);
      if (phase < sizes.shape.end_phase(tile.of_class)) break;
    }
  }
};

// Shared memory of the warps that convert.
template <int kWarps>
struct ConvertShared {
  float kept_scales[kWarps][kMostStages];
  ConvFills filled[kWarps];  // what each of them is filling, in case it is filled again
  uint32_t found[2][kWarps];
};
template <>
struct ConvertShared<0> {};

// The stages follow it in memory.
template <class Kind>
struct alignas(1024) ConvShared {
  char weights[Kind::kBoxes][Kind::kParts][Kind::kBoxBytes];
  WarpRows rows[Kind::kGroups][4];  // of the warps that multiply
  float scales[kMostStages];        // of the stages
  ConvertShared<Kind::kConvertWarps> convert;
  uint64_t loaded_x[kMostStages], done_x[kMostStages];
  uint64_t loaded_w[Kind::kBoxes], done_w[Kind::kBoxes];

  // High parts; low parts, if there are any, follow.
  FW_DEVICE char* ring(const ConvTiling& sizes, int index) {
    return reinterpret_cast<char*>(this + 1) + index * Kind::kParts * sizes.ring_bytes();
  }
};

// The ring of weight boxes in shared memory: 2 to the power of kBits.
template <int kBits>
struct ConvRing {
  uint32_t count = 0;

  FW_DEVICE int stage(int back = 0) const { return (count - back) & ((1u << kBits) - 1); }
  FW_DEVICE int parity() const { return count >> kBits & 1; }
};

// The ring of the input's stages, and the rings of rows that hold them.
struct ConvStages {
  const ConvTiling& sizes;
  int stage = 0, parity = 0;
  int row = 0;  // of the tile's first position in its rings

  FW_DEVICE int ring() const { return sizes.rings == 1 ? 0 : stage; }
  FW_DEVICE void advance(int stages = 1) {
    stage += stages;
#pragma unroll 1
    for (; stage >= sizes.stages; stage -= sizes.stages) parity ^= 1;
  }
  FW_DEVICE void next_tile() {
    if (!sizes.walks) return;
    row += sizes.tile_positions;
    if (row >= sizes.ring_rows) row -= sizes.ring_rows;
  }
};

// The warps that convert.
template <bool kByChannels, class Kind, class Input>
FW_DEVICE void convert_input(ConvShared<Kind>& shared, const Input& x, const ConvTiling& sizes) {
  const int warp = (threadIdx.x - Kind::kFirstConvert) / 32;
  float* const scales = shared.convert.kept_scales[warp];  // of the rings
  InputConverter<Kind::kTerms, kByChannels, Kind::kConvertWarps, Input> converter = {
      sizes, x, shared.convert.found, kConvertBarrier, warp, int(x.channel_stride)};
  if (threadIdx.x % 32 < kMostStages) scales[threadIdx.x % 32] = 2048.f;  // suits N(0, 1) elements
  __syncwarp();
  ConvStages to = {sizes};
  ConvFills fills = ConvFills::first(sizes);
  ConvRowSource source = fills.source(sizes, true);
  converter.begin(source);
#pragma unroll 1
  while (!fills.run.ended()) {
    ConvFills& here = shared.convert.filled[warp];
    const bool begins = fills.run.done == 0;
    here = fills;
    __syncwarp();
    const RingRows rows = {shared_address(shared.ring(sizes, to.ring())), to.row, sizes.ring_rows,
                           sizes.overlap, sizes.ring_bytes()};
    // If a ring has several stages, the others are read while this one is filled.
    const auto clear = [&] {
      if (sizes.walks && sizes.rings < sizes.stages && !begins) {
        const int before = (to.stage == 0 ? sizes.stages : to.stage) - 1;
        wait(&shared.done_x[before], to.parity ^ (to.stage == 0));
      }
    };
    wait(&shared.done_x[to.stage], to.parity ^ 1);
    if (source.first == 0) clear();
    bool tile_ends = false;
    const float scale = converter.convert(
        rows, source, scales[to.ring()],
        [&] {
          tile_ends = fills.advance(sizes);
          return fills.source(sizes, false);
        },
        [&] { return here.source(sizes, true); }, clear);
    if (threadIdx.x % 32 == 0) scales[to.ring()] = scale;
    if (threadIdx.x == Kind::kFirstConvert) {
      shared.scales[to.stage] = scale;
      arrive(&shared.loaded_x[to.stage]);
    }
    __syncwarp();
    to.advance();
    if (tile_ends) to.next_tile();
  }
}

// The thread that loads stages from the staged input, in boxes of `staged_box` rows.
template <class Kind>
FW_DEVICE void load_staged(ConvShared<Kind>& shared, const CUtensorMap* staged,
                           const ConvTiling& sizes) {
  const ConvShape& shape = sizes.shape;
  const int planes = sizes.blocks() * shape.planes, rows = sizes.ring_rows;
  const int64_t staged_rows = sizes.positions();
  ConvStages to = {sizes};
  for (TileRun run = sizes.run(); !run.ended(); ++run.done) {
    const ConvTile tile = sizes.tile(run.index());
    const int64_t first = sizes.start(tile);
    const int first_phase = shape.first_phase(tile.of_class), end = shape.end_phase(tile.of_class);
    for (int block = 0; block < planes; block += shape.planes) {
      for (int phase = first_phase; phase < end; ++phase, to.advance()) {
        const int64_t staged_index =
            int64_t(tile.group) * planes + block + shape.phase[phase].plane;
        const int64_t from =
            staged_index * staged_rows + first + (kVolumes ? shape.phase[phase].deeper : 0);
        uint64_t* loaded = &shared.loaded_x[to.stage];
        char* const stage = shared.ring(sizes, to.stage);
        wait(&shared.done_x[to.stage], to.parity ^ 1);
        arrive_expecting(loaded, rows * 128);
        for (int row = 0; row < rows; row += sizes.staged_box) {
          copy_box(stage + row * 128, staged, loaded, 0, int(from) + row, 0);
        }
      }
    }
  }
}

// The thread that loads weights: boxes in the order in which they are multiplied, for each tile
// those of its parts, one after the other.
template <class Kind>
FW_DEVICE void load_weights(ConvShared<Kind>& shared, const CUtensorMap* hi, const CUtensorMap* lo,
                            const ConvTiling& sizes) {
  const ConvShape& shape = sizes.shape;
  const int all_boxes = shape.boxes_between(0, shape.phases);
  ConvRing<Kind::kBoxBits> to;
  for (TileRun run = sizes.run(); !run.ended(); ++run.done) {
    const ConvTile tile = sizes.tile(run.index());
    const int boxes = sizes.boxes_of(tile.of_class);
    const int first_box =
        tile.group * all_boxes + shape.boxes_between(0, shape.first_phase(tile.of_class));
    for (int part = 0; part < sizes.parts; ++part) {
      int row = first_box * shape.channels_out + tile.q + 64 * part;
      for (int box = 0; box < boxes; ++box, ++to.count, row += shape.channels_out) {
        auto& weights = shared.weights[to.stage()];
        uint64_t* loaded = &shared.loaded_w[to.stage()];
        wait(&shared.done_w[to.stage()], to.parity() ^ 1);
        arrive_expecting(loaded, sizeof(weights));
        copy_box(weights[0], hi, loaded, 0, row, 0);
        if constexpr (Kind::kTerms == 3) copy_box(weights[1], lo, loaded, 0, row, 0);
      }
    }
  }
}

}  // namespace fw
