// The operands of a matmul, as its entry function gives them.
#pragma once

#include "cuda/lanes.cuh"

namespace fw {

// With a batch stride of 0 all batches share the matrix.
struct RawOperand {
  const float* data;
  int64_t free_stride, contracted_stride, batch_stride;
};

// High and low fp16 parts: [q][r] with an inverse scale for each q, or [r][q] with one for each r;
// batch after batch.
struct SplitOperand {
  const half* hi;
  const half* lo;
  const float* inverse;
  int64_t row_stride;
};

// 16-bit elements, half or bf16. A stored row is one free index, or one contracted index if the
// free index is contiguous. `inverse` is null, or has one factor of the result for each free index
// of the matrix: batch after batch, or shared like the matrix.
template <class T>
struct HalfOperand {
  const T* data;
  int64_t row_stride, batch_stride;
  const float* inverse;
};

struct MatmulExtents {
  int64_t columns, rows, contracted, batches;  // of p, q and r; matmuls of the batch
};

}  // namespace fw
