// Exponentials, logarithms and what is made of them. nvcc takes CUDA's accurate functions; on the
// host all is written without branches or calls, so that g++ turns a loop over lanes into vector
// code (a libm call per lane is 5 to 20 times slower). The polynomials are Chebyshev fits of our
// own; tests/test_optable.py holds their errors.
#pragma once

#include "math.hpp"

namespace fw {

#define FW_LIBM1(NAME)                                    \
  FW_FN float NAME(float x) { return ::NAME##f(x); }      \
  FW_FN double NAME(double x) { return ::NAME(x); }
FW_LIBM1(sqrt)

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

FW_FN float mad(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;  // std::fma without the instruction is a slow call
#endif
}
FW_FN double mad(double a, double b, double c) {
#if defined(__FMA__)
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

// A polynomial by Horner's rule, the highest coefficient first.
template <class T>
FW_FN T horner(T, T p) {
  return p;
}
template <class T, class... C>
FW_FN T horner(T x, T p, T c, C... rest) {
  return horner(x, mad(p, x, c), rest...);
}

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kInf64 = std::numeric_limits<double>::infinity();
constexpr double kNan64 = std::numeric_limits<double>::quiet_NaN();
constexpr float kLn2High = 0x1.62e4p-1f;  // few bits: k * kLn2High is exact
constexpr float kLn2Low = 0x1.7f7d1cp-20f;
constexpr double kLn2High64 = 6.93147180369123816490e-01;
constexpr double kLn2Low64 = 1.90821492927058770002e-10;
// Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits, NaN or not.
constexpr float kRounder = 12582912.0f;
constexpr double kRounder64 = 6755399441055744.0;

// e^x = 2^k * (1 + rest); k lies in the low bits of `rounder`.
template <class T>
struct Power {
  T rest, rounder;
};

// 2^(k + kMore); the sum must be a normal number's exponent.
template <int kMore>
FW_FN float two_to(float rounder) {
  return bits<float>((bits<uint32_t>(rounder) << 23) + (static_cast<uint32_t>(127 + kMore) << 23));
}
template <int kMore>
FW_FN double two_to(double rounder) {
  return bits<double>((bits<uint64_t>(rounder) << 52) +
                      (static_cast<uint64_t>(1023 + kMore) << 52));
}

// e^r - 1 for |r| <= ln2/2; the fits' errors are 2^-28 and 2^-59.
FW_FN float small_expm1(float r) {
  const float p = horner(r, 0.0013950476422905922f, 0.008368882350623608f, 0.04166620597243309f,
                         0.166665181517601f, 0.5f);
  return mad(p, r * r, r);
}
FW_FN double small_expm1(double r) {
  const double p =
      horner(r, 2.09147553258932e-09, 2.5105312729622103e-08, 2.755727347871858e-07,
             2.755725517000089e-06, 2.480158732567746e-05, 0.0001984126987500228,
             0.0013888888888883711, 0.008333333333326084, 0.04166666666666667, 0.1666666666666667,
             0.5);
  return mad(p, r * r, r);
}

FW_FN Power<float> power(float x) {
  const float rounder = mad(x, 1.4426950408889634f, kRounder);
  const float n = rounder - kRounder;
  return {small_expm1(mad(n, -kLn2Low, mad(n, -kLn2High, x))), rounder};
}
FW_FN Power<double> power(double x) {
  const double rounder = mad(x, 1.4426950408889634, kRounder64);
  const double n = rounder - kRounder64;
  return {small_expm1(mad(n, -kLn2Low64, mad(n, -kLn2High64, x))), rounder};
}

// 2^k * (1 + rest) in two steps, so that neither overflow nor denormals come early.
template <class T>
FW_FN T scaled(T rest, T rounder, bool small) {
  constexpr int kMore = sizeof(T) == 4 ? 64 : 512;
  constexpr T kBack = sizeof(T) == 4 ? T(0x1p64) : T(0x1p512);
  const T step = small ? two_to<kMore>(rounder) : two_to<-kMore>(rounder);
  return (rest + T(1)) * step * (small ? T(1) / kBack : kBack);
}

// e^x for x that neither overflow nor leave normal numbers.
template <class T>
FW_FN T plain_exp(T x) {
  const Power<T> p = power(x);
  return (p.rest + T(1)) * two_to<0>(p.rounder);
}

FW_FN float exp(float x) {
  const Power<float> p = power(x);
  float y = scaled(p.rest, p.rounder, x < 0.0f);
  y = x > 88.8f ? kInf : y;
  return x < -104.0f ? 0.0f : y;
}
FW_FN double exp(double x) {
  const Power<double> p = power(x);
  double y = scaled(p.rest, p.rounder, x < 0.0);
  y = x > 709.8 ? kInf64 : y;
  return x < -745.2 ? 0.0 : y;
}

FW_FN float exp2(float x) {
  const float rounder = x + kRounder;
  const float f = x - (rounder - kRounder);
  const float r = f * 0.69314718246459961f;
  const float low = mad(f, -1.9046542e-9f, mad(f, 0.69314718246459961f, -r));
  float y = scaled(small_expm1(r) + low, rounder, x < 0.0f);
  y = x > 128.5f ? kInf : y;
  return x < -151.0f ? 0.0f : y;
}
FW_FN double exp2(double x) {
  const double rounder = x + kRounder64;
  const double f = x - (rounder - kRounder64);
  double y = scaled(small_expm1(f * 0.69314718055994531), rounder, x < 0.0);
  y = x > 1025.0 ? kInf64 : y;
  return x < -1076.0 ? 0.0 : y;
}

// Half of the power keeps the last k finite until the last step.
template <class T>
FW_FN T plain_expm1(T x) {
  const Power<T> p = power(x);
  const T half = two_to<-1>(p.rounder);
  return mad(p.rest, half, half - T(0.5)) * T(2);
}
FW_FN float expm1(float x) {
  float y = plain_expm1(x);
  y = x > 88.8f ? kInf : y;
  y = x < -18.0f ? -1.0f : y;
  return x == 0.0f ? x : y;
}
FW_FN double expm1(double x) {
  double y = plain_expm1(x);
  y = x > 709.8 ? kInf64 : y;
  y = x < -40.0 ? -1.0 : y;
  return x == 0.0 ? x : y;
}

// x = 2^exponent * (1 + mantissa_less_one).
template <class T>
struct Split {
  T mantissa_less_one, exponent;
};

// The mantissa lies in [2/3, 4/3).
FW_FN Split<float> split(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const int32_t raw = bits<int32_t>(x * (tiny ? 0x1p23f : 1.0f));
  const int32_t e = (raw - 0x3f2aaaab) & static_cast<int32_t>(0xff800000u);
  const float exponent = static_cast<float>(e >> 23) - (tiny ? 23.0f : 0.0f);
  return {bits<float>(raw - e) - 1.0f, exponent};
}
// The mantissa lies in [sqrt(1/2), sqrt(2)).
FW_FN Split<double> split(double x) {
  const bool tiny = x < 2.2250738585072014e-308;
  const int64_t raw = bits<int64_t>(x * (tiny ? 0x1p54 : 1.0));
  const int64_t e = (raw - 0x3fe6a09e667f3bcd) & static_cast<int64_t>(0xfff0000000000000u);
  const double exponent = static_cast<double>(static_cast<int32_t>(e >> 52));
  return {bits<double>(raw - e) - 1.0, exponent - (tiny ? 54.0 : 0.0)};
}

// log(1 + f) - f for f in [-1/3, 1/3]; the fit's relative error is 2^-27.7.
FW_FN float log_rest(float f) {
  const float p =
      horner(f, -0.12891601026058197f, 0.13984467089176178f, -0.12184277921915054f,
             0.14005862176418304f, -0.16680486500263214f, 0.20010405778884888f,
             -0.24999797344207764f, 0.3333321511745453f, -0.5f);
  return p * (f * f);
}
// By the series of atanh(f / (2 + f)), as in fdlibm's log.
FW_FN double log_rest(double f) {
  const double s = f / (2.0 + f);
  const double z = s * s;
  const double half = 0.5 * f * f;
  const double r = z * horner(z, 1.479819860511658591e-01, 1.531383769920937332e-01,
                              1.818357216161805012e-01, 2.222219843214978396e-01,
                              2.857142874366239149e-01, 3.999999999940941908e-01,
                              6.666666666666735130e-01);
  return mad(s, half + r, -half);
}

// What every logarithm says of 0, negatives, infinity and NaN.
template <class T>
FW_FN T log_corners(T x, T y) {
  constexpr T kEnd = std::numeric_limits<T>::infinity();
  y = x < kEnd ? y : x;
  const T below = x == T(0) ? -kEnd : std::numeric_limits<T>::quiet_NaN();
  return x > T(0) ? y : below;
}

FW_FN float log(float x) {
  const Split<float> s = split(x);
  const float low = mad(s.exponent, kLn2Low, log_rest(s.mantissa_less_one));
  return log_corners(x, mad(s.exponent, kLn2High, low + s.mantissa_less_one));
}
FW_FN double log(double x) {
  const Split<double> s = split(x);
  const double low = mad(s.exponent, kLn2Low64, log_rest(s.mantissa_less_one));
  return log_corners(x, mad(s.exponent, kLn2High64, low + s.mantissa_less_one));
}

// log(x) / log(base), with 1/log(base) in two parts.
template <class T>
FW_FN T log_in(T x, T high, T low, T whole_high, T whole_low) {
  const Split<T> s = split(x);
  const T rest = log_rest(s.mantissa_less_one);
  const T f = s.mantissa_less_one;
  const T tail = mad(f, low, mad(rest, high, s.exponent * whole_low));
  return log_corners(x, mad(s.exponent, whole_high, mad(f, high, tail)));
}
FW_FN float log2(float x) { return log_in(x, 1.44269502f, 1.92596299e-8f, 1.0f, 0.0f); }
FW_FN float log10(float x) {
  return log_in(x, 0.43429449f, -1.01030729e-8f, 0.301025391f, 4.60503907e-6f);
}
FW_FN double log2(double x) {
  return log_in(x, 1.4426950408889634, 2.0355273740931033e-17, 1.0, 0.0);
}
FW_FN double log10(double x) {
  return log_in(x, 0.4342944819032518, 1.098319650216765e-17, 3.01029995663611771306e-01,
                3.69423907715893078616e-13);
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
  y = x < kInf ? y : x;
  y = x > -1.0f ? y : x == -1.0f ? -kInf : kNan;
  return x == 0.0f ? x : y;
}
FW_FN double log1p(double x) {
  const double u = 1.0 + x;
  const int64_t e =
      (bits<int64_t>(u) - 0x3fe6a09e667f3bcd) & static_cast<int64_t>(0xfff0000000000000u);
  const double power = bits<double>(0x4020000000000000 - e) * 0.125;
  const double f = mad(x, power, power - 1.0);
  const double exponent = static_cast<double>(static_cast<int32_t>(e >> 52));
  const double low = mad(exponent, kLn2Low64, log_rest(f));
  double y = mad(exponent, kLn2High64, low + f);
  y = x < kInf64 ? y : x;
  y = x > -1.0 ? y : x == -1.0 ? -kInf64 : kNan64;
  return x == 0.0 ? x : y;
}

// 1 - 2 / (e^2a + 1), which loses digits near 0.
template <class T>
FW_FN T large_tanh(T a) {
  return T(1) - T(2) / (plain_exp(T(2) * a) + T(1));
}
FW_FN float tanh(float x) {
  const float a = abs(x);
  const float s = x * x;
  const float p = horner(s, -0.00590586056932807f, 0.020805377513170242f, -0.05378668010234833f,
                         0.13331958651542664f, -0.33333298563957214f);
  const float small = mad(p * s, a, a);
  const float y = a < 0.6f ? small : large_tanh(a);
  return copysign(a > 10.0f ? 1.0f : y, x);
}
// (e^2a - 1) / (e^2a + 1) below 1/2: a polynomial would be long.
FW_FN double tanh(double x) {
  const double a = abs(x);
  const Power<double> p = power(2.0 * a);
  const double scale = two_to<0>(p.rounder);
  const double less_one = mad(p.rest, scale, scale - 1.0);
  const bool large = a > 0.5;
  const double ratio = (large ? -2.0 : less_one) / (less_one + 2.0);
  return copysign(a > 20.0 ? 1.0 : large ? 1.0 + ratio : ratio, x);
}

// erf(x) for |x| <= 0.85.
FW_FN float small_erf(float x) {
  return mad(horner(x * x, -0.0006332609918899834f, 0.0050542703829705715f,
                    -0.026804570108652115f, 0.11282770335674286f, -0.3761257529258728f,
                    0.12837916612625122f),
             x, x);
}
// Beyond, erf = 1 - 2^t with t a polynomial, whose error 1 hides; beyond 4 the float is 1.
FW_FN float erf(float x) {
  const float a = abs(x);
  const float b = a > 4.0f ? 4.0f : a;
  const float t =
      horner(b, 0.0002921868290286511f, -0.004482726100832224f, 0.03243035823106766f,
             -0.15068675577640533f, -0.9184219837188721f, -1.6273823976516724f,
             -0.00016547054110560566f);
  const float rounder = t + kRounder;
  const float f = t - (rounder - kRounder);
  const float p = horner(f, 0.0013276466634124517f, 0.009675540961325169f, 0.05550713464617729f,
                         0.24022120237350464f, 0.6931469440460205f, 1.0000001192092896f);
  const float large = copysign(mad(-p, two_to<0>(rounder), 1.0f), x);
  return a < 0.85f ? small_erf(x) : large;
}
FW_FN double erf(double x) {
  const double a = abs(x);
  const double small =
      mad(horner(x * x, 5.957176147748911e-11, -1.1372848856791674e-09, 1.4659775274047436e-08,
                 -1.6350312701054695e-07, 1.6461000484121368e-06, -1.4925595266831182e-05,
                 0.0001205533111164271, -0.000854832698083379, 0.0052239776248180145,
                 -0.026866170645076792, 0.11283791670954879, -0.3761263890318375,
                 0.1283791670955126),
          x, x);
  const double b = (a > 6.0 ? 6.0 : a) - 3.5;
  const double g =
      horner(b, 5.038175090820216e-18, -3.169997093543526e-17, -1.8647709480120564e-17,
             4.137506353844001e-16, -5.507869202468303e-16, 5.252994671634073e-15,
             -6.703248087615219e-14, 4.1568031971878565e-13, -2.0554075993038623e-12,
             9.09456815352739e-12, -3.065185473437961e-11, 2.5027567470717578e-11,
             7.74894938262315e-10, -9.532060947155006e-09, 8.069303240006965e-08,
             -5.856139032767791e-07, 3.889557155325179e-06, -2.4386373823313104e-05,
             0.00014729777489954873, -0.000873687323545211, 0.005225658221939981,
             0.9667530547422176, 7.266099588365191, 14.112437402148174);
  const double large = copysign(1.0 - plain_exp(-g), x);
  return a < 1.0 ? small : large;
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
}  // namespace fw
