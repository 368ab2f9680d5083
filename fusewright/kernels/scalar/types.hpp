// The storage types of tensors and their conversion to register values: float16 and bfloat16 exist
// in memory only, registers hold float. Compiled by g++ and by nvcc.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

// FW_FN is a function that is always inlined. FW_DEVICE is one that only the GPU's compiler needs to
// read, if there is one.
#if defined(__CUDACC__)
#define FW_FN __host__ __device__ __forceinline__
#define FW_DEVICE __device__ __forceinline__
#else
#define FW_FN inline __attribute__((always_inline))
#define FW_DEVICE FW_FN
#endif

// Whether the CPU has fused multiply-add.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define FW_FMA 1
#endif

namespace fw {

template <int kPhase>
struct Phase {};

template <class To, class From>
FW_FN To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits() keeps the size");
#if defined(__CUDACC__)
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
#else
  // Not memcpy: g++ vectorises the builtin in loops over lanes.
  return __builtin_bit_cast(To, from);
#endif
}

#if !defined(__CUDACC__)
// Prefetches memory that is read soon. In a loop with much arithmetic the processor sees few loads
// ahead (row sums of 1 M floats, two threads: 0.88 of eager's time instead of 0.99; exp, one
// thread: 0.94 instead of 0.98). Beyond the end of memory it does nothing.
template <class T>
FW_FN void fetch_ahead(const T* at) {
  __builtin_prefetch(reinterpret_cast<const char*>(at) + 2048);
}
#endif

// Integer arithmetic on the host: g++ 12 does not vectorise conversions of _Float16.
FW_FN float half_to_float(uint16_t raw) {
#if defined(__CUDA_ARCH__)
  // The instruction itself: cuda_fp16.h and cuda_bf16.h would add their compile time to each build.
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(raw));
  return y;
#else
  const uint32_t sign = (raw & 0x8000u) << 16;
  const uint32_t rest = (raw & 0x7fffu) << 13;
  // Scaling by 2^112 converts float16's exponent to float's and makes denormals normal.
  const float scaled = bits<float>(rest) * 0x1p112f;
  const uint32_t special = (raw & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return bits<float>(sign | special | bits<uint32_t>(scaled));
#endif
}

FW_FN uint16_t float_to_half(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#else
  const uint32_t raw = bits<uint32_t>(x);
  const uint32_t magnitude = raw & 0x7fffffffu;
  const uint32_t odd = (magnitude >> 13) & 1u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + odd) >> 13;
  // Adding 0.5 leaves the rounded bits of a denormal float16 in the low bits of the float.
  const uint32_t small = bits<uint32_t>(bits<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? small : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return static_cast<uint16_t>(half | ((raw >> 16) & 0x8000u));
#endif
}

FW_FN float bf16_to_float(uint16_t raw) { return bits<float>(static_cast<uint32_t>(raw) << 16); }

FW_FN uint16_t float_to_bf16(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#else
  const uint32_t raw = bits<uint32_t>(x);
  const uint32_t rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(x != x ? 0x7fc0u | ((raw >> 16) & 0x8000u) : rounded);
#endif
}

struct half {
  uint16_t raw;
};
struct bf16 {
  uint16_t raw;
};
// One byte, nonzero for true. Reading a byte such as 2 through C++'s bool is undefined behaviour.
struct bool8 {
  uint8_t raw;
};

FW_FN float value(half x) { return half_to_float(x.raw); }
FW_FN float value(bf16 x) { return bf16_to_float(x.raw); }
FW_FN bool value(bool8 x) { return x.raw != 0; }
template <class T>
FW_FN T value(T x) {
  return x;
}

// A number without its fraction. One that does not fit gives what the processor gives: x86 has the
// smallest integer for it. Without the comparison, gcc makes trunc(x) of an integer that becomes a
// float again, which is -0 for -0.5 and does not wrap.
template <class To, class From>
FW_FN To truncated(From x) {
#if defined(__x86_64__) && !defined(__CUDACC__)
  constexpr From least = static_cast<From>(std::numeric_limits<To>::min());
  return x >= least && x < -least ? static_cast<To>(x) : std::numeric_limits<To>::min();
#else
  return static_cast<To>(x);
#endif
}

// Converts between register types by PyTorch's rules: to bool is x != 0, to an integer truncates,
// to uint8 goes through int64, and to other narrow integers through int32, as on x86.
template <class To, class From>
FW_FN To cast(From x) {
  constexpr bool truncates = std::is_floating_point_v<From> && std::is_integral_v<To>;
  if constexpr (std::is_same_v<To, bool>) {
    return x != From(0);
  } else if constexpr (truncates && std::is_same_v<To, uint8_t>) {
    return static_cast<To>(truncated<int64_t>(x));
  } else if constexpr (truncates && sizeof(To) < 4) {
    return static_cast<To>(truncated<int32_t>(x));
  } else if constexpr (truncates) {
    return truncated<To>(x);
  } else {
    return static_cast<To>(x);
  }
}

template <class Stored>
struct Store {
  template <class T>
  FW_FN static Stored from(T x) {
    return cast<Stored>(x);
  }
};
template <>
struct Store<half> {
  template <class T>
  FW_FN static half from(T x) {
    return {float_to_half(cast<float>(x))};
  }
};
template <>
struct Store<bf16> {
  template <class T>
  FW_FN static bf16 from(T x) {
    return {float_to_bf16(cast<float>(x))};
  }
};
template <>
struct Store<bool8> {
  template <class T>
  FW_FN static bool8 from(T x) {
    return {static_cast<uint8_t>(cast<bool>(x))};
  }
};

// Whether an index is in [0, size). One comparison: as an unsigned integer a negative index is
// large.
template <typename I>
FW_FN bool inside(I at, I size) {
  using Word = std::make_unsigned_t<I>;
  return static_cast<Word>(at) < static_cast<Word>(size);
}

// The value after it is stored as `Stored` and read again.
template <class Stored, class T>
FW_FN float rounded(T x) {
#if !defined(__CUDACC__)
  // In 32 bits throughout, with the same result for all floats: conversion to 16 bits and back
  // takes 610 us instead of 190 for 1 M float16 values, and 205 instead of 180 for bfloat16.
  if constexpr (std::is_same_v<Stored, bf16> && std::is_same_v<T, float>) {
    const uint32_t raw = bits<uint32_t>(x);
    const uint32_t even = (raw + 0x7fffu + ((raw >> 16) & 1u)) & 0xffff0000u;
    return x != x ? bits<float>((raw & 0x80000000u) | 0x7fc00000u) : bits<float>(even);
  } else if constexpr (std::is_same_v<Stored, half> && std::is_same_v<T, float>) {
    const uint32_t raw = bits<uint32_t>(x), exponent = raw & 0x7f800000u;
    // Adding and subtracting 1.5 * 2^13 times the power of two below |x| rounds to 11 bits. The
    // power is at least 2^-14, the smallest normal float16.
    const float step = bits<float>(exponent > 0x38800000u ? exponent : 0x38800000u) * 0x1.8p13f;
    const float even = (x + step) - step;
    const float most = bits<float>(raw & 0x7fffffffu);
    const float y = most >= 65520.0f ? x * std::numeric_limits<float>::infinity() : even;
    return bits<float>(bits<uint32_t>(y) | (raw & 0x80000000u));
  }
#endif
  return value(Store<Stored>::from(x));
}

}  // namespace fw
