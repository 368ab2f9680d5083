// Helpers for operators that select one element of a row: floats as integers of the same order, and
// class indices with a bounds check.
#pragma once

#if defined(__CUDACC__)
#include <cassert>
#endif

#include "scalar/types.hpp"

namespace fw {

// Maps a float to a 32-bit integer and keeps the order. Both zeros map to 0, and NaN to the largest
// integer.
FW_FN int64_t ordered(float x) {
  const int32_t raw = bits<int32_t>(x + 0.f);
  const int32_t found = raw ^ ((raw >> 31) & 0x7fffffff);
  return x != x ? 0x7fffffff : x == 0.f ? 0 : found;
}

// The class index of a row, which must be below `classes` or be the ignored one; on a GPU this is
// asserted.
template <class T>
FW_FN T class_index(T target, T classes, T ignored) {
#if defined(__CUDA_ARCH__)
  assert(target == ignored || (target >= 0 && target < classes));
#endif
  return target;
}

}  // namespace fw
