// Converts runs of 16-bit floats to float and back. The conversions are written with vector
// instructions: by itself g++ 12 does not use the ones for float16, and its code for a loop that
// rounds to bfloat16 is twice as long.
#pragma once

#include "scalar/types.hpp"

// Lanes are independent: an output shares memory with an input only element for element.
#define FW_LANES(v, V, n) _Pragma("GCC ivdep") for (int v = 0; v < (n); ++v)

namespace fw {

#if defined(__AVX512F__)
constexpr int kHalfLanes = 16;
#else
constexpr int kHalfLanes = 8;
#endif
using HalfVector = short __attribute__((vector_size(2 * kHalfLanes)));
using Floats = float __attribute__((vector_size(4 * kHalfLanes)));

#if defined(__F16C__)
FW_FN Floats wide_of(half, HalfVector in) {
#if defined(__AVX512F__)
  return __builtin_ia32_vcvtph2ps512_mask(in, Floats{}, 0xffff, 4);
#else
  return __builtin_ia32_vcvtph2ps256(in);
#endif
}
FW_FN HalfVector narrow_of(half, Floats in) {
#if defined(__AVX512F__)
  return __builtin_ia32_vcvtps2ph512_mask(in, 0, HalfVector{}, 0xffff);
#else
  return __builtin_ia32_vcvtps2ph256(in, 0);
#endif
}
#endif

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#define FW_BF16_VECTORS
// The same results as float_to_bf16 and bf16_to_float.
using Integers = int __attribute__((vector_size(64)));
FW_FN Floats wide_of(bf16, HalfVector in) {
  const Integers raw = __builtin_ia32_pmovzxwd512_mask(in, Integers{}, -1);
  return __builtin_bit_cast(Floats, raw << 16);
}
FW_FN HalfVector narrow_of(bf16, Floats in) {
  const Integers raw = __builtin_bit_cast(Integers, in), high = raw >> 16;
  const Integers even = (raw + 0x7fff + (high & 1)) >> 16;
  const Integers rounded = in != in ? (high & 0x8000) | 0x7fc0 : even;
  return __builtin_ia32_pmovdw512_mask(rounded, HalfVector{}, -1);
}
#endif

// The last elements are converted as a full vector, too. With a test of the length in the loop and
// vectors half as wide, the sum of 1 M float16 values took 1.8 times eager's time instead of 1.2 to
// 1.4.
template <class T>
FW_FN void widen_vectors(const T* from, float* to, int n) {
  HalfVector in = {};
  int v = 0;
  for (; v + kHalfLanes <= n; v += kHalfLanes) {
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
  for (; v + kHalfLanes <= n; v += kHalfLanes) {
    std::memcpy(&in, from + v, sizeof in);
    const HalfVector out = narrow_of(T{}, in);
    std::memcpy(to + v, &out, sizeof out);
  }
  if (v == n) return;
  std::memcpy(&in, from + v, (n - v) * sizeof(float));
  const HalfVector out = narrow_of(T{}, in);
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
