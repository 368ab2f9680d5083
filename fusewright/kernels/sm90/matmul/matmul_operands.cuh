// The operands of a matrix product, as its entry hands them over.
#pragma once

#include "cuda/lanes.cuh"

namespace fw {

// With a batch stride of 0 all batches share the matrix.
struct RawOperand {
  const float* data;
  int64_t free_stride, contracted_stride, batch_stride;
};

// Halves [q][r] with an inverse scale for each q, or [r][q] with one for each r; batch after batch.
struct SplitOperand {
  const half* hi;
  const half* lo;
  const float* inverse;
  int64_t row_stride;
};

// 16-bit numbers, half or bf16. A stored row is one free index, or one contracted index where the
// free index is contiguous. `inverse`: null, or one factor of the result for each free index of the
// matrix; batch after batch, or shared as the matrix is.
template <class T>
struct HalfOperand {
  const T* data;
  int64_t row_stride, batch_stride;
  const float* inverse;
};

struct ProductExtents {
  int64_t columns, rows, contracted, batches;  // of p, q, r and the products side by side
};

}  // namespace fw
