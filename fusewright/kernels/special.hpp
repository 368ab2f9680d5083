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
#if defined(__CUDACC__)
FW_FN float erfinv(float x) {
#if defined(__CUDA_ARCH__)
  return ::erfinvf(x);
#else
  return static_cast<float>(erfinv(static_cast<double>(x)));
#endif
}
#else
// Branch-free: x times a polynomial in sqrt(4 - log(1 - x^2)), which is all but straight near 1; in
// double, where 1 - x^2 is exact. The fit's relative error is 2^-30.
FW_FN float erfinv(float x) {
  const double wide = x;
  const double root = sqrt(4.0 - log(mad(-wide, wide, 1.0)));
  const double u = mad(root, 0.8090169943749473, -2.618033988749895);
  const double p =
      horner(u, -0.0007111201197638335, -0.0001622716392338784, 0.004493946917100756,
             -0.0006161885374432085, -0.01210855566540835, 0.007413527879923306,
             0.014968712189933495, -0.02218052263142767, 0.003362312115244308,
             0.025344102822810424, -0.04018511107653631,
             0.017939774190793224, 0.037986408063054825, -0.08600730828027241, 0.08142313611022466,
             -0.013981670498317257, -0.10549401200682884, 1.54902899104115, 2.3792696437104457);
  return abs(x) == 1.0f ? x * kInf : static_cast<float>(wide * p);
}
#endif

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
