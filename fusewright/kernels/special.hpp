// Special functions that the C++ library lacks. Rare in models, so accuracy goes before speed:
// float versions run in double.
#pragma once

#include "transcendental.hpp"

namespace fw {

// Solves erf(y) = x: a closed first guess (relative error 2e-3), then Halley's steps, each of
// which triples the digits. Near 1 the equation is solved for erfc, where 1 - |x| is exact.
FW_FN double erfinv(double x) {
#if defined(__CUDA_ARCH__)
  return ::erfinv(x);
#else
  const double a = ::fabs(x);
  if (!(a < 1.0)) {
    const double edge = std::numeric_limits<double>::infinity();
    return a == 1.0 ? ::copysign(edge, x) : std::numeric_limits<double>::quiet_NaN();
  }
  const double logarithm = ::log1p(-a * a);
  const double half = 4.330746750799873 + 0.5 * logarithm;
  double y = ::sqrt(::sqrt(half * half - logarithm / 0.147) - half);
  for (int step = 0; step < 3; ++step) {
    const double error = a > 0.5 ? (1.0 - a) - ::erfc(y) : ::erf(y) - a;
    const double newton = error / (1.1283791670955126 * ::exp(-y * y));
    y -= newton / (1.0 + y * newton);
  }
  return ::copysign(a == 0.0 ? 0.0 : y, x);
#endif
}
FW_FN float erfinv(float x) {
#if defined(__CUDA_ARCH__)
  return ::erfinvf(x);
#else
  return static_cast<float>(erfinv(static_cast<double>(x)));
#endif
}

// Recurrence up to 10, then the asymptotic series; reflection below zero.
FW_FN double digamma(double x) {
  constexpr double kPi = 3.14159265358979323846;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();
  if (x == 0.0) return ::copysign(kInfinity, -x);
  double result = 0.0;
  if (x < 0.0) {
    if (x == ::trunc(x)) return kNotANumber;
    result = -kPi / ::tan(kPi * (x - ::trunc(x)));
    x = 1.0 - x;
  }
  for (; x < 10.0; x += 1.0) result -= 1.0 / x;
  const double square = 1.0 / (x * x);
  double series = 1.0 / 12.0;
  series = series * square - 691.0 / 32760.0;
  series = series * square + 1.0 / 132.0;
  series = series * square - 1.0 / 240.0;
  series = series * square + 1.0 / 252.0;
  series = series * square - 1.0 / 120.0;
  series = series * square + 1.0 / 12.0;
  return result + ::log(x) - 0.5 / x - (x < 1e17 ? series * square : 0.0);
}
FW_FN float digamma(float x) { return static_cast<float>(digamma(static_cast<double>(x))); }

}  // namespace fw
