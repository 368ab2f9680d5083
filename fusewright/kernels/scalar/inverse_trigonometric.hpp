// Inverse trigonometric functions, and hypot. On the host they are branch-free, as the exponentials
// are.
#pragma once

#include "scalar/transcendental.hpp"

namespace fw {

#if defined(__CUDACC__)
#define FW_LIBM2(NAME)                                           \
  FW_FN float NAME(float a, float b) { return ::NAME##f(a, b); } \
  FW_FN double NAME(double a, double b) { return ::NAME(a, b); }
FW_LIBM1(asin)
FW_LIBM1(acos)
FW_LIBM1(atan)
FW_LIBM2(atan2)
FW_LIBM2(hypot)
#undef FW_LIBM2
#else

constexpr float kHalfPi = 1.57079637050628662109375f;
constexpr float kHalfPiLow = -4.37113900018624283e-8f;  // pi/2 - kHalfPi
constexpr double kHalfPi64 = 1.57079632679489661923;
constexpr double kHalfPiLow64 = 6.123233995736766e-17;

// (asin(t) - t) / t for t * t = s <= 1/4.
FW_FN float asin_rest(float s) {
  return s * horner(s, 0.03369084745645523f, 0.017149237915873528f, 0.031100662425160408f,
                    0.04459940269589424f, 0.07500094175338745f, 0.1666666567325592f);
}
FW_FN double asin_rest(double s) {
  return s * horner(s, 0.028757851367421566, -0.014851887071247204, 0.01740087944269402,
                    0.005457506718640358, 0.01032281435018578, 0.011479177415184906,
                    0.013971212973552933, 0.017352392720869973, 0.02237217294214989,
                    0.030381944138531247, 0.04464285714635543, 0.07499999999998433,
                    0.16666666666666669);
}

// Beyond 1/2: asin(a) = pi/2 - 2 asin(sqrt((1 - a) / 2)).
template <class T>
FW_FN T host_asin(T x, T half_pi, T half_pi_low) {
  const T a = abs(x);
  const bool steep = a > T(0.5);
  const T s = steep ? T(0.5) - T(0.5) * a : a * a;
  const T t = steep ? sqrt(s) : a;
  const T rest = t * asin_rest(s);
  const T far = half_pi - (T(2) * t + (T(2) * rest - half_pi_low));
  return copysign(steep ? far : t + rest, x);
}
template <class T>
FW_FN T host_acos(T x, T half_pi, T half_pi_low) {
  const T a = abs(x);
  const bool steep = a > T(0.5);
  const T s = steep ? T(0.5) - T(0.5) * a : a * a;
  const T t = steep ? sqrt(s) : a;
  const T rest = t * asin_rest(s);
  const T near_one = T(2) * (t + rest);
  const T left = T(2) * half_pi - (T(2) * t + (T(2) * rest - T(2) * half_pi_low));
  const T flat = half_pi - (copysign(t, x) + (copysign(rest, x) - half_pi_low));
  return steep ? (x > T(0) ? near_one : left) : flat;
}
FW_FN float asin(float x) { return host_asin(x, kHalfPi, kHalfPiLow); }
FW_FN double asin(double x) { return host_asin(x, kHalfPi64, kHalfPiLow64); }
FW_FN float acos(float x) { return host_acos(x, kHalfPi, kHalfPiLow); }
FW_FN double acos(double x) { return host_acos(x, kHalfPi64, kHalfPiLow64); }

// atan(t) for 0 <= t <= 1.
FW_FN float small_atan(float t) {
  const float s = t * t;
  const float p = horner(s, 0.001488691894337535f, -0.00914462935179472f, 0.026305001229047775f,
                         -0.04896051436662674f, 0.07031914591789246f, -0.08931826800107956f,
                         0.11088261753320694f, -0.14284004271030426f, 0.19999949634075165f,
                         -0.3333333432674408f);
  return mad(s * t, p, t);
}
// Beyond tan(pi/8): atan(t) = pi/4 + atan((t - 1) / (t + 1)).
FW_FN double small_atan(double t) {
  const bool large = t > 0.41421356237309503;
  const double u = large ? (t - 1.0) / (t + 1.0) : t;
  const double s = u * u;
  const double p =
      horner(s, -0.019029290809743134, 0.03911053674347613, -0.05081236164642543,
             0.058573396761385246, -0.06664417824186955, 0.07692176510795928, -0.09090904289128517,
             0.11111111008107874, -0.14285714284577217, 0.1999999999999509, -0.3333333333333333);
  const double y = mad(s * u, p, u);
  return large ? 0.5 * kHalfPi64 + (y + 0.5 * kHalfPiLow64) : y;
}

template <class T>
FW_FN T host_atan(T x, T half_pi, T half_pi_low) {
  const T a = abs(x);
  const bool inverse = a > T(1);
  const T y = small_atan(inverse ? T(1) / a : a);
  return copysign(inverse ? half_pi - (y - half_pi_low) : y, x);
}
template <class T>
FW_FN T host_atan2(T y, T x, T half_pi, T half_pi_low) {
  const T ax = abs(x), ay = abs(y);
  const bool steep = ay > ax;
  const T most = steep ? ay : ax, least = steep ? ax : ay;
  T t = least / most;
  t = most == T(0) ? T(0) : t;
  t = (least == most) & (most != T(0)) ? T(1) : t;  // also for two infinities
  T angle = small_atan(t);
  angle = steep ? half_pi - (angle - half_pi_low) : angle;
  angle = signbit(x) ? T(2) * half_pi - (angle - T(2) * half_pi_low) : angle;
  angle = (x != x) | (y != y) ? std::numeric_limits<T>::quiet_NaN() : angle;
  return copysign(angle, y);
}
FW_FN float atan(float x) { return host_atan(x, kHalfPi, kHalfPiLow); }
FW_FN double atan(double x) { return host_atan(x, kHalfPi64, kHalfPiLow64); }
FW_FN float atan2(float y, float x) { return host_atan2(y, x, kHalfPi, kHalfPiLow); }
FW_FN double atan2(double y, double x) { return host_atan2(y, x, kHalfPi64, kHalfPiLow64); }

// Squares of floats are exact in double.
FW_FN float hypot(float x, float y) {
  const float root = float(sqrt(double(x) * double(x) + double(y) * double(y)));
  constexpr float kEnd = std::numeric_limits<float>::infinity();
  return (abs(x) == kEnd) | (abs(y) == kEnd) ? kEnd : root;
}
// Scaled by a power of two where squares would overflow or underflow.
FW_FN double hypot(double x, double y) {
  constexpr double kEdge = 0x1p400, kFactor = 0x1p700;
  const double a = abs(x), b = abs(y);
  const double most = a > b ? a : b;
  double by = most > kEdge ? 1 / kFactor : 1., back = most > kEdge ? kFactor : 1.;
  by = most < 1 / kEdge ? kFactor : by;
  back = most < 1 / kEdge ? 1 / kFactor : back;
  const double p = a * by, q = b * by;
  const double root = sqrt(mad(p, p, q * q)) * back;
  constexpr double kEnd = std::numeric_limits<double>::infinity();
  return (a == kEnd) | (b == kEnd) ? kEnd : root;
}
#endif  // __CUDACC__

}  // namespace fw
