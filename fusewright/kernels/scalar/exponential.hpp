// The basis of the host's math functions: fused multiply-add, polynomials, and e^x split into a
// power of two and a remainder. There are no branches or calls, so g++ vectorises loops over lanes.
// The time of such a loop is proportional to its vector operations (11 us each for 1 M floats,
// measured with 512-bit vectors), so the forms here use few of them.
#pragma once

#include "scalar/operators.hpp"

#if !defined(__CUDACC__)
namespace fw {

FW_FN float mad(float a, float b, float c) {
#if defined(FW_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;  // std::fma without the instruction is a slow call
#endif
}
FW_FN double mad(double a, double b, double c) {
#if defined(FW_FMA)
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
// Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits of the sum.
constexpr float kRounder = 12582912.0f;
constexpr double kRounder64 = 6755399441055744.0;

// e^x = 2^k * (1 + rest); k is in the low bits of `rounder`.
template <class T>
struct Power {
  T rest, rounder;
};

// 2^(k + kMore); k + kMore must be the exponent of a normal number.
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
  const double p = horner(r, 2.09147553258932e-09, 2.5105312729622103e-08, 2.755727347871858e-07,
                          2.755725517000089e-06, 2.480158732567746e-05, 0.0001984126987500228,
                          0.0013888888888883711, 0.008333333333326084, 0.04166666666666667,
                          0.1666666666666667, 0.5);
  return mad(p, r * r, r);
}

// x = k ln2 + r, |r| <= ln2/2.
template <class T>
struct Reduced {
  T r, rounder;
};
FW_FN Reduced<float> reduced(float x) {
  const float rounder = mad(x, 1.4426950408889634f, kRounder);
  const float n = rounder - kRounder;
  return {mad(n, -kLn2Low, mad(n, -kLn2High, x)), rounder};
}
FW_FN Reduced<double> reduced(double x) {
  const double rounder = mad(x, 1.4426950408889634, kRounder64);
  const double n = rounder - kRounder64;
  return {mad(n, -kLn2Low64, mad(n, -kLn2High64, x)), rounder};
}
template <class T>
FW_FN Power<T> power(T x) {
  const Reduced<T> b = reduced(x);
  return {small_expm1(b.r), b.rounder};
}

// Clamps an argument to a positive upper bound or a negative lower bound, beyond which the result
// is known. NaN is lost. The bits are compared as integers: as signed integers negative floats are
// below the others, as unsigned integers above. That is one instruction; for a comparison of floats
// g++ 12 uses two or three.
FW_FN float cut_above(float x, float most) {
  const int32_t raw = bits<int32_t>(x), high = bits<int32_t>(most);
  return bits<float>(raw < high ? raw : high);
}
FW_FN double cut_above(double x, double most) {
  const int64_t raw = bits<int64_t>(x), high = bits<int64_t>(most);
  return bits<double>(raw < high ? raw : high);
}
FW_FN float cut_below(float x, float least) {
  const uint32_t raw = bits<uint32_t>(x), low = bits<uint32_t>(least);
  return bits<float>(raw < low ? raw : low);
}
FW_FN double cut_below(double x, double least) {
  const uint64_t raw = bits<uint64_t>(x), low = bits<uint64_t>(least);
  return bits<double>(raw < low ? raw : low);
}

// y * 2^k for y in [1/2, 2), rounded once: k is added to the exponent of y, and the part of k that
// would make the number denormal is applied as a factor. If the result overflows, it has no
// meaning. The factor is 0 where the result rounds to 0: a product that underflows takes the
// processor some 150 cycles, and a masked softmax has many (7 times its time, Xeon, AVX2).
template <class T, class Signed, class Bits, int kMantissa>
FW_FN T times_power_of(T y, Signed k, Signed least) {
  const Signed normal = k > least ? k : least, rest = k - normal;
  const T first = bits<T>(bits<Bits>(y) + (static_cast<Bits>(normal) << kMantissa));
  const Bits factor = (static_cast<Bits>(rest) << kMantissa) + bits<Bits>(T(1));
  return first * bits<T>(rest > -(kMantissa + 3) ? factor : Bits(0));
}
FW_FN float times_power(float y, float rounder) {
  return times_power_of<float, int32_t, uint32_t, 23>(y, bits<int32_t>(rounder),
                                                      bits<int32_t>(kRounder) - 125);
}
FW_FN double times_power(double y, double rounder) {
  return times_power_of<double, int64_t, uint64_t, 52>(y, bits<int64_t>(rounder),
                                                       bits<int64_t>(kRounder64) - 1021);
}

// e^x where the result is a normal number.
template <class T>
FW_FN T plain_exp(T x) {
  const Power<T> p = power(x);
  return (p.rest + T(1)) * two_to<0>(p.rounder);
}

// e^r for |r| <= ln2/2: one operation less than by small_expm1, and less precise.
FW_FN float small_exp(float r) {
  return horner(r, 0.0013821038883179426f, 0.00836867094039917f, 0.04166826233267784f,
                0.1666652113199234f, 0.4999999403953552f, 1.0f, 1.0f);
}
FW_FN double small_exp(double r) { return small_expm1(r) + 1.0; }

}  // namespace fw
#endif  // __CUDACC__
