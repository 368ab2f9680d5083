// TF32: a float's exponent with ten bits behind the point.
#pragma once

#include "scalar/types.hpp"

namespace fw {

// The nearest number of TF32, ties away from zero; of a double, the nearest with as many bits. Zero,
// numbers below the normal ones, those that would become Inf, Inf and NaN stay as they are: so x and
// the result have the same sign, and both are zero or neither is.
FW_FN float round_tf32(float x) {
  const int32_t raw = bits<int32_t>(x);
  const int32_t size = raw & 0x7fffffff;
  const bool rounds = size >= 0x00800000 && size < 0x7f7ff000;
  return bits<float>(rounds ? (raw + 0x1000) & ~0x1fff : raw);
}

FW_FN double round_tf32(double x) {
  const int64_t raw = bits<int64_t>(x);
  const int64_t size = raw & 0x7fffffffffffffff;
  const bool rounds = size >= 0x0010000000000000 && size < 0x7feffe0000000000;
  return bits<double>(rounds ? (raw + 0x20000000000) & ~0x3ffffffffff : raw);
}

}  // namespace fw
