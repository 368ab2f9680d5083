// A convolution as its entry describes it.
#pragma once

#include "window_operands.cuh"

namespace fw {

// w[out][in][y][x]; strides may be negative, where a gradient reads the weights backwards.
struct WindowFilter {
  const float* data;
  int64_t out_stride, in_stride, y_stride, x_stride;
};

struct ConvolutionSizes {
  int64_t images;
  int groups, channels, channels_out;  // of one group
  WindowAxis y, x;
  int band_width;
};

}  // namespace fw
