// Hyperbolic functions, their inverses and erfc, branch-free on the host; lgamma is libm's.
#pragma once

#include "transcendental.hpp"

namespace fw {

#define FW_LIBM1(NAME)                                    \
  FW_FN float NAME(float x) { return ::NAME##f(x); }      \
  FW_FN double NAME(double x) { return ::NAME(x); }
FW_LIBM1(lgamma)

#if defined(__CUDACC__)
FW_LIBM1(sinh)
FW_LIBM1(cosh)
FW_LIBM1(asinh)
FW_LIBM1(acosh)
FW_LIBM1(atanh)
FW_LIBM1(erfc)
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

// log(a + sqrt(a^2 + 1)) with nothing lost near 0; where squares grow too large, log(2a).
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
template <class T>
FW_FN T atanh(T x) {
  const T a = abs(x);
  return copysign(T(0.5) * log1p(T(2) * a / (T(1) - a)), x);
}

FW_FN double erfc(double x) { return ::erfc(x); }
// Beyond 1/2 e^(-a^2) * P((a - 3) / (a + 3)) / (1 + 2a).
FW_FN float erfc(float x) {
  const float a = abs(x) > 10.2f ? 10.2f : abs(x);
  const float p =
      horner((a - 3.0f) / (a + 3.0f), -0.0002763902593869716f, -0.0007957492489367723f,
             0.0019963758531957865f, 0.0025788452476263046f, -0.023791348561644554f,
             0.06829337030649185f, -0.11927247792482376f, 0.12964661419391632f,
             -0.047562289983034134f, -0.13562114536762238f, 1.2530080080032349f);
  const float square = a * a;
#if defined(__FMA__)
  const float rounding = mad(a, a, -square);
#else
  const float rounding = static_cast<float>(static_cast<double>(a) * a - square);
#endif
  const Power<float> power_of = power(-square);
  const float e = scaled(power_of.rest, power_of.rounder, true);
  const float y = p * mad(-rounding, e, e) / mad(2.0f, a, 1.0f);
  const float large = x < 0.0f ? 2.0f - y : y;
  return a < 0.5f ? 1.0f - small_erf(x) : large;
}
#endif  // __CUDACC__

#undef FW_LIBM1
}  // namespace fw
