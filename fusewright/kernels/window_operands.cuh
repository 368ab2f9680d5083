// The operands of a convolution over two axes, as its entry hands them over.
//
// Outputs are walked in a line: position ((image·bands + band)·(y.out + halo) + y)·pitch + x, where
// a band is some columns of the output's width and `pitch` leaves room for the halo beside it. What
// a tap reads for position s is then row s + shift of a plane of the input that has the same pitch:
// there is one plane for each phase, the remainder of the tap's distance by the stride.
#pragma once

#include "lanes.cuh"

namespace fw {

constexpr int kMostTaps = 128, kMostPhases = 16;

struct WindowInput {
  const float* data;
  int64_t image_stride, channel_stride, y_stride, x_stride;

  // Whether groups of so many channels can be read four channels at a time.
  bool by_channels(int channels) const {
    return channel_stride == 1 && channels % 4 == 0 && image_stride % 4 == 0 &&
           y_stride % 4 == 0 && x_stride % 4 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  }
};

// Halves in boxes [channels_out][64], group after group. Those of a group: for each 64 of its in
// channels and each phase, tap after tap, the channels in steps of 16, zeros after the last of the
// group; four steps make a box, and a phase's last box is filled up with zeros. With 64 channels a
// tap is a box. `inverse` is the inverse scale of each out channel, `raw` what the halves are of.
struct WindowWeights {
  const half* hi;
  const half* lo;
  const float* inverse;
  const float* raw;
  int64_t out_stride, in_stride, y_stride, x_stride;
};

struct WindowAxis {
  int in, out, kernel, stride, dilation, padding;  // padding: before the first

  // How many positions further than its own an output reads.
  FW_FN int halo() const { return (kernel - 1) * dilation / stride; }
};

// Taps whose distance has the remainder (y, x) by the stride: `taps` in a row, the furthest `reach`
// rows further than the position itself.
struct WindowPhase {
  int y, x, taps, reach;
};

struct WindowShape {
  int images, groups, channels, channels_out;  // channels: of one group
  WindowAxis y, x;
  int band_width, pitch;  // pitch ≥ band_width + x.halo()
  int stage_rows;         // a multiple of 8, at least a tile's positions and the largest reach
  int taps, phases;
  WindowPhase phase[kMostPhases];
  uint16_t shift[kMostTaps];  // floor(distance / stride), y's times the pitch and x's; by phase
};

}  // namespace fw
