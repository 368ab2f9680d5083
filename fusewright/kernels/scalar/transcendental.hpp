// Exponentials and functions built on them. nvcc takes CUDA's accurate functions. On the host there
// are no branches or calls, so g++ vectorises loops over lanes (a libm call per lane is 5 to 20
// times slower). The polynomials are our own Chebyshev fits; tests/ir/test_operators.py checks
// their errors.
#pragma once

#include "scalar/vectors.hpp"

namespace fw {

FW_LIBM1(sqrt)

#if defined(__CUDACC__)
FW_LIBM1(exp)
FW_LIBM1(exp2)
FW_LIBM1(expm1)
#else

// `end` is the first argument whose result is not finite. From there on, x alone decides between
// infinity and NaN.
template <class T>
FW_FN T exp(T x, T least, T end) {
  const Reduced<T> b = reduced(cut_below(x, least));
  const T y = times_power(small_exp(b.r), b.rounder);
  return x < end ? y : x * std::numeric_limits<T>::infinity();
}
#if defined(FW_VECTORS)
// Horner's rule, as in the scalar version: with even and odd powers apart, the error is 0.08 ulp
// larger.
FW_FN Singles small_exp(Singles r) {
  return chain(r, 0.0013821038883179426f, 0.00836867094039917f, 0.04166826233267784f,
               0.1666652113199234f, 0.4999999403953552f, 1.0f, 1.0f);
}
FW_FN Singles exp(Singles x) {
  const Singles b = at_least(at_most(x, 89.0f), -105.0f);
  const Singles n = mad(b, 1.4426950408889634f, kRounder) - kRounder;
  const Singles r = mad(n, -kLn2Low, mad(n, -kLn2High, b));
  return times_power(small_exp(r), n);
}
FW_LANES_OF(exp, float, Singles)
// 2^(j/16), and its rounding error.
// clang-format off
alignas(kVectorBytes) constexpr double kRoots[2][16] = {
    {1.0, 1.0442737824274138, 1.0905077326652577, 1.1387886347566916, 1.189207115002721,
     1.241857812073484, 1.2968395546510096, 1.3542555469368927, 1.4142135623730951,
     1.4768261459394993, 1.5422108254079407, 1.6104903319492543, 1.681792830507429,
     1.7562521603732995, 1.8340080864093424, 1.9152065613971474},
    {0.0, 8.551889705537965e-17, -3.046782079812471e-17, 8.912812676025408e-17,
     3.982015231465646e-17, 4.658027591836937e-17, 2.5382502794888315e-17, 7.70094837980299e-17,
     -9.667293313452913e-17, -3.483994556892796e-17, 7.949834809697621e-17, 2.4707192569797888e-17,
     8.199010020581497e-17, 2.960140695448873e-17, 3.283107224245627e-17, -1.0619946056195963e-16},
};
// clang-format on
constexpr double kSixteenths = kRounder64 / 16;
// e^r - 1 for |r| <= ln2/32.
FW_FN Doubles tiny_expm1(Doubles r) {
  const Doubles p = series(r, 0.0013889034639665864, 0.008333449934107185, 0.04166666666495362,
                           0.16666666665296223, 0.5);
  return mad(p, r * r, r);
}
FW_FN Doubles exp(Doubles x) {
  const Doubles b = at_least(at_most(x, 710.0), -746.0);
  const Doubles rounder = mad(b, 1.4426950408889634, kSixteenths);
  const Doubles n = rounder - kSixteenths;
  const Doubles r = mad(n, -kLn2Low64, mad(n, -kLn2High64, b));
  const Doubles root = entry(kRoots[0], raw(rounder));
  const Doubles low = mad(root, tiny_expm1(r), entry(kRoots[1], raw(rounder)));
  return times_power(root + low, n);  // scales by 2^floor(n)
}
FW_LANES_OF(exp, double, Doubles)
#else
FW_FN float exp(float x) { return exp(x, -105.0f, 0x1.62e430p+6f); }
FW_FN double exp(double x) { return exp(x, -746.0, 0x1.62e42fefa39f0p+9); }
FW_LANES_RUN(exp)
#endif

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

// Half the power of two, so that the largest k overflows in the last step at the earliest.
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

#endif  // __CUDACC__

// e^x for results that are stored in 16 bits, in 3 instructions instead of 8. The relative error is
// at most 2^-21, plus 2^-23 for each unit of |x|. The result is the square of e^(x/2): the
// instruction flushes denormal results to 0, and e^(x/2) is denormal only for much smaller x.
FW_FN float approximate_exp(float x) {
#if defined(__CUDA_ARCH__)
  float root;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x * 0.72134752f));
  return root * root;
#else
  return exp(x);
#endif
}

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
// Divides by (1 + e^-x) / 4, whose reciprocal is not denormal.
FW_FN float sigmoid(float x) { return quick_div(0.25f, ::fmaf(exp(-x), 0.25f, 0.25f)); }
#else
// 1 / (1 + e^-x) with both sides halved: e^-x overflows before its half does.
template <class T>
FW_FN T sigmoid(T x) {
  constexpr bool kSingle = sizeof(T) == 4;
  const T b = cut_above(cut_below(-x, kSingle ? T(-80) : T(-700)), kSingle ? T(89.5) : T(710.2));
  const Reduced<T> h = reduced(b);
  const T y = T(0.5) / mad(small_exp(h.r), two_to<-1>(h.rounder), T(0.5));
  return x == x ? y : x;
}
#endif

}  // namespace fw
