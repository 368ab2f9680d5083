// fw::convolution and weight gradients for tests without a GPU: the same declarations, with loops
// in double precision. A shared staged input begins with the sum of all elements.
#pragma once

#include "convolution/computed_input.cuh"
#include "convolution/convolution_sizes.cuh"
#include "convolution/position_reductions.cuh"

#include <vector>

namespace fw {

// The index that a result reads along an axis for a tap, or -1.
inline int read_at(const ConvAxis& axis, int result, int tap, bool transposed) {
  int at = result * axis.stride - axis.padding + tap * axis.dilation;
  if (transposed) {
    const int far = result + axis.padding - tap * axis.dilation;
    at = far >= 0 && far % axis.stride == 0 ? far / axis.stride : -1;
  }
  return at < axis.in ? at : -1;
}

template <class Input>
float convolution_at(const Input& source, const ConvFilter& filter, const ConvolutionSizes& of,
                     int image, int out, int row, int x) {
  double sum = 0;
  const int z = row / of.y.out, y = row % of.y.out;
  const int group = out / of.channels_out;
  for (int channel = 0; channel < of.channels; ++channel) {
    for (int tap = 0; tap < of.taps(); ++tap) {
      const int k = tap / of.x.kernel / of.y.kernel, j = tap / of.x.kernel % of.y.kernel;
      const int i = tap % of.x.kernel;
      const int at_z = read_at(of.z, z, k, of.transposed);
      const int at_y = read_at(of.y, y, j, of.transposed);
      const int at_x = read_at(of.x, x, i, of.transposed);
      if (at_z < 0 || at_y < 0 || at_x < 0) continue;
      const auto from = source.location(image, group * of.channels + channel, at_z, at_y, at_x);
      sum += double(source.at(from)) *
             filter.data[group * filter.group_stride + out % of.channels_out * filter.out_stride +
                         channel * filter.in_stride + k * filter.z_stride + j * filter.y_stride +
                         i * filter.x_stride];
    }
  }
  return static_cast<float>(sum);
}

// By columns: for each position all channels. There is one partial result.
template <class Body, class Value>
int end_in(const ByColumn<Body>& end, const ConvolutionSizes& of, const Value& value) {
  const int outs = of.groups * of.channels_out;
  const int rows = of.z.out * of.y.out;
  const int64_t positions = of.images * rows * of.x.out;
  if (end.body.inner_extent() != outs || end.body.outer_extent() != positions) return 2;
  for (int64_t position = 0; position < positions; ++position) {
    typename ByColumn<Body>::template Column<1> down;
    const int64_t row = position / of.x.out;
    struct {
      int64_t column;
      int image, y, x;
    } const at = {position, int(row / rows), int(row % rows), int(position % of.x.out)};
    end.begin(down, at);
    for (int out = 0; out < outs; ++out) {
      typename ByColumn<Body>::template Elem<1> elem;
      end.load(elem, down, out, position);
      end.give(elem, 0, value(at.image, out, at.y, at.x));
      end.visit(elem, down, out);
    }
    if (end.kReduces) end.leave(down, 0, position);
  }
  end.join(1, nullptr);
  return 0;
}

// By channels. All positions are in one partial result.
template <class Body, bool kPerImage, int kTogether, bool kPlanes, class Value>
int end_in(const ByChannel<Body, kPerImage, kTogether, kPlanes>& end, const ConvolutionSizes& of,
           const Value& value) {
  std::vector<typename Parts<Body>::Part> parts(end.body.outer_extent());
  for (int image = 0; image < of.images; ++image) {
    for (int out = 0; out < of.groups * of.channels_out; ++out) {
      typename Body::template Row<1> row;
      end.enter(row, image, out);
      for (int y = 0; y < of.z.out * of.y.out; ++y) {
        for (int x = 0; x < of.x.out; ++x) {
          typename Body::template Elem<1> elem;
          const auto at = end.inner(image, out, y, x, of.z.out * of.y.out, of.x.out);
          auto& part = parts[end.outer(image, out)];
          end.body.load(Phase<0>{}, elem, row, at.rest, at.last);
          end.body.give(elem, 0, value(image, out, y, x));
          end.body.visit(Phase<0>{}, elem, row, part, at.rest, at.last, 1);
        }
      }
    }
  }
  for (size_t at = 0; at < parts.size(); ++at) end.put(0, at, parts[at].folded(1));
  end.join(1, nullptr);
  return 0;
}

template <class Stores, class Reduces, class Value>
int end_in(const StoredAndReduced<Stores, Reduces>& end, const ConvolutionSizes& of,
           const Value& value) {
  if (const int code = end_in(end.reduces, of, value)) return code;
  if constexpr (std::is_same_v<Stores, Nothing>) {
    return 0;
  } else {
    return end_in(end.stores, of, value);
  }
}

template <int kTileChannels, int kBeside_ = 0>
struct ByTiles {
  static constexpr bool kStaged = false;
  static constexpr int kBeside = kBeside_;
};
template <int kTileChannels, int kBeside = 0>
struct PingPong : ByTiles<kTileChannels, kBeside> {};
template <int kTileChannels, int kPositions, int kBeside_ = 0>
struct ByStagedInput {
  static constexpr bool kStaged = true;
  static constexpr int kBeside = kBeside_;
};

// The convolution before its rows were rearranged.
inline ConvolutionSizes unwoven(ConvolutionSizes of) {
  const RowOrder& row_order = of.row_order;
  if (row_order.beside == 2) {
    of.x = {of.x.in, row_order.columns, row_order.taps, 2, 1, row_order.first + 2 * of.x.padding};
  }
  if (row_order.by_eight()) of.channels_out = row_order.channels;
  return of;
}

template <class Input>
double sum_of(const Input& source, const ConvolutionSizes& of) {
  double sum = 0;
  for (int64_t image = 0; image < of.images; ++image) {
    for (int channel = 0; channel < of.groups * of.channels; ++channel) {
      for (int at = 0; at < of.z.in * of.y.in * of.x.in; ++at) {
        const int row = at / of.x.in;
        sum +=
            source.at(source.location(image, channel, row / of.y.in, row % of.y.in, at % of.x.in));
      }
    }
  }
  return sum;
}
template <class Input>
int stage_input(const Input& source, const ConvolutionSizes& of, void* staged, int, void*) {
  *static_cast<double*>(staged) = sum_of(source, of);
  return staged == nullptr || !of.shares_staged ? 3 : 0;
}

template <int kTerms, class Way, int kLanes, bool kAlways = false, class Epilogue, class Input>
int convolution(const Epilogue& end, bool vectors, const Input& source, const ConvFilter& filter,
                const ConvolutionSizes& given, void* workspace, void* staged, int device,
                void* stream) {
  if (Way::kBeside != given.row_order.beside || (kAlways && !vectors)) return 3;
  const ConvolutionSizes of = unwoven(given);
  if (of.band_width < 1 || workspace == nullptr || (kTerms != 1 && kTerms != 3)) return 3;
  if (Way::kStaged != (staged != nullptr)) return 3;
  if (kTerms == 1 && of.shares_staged && stage_input(source, of, staged, device, stream)) return 3;
  return end_in(end, of, [&](int64_t image, int out, int y, int x) {
    return convolution_at(source, filter, of, image, out, y, x);
  });
}

struct WeightGradient {
  float* data;
  int64_t out_stride, in_stride, z_stride, y_stride, x_stride;
};

template <int... kCounts>
struct TapCounts {
  static_assert(sizeof...(kCounts) > 0, "some warpgroup has taps");
};

template <class GradOutput>
float gradient_at(const ConvInput& source, const GradOutput& grad_output,
                  const ConvolutionSizes& of, int out, int channel, int k, int j, int i) {
  double sum = 0;
  const int whole = out / of.channels_out * of.channels + channel;
  for (int64_t image = 0; image < of.images; ++image) {
    for (int row = 0; row < of.z.out * of.y.out; ++row) {
      const int z = row / of.y.out, y = row % of.y.out;
      for (int x = 0; x < of.x.out; ++x) {
        const int64_t at_z = read_at(of.z, z, k, false), at_y = read_at(of.y, y, j, false);
        const int64_t at_x = read_at(of.x, x, i, false);
        if (at_z < 0 || at_y < 0 || at_x < 0) continue;
        sum += double(source.data[image * source.image_stride + whole * source.channel_stride +
                                  at_z * source.z_stride + at_y * source.y_stride +
                                  at_x * source.x_stride]) *
               grad_output.at(grad_output.location(image, out, z, y, x));
      }
    }
  }
  return static_cast<float>(sum);
}

template <int kTerms, class Taps, class GradOutput>
int weight_gradient(const ConvInput& source, const GradOutput& grad_output,
                    const WeightGradient& gradient, const ConvolutionSizes& of, int parts,
                    void* workspace, int device, void* stream) {
  if (parts < 1 || workspace == nullptr) return 3;
  for (int out = 0; out < of.groups * of.channels_out; ++out) {
    for (int channel = 0; channel < of.channels; ++channel) {
      for (int tap = 0; tap < of.taps(); ++tap) {
        const int k = tap / of.x.kernel / of.y.kernel, j = tap / of.x.kernel % of.y.kernel;
        const int i = tap % of.x.kernel;
        gradient.data[out * gradient.out_stride + channel * gradient.in_stride +
                      k * gradient.z_stride + j * gradient.y_stride + i * gradient.x_stride] =
            gradient_at(source, grad_output, of, out, channel, k, j, i);
      }
    }
  }
  return 0;
}

template <class Taps, class GradOutput>
int staged_gradient(const ConvInput& source, const GradOutput& grad_output,
                    const WeightGradient& gradient, const ConvolutionSizes& of,
                    const ConvolutionSizes& back, int parts, void* workspace, void* staged_x,
                    void* staged, int device, void* stream) {
  const double sum = sum_of(grad_output, unwoven(back));
  if (staged_x == nullptr || staged == nullptr || *static_cast<double*>(staged) != sum) return 3;
  const bool alike = of.x.least == back.x.least && of.y.least == back.y.least && of.x.least > 0;
  if (!alike) return 3;
  return weight_gradient<1, Taps>(source, grad_output, gradient, of, parts, workspace, device,
                                  stream);
}

}  // namespace fw
