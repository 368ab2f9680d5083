// The hyperbolic tangent.
#pragma once

#include "scalar/vectors.hpp"

namespace fw {

#if defined(__CUDACC__)
FW_FN float tanh(float x) { return ::tanhf(x); }
FW_FN double tanh(double x) { return ::tanh(x); }
#else

#if defined(FW_VECTORS)
// The range a >= 0 is cut into pieces, eight per octave of a + 1, one table column each: a point c
// near its middle at which tanh is very close to a float, tanh(c), and the coefficients of (tanh(c
// + t) - tanh(c)) / t - 1 as a polynomial in t.
// clang-format off
alignas(kVectorBytes) constexpr float kTanhPieces[7][32] = {
    {1.1253259f, 1.3747424f, 1.6258531f, 1.8782309f, 2.1278028f, 2.3784437f, 2.6337597f,
     2.8658006f, 3.2527745f, 3.7511117f, 4.238189f, 4.7524796f, 5.235043f, 5.739672f, 6.254197f,
     6.761008f, 7.513047f, 8.538147f, 9.538147f, 1.0538147e+01f, 1.1538147e+01f, 1.2538147e+01f,
     1.3538147e+01f, 1.4538147e+01f, 0.0f, 0.18808755f, 0.31359473f, 0.43750852f, 0.56176233f,
     0.6874732f, 0.8142662f, 0.9366142f},
    {0.8094135f, 0.8797685f, 0.92546874f, 0.9543345f, 0.9720278f, 0.9829618f, 0.98974013f,
     0.9935372f, 0.9970142f, 0.9988969f, 0.9995834f, 0.99985105f, 0.99994326f, 0.9999793f,
     0.9999926f, 0.9999973f, 0.9999994f, 0.99999994f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 0.0f,
     0.18590051f, 0.3037038f, 0.41157714f, 0.50928384f, 0.5963563f, 0.671937f, 0.7336628f},
    {-3.211207e-02f, -9.551022e-03f, 1.3814478e-03f, 4.597097e-03f, 4.480459e-03f, 3.4185136e-03f,
     2.3502521e-03f, 1.5317647e-03f, 7.7123713e-04f, 2.929472e-04f, 1.09031425e-04f,
     4.0281604e-05f, 1.48421705e-05f, 5.463225e-06f, 2.0102332e-06f, 7.395917e-07f, 1.7079387e-07f,
     2.3119036e-08f, 3.1288028e-09f, 4.234664e-10f, 5.730914e-11f, 7.736168e-12f, 1.1473401e-12f,
     1.5041045e-13f, 0.13216782f, 9.716324e-02f, 4.5964465e-02f, -5.6840586e-03f, -4.3342248e-02f,
     -6.1523587e-02f, -6.266978e-02f, -5.3077746e-02f},
    {3.6172327e-03f, -2.1101307e-02f, -2.5122223e-02f, -2.0775698e-02f, -1.4927587e-02f,
     -9.964617e-03f, -6.3356166e-03f, -4.111452e-03f, -1.9671728e-03f, -7.376034e-04f,
     -2.7997352e-04f, -1.00342164e-04f, -3.8237507e-05f, -1.3944253e-05f, -4.9843634e-06f,
     -1.8085868e-06f, -4.1608396e-07f, -5.343232e-08f, -7.2312933e-09f, -9.786423e-10f,
     -1.3244288e-10f, -1.7926575e-11f, -2.412747e-12f, -3.6991078e-13f, 0.0f, 0.11312646f,
     0.15797491f, 0.16966061f, 0.15342511f, 0.11945418f, 7.9341725e-02f, 4.3590926e-02f},
    {0.11098092f, 9.95937e-02f, 7.507847e-02f, 5.153282e-02f, 3.373176e-02f, 2.138236e-02f,
     1.3192388e-02f, 8.423579e-03f, 3.9390395e-03f, 1.4649837e-03f, 5.5473193e-04f, 1.9847181e-04f,
     7.566292e-05f, 2.7579454e-05f, 9.852613e-06f, 3.5750256e-06f, 7.926595e-07f, 1.0176188e-07f,
     1.3771981e-08f, 1.8638309e-09f, 2.5224162e-10f, 3.4142755e-11f, 4.59009e-12f, 6.1164577e-13f,
     -0.3333277f, -0.28845236f, -0.21886334f, -0.13616887f, -5.4779876e-02f, 1.4373475e-02f,
     6.4814195e-02f, 9.462279e-02f},
    {-0.27912802f, -0.19883534f, -0.13281223f, -8.5170284e-02f, -5.3618934e-02f, -3.3210415e-02f,
     -2.0204958e-02f, -1.2800546e-02f, -5.944426e-03f, -2.202397e-03f, -8.325735e-04f,
     -2.9781516e-04f, -1.1346954e-04f, -4.1361316e-05f, -1.4780679e-05f, -5.3640038e-06f,
     -1.1906358e-06f, -1.5326017e-07f, -2.074151e-08f, -2.807059e-09f, -3.7989498e-10f,
     -5.1413176e-11f, -6.9594413e-12f, -9.358893e-13f, 0.0f, -0.17947559f, -0.2756909f,
     -0.3418573f, -0.37719062f, -0.38426757f, -0.36855796f, -0.33876076f},
    {-0.65515023f, -0.7739926f, -0.8564924f, -0.9107543f, -0.944838f, -0.9662138f, -0.9795855f,
     -0.98711616f, -0.99403733f, -0.997795f, -0.999167f, -0.9997021f, -0.9998865f, -0.99995863f,
     -0.9999852f, -0.99999464f, -0.9999988f, -0.9999998f, -1.0f, -1.0f, -1.0f, -1.0f, -1.0f, -1.0f,
     0.0f, -3.4558997e-02f, -9.2236005e-02f, -0.16939573f, -0.25937003f, -0.3556408f, -0.4514993f,
     -0.53826106f},
};
// clang-format on
FW_FN Singles tanh(Singles x) {
  const Singles a = at_most(magnitude_of(x), 10.0f);
  const Words piece = raw(a + 1.0f) >> 20;
  const Singles t = a - entry(kTanhPieces[0], piece);
  const Singles p = series_at<2, 6>(t, kTanhPieces, piece);
  const Singles y = entry(kTanhPieces[1], piece) + mad(p, t, t);
  return from_raw<Singles>(raw(y) | sign_of(x));
}
FW_LANES_OF(tanh, float, Singles)
#else
// Beyond 0.8, tanh(a) = 1 - 2 / (e^2a + 1), which loses digits near 0. From 10 on the result is 1.
// ln2 as one float is precise enough: the larger e^2a is, the less its error matters.
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
FW_LANES_RUN(tanh)
#endif

// (e^2a - 1) / (e^2a + 1) up to 1/2, where a polynomial would be long.
FW_FN double tanh(double x) {
  const double a = abs(x);
  const Power<double> p = power(2.0 * a);
  const double scale = two_to<0>(p.rounder);
  const double less_one = mad(p.rest, scale, scale - 1.0);
  const bool large = a > 0.5;
  const double ratio = (large ? -2.0 : less_one) / (less_one + 2.0);
  return copysign(a > 20.0 ? 1.0 : large ? 1.0 + ratio : ratio, x);
}
#endif  // __CUDACC__

}  // namespace fw
