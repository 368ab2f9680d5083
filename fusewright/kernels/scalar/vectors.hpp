// Functions of whole vectors. AVX-512 has instructions that g++ does not generate from a loop over
// lanes: scaling by powers of two, exponents, lookups in tables of 16 or 32 values. A function that
// gains from them is written once, for the vector types Singles and Doubles. FW_LANES_OF derives
// the functions of one lane and of a run of lanes from it; all give the same bits. Without AVX-512
// a run is a loop over lanes (FW_LANES_RUN).
#pragma once

#include "scalar/exponential.hpp"

// Forwards to libm on the host and to CUDA's math library on a GPU.
#define FW_LIBM1(NAME)                               \
  FW_FN float NAME(float x) { return ::NAME##f(x); } \
  FW_FN double NAME(double x) { return ::NAME(x); }

#if !defined(__CUDACC__)

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__GNUC__) && !defined(__clang__)
#define FW_VECTORS
// Loops beside the functions take vectors of the same length. A vector that is loaded from two
// shorter ones that were just stored waits for both: softmax of 512 x 1000 took 0.65 ms, not 0.51.
#pragma GCC target("prefer-vector-width=512")
#endif

#define FW_LANES_RUN(NAME)                                                  \
  template <bool kHere = false, class T>                                    \
  FW_FN void NAME##_run(const T* from, T* to, int n) {                      \
    _Pragma("GCC ivdep") for (int v = 0; v < n; ++v) to[v] = NAME(from[v]); \
  }

#if defined(FW_VECTORS)
namespace fw {

constexpr int kVectorBytes = 64;
using Singles = float __attribute__((vector_size(kVectorBytes)));
using Doubles = double __attribute__((vector_size(kVectorBytes)));
using Words = uint32_t __attribute__((vector_size(kVectorBytes)));
using Longs = uint64_t __attribute__((vector_size(kVectorBytes)));

template <class V>
struct LanesOf;
template <>
struct LanesOf<Singles> {
  using Lane = float;
  using Bits = Words;
};
template <>
struct LanesOf<Doubles> {
  using Lane = double;
  using Bits = Longs;
};
template <class V>
using LaneOf = typename LanesOf<V>::Lane;
template <class V>
using BitsOf = typename LanesOf<V>::Bits;

// x in all lanes. Subtracting 0 keeps the sign of -0, adding 0 would lose it.
template <class V>
FW_FN V all(LaneOf<V> x) {
  return x - V{};
}
constexpr int kAsRounded = 4;  // use the current rounding mode

FW_FN Singles mad(Singles a, Singles b, Singles c) {
  return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, kAsRounded);
}
FW_FN Doubles mad(Doubles a, Doubles b, Doubles c) {
  return __builtin_ia32_vfmaddpd512_mask(a, b, c, -1, kAsRounded);
}
template <class V>
FW_FN V mad(V a, LaneOf<V> b, V c) {
  return mad(a, all<V>(b), c);
}
template <class V>
FW_FN V mad(V a, LaneOf<V> b, LaneOf<V> c) {
  return mad(a, all<V>(b), all<V>(c));
}

// A polynomial, the highest coefficient first. Even and odd powers are summed separately,
// recursively (Estrin's scheme): Horner's long chain of dependent multiplications would leave the
// processor idle. The last two steps follow Horner's rule, so that the last coefficient is rounded
// once and the one before hardly matters.
template <int kN, int kStep, class V>
FW_FN V split_series(V x, const V* last) {
  if constexpr (kN == 1) {
    return *last;
  } else if constexpr (kN == 2) {
    return mad(last[-kStep], x, *last);
  } else {
    const V even = split_series<(kN + 1) / 2, 2 * kStep>(x * x, last);
    return mad(split_series<kN / 2, 2 * kStep>(x * x, last - kStep), x, even);
  }
}
template <int kN, class V>
FW_FN V series_of(V x, const V (&c)[kN]) {
  const V rest = split_series<kN - 2, 1>(x, c + kN - 3);
  return mad(mad(rest, x, c[kN - 2]), x, c[kN - 1]);
}
template <class V, class... C>
FW_FN V series(V x, C... c) {
  const V all_of[] = {all<V>(c)...};
  return series_of(x, all_of);
}

// The same by Horner's rule, for short polynomials whose last digits matter.
template <class V, class... C>
FW_FN V chain(V x, C... c) {
  const V all_of[] = {all<V>(c)...};
  V p = all_of[0];
#pragma GCC unroll 16
  for (std::size_t at = 1; at < sizeof...(c); ++at) p = mad(p, x, all_of[at]);
  return p;
}

// Upper and lower bounds. NaN stays NaN.
FW_FN Singles at_most(Singles x, float most) {
  return __builtin_ia32_minps512_mask(all<Singles>(most), x, Singles{}, -1, kAsRounded);
}
FW_FN Doubles at_most(Doubles x, double most) {
  return __builtin_ia32_minpd512_mask(all<Doubles>(most), x, Doubles{}, -1, kAsRounded);
}
FW_FN Singles at_least(Singles x, float least) {
  return __builtin_ia32_maxps512_mask(all<Singles>(least), x, Singles{}, -1, kAsRounded);
}
FW_FN Doubles at_least(Doubles x, double least) {
  return __builtin_ia32_maxpd512_mask(all<Doubles>(least), x, Doubles{}, -1, kAsRounded);
}

// y * 2^floor(n) for y below 2, rounded once. Lanes whose result rounds to 0 are masked out: a lane
// that underflows takes the processor some 150 cycles, and a masked softmax has many.
constexpr int kNotBelow = 5;  // NaN is not below
FW_FN Singles times_power(Singles y, Singles n) {
  const auto kept =
      __builtin_ia32_cmpps512_mask(n, all<Singles>(-150.0f), kNotBelow, -1, kAsRounded);
  return __builtin_ia32_scalefps512_mask(y, n, Singles{}, kept, kAsRounded);
}
FW_FN Doubles times_power(Doubles y, Doubles n) {
  const auto kept =
      __builtin_ia32_cmppd512_mask(n, all<Doubles>(-1075.0), kNotBelow, -1, kAsRounded);
  return __builtin_ia32_scalefpd512_mask(y, n, Doubles{}, kept, kAsRounded);
}

// The exponent as a floating-point value: -inf for 0, inf for inf.
FW_FN Singles exponent_of(Singles x) {
  return __builtin_ia32_getexpps512_mask(x, Singles{}, -1, kAsRounded);
}
FW_FN Doubles exponent_of(Doubles x) {
  return __builtin_ia32_getexppd512_mask(x, Doubles{}, -1, kAsRounded);
}
// The mantissa in [3/4, 3/2): 1 for 0 and for inf, NaN for negative values.
constexpr int kAroundOne = 3 | 2 << 2;
FW_FN Singles mantissa_of(Singles x) {
  return __builtin_ia32_getmantps512_mask(x, kAroundOne, Singles{}, -1, kAsRounded);
}
FW_FN Doubles mantissa_of(Doubles x) {
  return __builtin_ia32_getmantpd512_mask(x, kAroundOne, Doubles{}, -1, kAsRounded);
}

template <class V>
FW_FN BitsOf<V> raw(V x) {
  return __builtin_bit_cast(BitsOf<V>, x);
}
template <class V>
FW_FN V from_raw(BitsOf<V> x) {
  return __builtin_bit_cast(V, x);
}
template <class V>
FW_FN BitsOf<V> sign_of(V x) {
  return raw(x) & raw(all<V>(-0.0f));
}
template <class V>
FW_FN V magnitude_of(V x) {
  return from_raw<V>(raw(x) & ~raw(all<V>(-0.0f)));
}

// The table entry at the low bits of each index.
FW_FN Singles entry(const float (&table)[32], Words index) {
  Singles low, high;
  std::memcpy(&low, table, sizeof low);
  std::memcpy(&high, table + 16, sizeof high);
  return __builtin_shuffle(low, high, index);
}
FW_FN Doubles entry(const double (&table)[16], Longs index) {
  Doubles low, high;
  std::memcpy(&low, table, sizeof low);
  std::memcpy(&high, table + 8, sizeof high);
  return __builtin_shuffle(low, high, index);
}
// Polynomials whose coefficients are the rows kFirst to kLast of a table, in the column `index`.
template <int kFirst, int kLast, class V, class Table>
FW_FN V series_at(V x, const Table& table, BitsOf<V> index) {
  V c[kLast + 1 - kFirst];
#pragma GCC unroll 16
  for (int row = kFirst; row <= kLast; ++row) c[row - kFirst] = entry(table[row], index);
  return series_of(x, c);
}
template <int kFirst, int kLast, class V, class Table>
FW_FN V chain_at(V x, const Table& table, BitsOf<V> index) {
  V p = entry(table[kFirst], index);
#pragma GCC unroll 16
  for (int row = kFirst + 1; row <= kLast; ++row) p = mad(p, x, entry(table[row], index));
  return p;
}

template <class V>
FW_FN V vector_at(const LaneOf<V>* from) {
  V in;
  std::memcpy(&in, from, sizeof in);
  return in;
}
// Each vector is loaded before the previous result is stored. Otherwise, where both have the same
// offset in their pages, the load would wait for the store (cos of 512 k doubles: 1.06 of eager's
// time instead of 0.98). Long functions compute their first steps in `begin`: instructions that
// wait for those steps would fill the processor's queue (erfc of doubles: 1.03 instead of 0.90).
// The last vector goes through `begin` twice. `to` may be equal to `from`.
template <class Of, class V>
FW_FN void run_vectors(const LaneOf<V>* from, LaneOf<V>* to, int vectors) {
  constexpr int kLanes = sizeof(V) / sizeof(LaneOf<V>);
  if (vectors == 0) return;
  auto begun = Of::begin(vector_at<V>(from));
  for (int at = 0; at < vectors; ++at) {
    const int after = at + 1 < vectors ? at + 1 : at;
    const auto next = Of::begin(vector_at<V>(from + after * kLanes));
    fetch_ahead(from + at * kLanes);
    const V out = Of::end(begun);
    std::memcpy(to + at * kLanes, &out, sizeof out);
    begun = next;
  }
}
// Not inlined where runs are long: the call costs little then, and a kernel may have many runs.
template <class Of, class V>
__attribute__((noinline)) void run_outlined(const LaneOf<V>* from, LaneOf<V>* to, int vectors) {
  run_vectors<Of, V>(from, to, vectors);
}
template <class Of, class V, bool kHere>
FW_FN void run_lanes(const LaneOf<V>* from, LaneOf<V>* to, int n) {
  constexpr int kLanes = sizeof(V) / sizeof(LaneOf<V>);
  const int whole = n / kLanes, done = whole * kLanes;
  const std::size_t rest = (n - done) * sizeof(LaneOf<V>);
  if (kHere) {
    run_vectors<Of, V>(from, to, whole);
  } else if (whole > 0) {
    run_outlined<Of, V>(from, to, whole);
  }
  if (rest > 0) {
    LaneOf<V> last[kLanes] = {};
    std::memcpy(last, from + done, rest);
    run_outlined<Of, V>(last, last, 1);
    std::memcpy(to + done, last, rest);
  }
}

#define FW_LANES_OF(NAME, LANE, VECTOR)                   \
  struct NAME##_of_##VECTOR {                             \
    FW_FN static VECTOR begin(VECTOR x) { return x; }     \
    FW_FN static VECTOR end(VECTOR x) { return NAME(x); } \
  };                                                      \
  FW_STEPS_OF(NAME, LANE, VECTOR)
// The same for a function in two steps, `begin` and `end`.
#define FW_STEPS_OF(NAME, LANE, VECTOR)                                           \
  FW_FN LANE NAME(LANE x) {                                                       \
    return NAME##_of_##VECTOR::end(NAME##_of_##VECTOR::begin(all<VECTOR>(x)))[0]; \
  }                                                                               \
  template <bool kHere = false>                                                   \
  FW_FN void NAME##_run(const LANE* from, LANE* to, int n) {                      \
    run_lanes<NAME##_of_##VECTOR, VECTOR, kHere>(from, to, n);                    \
  }

}  // namespace fw
#endif  // FW_VECTORS
#endif  // __CUDACC__
