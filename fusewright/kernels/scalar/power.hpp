// Powers. Those of integers wrap around. On the host, those of floats are branch-free and take the
// logarithm in double.
#pragma once

#include "scalar/transcendental.hpp"

namespace fw {

// Integer powers wrap around. A negative exponent gives 0, unless the base is 1 or -1.
template <class T>
FW_FN T whole_pow(T base, T exponent) {
  const bool odd = (exponent & T(1)) != 0;
  if (exponent < T(0)) return base == T(1) ? T(1) : base == T(-1) ? (odd ? T(-1) : T(1)) : T(0);
  T result = T(1);
  for (; exponent > T(0); exponent = static_cast<T>(exponent >> 1)) {
    if (exponent & T(1)) result = mul(result, base);
    base = mul(base, base);
  }
  return result;
}

#if !defined(__CUDACC__)
// log2 of a normal double, with a relative error of 2^-40.
FW_FN double approximate_log2(double x) {
  const int64_t raw = bits<int64_t>(x);
  const int64_t e = (raw - 0x3fe6a09e667f3bcd) & static_cast<int64_t>(0xfff0000000000000u);
  const double f = bits<double>(raw - e) - 1.0;
  const double s = f / (2.0 + f);
  const double series = horner(s * s, 0.291074875721698, 0.31926329278110754, 0.41222684197244774,
                               0.5770777473788922, 0.961796694859756, 2.8853900817774027);
  return mad(s, series, static_cast<double>(static_cast<int32_t>(e >> 52)));
}
// 2^t for |t| <= 300, with a relative error of 2^-37.
FW_FN double approximate_exp2(double t) {
  const double rounder = t + kRounder64;
  const double r = (t - (rounder - kRounder64)) * 0.6931471805599453;
  const double p = horner(r, 2.4868002978056962e-05, 0.00019907702175735054, 0.0013888838910996056,
                          0.008333283339034426, 0.04166666678698556, 0.16666666787028753,
                          0.4999999999995475, 0.999999999995473);
  return mad(p, r, 1.0) * two_to<0>(rounder);
}

FW_FN float host_pow(float x, float y) {
  const double a = abs(static_cast<double>(x));
  double logarithm = approximate_log2(a);
  logarithm = a < kInf64 ? logarithm : a;
  logarithm = a == 0.0 ? -kInf64 : logarithm;
  double t = logarithm == 0.0 ? 0.0 : y * logarithm;
  t = t > 300.0 ? 300.0 : t;
  t = t < -300.0 ? -300.0 : t;
  float z = static_cast<float>(approximate_exp2(t));
  const float half = y * 0.5f;
  const bool whole = trunc(y) == y;
  const bool odd = whole & (trunc(half) != half);
  z = signbit(x) & odd ? -z : z;
  z = ((x < 0.0f) & (x > -kInf) & !whole) | (y != y) ? kNan : z;
  return (x == 1.0f) | (y == 0.0f) ? 1.0f : z;
}
#endif

template <class T>
FW_FN T pow(T a, T b) {
  if constexpr (std::is_same_v<T, float>) {
#if defined(__CUDACC__)
    return ::powf(a, b);
#else
    return host_pow(a, b);
#endif
  } else if constexpr (kIsFloat<T>) {
    return ::pow(a, b);
  } else {
    return whole_pow(a, b);
  }
}

}  // namespace fw
