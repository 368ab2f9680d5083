// Exponentials, logarithms and what is made of them. nvcc takes CUDA's accurate functions; on the
// host float versions are written without branches or calls, so that g++ turns a loop over lanes
// into vector code (a libm call per lane is 5 to 10 times slower). Doubles call libm.
#pragma once

#include "math.hpp"

namespace fw {

#define FW_LIBM1(NAME)                                    \
  FW_FN float NAME(float x) { return ::NAME##f(x); }      \
  FW_FN double NAME(double x) { return ::NAME(x); }
#define FW_LIBM2(NAME)                                              \
  FW_FN float NAME(float a, float b) { return ::NAME##f(a, b); }    \
  FW_FN double NAME(double a, double b) { return ::NAME(a, b); }
FW_LIBM1(sqrt)
FW_LIBM1(sin)
FW_LIBM1(cos)
FW_LIBM1(tan)
FW_LIBM1(asin)
FW_LIBM1(acos)
FW_LIBM1(atan)
FW_LIBM1(sinh)
FW_LIBM1(cosh)
FW_LIBM1(asinh)
FW_LIBM1(acosh)
FW_LIBM1(atanh)
FW_LIBM1(erfc)
FW_LIBM1(lgamma)
FW_LIBM2(atan2)
FW_LIBM2(hypot)

#if defined(__CUDACC__)
FW_LIBM1(exp)
FW_LIBM1(exp2)
FW_LIBM1(expm1)
FW_LIBM1(log)
FW_LIBM1(log2)
FW_LIBM1(log10)
FW_LIBM1(log1p)
FW_LIBM1(tanh)
FW_LIBM1(erf)
#else
FW_FN double exp(double x) { return ::exp(x); }
FW_FN double exp2(double x) { return ::exp2(x); }
FW_FN double expm1(double x) { return ::expm1(x); }
FW_FN double log(double x) { return ::log(x); }
FW_FN double log2(double x) { return ::log2(x); }
FW_FN double log10(double x) { return ::log10(x); }
FW_FN double log1p(double x) { return ::log1p(x); }
FW_FN double tanh(double x) { return ::tanh(x); }
FW_FN double erf(double x) { return ::erf(x); }

FW_FN float mad(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;  // std::fma without the instruction is a slow call
#endif
}

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLn2High = 0x1.62e4p-1f;  // few bits: k * kLn2High is exact
constexpr float kLn2Low = 0x1.7f7d1cp-20f;
// Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits, NaN or not.
constexpr float kRounder = 12582912.0f;

// For NaN the exponent is garbage, which unsigned arithmetic may be given; the result is NaN still.
FW_FN float power_of_two(int32_t exponent) {
  return bits<float>((static_cast<uint32_t>(exponent) + 127u) << 23);
}

// e^r - 1 - r for |r| <= ln2/2; the fit's error is 2^-28.
FW_FN float exp_rest(float r) {
  float p = mad(0.0013950476422905922f, r, 0.008368882350623608f);
  p = mad(p, r, 0.04166620597243309f);
  p = mad(p, r, 0.166665181517601f);
  p = mad(p, r, 0.5f);
  return p * (r * r);
}

// 2^k * (1 + m): two steps, so that neither overflow nor denormals come early.
FW_FN float scaled(float m, int32_t k) {
  const int32_t half = k >> 1;
  const float step = power_of_two(half);
  return mad(m, step, step) * power_of_two(k - half);
}

FW_FN float exp(float x) {
  float t = x < -104.0f ? -104.0f : x;
  t = t > 89.0f ? 89.0f : t;
  const float rounder = mad(t, 1.4426950408889634f, kRounder);
  const int32_t k = bits<int32_t>(rounder) - 0x4b400000;
  const float n = rounder - kRounder;
  const float r = mad(n, -kLn2Low, mad(n, -kLn2High, t));
  return scaled(exp_rest(r) + r, k);
}

FW_FN float exp2(float x) {
  float t = x < -151.0f ? -151.0f : x;
  t = t > 129.0f ? 129.0f : t;
  const float rounder = t + kRounder;
  const int32_t k = bits<int32_t>(rounder) - 0x4b400000;
  const float f = t - (rounder - kRounder);
  const float r = f * 0.69314718246459961f;
  const float low = mad(f, -1.9046542e-9f, mad(f, 0.69314718246459961f, -r));
  return scaled(exp_rest(r) + low + r, k);
}

FW_FN float expm1(float x) {
  float t = x < -18.0f ? -18.0f : x;
  t = t > 89.0f ? 89.0f : t;
  const float rounder = mad(t, 1.4426950408889634f, kRounder);
  const int32_t k = bits<int32_t>(rounder) - 0x4b400000;
  const float n = rounder - kRounder;
  const float r = mad(n, -kLn2Low, mad(n, -kLn2High, t));
  const float p = exp_rest(r) + r;
  // Half of the power keeps k = 128 finite until the last step.
  const float step = power_of_two(k - 1);
  const float y = mad(p, step, step - 0.5f) * 2.0f;
  return x == 0.0f ? x : y;
}

// log(1 + f) - f for f in [-1/3, 1/3]; the fit's relative error is 2^-27.7.
FW_FN float log_rest(float f) {
  float p = mad(-0.12891601026058197f, f, 0.13984467089176178f);
  p = mad(p, f, -0.12184277921915054f);
  p = mad(p, f, 0.14005862176418304f);
  p = mad(p, f, -0.16680486500263214f);
  p = mad(p, f, 0.20010405778884888f);
  p = mad(p, f, -0.24999797344207764f);
  p = mad(p, f, 0.3333321511745453f);
  p = mad(p, f, -0.5f);
  return p * (f * f);
}

struct Split {
  float mantissa_less_one;
  float exponent;
};

// x = 2^exponent * (1 + mantissa_less_one), the mantissa in [2/3, 4/3).
FW_FN Split split(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const int32_t raw = bits<int32_t>(tiny ? x * 0x1p23f : x);
  const int32_t e = (raw - 0x3f2aaaab) & static_cast<int32_t>(0xff800000u);
  const float exponent = static_cast<float>(e >> 23) - (tiny ? 23.0f : 0.0f);
  return {bits<float>(raw - e) - 1.0f, exponent};
}

// What every logarithm says of 0, negatives, infinity and NaN.
FW_FN float log_corners(float x, float y) {
  y = x == kInf ? kInf : y;
  y = x == 0.0f ? -kInf : y;
  y = x < 0.0f ? kNan : y;
  return x != x ? x : y;
}

FW_FN float log(float x) {
  const Split s = split(x);
  const float low = mad(s.exponent, kLn2Low, log_rest(s.mantissa_less_one));
  return log_corners(x, mad(s.exponent, kLn2High, low + s.mantissa_less_one));
}

// log(x) / log(base), with 1/log(base) in two parts.
FW_FN float log_in(float x, float high, float low, float whole_high, float whole_low) {
  const Split s = split(x);
  const float rest = log_rest(s.mantissa_less_one);
  const float f = s.mantissa_less_one;
  const float tail = mad(f, low, mad(rest, high, s.exponent * whole_low));
  return log_corners(x, mad(s.exponent, whole_high, mad(f, high, tail)));
}
FW_FN float log2(float x) { return log_in(x, 1.44269502f, 1.92596299e-8f, 1.0f, 0.0f); }
FW_FN float log10(float x) {
  return log_in(x, 0.43429449f, -1.01030729e-8f, 0.301025391f, 4.60503907e-6f);
}

FW_FN float log1p(float x) {
  const float u = 1.0f + x;
  const int32_t e = (bits<int32_t>(u) - 0x3f2aaaab) & static_cast<int32_t>(0xff800000u);
  // 2^-k * (1 + x) - 1 with one rounding; the power comes as 8 * 2^-k, since k may be 128.
  const float power = bits<float>(0x41000000 - e) * 0.125f;
  const float f = mad(x, power, power - 1.0f);
  const float exponent = static_cast<float>(e >> 23);
  const float low = mad(exponent, kLn2Low, log_rest(f));
  float y = mad(exponent, kLn2High, low + f);
  y = x == kInf ? kInf : y;
  y = x == -1.0f ? -kInf : y;
  y = x < -1.0f ? kNan : y;
  return (x != x) | (x == 0.0f) ? x : y;
}

FW_FN float tanh(float x) {
  const float a = abs(x);
  const float s = x * x;
  float p = mad(-0.00590586056932807f, s, 0.020805377513170242f);
  p = mad(p, s, -0.05378668010234833f);
  p = mad(p, s, 0.13331958651542664f);
  p = mad(p, s, -0.33333298563957214f);
  const float small = mad(p * s, x, x);
  const float large = 1.0f - 2.0f / (exp(2.0f * a) + 1.0f);
  return copysign(a < 0.6f ? small : large, x);
}

FW_FN float erf(float x) {
  const float a = abs(x);
  const float s = x * x;
  float p = mad(7.889119297033176e-05f, s, -0.0008020841050893068f);
  p = mad(p, s, 0.005189535208046436f);
  p = mad(p, s, -0.026854444295167923f);
  p = mad(p, s, 0.11283600330352783f);
  p = mad(p, s, -0.3761262595653534f);
  p = mad(p, s, 0.1283791065216064f);
  const float small = mad(p, x, x);
  // Beyond 1: erf = 1 - e^-g with g a polynomial; beyond 4 the float is 1.
  const float b = a > 4.0f ? 4.0f : a;
  float g = mad(2.1686850232072175e-05f, b, -0.00044133636401966214f);
  g = mad(g, b, 0.004204561933875084f);
  g = mad(g, b, -0.025208257138729095f);
  g = mad(g, b, 0.10841857641935349f);
  g = mad(g, b, 0.6332198977470398f);
  g = mad(g, b, 1.1295784711837769f);
  g = mad(g, b, -0.0001880402269307524f);
  const float large = copysign(1.0f - exp(-g), x);
  return a < 1.0f ? small : large;
}
#endif  // __CUDACC__

template <class T>
FW_FN T reciprocal(T x) {
  return T(1) / x;
}
template <class T>
FW_FN T rsqrt(T x) {
#if defined(__CUDA_ARCH__)
  return ::rsqrt(x);
#else
  return T(1) / sqrt(x);
#endif
}
template <class T>
FW_FN T sigmoid(T x) {
  return T(1) / (T(1) + exp(-x));
}

#undef FW_LIBM1
#undef FW_LIBM2
}  // namespace fw
