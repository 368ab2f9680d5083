// A convolution as its entry describes it.
#pragma once

#include "convolution/operands.cuh"

namespace fw {

// Of a transposed convolution the axes are those of the convolution that it is the transpose of, but
// for `in` and `out`: x[n, c, iy, ix] adds to outputs iy·stride − padding + ky·dilation, and a band is
// some positions of a class. A woven one (operands.cuh) is given as what it is seen as.
struct ConvolutionSizes {
  int64_t images;
  int groups, channels, channels_out;  // of one group
  WindowAxis z, y, x;
  int band_width;
  bool transposed;
  RowOrder row_order;
  bool shares_lines = false;  // with the gradient by the weights

  bool has_outputs() const { return images > 0 && z.out > 0 && y.out > 0 && x.out > 0; }
  int taps() const { return z.kernel * y.kernel * x.kernel; }
};

}  // namespace fw
