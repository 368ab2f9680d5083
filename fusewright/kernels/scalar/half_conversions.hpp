// Half floats to floats and back, a run of lanes at once. g++ 12 does not use the instructions for
// float16 of its own accord, and makes two loops' worth of a loop that rounds to bfloat16.
#pragma once

#include "scalar/types.hpp"

// Lanes never meet: an output is an input's memory only at the very same element.
#define FW_LANES(v, V, n) _Pragma("GCC ivdep") for (int v = 0; v < (n); ++v)

namespace fw {

#if defined(__AVX512F__)
constexpr int kHalves = 16;
#else
constexpr int kHalves = 8;
#endif
using Halves = short __attribute__((vector_size(2 * kHalves)));
using Floats = float __attribute__((vector_size(4 * kHalves)));

#if defined(__F16C__)
FW_FN Floats wide_of(half, Halves in) {
#if defined(__AVX512F__)
  return __builtin_ia32_vcvtph2ps512_mask(in, Floats{}, 0xffff, 4);
#else
  return __builtin_ia32_vcvtph2ps256(in);
#endif
}
FW_FN Halves narrow_of(half, Floats in) {
#if defined(__AVX512F__)
  return __builtin_ia32_vcvtps2ph512_mask(in, 0, Halves{}, 0xffff);
#else
  return __builtin_ia32_vcvtps2ph256(in, 0);
#endif
}
#endif

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#define FW_BF16_VECTORS
// As float_to_bf16 and bf16_to_float.
using Integers = int __attribute__((vector_size(64)));
FW_FN Floats wide_of(bf16, Halves in) {
  const Integers raw = __builtin_ia32_pmovzxwd512_mask(in, Integers{}, -1);
  return __builtin_bit_cast(Floats, raw << 16);
}
FW_FN Halves narrow_of(bf16, Floats in) {
  const Integers raw = __builtin_bit_cast(Integers, in), high = raw >> 16;
  const Integers even = (raw + 0x7fff + (high & 1)) >> 16;
  const Integers rounded = in != in ? (high & 0x8000) | 0x7fc0 : even;
  return __builtin_ia32_pmovdw512_mask(rounded, Halves{}, -1);
}
#endif

// The last few as a whole vector too. A test of the length in the loop, and vectors half as wide,
// made the sum of 1 M float16 take 1.8 times eager's time instead of 1.2 to 1.4.
template <class T>
FW_FN void widen_vectors(const T* from, float* to, int n) {
  Halves in = {};
  int v = 0;
  for (; v + kHalves <= n; v += kHalves) {
    std::memcpy(&in, from + v, sizeof in);
    const Floats out = wide_of(T{}, in);
    std::memcpy(to + v, &out, sizeof out);
  }
  if (v == n) return;
  std::memcpy(&in, from + v, (n - v) * sizeof(T));
  const Floats out = wide_of(T{}, in);
  std::memcpy(to + v, &out, (n - v) * sizeof(float));
}
template <class T>
FW_FN void narrow_vectors(const float* from, T* to, int n) {
  Floats in = {};
  int v = 0;
  for (; v + kHalves <= n; v += kHalves) {
    std::memcpy(&in, from + v, sizeof in);
    const Halves out = narrow_of(T{}, in);
    std::memcpy(to + v, &out, sizeof out);
  }
  if (v == n) return;
  std::memcpy(&in, from + v, (n - v) * sizeof(float));
  const Halves out = narrow_of(T{}, in);
  std::memcpy(to + v, &out, (n - v) * sizeof(T));
}

template <class T>
FW_FN void widen(const T* from, float* to, int n) {
  FW_LANES(v, 1, n) to[v] = value(from[v]);
}
template <class T>
FW_FN void narrow(const float* from, T* to, int n) {
  FW_LANES(v, 1, n) to[v] = Store<T>::from(from[v]);
}
#if defined(__F16C__)
FW_FN void widen(const half* from, float* to, int n) { widen_vectors(from, to, n); }
FW_FN void narrow(const float* from, half* to, int n) { narrow_vectors(from, to, n); }
#endif
#if defined(FW_BF16_VECTORS)
FW_FN void widen(const bf16* from, float* to, int n) { widen_vectors(from, to, n); }
FW_FN void narrow(const float* from, bf16* to, int n) { narrow_vectors(from, to, n); }
#endif

}  // namespace fw
