// A convolution's taps in the order in which its kernels use them: phase after phase.
#pragma once

#include <algorithm>
#include <numeric>

#include "convolution/convolution_sizes.cuh"

namespace fw {

// A tap along one axis: the remainder, which decides its phase, and where it reads, counted in
// positions. Position p of class r of a transposed convolution is output p·stride + r, to which tap
// k adds the input at p − (k·dilation − padding − r) / stride.
struct TapPosition {
  int remainder, at;
};
inline TapPosition tap_position(const ConvAxis& axis, int tap, bool transposed) {
  const int far = tap * axis.dilation - (transposed ? axis.padding : 0);
  const int remainder = (far % axis.stride + axis.stride) % axis.stride;
  const int steps = (far - remainder) / axis.stride;
  return {remainder, transposed ? -steps : steps};
}

// The nearest and the furthest that the taps of a class read, or those of all classes.
struct TapSpan {
  int nearest, furthest;
};
constexpr int kAnyClass = -1;
inline TapSpan span_of(const ConvAxis& axis, int remainder) {
  TapSpan span = {};
  bool known = false;
  for (int tap = 0; tap < axis.kernel; ++tap) {
    const TapPosition position = tap_position(axis, tap, true);
    if (remainder != kAnyClass && position.remainder != remainder) continue;
    span.nearest = known ? min(span.nearest, position.at) : position.at;
    span.furthest = known ? max(span.furthest, position.at) : position.at;
    known = true;
  }
  return span;
}

// An axis of a transposed convolution as its largest class sees it; with `one_plane`, as all of
// them do.
inline ConvAxis axis_of_class(const ConvAxis& of, bool one_plane) {
  const int out = (of.out + of.stride - 1) / of.stride;
  if (one_plane) {
    const TapSpan all = span_of(of, kAnyClass);
    return {of.in, out, all.furthest - all.nearest + 1, 1, 1, 0};
  }
  const int common = std::gcd(of.stride, of.dilation), every = of.stride / common;
  return {of.in, out, (of.kernel + every - 1) / every, 1, of.dilation / common, 0};
}

// The remainders of a phase's taps, or of a class's outputs.
struct Remainders {
  int z, y, x;
};
inline int taps_with(const ConvAxis& axis, int remainder) {
  int count = 0;
  for (int tap = 0; tap < axis.kernel; ++tap) {
    count += tap_position(axis, tap, true).remainder == remainder;
  }
  return count;
}

// The index of the plane that begins at `begins`; it is added if it is new.
inline int plane_of(ConvShape& shape, const InputPlane& begins) {
  int plane = 0;
  while (plane < shape.planes &&
         (shape.plane[plane].z != begins.z || shape.plane[plane].y != begins.y ||
          shape.plane[plane].x != begins.x)) {
    ++plane;
  }
  shape.plane[plane] = begins;
  shape.planes = max(shape.planes, plane + 1);
  return plane;
}

// Adds the taps of z `tap_z` with these remainders as a phase. False if they read too far away, or
// if there are too many phases.
inline bool lay_out_phase(const ConvolutionSizes& of, int tap_z, const Remainders& with,
                          bool as_staged, ConvShape& shape, TapOrder& order) {
  const TapPosition in_z = tap_position(of.z, tap_z, of.transposed);
  InputPlane begins = {with.z, with.y, with.x};
  if (of.transposed) {
    begins = {span_of(of.z, kAnyClass).nearest,
              span_of(of.y, as_staged ? kAnyClass : with.y).nearest,
              span_of(of.x, as_staged ? kAnyClass : with.x).nearest};
  }
  const int z = of.transposed ? in_z.at : tap_z * of.z.dilation;
  const int from_y = of.transposed ? begins.y : 0, from_x = of.transposed ? begins.x : 0;
  TapPhase here = {z, begins.y, begins.x, 0, 0, 0, uint8_t(shape.taps), uint8_t(tap_z), 0};
  for (int tap = 0; tap < of.y.kernel * of.x.kernel; ++tap) {
    const int at_y = tap / of.x.kernel, at_x = tap % of.x.kernel;
    const TapPosition in_y = tap_position(of.y, at_y, of.transposed);
    const TapPosition in_x = tap_position(of.x, at_x, of.transposed);
    if (in_y.remainder != with.y || in_x.remainder != with.x) continue;
    const int shift = (in_y.at - from_y) * shape.pitch + in_x.at - from_x;
    if (shift > 0xffff) return false;
    order.y[shape.taps] = uint8_t(at_y), order.x[shape.taps] = uint8_t(at_x);
    order.far_y[shape.taps] = of.transposed ? in_y.at : at_y * of.y.dilation - of.y.padding;
    order.far_x[shape.taps] = of.transposed ? in_x.at : at_x * of.x.dilation - of.x.padding;
    shape.shift[shape.taps++] = uint16_t(shift);
    here.taps += 1, here.reach = max(here.reach, shift);
  }
  if (here.taps == 0) return true;
  if (shape.phases == kMostPhases) return false;
  if (as_staged) {
    const int further = of.transposed ? in_z.at - begins.z : in_z.at;
    here.plane = uint8_t(plane_of(shape, begins));
    here.deeper = further * shape.rows * shape.pitch;
  }
  shape.phase[shape.phases++] = here;
  return true;
}

// Orders the taps by phases, those of a class consecutively. False if there are more than the
// kernel has room for.
inline bool lay_out_taps(const ConvolutionSizes& of, bool as_staged, ConvShape& shape,
                         TapOrder& order) {
  const int remainders = of.z.stride * of.y.stride * of.x.stride;
  if (of.taps() > kMostTaps || (of.transposed && remainders > kMostPhases)) return false;
  const auto each = [&](int index) -> Remainders {
    const int row = index / of.x.stride;
    return {row / of.y.stride, row % of.y.stride, index % of.x.stride};
  };
  if (!of.transposed) {
    for (int tap_z = 0; tap_z < of.z.kernel; ++tap_z) {
      const int z = tap_position(of.z, tap_z, false).remainder;
      for (int index = 0; index < of.y.stride * of.x.stride; ++index) {
        const Remainders of_plane = each(index);
        if (!lay_out_phase(of, tap_z, {z, of_plane.y, of_plane.x}, as_staged, shape, order))
          return false;
      }
    }
    shape.class_[0] = {0, uint8_t(shape.phases), 0, 0, 0};
    shape.classes = 1;
    return true;
  }
  // The classes that take longest come first, so that the last tiles are short.
  const auto taps = [&](int index) {
    const Remainders with = each(index);
    return taps_with(of.z, with.z) * taps_with(of.y, with.y) * taps_with(of.x, with.x);
  };
  int sorted[kMostPhases];
  std::iota(sorted, sorted + remainders, 0);
  std::stable_sort(sorted, sorted + remainders, [&](int a, int b) { return taps(a) > taps(b); });
  for (int index = 0; index < remainders; ++index) {
    const Remainders with = each(sorted[index]);
    ResidueClass& here = shape.class_[index];
    here = {uint8_t(shape.phases), 0, uint8_t(with.z), uint8_t(with.y), uint8_t(with.x)};
    for (int tap_z = 0; tap_z < of.z.kernel; ++tap_z) {
      if (tap_position(of.z, tap_z, true).remainder != with.z) continue;
      if (!lay_out_phase(of, tap_z, with, as_staged, shape, order)) return false;
    }
    here.end = uint8_t(shape.phases);
  }
  shape.classes = remainders;
  return true;
}

// The distance between the starts of rows, or planes, in positions. What the furthest taps read
// after the last element is zero; so is what precedes the next first element, and both may be the
// same zeros.
inline int extent(const ConvAxis& walked, const ConvAxis& of, bool transposed) {
  const int all = walked.out + walked.halo();
  if (of.stride > 1) return max(all, of.least);
  const int before = transposed ? walked.halo() - of.padding : of.padding;
  return max(min(all, max(max(of.out, of.in + before), all - before)), of.least);
}

// Fills in a convolution's sizes, bands and taps as its kernels need them, apart from the rows of a
// stage. Rows begin at multiples of the greatest common divisor of `lanes` and the band's width.
// `as_staged`: taps of another z read other rows of the same plane, and all classes of a transposed
// convolution read the same plane.
inline bool lay_out(const ConvolutionSizes& of, int lanes, bool as_staged, ConvShape& shape,
                    TapOrder& order) {
  if (!kVolumes && !of.z.is_single()) return false;
  shape.images = int(of.images), shape.groups = of.groups;
  shape.channels = of.channels, shape.channels_out = of.channels_out;
  shape.transposed = of.transposed, shape.row_order = of.row_order;
  shape.z = of.transposed ? axis_of_class(of.z, as_staged) : of.z;
  shape.y = of.transposed ? axis_of_class(of.y, as_staged) : of.y;
  shape.x = of.transposed ? axis_of_class(of.x, as_staged) : of.x;
  shape.out_z = {of.z.out, of.transposed ? of.z.stride : 1};
  shape.out_y = {of.y.out, of.transposed ? of.y.stride : 1};
  shape.out_x = {of.x.out, of.transposed ? of.x.stride : 1};
  if (of.row_order.by_eight()) shape.out_x = {of.row_order.columns, 1};
  shape.band_width = of.band_width;
  lanes = std::gcd(lanes, of.band_width);
  const bool whole = of.band_width == shape.x.out;
  const int across = whole ? extent(shape.x, of.x, of.transposed) : of.band_width + shape.x.halo();
  shape.pitch = (across + lanes - 1) / lanes * lanes;
  shape.rows = extent(shape.y, of.y, of.transposed);
  shape.depth = as_staged ? extent(shape.z, of.z, of.transposed) : shape.z.out;
  return lay_out_taps(of, as_staged, shape, order);
}

}  // namespace fw
