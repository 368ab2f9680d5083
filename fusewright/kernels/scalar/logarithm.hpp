// Logarithms. On the host they have no branches or calls, as in transcendental.hpp.
#pragma once

#include "scalar/vectors.hpp"

namespace fw {

#if defined(__CUDACC__)
FW_LIBM1(log)
FW_LIBM1(log2)
FW_LIBM1(log10)
FW_LIBM1(log1p)
#else

// x = 2^exponent * (1 + mantissa_less_one).
template <class T>
struct Split {
  T mantissa_less_one, exponent;
};

FW_FN Split<double> split(double x) {
  const bool tiny = x < 2.2250738585072014e-308;
  const double normal = tiny ? x * 0x1p54 : x;
  const uint64_t from = bits<uint64_t>(normal) - 0x3fe6a09e667f3bcdu;
  const uint64_t e = from & 0xfff0000000000000u;
  // The exponent plus 2048, in the low bits of 2^52: not every CPU converts vectors of 64-bit
  // integers.
  const uint64_t biased = (from + 0x8000000000000000u) >> 52;
  const bool was_tiny = bits<int64_t>(x) < 0x0010000000000000;
  const double exponent = bits<double>(biased | 0x4330000000000000u) - (0x1p52 + 2048.0);
  return {bits<double>(bits<uint64_t>(normal) - e) - 1.0, exponent - (was_tiny ? 54.0 : 0.0)};
}

// Exponents of floats are kept multiplied by 2^23, which saves a shift. The constants contain the
// factor.
constexpr float kStep = 0x1p23f;

// (log(1 + f) - f) / f^2 for f in [sqrt(1/2) - 1, sqrt(2) - 1]. The relative error of the
// logarithm, by this fit and by those for other bases below, is 2^-27.7.
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
  const double r =
      z * horner(z, 1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01,
                 2.222219843214978396e-01, 2.857142874366239149e-01, 3.999999999940941908e-01,
                 6.666666666666735130e-01);
  return mad(s, half + r, -half);
}

// The results of every logarithm for 0, negative values, infinity and NaN.
template <class T>
FW_FN T log_corners(T x, T y) {
  constexpr T kEnd = std::numeric_limits<T>::infinity();
  y = x < kEnd ? y : x;
  const T below = x == T(0) ? -kEnd : std::numeric_limits<T>::quiet_NaN();
  return x > T(0) ? y : below;
}

#if defined(FW_VECTORS)
// The mantissas are cut into 32 pieces. In each there is a c for which -log(1/c), in this base, is
// very close to a short float. The tables hold 1/c and that float. The four pieces next to 1 have c
// = 1, so that nothing cancels there.
// clang-format off
alignas(kVectorBytes) constexpr float kLogPieces[2][32] = {
    {1.0f, 1.0f, 0.92734295f, 0.9011943f, 0.8778299f, 0.8538001f, 0.83203894f, 0.81072724f,
     0.7906669f, 0.77193284f, 0.752976f, 0.73555017f, 0.71851116f, 0.7028636f, 0.68844384f,
     0.6739805f, 1.3209697f, 1.292478f, 1.2672181f, 1.2427363f, 1.2181047f, 1.1961586f,
     1.1726023f, 1.1529353f, 1.1314639f, 1.1140836f, 1.0942955f, 1.0754822f, 1.0568392f,
     1.042083f, 1.0f, 1.0f},
    {0.0f, 0.0f, 7.5431824e-02f, 0.104034424f, 0.13030243f, 0.15805817f, 0.18387604f, 0.20982361f,
     0.23487854f, 0.25885773f, 0.28372192f, 0.30713654f, 0.33057404f, 0.35259247f, 0.37332153f,
     0.39455414f, -0.2783661f, -0.25656128f, -0.23682404f, -0.21731567f, -0.19729614f,
     -0.1791153f, -0.15922546f, -0.1423111f, -0.12351227f, -0.10803223f, -9.011078e-02f,
     -7.2769165e-02f, -5.5282593e-02f, -4.122162e-02f, 0.0f, 0.0f},
};
alignas(kVectorBytes) constexpr float kLog2Pieces[2][32] = {
    {1.0f, 1.0f, 0.9284319f, 0.9015975f, 0.87740195f, 0.85325086f, 0.82906276f, 0.8099773f,
     0.79056156f, 0.770274f, 0.7531072f, 0.7355602f, 0.7185436f, 0.70284927f, 0.6884801f,
     0.67311484f, 1.3189582f, 1.292991f, 1.2672805f, 1.2465689f, 1.2204382f, 1.196879f, 1.175228f,
     1.1534805f, 1.1314173f, 1.1126437f, 1.0928054f, 1.0779054f, 1.0577575f, 1.0408665f, 1.0f,
     1.0f},
    {0.0f, 0.0f, 0.10713196f, 0.14944458f, 0.18869019f, 0.22895813f, 0.27044678f, 0.30404663f,
     0.3390503f, 0.3765564f, 0.40907288f, 0.44308472f, 0.47685242f, 0.50871277f, 0.5385132f,
     0.57107544f, -0.3993988f, -0.37071228f, -0.34173584f, -0.31796265f, -0.2873993f,
     -0.25927734f, -0.23294067f, -0.20599365f, -0.1781311f, -0.1539917f, -0.1280365f,
     -0.10823059f, -8.100891e-02f, -5.7785034e-02f, 0.0f, 0.0f},
};
alignas(kVectorBytes) constexpr float kLog10Pieces[2][32] = {
    {1.0f, 1.0f, 0.927349f, 0.9005302f, 0.8774262f, 0.8540443f, 0.8315557f, 0.81039214f,
     0.79019046f, 0.771332f, 0.7531221f, 0.7356328f, 0.71907365f, 0.70341843f, 0.6881887f,
     0.67383295f, 1.3194467f, 1.2935011f, 1.268322f, 1.2435019f, 1.2197031f, 1.196076f,
     1.1746181f, 1.1540418f, 1.1326811f, 1.1136901f, 1.0908033f, 1.0750043f, 1.0596297f,
     1.0412688f, 1.0f, 1.0f},
    {0.0f, 0.0f, 3.2756805e-02f, 4.550171e-02f, 5.67894e-02f, 6.851959e-02f, 8.010864e-02f,
     9.130478e-02f, 0.10226822f, 0.11275864f, 0.12313461f, 0.13333893f, 0.14322662f, 0.15278625f,
     0.16229248f, 0.17144775f, -0.120391846f, -0.111766815f, -0.10322952f, -9.4646454e-02f,
     -8.625412e-02f, -7.775879e-02f, -6.98967e-02f, -6.2221527e-02f, -5.4107666e-02f,
     -4.6764374e-02f, -3.774643e-02f, -3.1410217e-02f, -2.5154114e-02f, -1.7562866e-02f, 0.0f,
     0.0f},
};
// clang-format on
// x = c * 2^exponent * (1 + f); `whole` is the logarithm of c.
struct LogPiece {
  Singles f, whole, exponent;
};
FW_FN LogPiece log_piece(Singles x, const float (&pieces)[2][32]) {
  const Singles m = mantissa_of(x);
  const Words piece = raw(m) >> 18;
  const Singles f = mad(m, entry(pieces[0], piece), all<Singles>(-1.0f));
  return {f, entry(pieces[1], piece), exponent_of(x) - exponent_of(m)};
}
// The logarithm as high + low, not yet rounded to one value.
struct Logarithm {
  Singles high, low;
};
FW_FN Logarithm log_parts(Singles x) {
  const LogPiece s = log_piece(x, kLogPieces);
  const Singles p = series(s.f, 0.18855223f, -0.2500667f, 0.33334446f, -0.5f);
  const Singles low = mad(s.f * s.f, p, mad(s.exponent, kLn2Low, s.f));
  return {mad(s.exponent, kLn2High, s.whole), low};
}
FW_FN Singles log(Singles x) {
  const Logarithm y = log_parts(x);
  return y.high + y.low;
}
FW_FN Singles log2(Singles x) {
  const LogPiece s = log_piece(x, kLog2Pieces);
  const Singles p = series(s.f, 0.27202335f, -0.36077f, 0.4809144f, -0.7213475f);
  const Singles low = mad(s.f * s.f, p, s.f * 1.92596299e-8f);
  return (s.exponent + s.whole) + mad(s.f, 1.44269502f, low);
}
FW_FN Singles log10(Singles x) {
  const LogPiece s = log_piece(x, kLog10Pieces);
  const Singles p = series(s.f, 8.188719e-02f, -0.10860258f, 0.14476967f, -0.21714725f);
  const Singles tail = mad(s.f, -1.01030729e-8f, s.exponent * 4.60503907e-6f);
  const Singles low = mad(s.f, 0.43429449f, mad(s.f * s.f, p, tail));
  return mad(s.exponent, 0.301025391f, s.whole) + low;
}
// 1/c for a c in each sixteenth of the mantissas, -log(1/c), and its rounding error. The two pieces
// next to 1 have c = 1, so that nothing cancels there.
// clang-format off
alignas(kVectorBytes) constexpr double kLogPieces64[3][16] = {
    {1.0, 0.9140625, 0.865234375, 0.8203125, 0.7802734375, 0.744140625, 0.7109375, 0.6806640625,
     1.3056640625, 1.2548828125, 1.2080078125, 1.1640625, 1.123046875, 1.0849609375, 1.048828125,
     1.0},
    {0.0, 0.08985632914118469, 0.14475485496222973, 0.19806991377845407, 0.24811085988767445,
     0.29552525002509356, 0.341170757310465, 0.3846863948274404, -0.2667117714881897,
     -0.22704219166189432, -0.18897256674245, -0.151916041970253, -0.11604541586712003,
     -0.08154398412443697, -0.04767346940934658, 0.0},
    {0.0, -1.9323640537793985e-11, 3.2142417970351364e-11, -1.636027050360844e-11,
     -5.449602377249269e-11, -1.122867351380364e-10, 9.230214654370605e-11, 1.148882900591336e-11,
     -1.430038651735648e-11, -6.797275733858204e-11, -5.058480640531306e-11,
     -5.558898434914717e-11, 1.0927737228893185e-10, 8.426007375163103e-11, -6.001032231258949e-11,
     0.0},
};
// clang-format on
FW_FN Doubles log(Doubles x) {
  const Doubles m = mantissa_of(x);
  const Doubles e = exponent_of(x) - exponent_of(m);
  const Longs piece = raw(m) >> 48;
  const Doubles f = mad(m, entry(kLogPieces64[0], piece), all<Doubles>(-1.0));
  const Doubles p = series(f, 0.080317871749449, -0.09973268871285426, 0.11112796808946702,
                           -0.12500070605404237, 0.14285713556435542, -0.16666666623882906,
                           0.20000000000085377, -0.25000000000006367, 0.3333333333333333, -0.5);
  const Doubles low = mad(e, kLn2Low64, entry(kLogPieces64[2], piece));
  const Doubles high = mad(e, kLn2High64, entry(kLogPieces64[1], piece));
  return high + (f + mad(f * f, p, low));
}
FW_LANES_OF(log, float, Singles)
FW_LANES_OF(log2, float, Singles)
FW_LANES_OF(log10, float, Singles)
FW_LANES_OF(log, double, Doubles)
#else
// The mantissa is in [sqrt(1/2), sqrt(2)).
FW_FN Split<float> split(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float normal = tiny ? x * kStep : x;
  const int32_t raw = bits<int32_t>(normal);
  const int32_t e = (raw - 0x3f3504f3) & static_cast<int32_t>(0xff800000u);
  // The same test, written differently: with `tiny` g++ would compute all in between for both
  // cases.
  const bool was_tiny = bits<int32_t>(x) < 0x00800000;
  const float exponent = static_cast<float>(e) - (was_tiny ? 23.0f * kStep : 0.0f);
  return {bits<float>(raw - e) - 1.0f, exponent};
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

FW_LANES_RUN(log)
FW_LANES_RUN(log2)
FW_LANES_RUN(log10)
#endif

// log(x) / log(base), with 1/log(base) as a high and a low part.
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
  const uint32_t e = (bits<uint32_t>(u) - 0x3f3504f3u) & 0xff800000u;
  // 2^-k * (1 + x) - 1 with one rounding. The power is formed as 8 * 2^-k, because k may be 128.
  const float power = bits<float>(0x41000000u - e) * 0.125f;
  const float f = mad(x, power, power - 1.0f);
  const float exponent = static_cast<float>(static_cast<int32_t>(e));
  const float low = mad(f * f, log_series(f), exponent * (kLn2Low / kStep));
  float y = mad(exponent, kLn2High / kStep, low + f);
  y = x < kInf ? y : x;
  y = x > -1.0f ? y : x == -1.0f ? -kInf : kNan;
  return x == 0.0f ? x : y;
}
FW_FN double log1p(double x) {
  const double u = 1.0 + x;
  const uint64_t e = (bits<uint64_t>(u) - 0x3fe6a09e667f3bcdu) & 0xfff0000000000000u;
  const double power = bits<double>(0x4020000000000000u - e) * 0.125;
  const double f = mad(x, power, power - 1.0);
  const double exponent = static_cast<double>(static_cast<int32_t>(static_cast<int64_t>(e) >> 52));
  const double low = mad(exponent, kLn2Low64, log_rest(f));
  double y = mad(exponent, kLn2High64, low + f);
  y = x < kInf64 ? y : x;
  y = x > -1.0 ? y : x == -1.0 ? -kInf64 : kNan64;
  return x == 0.0 ? x : y;
}
#endif  // __CUDACC__

}  // namespace fw
