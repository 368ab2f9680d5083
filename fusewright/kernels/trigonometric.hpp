// Circular functions and their inverses. On the host they are branch-free like the exponentials;
// sin, cos and tan beyond kFarTurn, whose reduction would need many more digits of pi, call libm.
#pragma once

#include "transcendental.hpp"

namespace fw {

#define FW_LIBM1(NAME)                                    \
  FW_FN float NAME(float x) { return ::NAME##f(x); }      \
  FW_FN double NAME(double x) { return ::NAME(x); }
#define FW_LIBM2(NAME)                                              \
  FW_FN float NAME(float a, float b) { return ::NAME##f(a, b); }    \
  FW_FN double NAME(double a, double b) { return ::NAME(a, b); }

#if defined(__CUDACC__)
FW_LIBM1(sin)
FW_LIBM1(cos)
FW_LIBM1(tan)
FW_LIBM1(asin)
FW_LIBM1(acos)
FW_LIBM1(atan)
FW_LIBM2(atan2)
FW_LIBM2(hypot)
#else

// x = quarter * pi/2 + (r + low), |r| <= pi/4.
template <class T, class Bits>
struct Turn {
  T r, low;
  Bits quarter;
};

constexpr float kFarTurn = 1e5f;

FW_FN Turn<double, uint64_t> turn(double x) {
  const double rounder = mad(x, 0.6366197723675814, kRounder64);
  const double n = rounder - kRounder64;
  // pi/2 in parts of 33 bits: the products are exact.
  const double first = x - n * 1.57079632673412561417e+00;
  const double part = n * 6.07710050630396597660e-11;
  const double r = first - part;
  const double low = ((first - r) - part) - n * 2.02226624879595063154e-21;
  return {r, low, bits<uint64_t>(rounder)};
}
FW_FN Turn<float, uint32_t> turn(float x) {
#if defined(__FMA__)
  const float rounder = mad(x, 0.63661975f, kRounder);
  const float n = rounder - kRounder;
  const float first = mad(n, -0x1.921fb6p+0f, x);  // exact; pi/2 is the sum of three floats
  const float part = n * 0x1.777a5cp-25f;
  const float r = first + part;
  // What the sum and the product rounded away: near a zero of the sine, first and part cancel.
  const float rest = mad(n, 0x1.ee59dap-50f, mad(n, 0x1.777a5cp-25f, -part));
  return {r, (part - (r - first)) + rest, bits<uint32_t>(rounder)};
#else
  const Turn<double, uint64_t> t = turn(static_cast<double>(x));
  const float r = static_cast<float>(t.r);
  return {r, static_cast<float>(t.r - r), static_cast<uint32_t>(t.quarter)};
#endif
}

struct Circle {
  double sine, cosine;
};
// 1 - r^2/2 + r^4 * even - r * low, with what 1 - r^2/2 rounds away.
FW_FN double cosine_of(double r, double low, double even) {
  const double s = r * r;
  const double half = 0.5 * s;
  const double first = 1.0 - half;
  return first + (((1.0 - first) - half) + mad(s * s, even, -(r * low)));
}
// b where the mask has all bits, a where it has none: g++ would compute both arms of a choice.
FW_FN float either(uint32_t mask, float a, float b) {
  return bits<float>(bits<uint32_t>(a) ^ (mask & (bits<uint32_t>(a) ^ bits<uint32_t>(b))));
}
// The sine of a turn of at least 0: one polynomial, with the coefficients of sine or cosine.
FW_FN float sine_of(float r, float low, uint32_t quarter) {
  const uint32_t odd = 0u - (quarter & 1u);
  const float s = r * r;
  const float half = 0.5f * s, first = 1.0f - half;
  const float lost = mad(-r, low, (1.0f - first) - half);
  const float p = mad(mad(either(odd, -0.00019518285989761353f, 2.4432563805021346e-05f), s,
                          either(odd, 0.008332189172506332f, -0.0013887310633435845f)),
                      s, either(odd, -0.16666655242443085f, 0.04166664555668831f));
  const float y = either(odd, r, first) + mad(s * either(odd, r, s), p, either(odd, low, lost));
  return bits<float>(bits<uint32_t>(y) ^ ((quarter & 2u) << 30));
}
FW_FN float with_sign_of(float y, float x) {
  return bits<float>(bits<uint32_t>(y) ^ (bits<uint32_t>(x) & 0x80000000u));
}
// The coefficients of fdlibm's kernels.
FW_FN Circle circle(double r, double low) {
  const double s = r * r;
  const double odd = horner(s, 1.58969099521155010221e-10, -2.50507602534068634195e-08,
                            2.75573137070700676789e-06, -1.98412698298579493134e-04,
                            8.33333333332248946124e-03, -1.66666666666666324348e-01);
  const double even = horner(s, -1.13596475577881948265e-11, 2.08757232129817482790e-09,
                             -2.75573143513906633035e-07, 2.48015872894767294178e-05,
                             -1.38888888888741095749e-03, 4.16666666666666019037e-02);
  return {r + mad(s * r, odd, low), cosine_of(r, low, even)};
}

// The sine of the turn: in quarters 0 to 3 sine, cosine, -sine, -cosine.
FW_FN double turned(double sine, double cosine, uint64_t quarter) {
  const double y = (quarter & 1u) != 0 ? cosine : sine;
  return bits<double>(bits<uint64_t>(y) ^ ((quarter & 2u) << 62));
}

FW_FN float sin(Near, float x) {
  const Turn<float, uint32_t> t = turn(abs(x));
  return with_sign_of(sine_of(t.r, t.low, t.quarter), x);
}
FW_FN float cos(Near, float x) {
  const Turn<float, uint32_t> t = turn(abs(x));
  return sine_of(t.r, t.low, t.quarter + 1u);
}
// A polynomial, or -1 over it; the quotient is mended by what it and the sum before rounded away.
FW_FN float tan(Near, float x) {
  const Turn<float, uint32_t> t = turn(abs(x));
  const float s = t.r * t.r;
  const float p = horner(s, 0.004370370879769325f, 0.00010291965736541897f, 0.01082383282482624f,
                         0.02128753811120987f, 0.054058682173490524f, 0.13332676887512207f,
                         0.33333349227905273f);
  const float rest = mad(s * t.r, p, t.low);
  const float y = t.r + rest;
  const float low = (t.r - y) + rest;
  const float inverse = -1.0f / y;
  const float error = mad(inverse, y, 1.0f);
  const float mended = mad(inverse, mad(inverse, low, error), inverse);
  return with_sign_of((t.quarter & 1u) != 0 ? mended : y, x);
}
FW_FN double sin(Near, double x) {
  const auto t = turn(x);
  const Circle c = circle(t.r, t.low);
  const double y = turned(c.sine, c.cosine, t.quarter);
  return x == 0.0 ? x : y;
}
FW_FN double cos(Near, double x) {
  const auto t = turn(x);
  const Circle c = circle(t.r, t.low);
  return turned(c.sine, c.cosine, t.quarter + 1u);
}
FW_FN double tan(Near, double x) {
  const auto t = turn(x);
  const Circle c = circle(t.r, t.low);
  const bool odd = (t.quarter & 1u) != 0;
  const double y = (odd ? c.cosine : c.sine) / (odd ? -c.sine : c.cosine);
  return x == 0.0 ? x : y;
}

// Infinity and NaN are not far: either way gives NaN.
template <class T>
FW_FN bool turn_far(T x) {
  return (abs(x) > T(kFarTurn)) & (abs(x) < std::numeric_limits<T>::infinity());
}
#define FW_TURNING(NAME, TYPE, LIBM)                                        \
  FW_FN bool NAME##_far(TYPE x) { return turn_far(x); }                     \
  FW_FN TYPE NAME(TYPE x) { return turn_far(x) ? ::LIBM(x) : NAME(Near{}, x); }
FW_TURNING(sin, float, sinf)
FW_TURNING(cos, float, cosf)
FW_TURNING(tan, float, tanf)
FW_TURNING(tan, double, tan)

#if defined(FW_VECTORS)
// As the lanes' own sine and cosine above, one for the other after each quarter.
FW_FN Doubles near_sine(Doubles x, uint64_t quarters) {
  const Doubles rounder = mad(x, 0.6366197723675814, kRounder64);
  const Doubles n = rounder - kRounder64;
  const Doubles first = mad(n, -1.57079632673412561417e+00, x);
  const Doubles r = mad(n, -6.07710050630396597660e-11, first);
  const Doubles low =
      mad(n, -2.02226624879595063154e-21, mad(n, -6.07710050630396597660e-11, first - r));
  const Doubles s = r * r;
  const Doubles odd = series(s, 1.58969099521155010221e-10, -2.50507602534068634195e-08,
                             2.75573137070700676789e-06, -1.98412698298579493134e-04,
                             8.33333333332248946124e-03, -1.66666666666666324348e-01);
  const Doubles even = series(s, -1.13596475577881948265e-11, 2.08757232129817482790e-09,
                              -2.75573143513906633035e-07, 2.48015872894767294178e-05,
                              -1.38888888888741095749e-03, 4.16666666666666019037e-02);
  const Doubles sine = r + mad(s * r, odd, low);
  const Doubles whole = mad(s, -0.5, 1.0);
  const Doubles lost = mad(s, -0.5, 1.0 - whole);
  const Doubles cosine = whole + mad(s * s, even, mad(-r, low, lost));
  const Longs turns = raw(rounder) + quarters;
  const Doubles y = (turns & 1) != 0 ? cosine : sine;
  return from_raw<Doubles>(raw(y) ^ ((turns & 2) << 62));
}
FW_FN bool any_far(Doubles x) {
  constexpr int kBelow = 1, kAbove = 14;
  const Doubles a = magnitude_of(x), far = all<Doubles>(kFarTurn);
  const auto above = __builtin_ia32_cmppd512_mask(a, far, kAbove, -1, kAsRounded);
  return __builtin_ia32_cmppd512_mask(a, all<Doubles>(kInf64), kBelow, above, kAsRounded) != 0;
}
FW_FN Doubles sin(Doubles x) {
  Doubles y = near_sine(magnitude_of(x), 0);
  y = from_raw<Doubles>(raw(y) ^ sign_of(x));
  if (__builtin_expect(any_far(x), 0)) {
    for (int v = 0; v < 8; ++v) y[v] = turn_far(x[v]) ? ::sin(x[v]) : y[v];
  }
  return y;
}
FW_FN Doubles cos(Doubles x) {
  Doubles y = near_sine(x, 1);
  if (__builtin_expect(any_far(x), 0)) {
    for (int v = 0; v < 8; ++v) y[v] = turn_far(x[v]) ? ::cos(x[v]) : y[v];
  }
  return y;
}
FW_LANES_OF(sin, double, Doubles)
FW_LANES_OF(cos, double, Doubles)
#else
FW_TURNING(sin, double, sin)
FW_TURNING(cos, double, cos)
#define FW_TURNING_RUN(NAME)                                                       \
  template <bool kHere = false>                                                    \
  FW_FN void NAME##_run(const double* from, double* to, int n) {                   \
    int32_t far = 0;                                                               \
    _Pragma("GCC ivdep") for (int v = 0; v < n; ++v) far |= turn_far(from[v]);     \
    if (far != 0) {                                                                \
      for (int v = 0; v < n; ++v) to[v] = NAME(from[v]);                           \
      return;                                                                      \
    }                                                                              \
    _Pragma("GCC ivdep") for (int v = 0; v < n; ++v) to[v] = NAME(Near{}, from[v]); \
  }
FW_TURNING_RUN(sin)
FW_TURNING_RUN(cos)
#undef FW_TURNING_RUN
#endif
#undef FW_TURNING

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
  const float p =
      horner(s, 0.001488691894337535f, -0.00914462935179472f, 0.026305001229047775f,
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
             0.058573396761385246, -0.06664417824186955, 0.07692176510795928,
             -0.09090904289128517, 0.11111111008107874, -0.14285714284577217, 0.1999999999999509,
             -0.3333333333333333);
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
  t = (least == most) & (most != T(0)) ? T(1) : t;  // two infinities too
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

// Scaled by a power of two where squares would leave the type's range.
template <class T>
FW_FN T host_hypot(T x, T y, T edge, T factor) {
  const T a = abs(x), b = abs(y);
  const T most = a > b ? a : b;
  T by = most > edge ? T(1) / factor : T(1), back = most > edge ? factor : T(1);
  by = most < T(1) / edge ? factor : by;
  back = most < T(1) / edge ? T(1) / factor : back;
  const T p = a * by, q = b * by;
  const T root = sqrt(mad(p, p, q * q)) * back;
  constexpr T kEnd = std::numeric_limits<T>::infinity();
  return (a == kEnd) | (b == kEnd) ? kEnd : root;
}
FW_FN float hypot(float x, float y) { return host_hypot(x, y, 0x1p40f, 0x1p100f); }
FW_FN double hypot(double x, double y) { return host_hypot(x, y, 0x1p400, 0x1p700); }
#endif  // __CUDACC__

#undef FW_LIBM1
#undef FW_LIBM2
}  // namespace fw
