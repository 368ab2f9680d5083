// Running reductions, V lanes wide. Lanes are combined in a fixed order, so results repeat.
// `Wide` is what a sum runs in: double on the host, the type itself on the GPU.
#pragma once

#include "scalar/operators.hpp"

namespace fw {

#if defined(__CUDACC__)
template <class T>
using Wide = T;
#else
template <class T>
using Wide = std::conditional_t<kIsFloat<T>, double, T>;
using EightFloats = float __attribute__((vector_size(32)));
using EightDoubles = double __attribute__((vector_size(64)));
FW_FN EightDoubles wide(EightFloats x) {
#if defined(__AVX512F__)
  return __builtin_ia32_cvtps2pd512_mask(x, EightDoubles{}, -1, 4);  // g++ 12 would make two of it
#else
  return __builtin_convertvector(x, EightDoubles);
#endif
}
#endif

// Variables, not functions: device code may read a constexpr value of the standard library but
// not call for it.
template <class T>
constexpr T kLowest =
    kIsFloat<T> ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::lowest();
template <class T>
constexpr T kHighest =
    kIsFloat<T> ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::max();
template <class T>
constexpr T kQuietNan = std::numeric_limits<T>::quiet_NaN();

// What most rules share: a state that is a number, made from a value and read as one.
template <class T, class S>
struct PlainRule {
  using State = S;
  template <class X>
  FW_FN static State of(X x) {
    return fw::cast<State>(x);
  }
  FW_FN static T result(State state) { return fw::cast<T>(state); }
};

// One reduction: its state type, its identity, and how two states join. T is what is reduced.
template <class T>
struct SumRule : PlainRule<T, Wide<T>> {
  using State = Wide<T>;
  FW_FN static State identity() { return State(0); }
  FW_FN static State join(State a, State b) { return fw::add(a, b); }
};
#if defined(__CUDACC__)
// A float sum beside the sum of what its additions rounded away (Knuth's two-sum): a long run of
// equal terms loses a bit with every doubling otherwise. The plain sum alone decides about inf.
struct Compensated {
  float sum, error;
};
template <>
struct SumRule<float> {
  using State = Compensated;
  FW_FN static State identity() { return {0.f, 0.f}; }
  template <class X>
  FW_FN static float of(X x) {
    return fw::cast<float>(x);
  }
  FW_FN static State join(State a, float b) {
    const float sum = a.sum + b;
    const float part = sum - a.sum;
    const float lost = (a.sum - (sum - part)) + (b - part);
    return {sum, a.error + lost};
  }
  FW_FN static State join(State a, State b) {
    const State sum = join(a, b.sum);
    return {sum.sum, sum.error + b.error};
  }
  FW_FN static float result(State state) {
    const float total = state.sum + state.error;
    return state.sum - state.sum == 0.f ? total : state.sum;
  }
};
#endif
template <class T>
struct ProdRule : PlainRule<T, Wide<T>> {
  using State = Wide<T>;
  FW_FN static State identity() { return State(1); }
  FW_FN static State join(State a, State b) { return fw::mul(a, b); }
};
template <class T>
struct MaxRule : PlainRule<T, T> {
  using State = T;
  FW_FN static State identity() { return kLowest<T>; }
  FW_FN static State join(State a, State b) { return fw::maximum(a, b); }
};
template <class T>
struct MinRule : PlainRule<T, T> {
  using State = T;
  FW_FN static State identity() { return kHighest<T>; }
  FW_FN static State join(State a, State b) { return fw::minimum(a, b); }
};
template <class T>
struct AnyRule : PlainRule<T, bool> {
  using State = bool;
  FW_FN static State identity() { return false; }
  FW_FN static State join(State a, State b) { return a | b; }
};
template <class T>
struct AllRule : PlainRule<T, bool> {
  using State = bool;
  FW_FN static State identity() { return true; }
  FW_FN static State join(State a, State b) { return a & b; }
};

// Joins an array by halves: short chains, which vectorise, in a fixed order.
template <class Rule, int kN, class State>
FW_FN State halved(State* state) {
  if constexpr (kN > 1) {
    constexpr int kHalf = (kN + 1) / 2;
    for (int v = 0; v < kN - kHalf; ++v) state[v] = Rule::join(state[v], state[v + kHalf]);
    return halved<Rule, kHalf>(state);
  }
  return state[0];
}

// A float sum that loses what it rounds away.
struct PlainSum {
  FW_FN static float join(float a, float b) { return a + b; }
};

template <template <class> class Rule, class T, int V>
struct Running {
  using State = typename Rule<T>::State;
  State state[V];

  FW_FN Running() {
#if !defined(__CUDACC__)
    // Unrolled, since g++ makes `rep stos` of the loop: 30 ns, a third of what the sum of 1024
    // floats takes.
#pragma GCC unroll 64
#endif
    for (int v = 0; v < V; ++v) state[v] = Rule<T>::identity();
  }
  template <class X>
  FW_FN void add(int v, X x) {
    state[v] = Rule<T>::join(state[v], Rule<T>::of(x));
  }
#if !defined(__CUDACC__)
  // The same for the first n lanes, from memory: eight floats at once, since g++ 12 reads sixteen
  // and takes them apart again.
  FW_FN void add_run(const float* x, int n) {
    int v = 0;
    for (; v + 8 <= n; v += 8) add_eight(v, floats_at(x + v));
    for (; v < n; ++v) add(v, x[v]);
  }
  // The same for two numbers a lane, added as floats before they go wide: conversions bound sums of
  // what is in cache. That rounds once; a sum of floats rounds as often as numbers follow.
  FW_FN void add_two(const float* x, const float* y, int n) {
    int v = 0;
    for (; v + 8 <= n; v += 8) add_eight(v, floats_at(x + v) + floats_at(y + v));
    for (; v < n; ++v) add(v, x[v] + y[v]);
  }
  // A run for lanes that are one in the end (1 M floats by rows, two threads: 52 instead of 75 us).
  FW_FN void add_pairs(const float* x, int n) {
    if (n < V || V % 16 != 0) {
      add_run(x, n);
    } else {
      for (int v = 0; v < V; v += 16) fetch_ahead(x + v);
      add_two(x, x + V / 2, V / 2);
    }
  }
  FW_FN static EightFloats floats_at(const float* x) {
    EightFloats in;
    std::memcpy(&in, x, sizeof in);
    return in;
  }
  FW_FN void add_eight(int v, EightFloats x) {
    static_assert(std::is_same_v<State, double>, "sums of floats run in double");
    EightDoubles sum;
    std::memcpy(&sum, state + v, sizeof sum);
    sum += wide(x);
    std::memcpy(state + v, &sum, sizeof sum);
  }
#endif
  // The lanes of one row's vector, added by halves before the running sum takes them: that loses
  // little beside the lanes themselves, and each step of the running sum is seven additions.
  template <int kLanes>
  FW_FN void add_all(float (&x)[kLanes]) {
    add(0, halved<PlainSum, kLanes>(x));
  }
  FW_FN void combine(const Running& other) {
    for (int v = 0; v < V; ++v) state[v] = Rule<T>::join(state[v], other.state[v]);
  }
  FW_FN Running<Rule, T, 1> lane(int v) const {
    Running<Rule, T, 1> one;
    one.state[0] = state[v];
    return one;
  }
  // All lanes as one; those that saw nothing hold the identity.
  FW_FN Running<Rule, T, 1> folded(int) const {
    Running lanes = *this;
    Running<Rule, T, 1> one;
    one.state[0] = halved<Rule<T>, V>(lanes.state);
    return one;
  }
  FW_FN T result(int v) const { return Rule<T>::result(state[v]); }
};

template <class T, int V>
using Sum = Running<SumRule, T, V>;
template <class T, int V>
using Prod = Running<ProdRule, T, V>;
template <class T, int V>
using Max = Running<MaxRule, T, V>;
template <class T, int V>
using Min = Running<MinRule, T, V>;
template <class T, int V>
using Any = Running<AnyRule, T, V>;
template <class T, int V>
using All = Running<AllRule, T, V>;

// Mean and sum of squared deviations. All lanes see the same count, so `step` pays one division
// for V of them; `combine` is Chan's formula, which holds for an empty side too.
template <class T, int V>
struct Welford {
  using State = Wide<T>;
  State count, share;
  State center[V], spread[V];

  FW_FN Welford() : count(0), share(0) {
    for (int v = 0; v < V; ++v) center[v] = spread[v] = State(0);
  }
  FW_FN void step() {
    count += State(1);
    share = quick_div(State(1), count);
  }
  template <class X>
  FW_FN void add(int v, X x) {
    const State delta = static_cast<State>(x) - center[v];
    center[v] += delta * share;
    spread[v] += delta * (static_cast<State>(x) - center[v]);
  }
  // The lanes of one row's vector, their own mean first: half as many instructions as one by one,
  // and no lanes to join in the end. Shares are summed, since a sum may exceed all numbers.
  template <int kLanes>
  FW_FN void add_all(const T (&x)[kLanes]) {
    constexpr State kShare = State(1) / kLanes;
    State mean = x[0] * kShare;
    for (int v = 1; v < kLanes; ++v) mean = fused(x[v], kShare, mean);
    State squares = (x[0] - mean) * (x[0] - mean);
    for (int v = 1; v < kLanes; ++v) squares = fused(x[v] - mean, x[v] - mean, squares);
    const State before = count, delta = mean - center[0];
    count += State(kLanes);
    share = quick_div(State(kLanes), count);
    center[0] = fused(delta, share, center[0]);
    // Not delta * delta, which is infinite where equal numbers are large: nothing is before them.
    spread[0] += fused(delta * share * before, delta, squares);
  }
  FW_FN static float fused(float a, float b, float c) { return ::fmaf(a, b, c); }
  FW_FN static double fused(double a, double b, double c) { return ::fma(a, b, c); }
  FW_FN void combine(const Welford& other) {
    const State total = count + other.count;
    const State weight = total > State(0) ? quick_div(other.count, total) : State(0);
    for (int v = 0; v < V; ++v) {
      const State delta = other.center[v] - center[v];
      // An empty side holds zeros, and a weight of 0 or 1: its center must not leak inf * 0.
      center[v] = count > State(0) ? center[v] + (other.count > State(0) ? delta * weight : 0)
                                   : other.center[v];
      spread[v] += other.spread[v] +
                   (weight > State(0) && count > State(0) ? delta * delta * count * weight : 0);
    }
    count = total;
  }
  FW_FN Welford<T, 1> lane(int v) const {
    Welford<T, 1> one;
    one.count = count;
    one.center[0] = center[v];
    one.spread[0] = spread[v];
    return one;
  }
  FW_FN Welford<T, 1> folded(int n) const {
    Welford<T, 1> one = lane(0);
    for (int v = 1; v < n; ++v) one.combine(lane(v));
    return one;
  }
  FW_FN T mean(int v) const {
    return count > State(0) ? static_cast<T>(center[v]) : T(kQuietNan<T>);
  }
  FW_FN T m2(int v) const { return static_cast<T>(spread[v]); }
};

#if !defined(__CUDACC__)
// On the host floats need no running mean: sums of x - shift and of its square in double lose at
// most a factor n of 2^-53, since the shift is one of the numbers, and no division waits for one.
template <int V>
struct Welford<float, V> {
  double count;
  double shift[V], sum[V], squares[V];

  FW_FN Welford() : count(0) {
    for (int v = 0; v < V; ++v) shift[v] = sum[v] = squares[v] = 0;
  }
  FW_FN void step() { count += 1; }
  template <class X>
  FW_FN void add(int v, X x) {
    const double wide = static_cast<double>(x);
    // The first finite number of a lane; an infinite one must not make NaN of a mean. All lanes
    // share the test, so that later loops go without it (layer norm: 1.2 to 1.0 times eager).
    if (count == 1) shift[v] = wide - wide == 0 ? wide : 0;
    const double delta = wide - shift[v];
    sum[v] += delta;
#if defined(FW_FMA)
    squares[v] = __builtin_fma(delta, delta, squares[v]);
#else
    squares[v] += delta * delta;
#endif
  }
  template <int kLanes>
  FW_FN void add_all(const float (&x)[kLanes]) {
    for (int v = 0; v < kLanes; ++v) {
      step();
      add(0, x[v]);
    }
  }
  FW_FN double center(int v) const { return count > 0 ? shift[v] + sum[v] / count : 0; }
  FW_FN double spread(int v) const {
    const double m2 = count > 0 ? squares[v] - sum[v] * (sum[v] / count) : 0;
    return m2 < 0 ? 0 : m2;
  }
  FW_FN Welford<float, 1> lane(int v) const {
    Welford<float, 1> one;
    one.count = count;
    one.shift[0] = center(v);
    one.squares[0] = spread(v);
    return one;
  }
  // The first n lanes as one: they have seen equally many numbers, the others none.
  FW_FN Welford<float, 1> folded(int n) const {
    Welford<float, 1> one;
    if (!(count > 0)) return one;
    const double share = 1 / count;
    double means[V], deviations[V];
    for (int v = 0; v < V; ++v) means[v] = shift[v] + sum[v] * share;
    const double whole = halved<SumRule<double>, V>(means) / n;  // which overwrites them
    for (int v = 0; v < V; ++v) {
      const double inner = squares[v] - sum[v] * (sum[v] * share);
      const double delta = shift[v] + sum[v] * share - whole;
      const double deviation = (inner < 0 ? 0 : inner) + delta * delta * count;
      deviations[v] = v < n ? deviation : 0;
    }
    one.count = count * n;
    one.shift[0] = whole;
    one.squares[0] = halved<SumRule<double>, V>(deviations);
    return one;
  }
  // Chan's formula on lanes that hold a mean and its deviations, as `lane` and `folded` leave them.
  FW_FN void combine(const Welford& other) {
    const double all = count + other.count;
    for (int v = 0; v < V; ++v) {
      const double mine = center(v), delta = other.center(v) - mine;
      const double m2 = spread(v) + other.spread(v);
      const bool both = (count > 0) & (other.count > 0);
      shift[v] = both ? mine + delta * (other.count / all) : count > 0 ? mine : other.center(v);
      squares[v] = both ? m2 + delta * delta * count * (other.count / all) : m2;
      sum[v] = 0;
    }
    count = all;
  }
  FW_FN float mean(int v) const {
    return count > 0 ? static_cast<float>(center(v)) : kQuietNan<float>;
  }
  FW_FN float m2(int v) const { return static_cast<float>(spread(v)); }
};
#endif

}  // namespace fw
