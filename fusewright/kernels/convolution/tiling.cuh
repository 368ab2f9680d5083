// How a convolution's outputs are cut into tiles, and where a position of a tile lies.
#pragma once

#include "convolution/operands.cuh"

namespace fw {

// Division by a number known before the launch, for dividends below 2^31.
struct Divisor {
  uint32_t divisor, multiplier, shift;

  explicit Divisor(int by) : divisor(by), shift(31) {
    while (uint64_t(1) << (shift - 31) < divisor) ++shift;
    multiplier = uint32_t(((uint64_t(1) << shift) + divisor - 1) / divisor);
  }
  __device__ __forceinline__ void divide(uint32_t x, uint32_t& quotient, uint32_t& rest) const {
    quotient = uint32_t(uint64_t(x) * multiplier >> shift);
    rest = x - quotient * divisor;
  }
};

// The same for larger ones, as long as dividend times divisor is below 2^64.
struct WideDivisor {
  uint64_t multiplier;
  uint32_t divisor;

  explicit WideDivisor(int by) : multiplier(~uint64_t(0) / by + (by > 1)), divisor(by) {}
  __device__ __forceinline__ void divide(uint64_t x, uint32_t& quotient, uint32_t& rest) const {
    quotient = uint32_t(divisor > 1 ? __umul64hi(x, multiplier) : x);
    rest = uint32_t(x - uint64_t(quotient) * divisor);
  }
};

// A tile: out channels from q on of a group, and positions from place `first` of a band's plane on;
// of the outputs, one class.
struct WindowTile {
  int group, q;
  uint32_t band, first;  // bands count through all images
  int of_class;
  bool follows;  // the tile before it has the positions before its own
};

// The tiles of a thread block.
struct WindowRun {
  int first, step, count, done;

  __device__ __forceinline__ bool ended() const { return done >= count; }
  __device__ __forceinline__ int index() const { return first + done * step; }
};
struct WindowPosition {
  int image, z, y, column;
  bool in_band;  // not in the halo beside, below or behind it
};

// What window_cost.py counts on for a stage, whatever else is in shared memory; in turns, for all.
constexpr int kStageBytes = 138 * 1024, kTurnBytes = 125 * 1024;
constexpr int kMostStages = 4;

struct WindowSizes {
  WindowShape shape;
  int tile_positions, tile_channels, tiles_q;
  Divisor plane, pitch, rows, bands;  // positions of a band, of a row; rows of a z; bands of an image
  WideDivisor all_of_plane;
  int tiles;             // all, of all classes; each group and its tiles_q have tiles_p of a class
  Divisor tiles_p, units, of_group;
  int stages = 2, rings = 2, ring_rows = 0;  // of the input
  int overlap = 0;          // rows of a ring that lie behind its last again: wgmma reads some in a row
  int lead = 0;             // boxes that one warpgroup is ahead of the other
  int parts = 1;            // of a tile's channels, that warpgroups multiply in turns
  int tile_boxes;           // of a part's weights
  int line_box = 0;         // rows of lines that are copied at once
  int together = 1;         // tiles of a class after which the next class takes its turn
  bool walks = false;       // a thread block goes on from tile to tile
  bool by_channels = false;  // the input's channels are read four at a time

  WindowSizes(const WindowShape& shape, int tile_positions, int tile_channels)
      : shape(shape), tile_positions(tile_positions), tile_channels(tile_channels),
        tiles_q((shape.channels_out + tile_channels - 1) / tile_channels),
        plane(shape.depth * shape.rows * shape.pitch), pitch(shape.pitch), rows(shape.rows),
        bands((shape.x.out + shape.band_width - 1) / shape.band_width),
        all_of_plane(int(plane.divisor)),
        tiles_p(max(1, int((positions() + tile_positions - 1) / tile_positions))),
        units(max(1, shape.groups * tiles_q)), of_group(max(1, tiles_q)),
        tile_boxes(shape.boxes_between(0, shape.phases)) {
    tiles = int(tiles_p.divisor * units.divisor) * shape.classes;
  }

  // How classes take turns, with so many thread blocks.
  void take_turns(int blocks) {
    const int each = int(units.divisor);
    together = max(1, blocks / each) * each;
  }
  // Of all images and bands, those in halos too.
  FW_FN int64_t positions() const { return shape.images * image_positions(); }
  FW_FN int64_t image_positions() const { return int64_t(plane.divisor) * bands.divisor; }
  // A tile's first, among all.
  FW_FN int64_t start(const WindowTile& tile) const {
    return int64_t(tile.band) * plane.divisor + tile.first;
  }
  // Of the in channels, 64 each; the steps of 16 channels in one; and the boxes of four steps that
  // the weights of a phase fill.
  FW_FN int blocks() const { return shape.channel_blocks(); }
  FW_FN int steps(int block) const {
    return block + 1 < blocks() ? 4 : (shape.channels - 64 * block + 15) / 16;
  }
  FW_FN int boxes(int block, int phase) const {
    return (shape.phase[phase].taps * steps(block) + 3) / 4;
  }
  FW_FN int ring_bytes() const { return (ring_rows + overlap) * 128; }
  // Of a part's weights, in a tile of a class.
  FW_FN int boxes_of(int of_class) const {
    if (shape.classes == 1) return tile_boxes;
    return shape.boxes_between(shape.first_phase(of_class), shape.end_phase(of_class));
  }

  // The class of a tile, and its number among the tiles of that class. Classes differ in their work:
  // all thread blocks have the same one at a time, and then the next for the same positions, which
  // are still in the cache.
  __device__ __forceinline__ int class_of(int& index) const {
    if (shape.classes == 1) return 0;
    const int first = index / (together * shape.classes) * together;
    const int here = min(together, tiles / shape.classes - first);
    const int rest = index - first * shape.classes, of_class = rest / here;
    index = first + rest - of_class * here;
    return of_class;
  }
  __device__ __forceinline__ WindowRun run() const {
    const int here = blockIdx.x, all = gridDim.x;
    if (!walks) return {here, all, (tiles - here + all - 1) / all, 0};
    const int first = int(int64_t(tiles) * here / all);
    return {first, 1, int(int64_t(tiles) * (here + 1) / all) - first, 0};
  }
  // Tiles that run together read the same positions; those of a walk come one after the other.
  __device__ __forceinline__ WindowTile tile(int index) const {
    const int of_class = class_of(index);
    uint32_t unit, positions, group, q, band, place;
    if (walks) {
      tiles_p.divide(index, unit, positions);
    } else {
      units.divide(index, positions, unit);
    }
    of_group.divide(unit, group, q);
    all_of_plane.divide(uint64_t(positions) * tile_positions, band, place);
    return {int(group), int(q) * tile_channels, band, place, of_class, walks && positions > 0};
  }
  __device__ __forceinline__ WindowPosition position(const WindowTile& tile, int offset) const {
    return position(tile.band, tile.first, offset);
  }
  __device__ __forceinline__ WindowPosition position(uint32_t first_band, uint32_t first,
                                                     int offset) const {
    uint32_t band, place, image, z = 0, y, x;
    plane.divide(first + offset, band, place);
    bands.divide(first_band + band, image, band);
    pitch.divide(place, y, x);
    if (kVolumes && shape.depth > 1) rows.divide(y, z, y);
    return {int(image), int(z), int(y), int(band * shape.band_width + x),
            int(x) < shape.band_width && int(y) < shape.y.out &&
                (!kVolumes || int(z) < shape.z.out)};
  }
};

}  // namespace fw
