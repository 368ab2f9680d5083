// Sine, cosine and tangent. Beyond kFarAngle they call libm: the reduction would need many more
// digits of pi.
#pragma once

#include "scalar/transcendental.hpp"

namespace fw {

#if defined(__CUDACC__)
FW_LIBM1(sin)
FW_LIBM1(cos)
FW_LIBM1(tan)
#else

constexpr float kFarAngle = 1e5f;
// Infinity and NaN do not count as far: they give NaN either way.
template <class T>
FW_FN bool is_far_angle(T x) {
  return (abs(x) > T(kFarAngle)) & (abs(x) < std::numeric_limits<T>::infinity());
}

#if defined(FW_VECTORS)

// x = quarter * pi/2 + (r + low), |r| <= pi/4.
template <class V>
struct ReducedAngle {
  V r, low;
  BitsOf<V> quarter;
};
FW_FN ReducedAngle<Singles> reduced_angle(Singles x) {
  const Singles rounder = mad(x, 0.63661975f, kRounder);
  const Singles n = rounder - kRounder;
  const Singles first = mad(n, -0x1.921fb6p+0f, x);  // exact; pi/2 is the sum of three floats
  const Singles part = n * 0x1.777a5cp-25f;
  const Singles r = first + part;
  // The rounding errors of the sum and the product: near a zero of the sine, first and part cancel.
  const Singles rest = mad(n, 0x1.ee59dap-50f, mad(n, 0x1.777a5cp-25f, -part));
  return {r, (part - (r - first)) + rest, raw(rounder)};
}
FW_FN ReducedAngle<Doubles> reduced_angle(Doubles x) {
  const Doubles rounder = mad(x, 0.6366197723675814, kRounder64);
  const Doubles n = rounder - kRounder64;
  // pi/2 in parts of 33 bits: the first product is exact.
  const Doubles first = mad(n, -1.57079632673412561417e+00, x);
  const Doubles r = mad(n, -6.07710050630396597660e-11, first);
  const Doubles rest = mad(n, -6.07710050630396597660e-11, first - r);
  return {r, mad(n, -2.02226624879595063154e-21, rest), raw(rounder)};
}

// b where `quarter` is odd, a where it is even.
FW_FN Singles either(Words quarter, Singles a, Singles b) {
  using Signed = int32_t __attribute__((vector_size(kVectorBytes)));
  const auto odd = __builtin_ia32_ptestmd512((Signed)quarter, Signed{} + 1, -1);
  return __builtin_ia32_blendmps_512_mask(a, b, odd);
}
FW_FN Doubles either(Longs quarter, Doubles a, Doubles b) {
  using Signed = long long __attribute__((vector_size(kVectorBytes)));
  const auto odd = __builtin_ia32_ptestmq512((Signed)quarter, Signed{} + 1, -1);
  return __builtin_ia32_blendmpd_512_mask(a, b, odd);
}

// 1 - r^2/2, and what it lacks: its rounding error minus r * low.
template <class V>
struct Flat {
  V first, rest;
};
template <class V>
FW_FN Flat<V> flat(V r, V low, V s) {
  using T = LaneOf<V>;
  const V first = mad(s, T(-0.5), T(1));
  return {first, mad(-r, low, mad(s, T(-0.5), T(1) - first))};
}
// One polynomial; each lane takes the coefficients of sine or of cosine.
FW_FN Singles sine_of(const ReducedAngle<Singles>& t, Words quarter) {
  const auto pick = [&](float sine, float cosine) {
    return either(quarter, all<Singles>(sine), all<Singles>(cosine));
  };
  const Singles s = t.r * t.r;
  const Flat<Singles> top = flat(t.r, t.low, s);
  const Singles p = mad(mad(pick(-0.00019518285989761353f, 2.4432563805021346e-05f), s,
                            pick(0.008332189172506332f, -0.0013887310633435845f)),
                        s, pick(-0.16666655242443085f, 0.04166664555668831f));
  return either(quarter, t.r, top.first) +
         mad(s * either(quarter, t.r, s), p, either(quarter, t.low, top.rest));
}
// The coefficients of fdlibm's kernels.
struct Circle {
  Doubles sine, cosine;
};
FW_FN Circle circle(const ReducedAngle<Doubles>& t) {
  const Doubles s = t.r * t.r;
  const Doubles odd =
      series(s, 1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06,
             -1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01);
  const Doubles even = series(s, -1.13596475577881948265e-11, 2.08757232129817482790e-09,
                              -2.75573143513906633035e-07, 2.48015872894767294178e-05,
                              -1.38888888888741095749e-03, 4.16666666666666019037e-02);
  const Flat<Doubles> top = flat(t.r, t.low, s);
  return {t.r + mad(s * t.r, odd, t.low), top.first + mad(s * s, even, top.rest)};
}
FW_FN Doubles sine_of(const ReducedAngle<Doubles>& t, Longs quarter) {
  const Circle c = circle(t);
  return either(quarter, c.sine, c.cosine);
}
// A polynomial y, or -1 / y. The quotient is corrected by its own rounding error and that of y.
FW_FN Singles tangent_of(const ReducedAngle<Singles>& t) {
  const Singles s = t.r * t.r;
  const Singles p = chain(s, 0.004370370879769325f, 0.00010291965736541897f, 0.01082383282482624f,
                          0.02128753811120987f, 0.054058682173490524f, 0.13332676887512207f,
                          0.33333349227905273f);
  const Singles rest = mad(s * t.r, p, t.low);
  const Singles y = t.r + rest;
  const Singles low = (t.r - y) + rest;
  const Singles inverse = -1.0f / y;
  const Singles error = mad(inverse, y, all<Singles>(1.0f));
  return either(t.quarter, y, mad(inverse, mad(inverse, low, error), inverse));
}
FW_FN Doubles tangent_of(const ReducedAngle<Doubles>& t) {
  const Circle c = circle(t);
  return either(t.quarter, c.sine, c.cosine) / either(t.quarter, c.cosine, -c.sine);
}

constexpr int kAbove = 14;
FW_FN bool any_far(Singles a) {
  return __builtin_ia32_cmpps512_mask(a, all<Singles>(kFarAngle), kAbove, -1, kAsRounded) != 0;
}
FW_FN bool any_far(Doubles a) {
  return __builtin_ia32_cmppd512_mask(a, all<Doubles>(kFarAngle), kAbove, -1, kAsRounded) != 0;
}
// Arguments by value, and no inlining. Inlined, it would send every vector through memory, and no
// constant could stay in a register (tan of 1 M floats, one thread: 1.07 of eager's time instead of
// 0.95).
template <class V, class Libm>
__attribute__((noinline, cold)) V with_far(V x, V y, Libm libm) {
  constexpr int kLanes = sizeof(V) / sizeof(LaneOf<V>);
  for (int v = 0; v < kLanes; ++v) y[v] = is_far_angle(x[v]) ? libm(x[v]) : y[v];
  return y;
}
// y with the sign of x, which changes with every second quarter.
template <class V>
FW_FN V signed_as(V y, V x, BitsOf<V> quarter) {
  constexpr int kUp = sizeof(LaneOf<V>) * 8 - 2;
  return from_raw<V>(raw(y) ^ sign_of(from_raw<V>(raw(x) ^ (quarter << kUp))));
}
#define FW_CIRCULAR(LANE, VECTOR, SIN, COS, TAN)                                   \
  FW_FN VECTOR sin(VECTOR x) {                                                     \
    const VECTOR a = magnitude_of(x);                                              \
    const ReducedAngle<VECTOR> t = reduced_angle(a);                               \
    const VECTOR y = signed_as(sine_of(t, t.quarter), x, t.quarter);               \
    if (__builtin_expect(!any_far(a), 1)) return y;                                \
    return with_far(x, y, [](LANE far) { return ::SIN(far); });                    \
  }                                                                                \
  FW_FN VECTOR cos(VECTOR x) {                                                     \
    const VECTOR a = magnitude_of(x);                                              \
    const ReducedAngle<VECTOR> t = reduced_angle(a);                               \
    const VECTOR y = signed_as(sine_of(t, t.quarter + 1), a, t.quarter + 1);       \
    if (__builtin_expect(!any_far(a), 1)) return y;                                \
    return with_far(x, y, [](LANE far) { return ::COS(far); });                    \
  }                                                                                \
  FW_FN VECTOR tan(VECTOR x) {                                                     \
    const VECTOR a = magnitude_of(x);                                              \
    const VECTOR y = signed_as(tangent_of(reduced_angle(a)), x, BitsOf<VECTOR>{}); \
    if (__builtin_expect(!any_far(a), 1)) return y;                                \
    return with_far(x, y, [](LANE far) { return ::TAN(far); });                    \
  }                                                                                \
  FW_LANES_OF(sin, LANE, VECTOR)                                                   \
  FW_LANES_OF(cos, LANE, VECTOR)                                                   \
  FW_LANES_OF(tan, LANE, VECTOR)
FW_CIRCULAR(float, Singles, sinf, cosf, tanf)
FW_CIRCULAR(double, Doubles, sin, cos, tan)
#undef FW_CIRCULAR

#else

// x = quarter * pi/2 + (r + low), |r| <= pi/4.
template <class T, class Bits>
struct ReducedAngle {
  T r, low;
  Bits quarter;
};

FW_FN ReducedAngle<double, uint64_t> reduced_angle(double x) {
  const double rounder = mad(x, 0.6366197723675814, kRounder64);
  const double n = rounder - kRounder64;
  // pi/2 in parts of 33 bits: the products are exact.
  const double first = x - n * 1.57079632673412561417e+00;
  const double part = n * 6.07710050630396597660e-11;
  const double r = first - part;
  const double low = ((first - r) - part) - n * 2.02226624879595063154e-21;
  return {r, low, bits<uint64_t>(rounder)};
}
FW_FN ReducedAngle<float, uint32_t> reduced_angle(float x) {
#if defined(FW_FMA)
  const float rounder = mad(x, 0.63661975f, kRounder);
  const float n = rounder - kRounder;
  const float first = mad(n, -0x1.921fb6p+0f, x);  // exact; pi/2 is the sum of three floats
  const float part = n * 0x1.777a5cp-25f;
  const float r = first + part;
  // The rounding errors of the sum and the product: near a zero of the sine, first and part cancel.
  const float rest = mad(n, 0x1.ee59dap-50f, mad(n, 0x1.777a5cp-25f, -part));
  return {r, (part - (r - first)) + rest, bits<uint32_t>(rounder)};
#else
  const ReducedAngle<double, uint64_t> t = reduced_angle(static_cast<double>(x));
  const float r = static_cast<float>(t.r);
  return {r, static_cast<float>(t.r - r), static_cast<uint32_t>(t.quarter)};
#endif
}

struct Circle {
  double sine, cosine;
};
// 1 - r^2/2 + r^4 * even - r * low, corrected by the rounding error of 1 - r^2/2.
FW_FN double cosine_of(double r, double low, double even) {
  const double s = r * r;
  const double half = 0.5 * s;
  const double first = 1.0 - half;
  return first + (((1.0 - first) - half) + mad(s * s, even, -(r * low)));
}
// b where all bits of the mask are set, a where none is. For a conditional, g++ would compute both
// results.
FW_FN float either(uint32_t mask, float a, float b) {
  return bits<float>(bits<uint32_t>(a) ^ (mask & (bits<uint32_t>(a) ^ bits<uint32_t>(b))));
}
// The sine of an angle >= 0 after reduction: one polynomial, with the coefficients of sine or
// cosine.
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
  const double odd =
      horner(s, 1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06,
             -1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01);
  const double even = horner(s, -1.13596475577881948265e-11, 2.08757232129817482790e-09,
                             -2.75573143513906633035e-07, 2.48015872894767294178e-05,
                             -1.38888888888741095749e-03, 4.16666666666666019037e-02);
  return {r + mad(s * r, odd, low), cosine_of(r, low, even)};
}

// The sine of the angle before reduction: sine, cosine, -sine, -cosine in quarters 0 to 3.
FW_FN double in_quarter(double sine, double cosine, uint64_t quarter) {
  const double y = (quarter & 1u) != 0 ? cosine : sine;
  return bits<double>(bits<uint64_t>(y) ^ ((quarter & 2u) << 62));
}

FW_FN float sin(Near, float x) {
  const ReducedAngle<float, uint32_t> t = reduced_angle(abs(x));
  return with_sign_of(sine_of(t.r, t.low, t.quarter), x);
}
FW_FN float cos(Near, float x) {
  const ReducedAngle<float, uint32_t> t = reduced_angle(abs(x));
  return sine_of(t.r, t.low, t.quarter + 1u);
}
// A polynomial y, or -1 / y. The quotient is corrected by its own rounding error and that of y.
FW_FN float tan(Near, float x) {
  const ReducedAngle<float, uint32_t> t = reduced_angle(abs(x));
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
  const auto t = reduced_angle(x);
  const Circle c = circle(t.r, t.low);
  const double y = in_quarter(c.sine, c.cosine, t.quarter);
  return x == 0.0 ? x : y;
}
FW_FN double cos(Near, double x) {
  const auto t = reduced_angle(x);
  const Circle c = circle(t.r, t.low);
  return in_quarter(c.sine, c.cosine, t.quarter + 1u);
}
FW_FN double tan(Near, double x) {
  const auto t = reduced_angle(x);
  const Circle c = circle(t.r, t.low);
  const bool odd = (t.quarter & 1u) != 0;
  const double y = (odd ? c.cosine : c.sine) / (odd ? -c.sine : c.cosine);
  return x == 0.0 ? x : y;
}

#define FW_CIRCULAR(NAME, TYPE, LIBM) \
  FW_FN TYPE NAME(TYPE x) { return is_far_angle(x) ? ::LIBM(x) : NAME(Near{}, x); }
FW_CIRCULAR(sin, float, sinf)
FW_CIRCULAR(cos, float, cosf)
FW_CIRCULAR(tan, float, tanf)
FW_CIRCULAR(sin, double, sin)
FW_CIRCULAR(cos, double, cos)
FW_CIRCULAR(tan, double, tan)
#undef FW_CIRCULAR
#define FW_CIRCULAR_RUN(NAME)                                                       \
  template <bool kHere = false, class T>                                            \
  FW_FN void NAME##_run(const T* from, T* to, int n) {                              \
    int32_t far = 0;                                                                \
    _Pragma("GCC ivdep") for (int v = 0; v < n; ++v) far |= is_far_angle(from[v]);  \
    if (far != 0) {                                                                 \
      for (int v = 0; v < n; ++v) to[v] = NAME(from[v]);                            \
      return;                                                                       \
    }                                                                               \
    _Pragma("GCC ivdep") for (int v = 0; v < n; ++v) to[v] = NAME(Near{}, from[v]); \
  }
FW_CIRCULAR_RUN(sin)
FW_CIRCULAR_RUN(cos)
FW_CIRCULAR_RUN(tan)
#undef FW_CIRCULAR_RUN
#endif  // FW_VECTORS
#endif  // __CUDACC__

}  // namespace fw
