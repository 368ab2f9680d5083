// How a convolution's input and weights come into shared memory, tile after tile.
//
// A stage is what the taps of one phase read of 64 in channels. wgmma swizzles by the bits of the
// address, so a tap's operand is the same stage seen from `shift` rows further. Some warps convert
// the input to stages; another thread streams the weights in boxes of 64 of a phase's in channels, tap
// after tap.
//
// A tile's furthest taps read what the nearest of the next tile read. Where there is room, a thread
// block therefore walks on from tile to tile, and each block of channels and phase has a ring of
// rows: only what is new is converted. Elsewhere stages are filled anew, one or two in turns.
#pragma once

#include "sm90_window_fill.cuh"
#include "sm90_window_finish.cuh"

namespace fw {

// Two warpgroups multiply, one or two convert, and of the last one a thread loads weights: how many
// registers each thread of them has.
template <int kTerms>
struct WindowTeam {
  static constexpr int kConvertWarps = 8, kMultiply = 128, kConvert = 96, kLoad = 24;
};
template <>
struct WindowTeam<3> {
  static constexpr int kConvertWarps = 4, kMultiply = 184, kConvert = 120, kLoad = 24;
};
template <int kTerms>
struct WindowThreads : WindowTeam<kTerms> {
  using Team = WindowTeam<kTerms>;
  static constexpr int kFirstConvert = 256, kFirstLoad = 256 + 32 * Team::kConvertWarps;
  static constexpr int kAll = kFirstLoad + 128;
  // What a thread begins with; together they never have more.
  static constexpr int kRegisters = 65536 / kAll / 8 * 8;
  static_assert(kFirstConvert * Team::kMultiply + (kFirstLoad - kFirstConvert) * Team::kConvert +
                        128 * Team::kLoad <=
                    kAll * kRegisters,
                "there are no more registers than the block begins with");
  static_assert(Team::kConvert <= kRegisters && kRegisters <= Team::kMultiply,
                "those that convert leave some, those that multiply take them");
};

// Where the multiplying warpgroups do not take turns: boxes of weights that one is ahead of the other.
constexpr int kLead = 1;

// Named barriers: each multiplying warpgroup's own are 1 and 2, and the turns that it waits for 4 and 5.
constexpr int kConvertBarrier = 3, kTurnBarrier = 4;

// Positions of a tile: as many as a thread has 64 sums for, and with three terms as many again for what
// the tensor cores add up. More would leave the warps that convert too few registers for the loads that
// they need on their way (H200: 1.04 ms with these, 1.17 with twice as many).
template <int kTerms, int kTileChannels>
constexpr int kTilePositions = kTerms == 1 && kTileChannels == 64 ? 256 : 128;

// Those of a multiplying warpgroup, which has 64 channels: all of the tile's, or half.
template <int kTerms, int kTileChannels>
constexpr int kGroupPositions = kTilePositions<kTerms, kTileChannels> / (kTileChannels == 64 ? 2 : 1);

// The stages that a thread block fills: tile after tile, of each the blocks of channels, and of each
// of those the phases.
struct WindowFills {
  WindowRun run;
  WindowTile tile;
  int block, phase;

  __device__ __forceinline__ static WindowFills first(const WindowSizes& sizes) {
    WindowFills fills = {sizes.run(), {}, 0, 0};
    fills.start_tile(sizes);
    return fills;
  }
  // All rows, or those that the last tile had not.
  __device__ __forceinline__ WindowSource source(const WindowSizes& sizes, bool all) const {
    const WindowShape& shape = sizes.shape;
    const int reach = shape.phase[phase].reach;
    return {tile.band, tile.first, tile.group * shape.channels + 64 * block,
            min(64, shape.channels - 64 * block), phase,
            !all && tile.follows && run.done > 0 ? reach : 0,
            run.ended() ? 0 : sizes.tile_positions + reach};
  }
  // Whether another tile begins.
  __device__ __forceinline__ bool advance(const WindowSizes& sizes) {
    if (++phase < sizes.shape.end_phase(tile.of_class)) return false;
    phase = sizes.shape.first_phase(tile.of_class);
    if (++block < sizes.blocks()) return false;
    block = 0, ++run.done;
    start_tile(sizes);
    return true;
  }

  // A class without taps has no stages.
  __device__ __forceinline__ void start_tile(const WindowSizes& sizes) {
#pragma unroll 1
    for (; !run.ended(); ++run.done) {
      tile = sizes.tile(run.index());
      phase = sizes.shape.first_phase(tile.of_class);
      if (phase < sizes.shape.end_phase(tile.of_class)) break;
    }
  }
};

// The stages follow.
template <int kTerms, int kTileChannels>
struct alignas(1024) WindowShared {
  static constexpr int kConvertWarps = WindowTeam<kTerms>::kConvertWarps;
  static constexpr int kHalves = kTerms == 3 ? 2 : 1;
  // Stages of the weights, a box each: of the tile's channels, or, where warpgroups take turns, twice as
  // many with 64.
  static constexpr bool kTurns = kTerms == 1 && kTileChannels == 128;
  static constexpr int kWeightBytes = kTileChannels * 128;
  static constexpr int kWeightBits = kHalves * kTileChannels == 256 ? 1 : 2;
  static constexpr int kWeightStages = 1 << (kWeightBits + kTurns);
  char weights[1 << kWeightBits][kHalves][kWeightBytes];
  WarpRows rows[2][4];  // of the warps that multiply
  float scales[kMostStages];  // of the stages
  float kept_scales[kConvertWarps][kMostStages];
  WindowFills filled[kConvertWarps];  // what each of them is filling, in case of doing it again
  uint32_t found[2][kConvertWarps];
  uint64_t loaded_x[kMostStages], done_x[kMostStages];
  uint64_t loaded_w[kWeightStages], done_w[kWeightStages];

  // One half of each number; the other follows.
  __device__ __forceinline__ char* ring(const WindowSizes& sizes, int index) {
    return reinterpret_cast<char*>(this + 1) + index * kHalves * sizes.ring_bytes();
  }
};

// The weights' stages, round and round: 2 to the power of kBits, or twice as many.
template <int kBits>
struct WindowRing {
  int more;
  uint32_t count = 0;

  __device__ __forceinline__ int stage(int back = 0) const {
    return (count - back) & ((1u << kBits << more) - 1);
  }
  __device__ __forceinline__ int parity() const { return count >> kBits >> more & 1; }
};

// The input's stages, round and round, and the rings that they lie in.
struct WindowStages {
  const WindowSizes& sizes;
  int stage = 0, parity = 0;
  int row = 0;  // of the tile's first position in its rings

  __device__ __forceinline__ int ring() const { return sizes.rings == 1 ? 0 : stage; }
  __device__ __forceinline__ void advance() {
    if (++stage == sizes.stages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void next_tile() {
    if (!sizes.walks) return;
    row += sizes.tile_positions;
    if (row >= sizes.ring_rows) row -= sizes.ring_rows;
  }
};

// The warps that convert.
template <bool kByChannels, int kTerms, int kTileChannels>
__device__ __forceinline__ void convert_input(WindowShared<kTerms, kTileChannels>& shared,
                                              const WindowInput& x, const WindowSizes& sizes) {
  constexpr int kConvertWarps = WindowTeam<kTerms>::kConvertWarps;
  const int warp = (threadIdx.x - WindowThreads<kTerms>::kFirstConvert) / 32;
  float* const scales = shared.kept_scales[warp];  // of the rings
  WindowConverter<kTerms, kByChannels, kConvertWarps> converter = {
      sizes, x, shared.found, kConvertBarrier, warp, int(x.channel_stride)};
  if (threadIdx.x % 32 < kMostStages) scales[threadIdx.x % 32] = 2048.f;  // normal numbers'
  __syncwarp();
  WindowStages to = {sizes};
  WindowFills fills = WindowFills::first(sizes);
  WindowSource source = fills.source(sizes, true);
  converter.begin(source);
#pragma unroll 1
  while (!fills.run.ended()) {
    WindowFills& here = shared.filled[warp];
    const bool begins = fills.run.done == 0;
    here = fills;
    __syncwarp();
    const RingRows rows = {shared_address(shared.ring(sizes, to.ring())), to.row, sizes.ring_rows,
                           sizes.overlap, sizes.ring_bytes()};
    // Of a ring with several stages, the others are read while this one is filled.
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
    if (threadIdx.x == WindowThreads<kTerms>::kFirstConvert) {
      shared.scales[to.stage] = scale;
      arrive(&shared.loaded_x[to.stage]);
    }
    __syncwarp();
    to.advance();
    if (tile_ends) to.next_tile();
  }
}

// The thread that loads weights, boxes in the order in which they are multiplied: where warpgroups take
// turns, of each tile those of the first 64 channels and then those of the others.
template <int kTerms, int kTileChannels>
__device__ __forceinline__ void load_weights(WindowShared<kTerms, kTileChannels>& shared,
                                             const CUtensorMap* hi, const CUtensorMap* lo,
                                             const WindowSizes& sizes) {
  using Shared = WindowShared<kTerms, kTileChannels>;
  const WindowShape& shape = sizes.shape;
  const int all_boxes = shape.boxes_between(0, shape.phases), turns = sizes.takes_turns;
  const int bytes = Shared::kWeightBytes >> turns;
  WindowRing<Shared::kWeightBits> to = {turns};
  for (WindowRun run = sizes.run(); !run.ended(); ++run.done) {
    const WindowTile tile = sizes.tile(run.index());
    const int phase = shape.first_phase(tile.of_class);
    const int boxes = shape.boxes_between(phase, shape.end_phase(tile.of_class));
    const int first_box = tile.group * all_boxes + shape.boxes_between(0, phase);
    for (int turn = 0; turn <= turns; ++turn) {
      int row = first_box * shape.channels_out + tile.q + 64 * turn;
      for (int box = 0; box < boxes; ++box, ++to.count, row += shape.channels_out) {
        char* const weights = shared.weights[0][0] + to.stage() * Shared::kHalves * bytes;
        uint64_t* loaded = &shared.loaded_w[to.stage()];
        wait(&shared.done_w[to.stage()], to.parity() ^ 1);
        arrive_expecting(loaded, Shared::kHalves * bytes);
        copy_box(weights, hi, loaded, 0, row, 0);
        if constexpr (kTerms == 3) copy_box(weights + bytes, lo, loaded, 0, row, 0);
      }
    }
  }
}

}  // namespace fw
