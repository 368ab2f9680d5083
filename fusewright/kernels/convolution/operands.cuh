// The operands of a convolution over up to three axes, as its entry function gives them.
//
// Outputs are numbered: position (((image·bands + band)·depth + z)·rows + y)·pitch + x. A band is
// some columns of the output's width; `rows` and `pitch` leave room for the halo beside it. For
// position s a tap then reads row s + shift of a plane of the input that has the same pitch. There
// is one plane for each remainder of the taps' distances modulo the stride. The taps that read one
// plane are a phase. Taps of different z are different phases, because what they read is far apart.
// Images of two axes have one z.
//
// In a transposed convolution the outputs have remainders modulo the stride. The outputs with the
// same remainders are a residue class: a convolution of stride 1 with the taps that reach them.
// Kernels go through the positions of a class, which are the same for all classes, and each class
// has phases of its own.
//
// The outputs of one class are not contiguous. With a stride of 2 along x both remainders are woven
// together instead (RowOrder): one position stands for two columns.
#pragma once

#include "cuda/lanes.cuh"

namespace fw {

// Whether images may have a third axis. A source without any defines 0; then positions are not
// divided by the depth (H200: 2 to 9 % of a convolution's time).
#ifndef FW_VOLUMES
#define FW_VOLUMES 1
#endif
constexpr bool kVolumes = FW_VOLUMES;

constexpr int kMostTaps = 128, kMostPhases = 16;
constexpr uint32_t kNoTap = ~0u;

struct ConvInput {
  using Location = const float*;
  static constexpr bool kInMemory = true;
  static constexpr int kBlocks = 4;  // thread blocks per SM of the kernel that stages the input

  const float* data;
  int64_t image_stride, channel_stride, z_stride, y_stride, x_stride;

  FW_FN Location location(int image, int channel, int z, int y, int x) const {
    return data + image * image_stride + z * z_stride + y * y_stride + x * x_stride +
           channel * channel_stride;
  }
  FW_FN float at(Location from) const { return *from; }

  // Whether a group of `channels` channels can be read four channels at a time.
  bool by_channels(int channels) const {
    return channel_stride == 1 && channels % 4 == 0 && image_stride % 4 == 0 && z_stride % 4 == 0 &&
           y_stride % 4 == 0 && x_stride % 4 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  }
  // Calls `call` with whether channels are read four at a time, which is known at run time.
  template <class Function>
  FW_FN static void by_layout(bool by_channels, const Function& call) {
    if (by_channels) {
      call(std::true_type());
    } else {
      call(std::false_type());
    }
  }
  // An address takes one instruction with a 32-bit stride, two with a longer one.
  bool has_near_channels() const { return channel_stride == int32_t(channel_stride); }
};

// An input that codegen knows is not channels-last: code for four channels at a time is not
// compiled.
struct PlanarInput : ConvInput {
  bool by_channels(int) const { return false; }
  template <class Function>
  FW_FN static void by_layout(bool, const Function& call) {
    call(std::false_type());
  }
};

// w[group][out][in][z][y][x]
struct ConvFilter {
  const float* data;
  int64_t group_stride, out_stride, in_stride, z_stride, y_stride, x_stride;
};

// Which tap is the i-th in the order of phases, and how far from a position's own element it reads.
// Its z is the phase's.
struct TapOrder {
  uint8_t y[kMostTaps], x[kMostTaps];
  int far_y[kMostTaps], far_x[kMostTaps];
};

// The fp16 parts of the filter, in boxes [channels_out][64], group after group. The order within a
// group: each 64 input channels, each phase, each tap, then its channels in steps of 16, zeros
// after the last one of the group. Four steps make a box, and the last box of a phase is filled up
// with zeros. With 64 channels a box is one tap. Residue classes follow each other. `inverse` is
// the inverse scale of each output channel, `raw` the filter itself.
struct SplitFilter {
  const half* hi;
  const half* lo;
  const float* inverse;
  ConvFilter raw;
  TapOrder order;
};

struct ConvAxis {
  int in, out, kernel, stride, dilation, padding;  // padding: before the first element
  int least = 0;  // least distance between the starts of rows, or planes, in positions

  // Whether the axis has one element and one tap, with nothing beside them.
  FW_FN bool is_single() const {
    return in == 1 && out == 1 && kernel == 1 && stride == 1 && padding == 0;
  }
  // How many positions beyond its own an output reads.
  FW_FN int halo() const { return (kernel - 1) * dilation / stride; }
};

// Taps of one z that read one plane: `taps` consecutive ones, from index `first` on. The plane
// begins (z, y, x) after a position's own element, and the furthest tap reads `reach` rows after
// the position's own row. In the staged input (staged_input.cuh) the taps read plane `plane`,
// `deeper` rows further on.
struct TapPhase {
  int z, y, x, reach, deeper;
  uint8_t taps, first, tap_z, plane;
};

// Outputs with the same remainders, which are the coordinates of the first one. A class without
// phases is zero. A convolution that is not transposed has one class.
struct ResidueClass {
  uint8_t first, end;  // of its phases
  uint8_t z, y, x;
};

// Where a plane of the staged input begins, as in TapPhase.
struct InputPlane {
  int z, y, x;
};

// Outputs along an axis; neighbours of one class are `apart` columns, rows or planes from each
// other.
struct ConvOutputs {
  int count, apart;
};

// A transposed convolution of stride 2 along x, treated as one of stride 1 with twice the output
// channels: its tap x is tap 2·x + first for the columns 2·position, and the tap after that for the
// columns beside them. Rows of weights come in groups of 16: eight channels for the former columns,
// then the same channels for the latter. So a thread has neighbouring columns of a channel
// (sm90_convolution_epilogue.cuh).
//
// Few output channels come in groups of eight, too, with zeros instead of the second eight
// (`beside` is 1): so all warps have some channels to finish.
struct RowOrder {
  int beside;                          // columns of a position; 0: rows are channels
  int channels, columns, taps, first;  // of the outputs; of the weights along x

  FW_FN bool by_eight() const { return beside > 0; }
  FW_FN int columns_of_position() const { return beside == 2 ? 2 : 1; }
};

struct ConvShape {
  int images, groups, channels, channels_out;  // channels: of one group
  ConvAxis z, y, x;                            // of a class
  ConvOutputs out_z, out_y, out_x;
  bool transposed;
  RowOrder row_order;
  int band_width, pitch, rows, depth;
  int stage_rows;  // a multiple of 8, at least a tile's positions plus the largest reach
  int taps, phases, classes, planes;
  // What is read most comes first: the constant cache has 2 KB.
  TapPhase phase[kMostPhases];  // class after class
  uint16_t shift[kMostTaps];    // floor(distance / stride), y's times the pitch plus x's; by phase
  ResidueClass class_[kMostPhases];
  InputPlane plane[kMostPhases];

  FW_FN int first_phase(int of_class) const { return classes > 1 ? class_[of_class].first : 0; }
  FW_FN int end_phase(int of_class) const { return classes > 1 ? class_[of_class].end : phases; }
  // The taps of a class are consecutive.
  FW_FN int first_tap(int of_class) const { return phase[first_phase(of_class)].first; }
  FW_FN int taps_of(int of_class) const {
    if (classes == 1) return taps;
    int sum = 0;
    for (int at = first_phase(of_class); at < end_phase(of_class); ++at) sum += phase[at].taps;
    return sum;
  }
  // The stages that a tile reads one after the other: 64 input channels of a phase each. (A class
  // may have none.)
  FW_FN int channel_blocks() const { return (channels + 63) / 64; }
  FW_FN int stages(int of_class) const {
    return channel_blocks() * (end_phase(of_class) - first_phase(of_class));
  }
  FW_FN bool has_pixels() const { return images > 0 && z.out > 0 && y.out > 0 && x.out > 0; }
  // Rows of an output image, of all z.
  FW_FN int out_rows() const { return kVolumes ? out_z.count * out_y.count : out_y.count; }
  // The output channels of a group; the channel of a row of the weights; which of a position's
  // columns the row is for; and the x of the row's tap, or kNoTap.
  FW_FN int results() const { return row_order.by_eight() ? row_order.channels : channels_out; }
  FW_FN int channel_of(int row) const {
    return row_order.by_eight() ? row / 16 * 8 + row % 8 : row;
  }
  FW_FN int column_of(int row) const { return row_order.by_eight() ? row / 8 % 2 : 0; }
  FW_FN uint32_t tap_x(int x, int column) const {
    if (!row_order.by_eight()) return x;
    const uint32_t tap = row_order.beside * x + row_order.first + column;
    return column < row_order.beside && tap < uint32_t(row_order.taps) ? tap : kNoTap;
  }
  // The z of a tap, by its index in the order of phases.
  FW_FN int tap_z(int tap) const {
    int at = 0;
    if (!kVolumes) return 0;
    while (at + 1 < phases && tap >= phase[at + 1].first) ++at;
    return phase[at].tap_z;
  }
  // Boxes of weights that the taps of a phase fill with `of_channels` channels, and that some
  // phases fill with all channels.
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
