// What chooses one of a row: numbers as whole ones of the same order, and classes that there are.
#pragma once

#if defined(__CUDACC__)
#include <cassert>
#endif

#include "scalar/types.hpp"

namespace fw {

// A whole number of 32 bits for each float, in their order: both zeros are one, and NaN comes last.
FW_FN int64_t ordered(float x) {
  const int32_t raw = bits<int32_t>(x + 0.f);
  const int32_t found = raw ^ ((raw >> 31) & 0x7fffffff);
  return x != x ? 0x7fffffff : x == 0.f ? 0 : found;
}

// A row's class, which is one of so many, or the one that does not count.
template <class T>
FW_FN T class_index(T target, T classes, T ignored) {
#if defined(__CUDA_ARCH__)
  assert(target == ignored || (target >= 0 && target < classes));
#endif
  return target;
}

}  // namespace fw
