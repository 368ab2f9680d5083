// Special functions that the C++ standard library lacks. They are rare in models, so accuracy comes
// before speed: float versions compute in double.
#pragma once

#include "scalar/types.hpp"

namespace fw {

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
