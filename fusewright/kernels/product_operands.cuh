// The operands of a matrix product, as its entry hands them over.
#pragma once

#include "lanes.cuh"

namespace fw {

struct RawOperand {
  const float* data;
  int64_t free_stride, contracted_stride;
};

// Halves [q][r] with an inverse scale for each q, or [r][q] with one for each r.
struct SplitOperand {
  const half* hi;
  const half* lo;
  const float* inverse;
  int64_t row_stride;
};

}  // namespace fw
