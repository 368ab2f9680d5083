// How a convolution's outputs are divided into tiles, and which output a position of a tile is.
#pragma once

#include "convolution/operands.cuh"

namespace fw {

// Division by a number that is known before the launch, for dividends below 2^31.
struct Divisor {
  uint32_t divisor, multiplier, shift;

  explicit Divisor(int by) : divisor(by), shift(31) {
    while (uint64_t(1) << (shift - 31) < divisor) ++shift;
    multiplier = uint32_t(((uint64_t(1) << shift) + divisor - 1) / divisor);
  }
  FW_DEVICE void divide(uint32_t x, uint32_t& quotient, uint32_t& rest) const {
    quotient = uint32_t(uint64_t(x) * multiplier >> shift);
    rest = x - quotient * divisor;
  }
};

// The same for larger dividends, as long as dividend times divisor is below 2^64.
struct WideDivisor {
  uint64_t multiplier;
  uint32_t divisor;

  explicit WideDivisor(int by) : multiplier(~uint64_t(0) / by + (by > 1)), divisor(by) {}
  FW_DEVICE void divide(uint64_t x, uint32_t& quotient, uint32_t& rest) const {
    quotient = uint32_t(divisor > 1 ? __umul64hi(x, multiplier) : x);
    rest = uint32_t(x - uint64_t(quotient) * divisor);
  }
};

// A tile of one group and one residue class: output channels from q on, and positions from index
// `first` of a band's plane on.
struct ConvTile {
  int group, q;
  uint32_t band, first;  // bands are numbered through all images
  int of_class;
  bool follows;  // the tile before it has the positions before its own
};

// The tiles of a thread block.
struct TileRun {
  int first, step, count, done;

  FW_DEVICE bool ended() const { return done >= count; }
  FW_DEVICE int index() const { return first + done * step; }
};
struct ConvPosition {
  int image, z, y, column;
  bool in_band;  // not in the halo beside, below or behind the band
};

// What cost/conv_tensor_core.py counts on for a stage, whatever else is in shared memory; in
// ping-pong, for all stages.
constexpr int kStageBytes = 138 * 1024, kPingPongBytes = 125 * 1024;
constexpr int kMostStages = 4;

struct ConvTiling {
  ConvShape shape;
  int tile_positions, tile_channels, tiles_q;
  Divisor plane, pitch, rows, bands;  // positions of a band, a row; rows of a z; bands of an image
  WideDivisor all_of_plane;
  int tiles;  // of all classes; each group and its tiles_q have tiles_p of a class
  Divisor tiles_p, units, of_group;
  int stages = 2, rings = 2, ring_rows = 0;  // of the input
  int overlap = 0;           // rows repeated after a ring's last: wgmma reads several in a row
  int lead = 0;              // boxes by which one warpgroup is ahead of the other
  int parts = 1;             // of a tile's channels, which warpgroups multiply in ping-pong
  int tile_boxes;            // of a part's weights
  int staged_box = 0;        // rows of staged input that are copied at once
  int together = 1;          // tiles of a class, after which the next class takes its turn
  bool walks = false;        // a thread block goes from a tile to its neighbour
  bool by_channels = false;  // the input's channels are read four at a time

  ConvTiling(const ConvShape& shape, int tile_positions, int tile_channels)
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

  // How classes take turns, with `blocks` thread blocks.
  void take_turns(int blocks) {
    const int each = int(units.divisor);
    together = max(1, blocks / each) * each;
  }
  // Of all images and bands, halos included.
  FW_FN int64_t positions() const { return shape.images * image_positions(); }
  FW_FN int64_t image_positions() const { return int64_t(plane.divisor) * bands.divisor; }
  // The index of a tile's first position among all.
  FW_FN int64_t start(const ConvTile& tile) const {
    return int64_t(tile.band) * plane.divisor + tile.first;
  }
  // Blocks of 64 input channels; the steps of 16 channels in a block; and the boxes of four steps
  // that the weights of a phase fill.
  FW_FN int blocks() const { return shape.channel_blocks(); }
  FW_FN int steps(int block) const {
    return block + 1 < blocks() ? 4 : (shape.channels - 64 * block + 15) / 16;
  }
  FW_FN int boxes(int block, int phase) const {
    return (shape.phase[phase].taps * steps(block) + 3) / 4;
  }
  FW_FN int ring_bytes() const { return (ring_rows + overlap) * 128; }
  // Boxes of a part's weights, in a tile of a class.
  FW_FN int boxes_of(int of_class) const {
    if (shape.classes == 1) return tile_boxes;
    return shape.boxes_between(shape.first_phase(of_class), shape.end_phase(of_class));
  }

  // The class of a tile; `index` becomes the tile's index within that class. Classes differ in
  // their work: all thread blocks work on the same class at a time, and then on the next one for
  // the same positions, which are still in the cache.
  FW_DEVICE int class_of(int& index) const {
    if (shape.classes == 1) return 0;
    const int first = index / (together * shape.classes) * together;
    const int here = min(together, tiles / shape.classes - first);
    const int rest = index - first * shape.classes, of_class = rest / here;
    index = first + rest - of_class * here;
    return of_class;
  }
  FW_DEVICE TileRun run() const {
    const int here = blockIdx.x, all = gridDim.x;
    if (!walks) return {here, all, (tiles - here + all - 1) / all, 0};
    const int first = int(int64_t(tiles) * here / all);
    return {first, 1, int(int64_t(tiles) * (here + 1) / all) - first, 0};
  }
  // Tiles that run together read the same positions; those of a walk are consecutive.
  FW_DEVICE ConvTile tile(int index) const {
    const int of_class = class_of(index);
    uint32_t unit, positions, group, q, band, in_plane;
    if (walks) {
      tiles_p.divide(index, unit, positions);
    } else {
      units.divide(index, positions, unit);
    }
    of_group.divide(unit, group, q);
    all_of_plane.divide(uint64_t(positions) * tile_positions, band, in_plane);
    return {int(group), int(q) * tile_channels, band, in_plane, of_class, walks && positions > 0};
  }
  FW_DEVICE ConvPosition position(const ConvTile& tile, int offset) const {
    return position(tile.band, tile.first, offset);
  }
  FW_DEVICE ConvPosition position(uint32_t first_band, uint32_t first, int offset) const {
    uint32_t band, in_plane, image, z = 0, y, x;
    plane.divide(first + offset, band, in_plane);
    bands.divide(first_band + band, image, band);
    pitch.divide(in_plane, y, x);
    if (kVolumes && shape.depth > 1) rows.divide(y, z, y);
    return {
        int(image), int(z), int(y), int(band * shape.band_width + x),
        int(x) < shape.band_width && int(y) < shape.y.out && (!kVolumes || int(z) < shape.z.out)};
  }
};

}  // namespace fw
