// How a convolution's outputs are cut into tiles, and where a position of a tile lies.
#pragma once

#include "window_operands.cuh"

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

// A tile: out channels from q on of a group, and positions from place `first` of a band's plane on;
// of the outputs, one class.
struct WindowTile {
  int group, q;
  uint32_t band, first;  // bands count through all images
  int of_class;
};
struct WindowPosition {
  int image, y, column;
  bool in_band;  // not in the halo beside or below it
};

struct WindowSizes {
  WindowShape shape;
  Divisor plane, pitch, bands;  // positions of a band, of a row; bands of an image
  int tile_positions, tile_channels, tiles_q;
  int stages, lead;  // of the input; boxes that one warpgroup is ahead of the other
  int64_t tiles;
  bool by_channels;  // the input's channels are read four at a time
  bool vectors;      // the epilogue may take four columns at a time
  int64_t together;  // tiles of a class after which the next class takes its turn

  // Of the in channels, 64 each; the steps of 16 channels in one; and the boxes of four steps that
  // the weights of a phase fill.
  FW_FN int blocks() const { return (shape.channels + 63) / 64; }
  FW_FN int steps(int block) const {
    return block + 1 < blocks() ? 4 : (shape.channels - 64 * block + 15) / 16;
  }
  FW_FN int boxes(int block, int phase) const {
    return (shape.phase[phase].taps * steps(block) + 3) / 4;
  }
  // The class of a tile, and its number among the tiles of that class. Classes differ in their work:
  // all thread blocks have the same one at a time, and then the next for the same positions, which
  // are still in the cache.
  __device__ __forceinline__ int class_of(int64_t& index) const {
    if (shape.classes == 1) return 0;
    const int64_t first = index / (together * shape.classes) * together;
    const int64_t here = min(together, tiles / shape.classes - first);
    const int64_t rest = index - first * shape.classes, of_class = rest / here;
    index = first + rest - of_class * here;
    return int(of_class);
  }
  // Tiles that run together read the same positions.
  __device__ __forceinline__ WindowTile tile(int64_t index) const {
    const int of_class = class_of(index);
    const int64_t of_positions = index / tiles_q, positions = of_positions / shape.groups;
    const int64_t first = positions * tile_positions, band = first / plane.divisor;
    return {int(of_positions - positions * shape.groups),
            int(index - of_positions * tiles_q) * tile_channels, uint32_t(band),
            uint32_t(first - band * plane.divisor), of_class};
  }
  __device__ __forceinline__ WindowPosition position(const WindowTile& tile, int offset) const {
    uint32_t band, place, image, y, x;
    plane.divide(tile.first + offset, band, place);
    bands.divide(tile.band + band, image, band);
    pitch.divide(place, y, x);
    return {int(image), int(y), int(band * shape.band_width + x),
            int(x) < shape.band_width && int(y) < shape.y.out};
  }
};

}  // namespace fw
