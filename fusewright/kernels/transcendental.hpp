// Exponentials, logarithms and what is made of them. nvcc takes CUDA's accurate functions; on the
// host all is written without branches or calls, so that g++ turns a loop over lanes into vector
// code (a libm call per lane is 5 to 20 times slower). The polynomials are Chebyshev fits of our
// own; tests/test_optable.py holds their errors.
#pragma once

#include "exponential.hpp"

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

// `end` is the first argument whose power is no finite number: infinity and NaN come of x alone.
template <class T>
FW_FN T exp(T x, T least, T end) {
  const Reduced<T> b = reduced(cut_below(x, least));
  const T y = times_power(small_exp(b.r), b.rounder);
  return x < end ? y : x * std::numeric_limits<T>::infinity();
}
FW_FN float exp(float x) { return exp(x, -105.0f, 0x1.62e430p+6f); }
FW_FN double exp(double x) { return exp(x, -746.0, 0x1.62e42fefa39f0p+9); }

FW_FN float exp2(float x) {
  const float b = cut_below(x, -151.0f);
  const float rounder = b + kRounder;
  const float y = horner(b - (rounder - kRounder), 0.0001532892056275159f, 0.0013390971580520272f,
                         0.009618500247597694f, 0.05550359562039375f, 0.24022647738456726f,
                         0.6931471824645996f, 1.0f);
  return x < 128.0f ? times_power(y, rounder) : x * kInf;
}
FW_FN double exp2(double x) {
  const double b = cut_below(x, -1077.0);
  const double rounder = b + kRounder64;
  const double y = small_exp((b - (rounder - kRounder64)) * 0.69314718055994531);
  return x < 1024.0 ? times_power(y, rounder) : x * kInf64;
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

// The mantissa lies in [sqrt(1/2), sqrt(2)); the exponent comes as 2^23 times itself, which saves a
// shift: the factor goes into the constants.
constexpr float kStep = 0x1p23f;
FW_FN Split<float> split(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float normal = tiny ? x * kStep : x;
  const int32_t raw = bits<int32_t>(normal);
  const int32_t e = (raw - 0x3f3504f3) & static_cast<int32_t>(0xff800000u);
  // The same test in other words: g++ would follow `tiny` and compute both arms of all between.
  const bool was_tiny = bits<int32_t>(x) < 0x00800000;
  const float exponent = static_cast<float>(e) - (was_tiny ? 23.0f * kStep : 0.0f);
  return {bits<float>(raw - e) - 1.0f, exponent};
}
FW_FN Split<double> split(double x) {
  const bool tiny = x < 2.2250738585072014e-308;
  const double normal = tiny ? x * 0x1p54 : x;
  const int64_t raw = bits<int64_t>(normal);
  const int64_t from = raw - 0x3fe6a09e667f3bcd;
  const int64_t e = from & static_cast<int64_t>(0xfff0000000000000u);
  // The exponent, 2048 more, as the low bits of 2^52: not every machine converts 64-bit integers.
  const uint64_t biased = (static_cast<uint64_t>(from) + 0x8000000000000000u) >> 52;
  const bool was_tiny = bits<int64_t>(x) < 0x0010000000000000;
  const double exponent = bits<double>(biased | 0x4330000000000000u) - (0x1p52 + 2048.0);
  return {bits<double>(raw - e) - 1.0, exponent - (was_tiny ? 54.0 : 0.0)};
}

// (log(1 + f) - f) / f^2 for f in [sqrt(1/2) - 1, sqrt(2) - 1]; the errors of this fit and of those
// for other bases below are 2^-27.7 of the logarithm.
FW_FN float log_series(float f) {
  return horner(f, -0.07622822374105453f, 0.12908481061458588f, -0.13244691491127014f,
                0.14181220531463623f, -0.16608762741088867f, 0.20002000033855438f,
                -0.2500160038471222f, 0.33333325386047363f, -0.49999988079071045f);
}
// log(1 + f) - f by the series of atanh(f / (2 + f)), as in fdlibm's log.
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
  const float f = s.mantissa_less_one;
  const float low = mad(f * f, log_series(f), s.exponent * (kLn2Low / kStep));
  return log_corners(x, mad(s.exponent, kLn2High / kStep, low + f));
}
FW_FN double log(double x) {
  const Split<double> s = split(x);
  const double low = mad(s.exponent, kLn2Low64, log_rest(s.mantissa_less_one));
  return log_corners(x, mad(s.exponent, kLn2High64, low + s.mantissa_less_one));
}

FW_FN float log2(float x) {
  const Split<float> s = split(x);
  const float f = s.mantissa_less_one;
  const float p = horner(f, -0.11075079441070557f, 0.1869446039199829f, -0.19113478064537048f,
                         0.20448288321495056f, -0.23959168791770935f, 0.288572758436203f,
                         -0.36069807410240173f, 0.4808981716632843f, -0.7213473320007324f);
  const float low = mad(f * f, p, f * 1.92596299e-8f);
  return log_corners(x, mad(s.exponent, 1.0f / kStep, mad(f, 1.44269502f, low)));
}
FW_FN float log10(float x) {
  const Split<float> s = split(x);
  const float f = s.mantissa_less_one;
  const float p = horner(f, -0.033212337642908096f, 0.05615761876106262f, -0.057525914162397385f,
                         0.06157222017645836f, -0.07212799787521362f, 0.08686839044094086f,
                         -0.10858075320720673f, 0.14476478099822998f, -0.21714718639850616f);
  const float tail = mad(f, -1.01030729e-8f, s.exponent * (4.60503907e-6f / kStep));
  const float low = mad(f, 0.43429449f, mad(f * f, p, tail));
  return log_corners(x, mad(s.exponent, 0.301025391f / kStep, low));
}

// log(x) / log(base), with 1/log(base) in two parts.
FW_FN double log_in(double x, double high, double low, double whole_high, double whole_low) {
  const Split<double> s = split(x);
  const double f = s.mantissa_less_one;
  const double tail = mad(f, low, mad(log_rest(f), high, s.exponent * whole_low));
  return log_corners(x, mad(s.exponent, whole_high, mad(f, high, tail)));
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
  const int32_t e = (bits<int32_t>(u) - 0x3f3504f3) & static_cast<int32_t>(0xff800000u);
  // 2^-k * (1 + x) - 1 with one rounding; the power comes as 8 * 2^-k, since k may be 128.
  const float power = bits<float>(0x41000000 - e) * 0.125f;
  const float f = mad(x, power, power - 1.0f);
  const float exponent = static_cast<float>(e);
  const float low = mad(f * f, log_series(f), exponent * (kLn2Low / kStep));
  float y = mad(exponent, kLn2High / kStep, low + f);
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

// Beyond 0.8 tanh(a) = 1 - 2 / (e^2a + 1), which loses digits near 0. From 10 on the float is 1, so
// ln2 as one float is near enough: the error of e^2a weighs less the larger it is.
FW_FN float tanh(float x) {
  const float a = abs(x), b = cut_above(a, 10.0f);
  const float s = x * x;
  const float p = horner(s, 0.0015870444476604462f, -0.007414176594465971f, 0.02130652777850628f,
                         -0.0538535974919796f, 0.13332241773605347f, -0.33333298563957214f);
  const float small = mad(p * s, a, a);
  const float rounder = mad(b, 2.885390081777927f, kRounder);
  const float r = mad(rounder - kRounder, -0.34657359f, b);
  const float e = horner(r, 0.08845464885234833f, 0.26779747009277344f, 0.6666921973228455f,
                         1.3333216905593872f, 1.999999761581421f, 2.0f, 1.0f);
  const float large = 1.0f - 2.0f / mad(e, two_to<0>(rounder), 1.0f);
  return copysign(a >= 0.8f ? large : small, x);
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

// x + x * P(x^2 - 9/8) up to 3/2, then a polynomial around the place near 11/4 where erf is all but
// a float. From 4 on the float is 1. NaN, cut away there, comes back by the other arm.
FW_FN float erf(float x) {
  const float a = abs(x);
  const float p =
      horner(mad(x, x, -1.125f), 6.780129524486256e-07f, -5.689178124157479e-06f,
             4.569477459881455e-05f, -0.0003337914531584829f, 0.0021134638227522373f,
             -0.011439234018325806f, 0.05207602307200432f, -0.20022448897361755f,
             -0.1831638216972351f);
  const float large =
      horner(cut_above(a, 4.0f) - 2.7500157356262207f, -4.335629455454182e-06f,
             -3.30090438183106e-06f, 6.097621735534631e-05f, -9.46016371017322e-05f,
             -9.500763553660363e-05f, 0.0006672625313512981f, -0.0016540439100936055f,
             0.0027462360449135303f, -0.003258725628256798f, 0.0027619691099971533f,
             -0.001612057676538825f, 0.0005861314130015671f, 0.9998993873596191f);
  return a >= 1.5f ? copysign(large, x) : mad(p, x, x);
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
#if defined(__CUDACC__)
template <class T>
FW_FN T sigmoid(T x) {
  return T(1) / (T(1) + exp(-x));
}
#else
// 1 / (1 + e^-x), by halves, since e^-x overflows before half of it does.
template <class T>
FW_FN T sigmoid(T x) {
  constexpr bool kSingle = sizeof(T) == 4;
  const T b = cut_above(cut_below(-x, kSingle ? T(-80) : T(-700)), kSingle ? T(89.5) : T(710.2));
  const Reduced<T> h = reduced(b);
  const T y = T(0.5) / mad(small_exp(h.r), two_to<-1>(h.rounder), T(0.5));
  return x == x ? y : x;
}
#endif

#undef FW_LIBM1
}  // namespace fw
