// A convolution's taps in the order in which its kernels take them: phase after phase.
#pragma once

#include "window_operands.cuh"

namespace fw {

// Which tap is the i-th in the order of phases.
struct TapOrder {
  uint8_t y[kMostTaps], x[kMostTaps];
};

// The taps by phases; false where there are more than the kernel has room for.
inline bool lay_out_taps(WindowShape& shape, TapOrder& order) {
  const WindowAxis &y = shape.y, &x = shape.x;
  if (y.kernel * x.kernel > kMostTaps || y.stride * x.stride > kMostPhases) return false;
  for (int phase = 0; phase < y.stride * x.stride; ++phase) {
    WindowPhase here = {phase / x.stride, phase % x.stride, 0, 0};
    for (int tap = 0; tap < y.kernel * x.kernel; ++tap) {
      const int at_y = tap / x.kernel, at_x = tap % x.kernel;
      const int far_y = at_y * y.dilation, far_x = at_x * x.dilation;
      if (far_y % y.stride != here.y || far_x % x.stride != here.x) continue;
      const int shift = far_y / y.stride * shape.pitch + far_x / x.stride;
      if (shift > 0xffff) return false;
      order.y[shape.taps] = uint8_t(at_y), order.x[shape.taps] = uint8_t(at_x);
      shape.shift[shape.taps++] = uint16_t(shift);
      here.taps += 1, here.reach = max(here.reach, shift);
    }
    if (here.taps > 0) shape.phase[shape.phases++] = here;
  }
  return true;
}

}  // namespace fw
