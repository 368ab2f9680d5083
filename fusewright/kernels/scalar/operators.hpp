// The scalar operators of ir/operators.py, with PyTorch's semantics in all corner cases. On the
// host the common float functions are branch-free, so g++ vectorises loops over lanes. The
// polynomials are our own near-minimax fits; tests/ir/test_operators.py checks their errors.
#pragma once

#include "scalar/types.hpp"

namespace fw {

template <class T>
constexpr bool kIsFloat = std::is_floating_point_v<T>;

// Integers wrap around: arithmetic uses an unsigned type that is at least as wide as int.
template <class T>
using Wrap = std::common_type_t<unsigned, std::make_unsigned_t<T>>;

FW_FN bool add(bool a, bool b) { return a | b; }
FW_FN bool mul(bool a, bool b) { return a & b; }
FW_FN bool sub(bool a, bool b) { return a ^ b; }

#define FW_ARITHMETIC(NAME, OPERATOR)                                                  \
  template <class T>                                                                   \
  FW_FN T NAME(T a, T b) {                                                             \
    if constexpr (kIsFloat<T>) {                                                       \
      return a OPERATOR b;                                                             \
    } else {                                                                           \
      return static_cast<T>(static_cast<Wrap<T>>(a) OPERATOR static_cast<Wrap<T>>(b)); \
    }                                                                                  \
  }
FW_ARITHMETIC(add, +)
FW_ARITHMETIC(sub, -)
FW_ARITHMETIC(mul, *)
#undef FW_ARITHMETIC

#define FW_COMPARISON(NAME, OPERATOR) \
  template <class T>                  \
  FW_FN bool NAME(T a, T b) {         \
    return a OPERATOR b;              \
  }
FW_COMPARISON(eq, ==)
FW_COMPARISON(ne, !=)
FW_COMPARISON(lt, <)
FW_COMPARISON(le, <=)
FW_COMPARISON(gt, >)
FW_COMPARISON(ge, >=)
#undef FW_COMPARISON

template <class T>
FW_FN bool logical_and(T a, T b) {
  return (a != T(0)) & (b != T(0));
}
template <class T>
FW_FN bool logical_or(T a, T b) {
  return (a != T(0)) | (b != T(0));
}
template <class T>
FW_FN bool logical_xor(T a, T b) {
  return (a != T(0)) != (b != T(0));
}
template <class T>
FW_FN bool logical_not(T a) {
  return a == T(0);
}
template <class T>
FW_FN T bitwise_and(T a, T b) {
  return static_cast<T>(a & b);
}
template <class T>
FW_FN T bitwise_or(T a, T b) {
  return static_cast<T>(a | b);
}
template <class T>
FW_FN T bitwise_xor(T a, T b) {
  return static_cast<T>(a ^ b);
}
FW_FN bool bitwise_not(bool a) { return !a; }
template <class T>
FW_FN T bitwise_not(T a) {
  return static_cast<T>(~a);
}
template <class T>
FW_FN T where(bool condition, T a, T b) {
#if !defined(__CUDACC__)
  // Without a branch, which would keep g++ from vectorising a loop with several comparisons.
  if constexpr (std::is_same_v<T, int32_t>) return b ^ ((a ^ b) & -static_cast<T>(condition));
  if constexpr (std::is_same_v<T, float>) {
    const int32_t x = __builtin_bit_cast(int32_t, a), y = __builtin_bit_cast(int32_t, b);
    return __builtin_bit_cast(float, y ^ ((x ^ y) & -static_cast<int32_t>(condition)));
  }
#endif
  return condition ? a : b;
}

template <class T>
FW_FN bool isnan(T x) {
  return x != x;
}
template <class T>
FW_FN bool isinf(T x) {
  if constexpr (kIsFloat<T>) {
    constexpr T kInfinity = std::numeric_limits<T>::infinity();
    return (x == kInfinity) | (x == -kInfinity);
  } else {
    return false;
  }
}
template <class T>
FW_FN bool signbit(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return bits<int32_t>(x) < 0;
  } else if constexpr (std::is_same_v<T, double>) {
    return bits<int64_t>(x) < 0;
  } else {
    return x < T(0);
  }
}

template <class T>
FW_FN T neg(T x) {
  if constexpr (kIsFloat<T>) {
    return -x;
  } else {
    return static_cast<T>(Wrap<T>(0) - static_cast<Wrap<T>>(x));
  }
}
FW_FN float abs(float x) { return ::fabsf(x); }
FW_FN double abs(double x) { return ::fabs(x); }
FW_FN bool abs(bool x) { return x; }
template <class T>
FW_FN T abs(T x) {
  return x < T(0) ? neg(x) : x;
}
FW_FN bool sign(bool x) { return x; }
template <class T>
FW_FN T sign(T x) {
  return static_cast<T>((T(0) < x) - (x < T(0)));
}

// NaN if an operand is NaN. Two selects with one comparison each: for one select with both, g++
// uses branches where a chain of them reads every other element (pooling of 8 × 64 × 112² floats on
// one Neoverse-N1, g++ 12: 22 ms instead of 3).
template <class T>
FW_FN T maximum(T a, T b) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, float>) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  }
#endif
  if constexpr (kIsFloat<T>) {
    const T larger = !(a <= b) ? a : b;
    return b != b ? b : larger;
  } else {
    return a > b ? a : b;
  }
}
template <class T>
FW_FN T minimum(T a, T b) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, float>) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
  }
#endif
  if constexpr (kIsFloat<T>) {
    const T smaller = !(a >= b) ? a : b;
    return b != b ? b : smaller;
  } else {
    return a < b ? a : b;
  }
}
// If one operand is NaN, the result is the other.
template <class T>
FW_FN T fmax(T a, T b) {
  return (a > b) | (b != b) ? a : b;
}
template <class T>
FW_FN T fmin(T a, T b) {
  return (a < b) | (b != b) ? a : b;
}
FW_FN bool relu(bool x) { return x; }
template <class T>
FW_FN T relu(T x) {
#if !defined(__CUDACC__)
  // On bits: in maximum(x, 0) g++ knows that 0 is not NaN, and uses branches (max pooling with
  // offsets, 4 × 64 × 112² floats, two Neoverse-N1, g++ 12: 1.8 ms instead of 17).
  if constexpr (kIsFloat<T>) {
    using Bits = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
    const Bits kept = -static_cast<Bits>(!(x <= T(0)));
    return __builtin_bit_cast(T, __builtin_bit_cast(Bits, x) & kept);
  }
#endif
  return x <= T(0) ? T(0) : x;
}

template <class T>
FW_FN T div(T a, T b) {
  if constexpr (kIsFloat<T>) {
    return a / b;
  } else {
    // Eager PyTorch raises an error on the CPU, C++ leaves it undefined; we return 0.
    if (b == T(0)) return T(0);
    if constexpr (std::is_signed_v<T>) {
      if (b == T(-1)) return neg(a);
    }
    return static_cast<T>(a / b);
  }
}
// A divisor that many values share; its reciprocal is computed once. `scale` has its sign and
// brings it close enough to 1 for the reciprocal to be a normal number.
struct CommonDivisor {
  float scale, by, share;
  CommonDivisor() = default;
  FW_FN explicit CommonDivisor(float x) {
    const float most = ::fabsf(x);
    scale = ::copysignf(most > 0x1p60f ? 0x1p-60f : most < 0x1p-60f ? 0x1p60f : 1.f, x);
    by = x * scale;
    share = 1.f / by;
  }
};
// a / b to the bit, so that a value computed again elsewhere is the same. Markstein's method: the
// first correction leaves an error of less than one ulp, the second rounds as division does.
// Quotients below 2^-100 are less precise, since the corrections lose digits. No branch, unlike
// nvcc's division.
FW_FN float div(float a, CommonDivisor b) {
  const float x = a * b.scale;
  const float first = x * b.share;
  const float near = ::fmaf(::fmaf(first, b.by, -x), -b.share, first);
  const float y = ::fmaf(::fmaf(near, b.by, -x), -b.share, near);
  return y == y ? y : first;  // with infinities the corrections are NaN
}
// The same to 2 ulp, for results that are stored in 16 bits.
FW_FN float approximate_div(float a, CommonDivisor b) { return a * b.scale * b.share; }
// a / b to 1 ulp for b from 1/4 to infinity, without the branch of a division on GPUs.
template <class T>
FW_FN T quick_div(T a, T b) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, float>) {
    float first;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(first) : "f"(b));
    const float rest = ::fmaxf(::fmaf(-b, first, 1.f), -1.f);  // of infinity it would be NaN
    return a * ::fmaf(first, rest, first);
  }
#endif
  return a / b;
}
template <class T>
FW_FN T fmod(T a, T b) {
  if constexpr (std::is_same_v<T, float>) {
    return ::fmodf(a, b);
  } else if constexpr (kIsFloat<T>) {
    return ::fmod(a, b);
  } else {
    return sub(a, mul(div(a, b), b));
  }
}

// The host's loops over lanes call NAME_far first. If no lane is far, they call NAME(Near{}, ...),
// which is branch-free and gives the same bits as NAME.
struct Near {};

#if !defined(__CUDACC__)
// For floats with |a| < 2^28 |b| the remainder is exact in double. Doubles need fused multiply-add.
FW_FN bool fmod_far(float a, float b) {
  const float most = ::fabsf(b);
  return !((::fabsf(a) < most * 0x1p28f) & (most < std::numeric_limits<float>::infinity()));
}
FW_FN bool fmod_far(double a, double b) {
#if defined(FW_FMA)
  const double most = ::fabs(b);
  return !((::fabs(a) < most * 0x1p50) & (most < std::numeric_limits<double>::infinity()));
#else
  return true;
#endif
}
FW_FN double near_rest(double a, double b) {
  const double whole = ::trunc(a / b);
#if defined(FW_FMA)
  const double rest = __builtin_fma(-whole, b, a);
#else
  const double rest = a - whole * b;
#endif
  return rest < 0.0 ? rest + b : rest;  // the quotient may have been rounded up
}
template <class T>
FW_FN T fmod(Near, T a, T b) {
  const double rest = near_rest(::fabs(static_cast<double>(a)), ::fabs(static_cast<double>(b)));
  return ::copysign(static_cast<T>(rest), a);
}
#endif

template <class T>
FW_FN T remainder_of(T rest, T b) {
  if constexpr (std::is_unsigned_v<T>) {
    return rest;
  } else {
    return (rest != T(0)) & ((b < T(0)) != (rest < T(0))) ? add(rest, b) : rest;
  }
}
template <class T>
FW_FN T remainder(T a, T b) {
  return remainder_of(fmod(a, b), b);
}
FW_FN float floor(float x) { return ::floorf(x); }
FW_FN double floor(double x) { return ::floor(x); }
FW_FN float ceil(float x) { return ::ceilf(x); }
FW_FN double ceil(double x) { return ::ceil(x); }
FW_FN float trunc(float x) { return ::truncf(x); }
FW_FN double trunc(double x) { return ::trunc(x); }
FW_FN float round(float x) { return ::rintf(x); }
FW_FN double round(double x) { return ::rint(x); }
#define FW_WHOLE(NAME)                                         \
  template <class T>                                           \
  FW_FN std::enable_if_t<std::is_integral_v<T>, T> NAME(T x) { \
    return x;                                                  \
  }
FW_WHOLE(floor)
FW_WHOLE(ceil)
FW_WHOLE(trunc)
FW_WHOLE(round)
#undef FW_WHOLE
template <class T>
FW_FN T frac(T x) {
  return sub(x, trunc(x));
}
template <class T>
FW_FN T trunc_divide(T a, T b) {
  return trunc(div(a, b));
}
template <class T>
FW_FN T floor_quotient(T rest, T a, T b) {
  if constexpr (kIsFloat<T>) {
    // PyTorch's own steps: rounding must not turn an exact multiple into the next lower quotient.
    T quotient = (a - rest) / b;
    quotient = (rest != T(0)) & ((b < T(0)) != (rest < T(0))) ? quotient - T(1) : quotient;
    T whole = floor(quotient);
    whole = quotient - whole > T(0.5) ? whole + T(1) : whole;
    whole = quotient == T(0) ? ::copysign(T(0), a / b) : whole;
    return b == T(0) ? a / b : whole;
  } else {
    const T quotient = div(a, b);
    if constexpr (std::is_unsigned_v<T>) {
      return quotient;
    } else {
      return (rest != T(0)) & ((b < T(0)) != (rest < T(0))) ? sub(quotient, T(1)) : quotient;
    }
  }
}
template <class T>
FW_FN T floor_divide(T a, T b) {
  return floor_quotient(fmod(a, b), a, b);
}

#if !defined(__CUDACC__)
template <class T>
FW_FN T remainder(Near near, T a, T b) {
  return remainder_of(fmod(near, a, b), b);
}
template <class T>
FW_FN bool remainder_far(T a, T b) {
  return fmod_far(a, b);
}
template <class T>
FW_FN T floor_divide(Near near, T a, T b) {
  return floor_quotient(fmod(near, a, b), a, b);
}
template <class T>
FW_FN bool floor_divide_far(T a, T b) {
  return fmod_far(a, b);
}
#endif

template <class T>
FW_FN T shift_left(T a, T b) {
  constexpr int kBits = 8 * sizeof(T);
  const bool outside = (b < T(0)) | (b >= T(kBits));
  return outside ? T(0) : static_cast<T>(static_cast<Wrap<T>>(a) << static_cast<int>(b));
}
template <class T>
FW_FN T shift_right(T a, T b) {
  constexpr int kBits = 8 * sizeof(T);
  constexpr int kMost = std::is_signed_v<T> ? kBits - 1 : kBits;
  const bool outside = (b < T(0)) | (b >= T(kBits));
  const int by = outside ? kMost : static_cast<int>(b);
  return by >= kBits ? T(0) : static_cast<T>(a >> by);
}

template <class T>
FW_FN T copysign(T a, T b) {
  if constexpr (std::is_same_v<T, float>) {
    return ::copysignf(a, b);
  } else {
    return ::copysign(a, b);
  }
}

}  // namespace fw
