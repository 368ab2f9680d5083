// A convolution's taps in the order in which its kernels take them: phase after phase.
#pragma once

#include <algorithm>
#include <numeric>

#include "convolution_operands.cuh"

namespace fw {

// A tap along one axis: the remainder that says which phase it is of, and where it reads, counted in
// positions. Position p of the class r of a transposed convolution is output p·stride + r, to which
// tap k adds what lies at p − (k·dilation − padding − r) / stride.
struct TapPlace {
  int remainder, at;
};
inline TapPlace tap_place(const WindowAxis& axis, int tap, bool transposed) {
  const int far = tap * axis.dilation - (transposed ? axis.padding : 0);
  const int remainder = (far % axis.stride + axis.stride) % axis.stride;
  const int steps = (far - remainder) / axis.stride;
  return {remainder, transposed ? -steps : steps};
}

// Where the taps of a class begin to read, and end; or those of all classes.
struct TapSpan {
  int nearest, furthest;
};
constexpr int kAnyClass = -1;
inline TapSpan span_of(const WindowAxis& axis, int remainder) {
  TapSpan span = {};
  bool known = false;
  for (int tap = 0; tap < axis.kernel; ++tap) {
    const TapPlace place = tap_place(axis, tap, true);
    if (remainder != kAnyClass && place.remainder != remainder) continue;
    span.nearest = known ? min(span.nearest, place.at) : place.at;
    span.furthest = known ? max(span.furthest, place.at) : place.at;
    known = true;
  }
  return span;
}

// An axis of a transposed convolution as its largest class sees it, or, in `one_plane`, all of them.
inline WindowAxis axis_of_class(const WindowAxis& of, bool one_plane) {
  const int out = (of.out + of.stride - 1) / of.stride;
  if (one_plane) {
    const TapSpan all = span_of(of, kAnyClass);
    return {of.in, out, all.furthest - all.nearest + 1, 1, 1, 0};
  }
  const int common = std::gcd(of.stride, of.dilation), every = of.stride / common;
  return {of.in, out, (of.kernel + every - 1) / every, 1, of.dilation / common, 0};
}

// The taps (y, x) of one phase, added to those of the phases before it; false if they lie too far.
inline bool lay_out_phase(const ConvolutionSizes& of, int y, int x, bool one_plane,
                          WindowShape& shape, TapOrder& order) {
  const int from_y = of.transposed ? span_of(of.y, one_plane ? kAnyClass : y).nearest : 0;
  const int from_x = of.transposed ? span_of(of.x, one_plane ? kAnyClass : x).nearest : 0;
  WindowPhase here = {y, x, 0, 0, shape.taps, 0, 0};
  if (of.transposed) here = {from_y, from_x, 0, 0, shape.taps, y, x};
  for (int tap = 0; tap < of.y.kernel * of.x.kernel; ++tap) {
    const int at_y = tap / of.x.kernel, at_x = tap % of.x.kernel;
    const TapPlace in_y = tap_place(of.y, at_y, of.transposed);
    const TapPlace in_x = tap_place(of.x, at_x, of.transposed);
    if (in_y.remainder != y || in_x.remainder != x) continue;
    const int shift = (in_y.at - from_y) * shape.pitch + in_x.at - from_x;
    if (shift > 0xffff) return false;
    order.y[shape.taps] = uint8_t(at_y), order.x[shape.taps] = uint8_t(at_x);
    order.far_y[shape.taps] = of.transposed ? in_y.at : at_y * of.y.dilation - of.y.padding;
    order.far_x[shape.taps] = of.transposed ? in_x.at : at_x * of.x.dilation - of.x.padding;
    shape.shift[shape.taps++] = uint16_t(shift);
    here.taps += 1, here.reach = max(here.reach, shift);
  }
  if (here.taps > 0 || of.transposed) shape.phase[shape.phases++] = here;
  return true;
}

// The taps by phases; false where there are more than the kernel has room for.
inline bool lay_out_taps(const ConvolutionSizes& of, bool one_plane, WindowShape& shape,
                         TapOrder& order) {
  const int phases = of.y.stride * of.x.stride;
  if (of.y.kernel * of.x.kernel > kMostTaps || phases > kMostPhases) return false;
  for (int phase = 0; phase < phases; ++phase) {
    const int y = phase / of.x.stride, x = phase % of.x.stride;
    if (!lay_out_phase(of, y, x, one_plane, shape, order)) return false;
  }
  shape.classes = of.transposed ? shape.phases : 1;
  // What takes longest first: no one waits long for the last tiles.
  if (of.transposed) {
    std::stable_sort(shape.phase, shape.phase + shape.phases,
                     [](const WindowPhase& a, const WindowPhase& b) { return a.taps > b.taps; });
  }
  return true;
}

// How many positions after each other begin rows, or planes. What the furthest taps read behind the last
// of them is zero; so is what lies before the first, and it may be the same.
inline int extent(const WindowAxis& walked, const WindowAxis& of, bool transposed) {
  const int all = walked.out + walked.halo();
  if (of.stride > 1) return all;
  const int before = transposed ? walked.halo() - of.padding : of.padding;
  return min(all, max(max(of.out, of.in + before), all - before));
}

// A convolution's sizes, bands and taps as its kernels take them, but for the rows of a stage. Rows of so
// many lanes begin at multiples of them. `one_plane`: all classes of a transposed one read the same.
inline bool lay_out(const ConvolutionSizes& of, int lanes, bool one_plane, WindowShape& shape,
                    TapOrder& order) {
  shape.images = int(of.images), shape.groups = of.groups;
  shape.channels = of.channels, shape.channels_out = of.channels_out;
  shape.transposed = of.transposed, shape.row_order = of.row_order;
  shape.y = of.transposed ? axis_of_class(of.y, one_plane) : of.y;
  shape.x = of.transposed ? axis_of_class(of.x, one_plane) : of.x;
  shape.out_y = {of.y.out, of.transposed ? of.y.stride : 1};
  shape.out_x = {of.x.out, of.transposed ? of.x.stride : 1};
  if (of.row_order.by_eight()) shape.out_x = {of.row_order.columns, 1};
  shape.band_width = of.band_width;
  lanes = std::gcd(lanes, of.band_width);
  const bool whole = of.band_width == shape.x.out;
  const int across = whole ? extent(shape.x, of.x, of.transposed) : of.band_width + shape.x.halo();
  shape.pitch = (across + lanes - 1) / lanes * lanes;
  shape.rows = extent(shape.y, of.y, of.transposed);
  return lay_out_taps(of, one_plane, shape, order);
}

}  // namespace fw
