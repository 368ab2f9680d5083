// The sizes of a convolution, as its entry function gives them.
#pragma once

#include "convolution/operands.cuh"

namespace fw {

// For a transposed convolution the axes describe the convolution that it is the transpose of; only
// `in` and `out` are its own: x[n, c, iy, ix] adds to outputs iy·stride − padding + ky·dilation.
// Its bands consist of positions of one residue class. A woven one (RowOrder in operands.cuh) is
// described as the convolution of stride 1 that it is treated as.
struct ConvolutionSizes {
  int64_t images;
  int groups, channels, channels_out;  // channels: of one group
  ConvAxis z, y, x;
  int band_width;
  bool transposed;
  RowOrder row_order;
  bool shares_staged = false;  // the weight gradient reads the staged input, too

  bool has_outputs() const { return images > 0 && z.out > 0 && y.out > 0 && x.out > 0; }
  int taps() const { return z.kernel * y.kernel * x.kernel; }
};

}  // namespace fw
