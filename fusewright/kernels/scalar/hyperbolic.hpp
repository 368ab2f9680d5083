// Hyperbolic functions and their inverses, branch-free on the host. lgamma is libm's.
#pragma once

#include "scalar/logarithm.hpp"
#include "scalar/transcendental.hpp"

namespace fw {

FW_LIBM1(lgamma)

#if defined(__CUDACC__)
FW_LIBM1(sinh)
FW_LIBM1(cosh)
FW_LIBM1(asinh)
FW_LIBM1(acosh)
FW_LIBM1(atanh)
#else

// e^a / 2, which overflows no earlier than sinh and cosh do.
template <class T>
FW_FN T half_exp(T a) {
  const Power<T> p = power(a);
  return (p.rest + T(1)) * two_to<-2>(p.rounder) * T(2);
}
template <class T>
constexpr T kHyperbolicEnd = sizeof(T) == 4 ? T(89.5) : T(710.5);

// (sinh(x) - x) / x^3 for |x| <= 1, s being x * x.
FW_FN float sinh_rest(float s) {
  return horner(s, 2.806280235745362e-06f, 0.00019838102161884308f, 0.008333339355885983f,
                0.1666666716337204f);
}
FW_FN double sinh_rest(double s) {
  return horner(s, 2.8445264169895285e-15, 7.646625361656657e-13, 1.6059048396350562e-10,
                2.505210836405804e-08, 2.755731922404034e-06, 0.00019841269841269773,
                0.008333333333333333, 0.16666666666666666);
}
template <class T>
FW_FN T sinh(T x) {
  const T a = abs(x);
  const T s = a * a;
  const T small = mad(s * a, sinh_rest(s), a);
  const T e = half_exp(a);
  T large = e - T(0.25) / e;
  large = a > kHyperbolicEnd<T> ? std::numeric_limits<T>::infinity() : large;
  return copysign(a < T(1) ? small : large, x);
}
template <class T>
FW_FN T cosh(T x) {
  const T a = abs(x);
  const T e = half_exp(a);
  const T y = e + T(0.25) / e;
  return a > kHyperbolicEnd<T> ? std::numeric_limits<T>::infinity() : y;
}

template <class T>
constexpr T kSquaresEnd = sizeof(T) == 4 ? T(1e9) : T(1e18);

// log(a + sqrt(a^2 + 1)) without cancellation near 0; log(2a) where squares become too large.
template <class T>
FW_FN T asinh(T x) {
  const T a = abs(x);
  const bool large = a > kSquaresEnd<T>;
  const T s = a * a;
  const T u = a + s / (T(1) + sqrt(T(1) + s));
  const T y = log1p(large ? a : u) + (large ? T(0.69314718055994530942) : T(0));
  return copysign(y, x);
}
template <class T>
FW_FN T acosh(T x) {
  const bool large = x > kSquaresEnd<T>;
  const T t = x - T(1);
  const T u = t + sqrt(t * (t + T(2)));
  const T y = log1p(large ? x : u) + (large ? T(0.69314718055994530942) : T(0));
  return x < T(1) ? std::numeric_limits<T>::quiet_NaN() : y;
}
// A series below 1/2, where the rounding of the quotient would be most of the error.
FW_FN float atanh(float x) {
  const float a = abs(x), s = x * x;
  const float p = horner(s, 0.1763589233160019f, 0.05161825194954872f, 0.11816029995679855f,
                         0.14223824441432953f, 0.20002451539039612f, 0.33333301544189453f);
  const float y = 0.5f * log1p(2.0f * a / (1.0f - a));
  return copysign(a < 0.5f ? mad(s * a, p, a) : y, x);
}
FW_FN double atanh(double x) {
  const double a = abs(x);
  return copysign(0.5 * log1p(2.0 * a / (1.0 - a)), x);
}
#endif  // __CUDACC__

}  // namespace fw
