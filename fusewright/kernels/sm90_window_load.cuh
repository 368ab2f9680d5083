// How a convolution's input and weights come into shared memory, tile after tile.
//
// A stage is what the taps of one phase read of 64 in channels: a row for each position, 64 halves
// in 128 bytes, swizzled as wgmma expects it. wgmma swizzles by the bits of the address, so a tap's
// operand is the same stage seen from `shift` rows further. Seven warps convert the input to
// stages; the eighth streams the weights in boxes of 64 of a phase's in channels, tap after tap.
#pragma once

#include "sm90_finish_direct.cuh"
#include "sm90_split.cuh"
#include "window_walk.cuh"

namespace fw {

constexpr int kWindowThreads = 512, kConvertWarps = 7;

// Boxes of weights that one multiplying warpgroup is ahead of the other.
constexpr int kLead = 1;

// Named barriers: each multiplying warpgroup's own are 1 and 2.
constexpr int kConvertBarrier = 3, kLeadBarrier = 4;

// Positions of a tile: with three terms a warpgroup has twice as many sums for each.
template <int kTerms>
constexpr int kTilePositions = kTerms == 1 ? 256 : 128;

// Stages of the input follow, as many as there is room for.
template <int kTerms, int kTileChannels>
struct alignas(1024) WindowShared {
  static constexpr int kHalves = kTerms == 3 ? 2 : 1;
  static constexpr int kWeightBytes = kTileChannels * 128;
  static constexpr int kWeightStages = kHalves * kTileChannels == 256 ? 2 : 4;
  char weights[kWeightStages][kHalves][kWeightBytes];
  float finished[2][kFinishRows][kFinishStride];
  float scales[2];                     // of the stages
  uint32_t largest[2][kConvertWarps];  // the bits of what each warp found
  uint64_t loaded_x[2], done_x[2], loaded_w[kWeightStages], done_w[kWeightStages];

  __device__ __forceinline__ char* stage(int index, int stage_rows) {
    return reinterpret_cast<char*>(this + 1) + index * kHalves * stage_rows * 128;
  }
};

// The stages that blocks go through, round and round: 1, 2 or 4 of them.
struct WindowRing {
  uint32_t count = 0;
  int bits;

  __device__ __forceinline__ explicit WindowRing(int stages) : bits(stages / 2) {}
  __device__ __forceinline__ int stage(int back = 0) const {
    return (count - back) & ((1u << bits) - 1);
  }
  __device__ __forceinline__ int parity() const { return count >> bits & 1; }
};

// A stage to be filled: the input of one phase, from a tile's first channel of a block on.
struct WindowSource {
  const WindowSizes& sizes;
  const WindowInput& x;
  WindowTile tile;
  const WindowPhase& phase;
  int channel, channels;  // the first, of all; how many
  int rows;

  // Where the number that a position reads lies, in the first channel, if it is inside the input.
  __device__ __forceinline__ const float* at(int row, bool& inside) const {
    const WindowAxis &along_y = sizes.shape.y, &along_x = sizes.shape.x;
    const WindowPosition position = sizes.position(tile, row);
    const int y = position.y * along_y.stride - along_y.padding + phase.y;
    const int column = position.column * along_x.stride - along_x.padding + phase.x;
    inside = (row < rows) & (position.image < sizes.shape.images) &
             (unsigned(y) < unsigned(along_y.in)) & (unsigned(column) < unsigned(along_x.in));
    return x.data + position.image * x.image_stride + y * x.y_stride + column * x.x_stride +
           channel * x.channel_stride;
  }
};

// Rows of shared memory to be filled, and how far behind them their lower halves lie.
struct StageRows {
  uint32_t first;
  int lower_bytes;

  template <int kTerms>
  __device__ __forceinline__ void put(int row, int column, const Fragment& eight) const {
    const uint32_t to = first + row * 128 + ((column ^ row % 8) << 4);
    store_four_pairs(to, eight.hi);
    if constexpr (kTerms == 3) store_four_pairs(to + lower_bytes, eight.lo);
  }
};

// What a thread converts at a time: four parts of eight channels. Where channels lie side by side,
// of four rows, and eight threads have a row; elsewhere of one row, and 32 threads have neighbouring
// rows. Either way eight threads' stores meet all banks.
template <bool kByChannels>
struct WindowUnit {
  static constexpr int kRows = kByChannels ? 16 : 32;  // of a warp
  int first_row, first_column;  // a column is eight channels

  // `two`: whether rows have more than the 32 channels of one unit.
  __device__ __forceinline__ WindowUnit(int unit, bool two) {
    const int lane = threadIdx.x % 32;
    first_row = (two ? unit / 2 : unit) * kRows + (kByChannels ? lane / 8 : lane);
    first_column = kByChannels ? lane % 8 : two ? unit % 2 * 4 : 0;
  }
  __device__ __forceinline__ int row(int k) const { return first_row + (kByChannels ? 4 * k : 0); }
  __device__ __forceinline__ int column(int k) const {
    return first_column + (kByChannels ? 0 : k);
  }
};

// One after the other, a unit's parts as numbers.
template <bool kByChannels, class Source>
struct WindowReader {
  const Source& source;
  const float* from;
  bool inside;

  __device__ __forceinline__ void read(float (&x)[8], const WindowUnit<kByChannels>& unit, int k) {
    if (kByChannels || k == 0) from = source.at(unit.row(k), inside);
    const int left = inside ? source.channels - 8 * unit.column(k) : 0;
    if constexpr (kByChannels) {
      load_four_if(x, from + 8 * unit.column(k), left > 0);
      load_four_if(x + 4, from + 8 * unit.column(k) + 4, left > 4);
    } else {
      const float* eight = from + 8 * unit.column(k) * source.x.channel_stride;
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = load_if(eight + i * source.x.channel_stride, i < left);
    }
  }
};

__device__ __forceinline__ float largest_of(const float (&x)[8]) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(x[i]));
  if (isfinite(most)) return most;
  most = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (isfinite(x[i])) most = fmaxf(most, fabsf(x[i]));
  }
  return most;
}

// Fills a stage's rows, which kWarps share, and returns the largest finite magnitude that the
// thread has seen. As soon as a part is converted, the next unit's takes its place: numbers are on
// their way all the time.
template <int kTerms, bool kByChannels, int kWarps, class Rows, class Source>
__device__ __forceinline__ float fill_stage(const Rows& to, const Source& source, int warp,
                                            float scale) {
  using Unit = WindowUnit<kByChannels>;
  const bool two = !kByChannels && source.channels > 32;
  const int units = (source.rows + Unit::kRows - 1) / Unit::kRows << int(two);
  WindowReader<kByChannels, Source> reader = {source};
  float x[4][8], largest = 0.f;
  asm volatile("" : "+r"(warp));  // or the first unit's 32 addresses would be kept for another time
  Unit unit(warp, two);
#pragma unroll
  for (int k = 0; k < 4; ++k) reader.read(x[k], unit, k);
#pragma unroll 1
  for (int index = warp; index < units; index += kWarps) {
    const Unit next(index + kWarps, two);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      largest = fmaxf(largest, largest_of(x[k]));
      Fragment eight;
#pragma unroll
      for (int i = 0; i < 4; ++i) eight.split(i, x[k][2 * i] * scale, x[k][2 * i + 1] * scale);
      if (unit.row(k) < source.rows) to.template put<kTerms>(unit.row(k), unit.column(k), eight);
      reader.read(x[k], next, k);  // nothing, after the last
    }
    unit = next;
  }
  return largest;
}

// Whether halves of numbers up to `largest` are finite and keep their bits.
__device__ __forceinline__ bool scale_fits(float scale, float largest) {
  return largest == 0.f || (largest * scale >= 128.f && largest * scale <= 61000.f);
}

// The warps that convert. A stage has one scale: the last stage's, and where that does not fit,
// which is rare, the stage is filled again.
template <int kTerms, int kTileChannels>
__device__ __forceinline__ void convert_input(WindowShared<kTerms, kTileChannels>& shared,
                                              const WindowInput& x, const WindowSizes& sizes) {
  const WindowShape& shape = sizes.shape;
  const int warp = threadIdx.x / 32 % 8 - 1;
  float scale = 2048.f;  // normal numbers'
  int turn = 0;
  WindowRing to(sizes.stages);
  for (int64_t index = blockIdx.x; index < sizes.tiles; index += gridDim.x) {
    const WindowTile tile = sizes.tile(index);
    const int end = shape.end_phase(tile.of_class);
    for (int block = 0; block < sizes.blocks(); ++block) {
      for (int phase = shape.first_phase(tile.of_class); phase < end; ++phase, ++to.count) {
        const WindowSource source = {
            sizes, x, tile, shape.phase[phase], tile.group * shape.channels + 64 * block,
            min(64, shape.channels - 64 * block),
            kTilePositions<kTerms> + shape.phase[phase].reach};
        const StageRows rows = {shared_address(shared.stage(to.stage(), shape.stage_rows)),
                                shape.stage_rows * 128};
        wait(&shared.done_x[to.stage()], to.parity() ^ 1);
        for (bool again = true; again; turn ^= 1) {
          const float mine =
              sizes.by_channels
                  ? fill_stage<kTerms, true, kConvertWarps>(rows, source, warp, scale)
                  : fill_stage<kTerms, false, kConvertWarps>(rows, source, warp, scale);
          const uint32_t of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(mine));
          if (threadIdx.x % 32 == 0) shared.largest[turn][warp] = of_warp;
          publish_stores();
          meet(kConvertBarrier, 32 * kConvertWarps);
          uint32_t most = 0;
          for (const uint32_t each : shared.largest[turn]) most = max(most, each);
          const float largest = __uint_as_float(most), better = scale_for(largest);
          again = !scale_fits(scale, largest) && scale != better;
          if (again) scale = better;
        }
        if (warp == 0 && threadIdx.x % 32 == 0) {
          shared.scales[to.stage()] = scale;
          arrive(&shared.loaded_x[to.stage()]);
        }
      }
    }
  }
}

// The thread that loads weights, boxes in the order in which they are multiplied.
template <int kTerms, int kTileChannels>
__device__ __forceinline__ void load_weights(WindowShared<kTerms, kTileChannels>& shared,
                                             const CUtensorMap* hi, const CUtensorMap* lo,
                                             const WindowSizes& sizes) {
  using Shared = WindowShared<kTerms, kTileChannels>;
  const WindowShape& shape = sizes.shape;
  const int all_boxes = shape.boxes_between(0, shape.phases);
  WindowRing to(Shared::kWeightStages);
  for (int64_t index = blockIdx.x; index < sizes.tiles; index += gridDim.x) {
    const WindowTile tile = sizes.tile(index);
    const int phase = shape.first_phase(tile.of_class);
    const int boxes = shape.boxes_between(phase, shape.end_phase(tile.of_class));
    const int first_box = tile.group * all_boxes + shape.boxes_between(0, phase);
    int row = first_box * shape.channels_out + tile.q;
    for (int box = 0; box < boxes; ++box, ++to.count, row += shape.channels_out) {
      auto& weights = shared.weights[to.stage()];
      uint64_t* loaded = &shared.loaded_w[to.stage()];
      wait(&shared.done_w[to.stage()], to.parity() ^ 1);
      arrive_expecting(loaded, Shared::kHalves * Shared::kWeightBytes);
      copy_box(weights[0], hi, loaded, 0, row, 0);
      if constexpr (kTerms == 3) copy_box(weights[1], lo, loaded, 0, row, 0);
    }
  }
}

}  // namespace fw
