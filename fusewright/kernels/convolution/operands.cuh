// The operands of a convolution over up to three axes, as its entry hands them over.
//
// Outputs are walked in a line: position (((image·bands + band)·depth + z)·rows + y)·pitch + x, where a
// band is some columns of the output's width; `rows` and `pitch` leave room for the halo beside it. What
// a tap reads for position s is then row s + shift of a plane of the input that has the same pitch: there
// is one plane for each remainder of the taps' distances by the stride. Taps that read one are a phase; so
// are those of each z for itself, since what they read lies far apart. Images of two axes have one z.
//
// In a transposed convolution it is the outputs that have remainders by the stride. Those of one
// pair of remainders are a class, a convolution of stride 1 with the taps that meet it: the walk is
// over the positions of a class, the same for all of them, and each class is a phase of its own.
//
// Outputs of one class do not lie beside each other. With a stride of 2 along x both remainders are
// woven together instead (RowOrder): one position stands for two columns.
#pragma once

#include "cuda/lanes.cuh"

namespace fw {

// Whether images may have a third axis: a source without any says 0, and its positions are not divided
// by it (H200: 2 to 9 % of a convolution's time).
#ifndef FW_VOLUMES
#define FW_VOLUMES 1
#endif
constexpr bool kVolumes = FW_VOLUMES;

constexpr int kMostTaps = 128, kMostPhases = 16;
constexpr uint32_t kNoTap = ~0u;

struct WindowInput {
  using Place = const float*;
  static constexpr bool kInMemory = true;
  static constexpr int kBlocks = 4;  // of a processor that lays out lines

  const float* data;
  int64_t image_stride, channel_stride, z_stride, y_stride, x_stride;

  FW_FN Place place(int image, int channel, int z, int y, int x) const {
    return data + image * image_stride + z * z_stride + y * y_stride + x * x_stride +
           channel * channel_stride;
  }
  FW_FN float at(Place from) const { return *from; }

  // Whether groups of so many channels can be read four channels at a time.
  bool by_channels(int channels) const {
    return channel_stride == 1 && channels % 4 == 0 && image_stride % 4 == 0 &&
           z_stride % 4 == 0 && y_stride % 4 == 0 && x_stride % 4 == 0 &&
           reinterpret_cast<uintptr_t>(data) % 16 == 0;
  }
  // Calls with whether channels go by four, as is known at run time.
  template <class Call>
  FW_FN static void by_layout(bool by_channels, const Call& call) {
    if (by_channels) {
      call(std::true_type());
    } else {
      call(std::false_type());
    }
  }
  // One instruction makes an address of a stride of 32 bits, two of a longer one.
  bool has_near_channels() const { return channel_stride == int32_t(channel_stride); }
};

// Channels that do not lie side by side, as was known before: what reads them four at a time is not built.
struct PlanarInput : WindowInput {
  bool by_channels(int) const { return false; }
  template <class Call>
  FW_FN static void by_layout(bool, const Call& call) {
    call(std::false_type());
  }
};

// w[group][out][in][z][y][x]
struct WindowFilter {
  const float* data;
  int64_t group_stride, out_stride, in_stride, z_stride, y_stride, x_stride;
};

// Which tap is the i-th in the order of phases, and how far from a position's own place it reads; its z
// is the phase's.
struct TapOrder {
  uint8_t y[kMostTaps], x[kMostTaps];
  int far_y[kMostTaps], far_x[kMostTaps];
};

// Halves in boxes [channels_out][64], group after group. Those of a group: for each 64 of its in
// channels and each phase, tap after tap, the channels in steps of 16, zeros after the last of the
// group; four steps make a box, and a phase's last box is filled up with zeros. With 64 channels a
// tap is a box. Classes follow each other. `inverse` is the inverse scale of each out channel, `raw`
// what the halves are of.
struct WindowWeights {
  const half* hi;
  const half* lo;
  const float* inverse;
  WindowFilter raw;
  TapOrder order;
};

struct WindowAxis {
  int in, out, kernel, stride, dilation, padding;  // padding: before the first
  int least = 0;  // positions between the beginnings of rows, or planes, if they need not be more

  // Whether nothing moves along it, and nothing lies beside it.
  FW_FN bool is_single() const {
    return in == 1 && out == 1 && kernel == 1 && stride == 1 && padding == 0;
  }
  // How many positions further than its own an output reads.
  FW_FN int halo() const { return (kernel - 1) * dilation / stride; }
};

// Taps of one z that read one plane, which begins (z, y, x) further than a position's own place: `taps`
// in a row from the `first` of all on, the furthest `reach` rows further than the position itself. In
// lines (staged_input.cuh) what they read lies `deeper` rows further in line `plane`.
struct WindowPhase {
  int z, y, x, reach, deeper;
  uint8_t taps, first, tap_z, plane;
};

// Outputs that have the same remainders, and begin at them; without phases they are zero. Where a
// convolution is not transposed, all are of one class.
struct WindowClass {
  uint8_t first, end;  // phases
  uint8_t z, y, x;
};

// Where a plane of the input begins in lines, as a phase does.
struct WindowPlane {
  int z, y, x;
};

// Outputs along an axis, those of a class `apart`.
struct WindowOutputs {
  int count, apart;
};

// A transposed convolution of stride 2 along x, seen as one of stride 1 with twice the out channels:
// tap x of it is tap 2·x + first of the columns 2·position, and the next of the columns beside them.
// Rows of weights go by 16: eight channels of the former, then the same of the latter, so that a
// thread has neighbouring columns of a channel (sm90_convolution_epilogue.cuh).
//
// Few out channels go by eight, too, with nothing beside them: so all warps have some to finish.
struct RowOrder {
  int beside;                          // columns of a position; 0: rows are channels
  int channels, columns, taps, first;  // of the outputs; of the weights

  FW_FN bool by_eight() const { return beside > 0; }
  FW_FN int columns_of_position() const { return beside == 2 ? 2 : 1; }
};

struct WindowShape {
  int images, groups, channels, channels_out;  // channels: of one group
  WindowAxis z, y, x;                          // of a class
  WindowOutputs out_z, out_y, out_x;
  bool transposed;
  RowOrder row_order;
  int band_width, pitch, rows, depth;
  int stage_rows;         // a multiple of 8, at least a tile's positions and the largest reach
  int taps, phases, classes, planes;
  // What is read all the time comes first: the cache for what is constant has 2 KB.
  WindowPhase phase[kMostPhases];  // class after class
  uint16_t shift[kMostTaps];       // floor(distance / stride), y's times the pitch and x's; by phase
  WindowClass class_[kMostPhases];
  WindowPlane plane[kMostPhases];

  FW_FN int first_phase(int of_class) const { return classes > 1 ? class_[of_class].first : 0; }
  FW_FN int end_phase(int of_class) const { return classes > 1 ? class_[of_class].end : phases; }
  // The taps of a class, all of which lie beside each other.
  FW_FN int first_tap(int of_class) const { return phase[first_phase(of_class)].first; }
  FW_FN int taps_of(int of_class) const {
    if (classes == 1) return taps;
    int sum = 0;
    for (int at = first_phase(of_class); at < end_phase(of_class); ++at) sum += phase[at].taps;
    return sum;
  }
  // What a tile reads one after the other: 64 in channels of a phase each. (A class may have none.)
  FW_FN int channel_blocks() const { return (channels + 63) / 64; }
  FW_FN int stages(int of_class) const {
    return channel_blocks() * (end_phase(of_class) - first_phase(of_class));
  }
  FW_FN bool has_pixels() const {
    return images > 0 && z.out > 0 && y.out > 0 && x.out > 0;
  }
  // Rows of an image of outputs, of all z.
  FW_FN int out_rows() const { return kVolumes ? out_z.count * out_y.count : out_y.count; }
  // Channels of the outputs, of one group; that of a row of the weights, and the x of its tap, which
  // is beyond all taps where there is none.
  FW_FN int results() const { return row_order.by_eight() ? row_order.channels : channels_out; }
  FW_FN int channel_of(int row) const { return row_order.by_eight() ? row / 16 * 8 + row % 8 : row; }
  FW_FN int column_of(int row) const { return row_order.by_eight() ? row / 8 % 2 : 0; }
  FW_FN uint32_t tap_x(int x, int column) const {
    if (!row_order.by_eight()) return x;
    const uint32_t tap = row_order.beside * x + row_order.first + column;
    return column < row_order.beside && tap < uint32_t(row_order.taps) ? tap : kNoTap;
  }
  // The z of a tap, by its place in the order of phases.
  FW_FN int tap_z(int tap) const {
    int at = 0;
    if (!kVolumes) return 0;
    while (at + 1 < phases && tap >= phase[at + 1].first) ++at;
    return phase[at].tap_z;
  }
  // Boxes of weights that the taps of a phase fill with so many channels, and some phases with all.
  FW_FN int boxes(int at, int of_channels) const {
    return (phase[at].taps * ((of_channels + 15) / 16) + 3) / 4;
  }
  FW_FN int boxes_between(int first, int end) const {
    int sum = 0;
    for (int at = first; at < end; ++at) {
      sum += channels / 64 * phase[at].taps + boxes(at, channels % 64);
    }
    return sum;
  }
};

}  // namespace fw
