// Scales for splitting a float into a high and a low fp16 part. A power of two brings the largest
// value of a row close to the top of float16's range. The high part then holds eleven bits, and the
// low part eleven more.
#pragma once

#include "scalar/types.hpp"

namespace fw {

// |x|, or 0 for Inf and NaN, from which no scale can be computed.
template <class T>
FW_FN T finite_magnitude(T x) {
  const T size = x < T(0) ? -x : x;
  return size - size == T(0) ? size + T(0) : T(0);
}

// The power of two s with |x|·s in [2^14, 2^15), clamped so that s and 1/s are normal numbers; 1
// for Inf and NaN. For 0 it is the largest scale: 1/s is the factor of a row of zeros and must not
// outweigh the factors of other rows.
FW_FN float fp16_scale(float x) {
  const int32_t exponent = (bits<int32_t>(x) >> 23) & 0xff;
  const int32_t scale = 254 + 14 - exponent;
  return bits<float>(exponent != 0xff ? (scale < 253 ? scale : 253) << 23 : 0x3f800000);
}

FW_FN double fp16_scale(double x) {
  const int64_t exponent = (bits<int64_t>(x) >> 52) & 0x7ff;
  const int64_t scale = 2046 + 14 - exponent;
  const bool finite = exponent != 0x7ff;
  return bits<double>(finite ? (scale < 2045 ? scale : int64_t{2045}) << 52 : 0x3ff0000000000000);
}

}  // namespace fw
