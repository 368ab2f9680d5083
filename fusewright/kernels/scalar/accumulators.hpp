// Running reductions over V lanes. Lanes are combined in a fixed order, so results are
// reproducible. `Wide` is the type in which sums accumulate: double for floats on the host, the
// type itself on the GPU.
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
  return __builtin_ia32_cvtps2pd512_mask(x, EightDoubles{}, -1, 4);  // g++ 12 would use two
#else
  return __builtin_convertvector(x, EightDoubles);
#endif
}
#endif

// Variables rather than functions: device code may read a constexpr value of the standard library,
// but may not call its functions.
template <class T>
constexpr T kLowest =
    kIsFloat<T> ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::lowest();
template <class T>
constexpr T kHighest =
    kIsFloat<T> ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::max();
template <class T>
constexpr T kQuietNan = std::numeric_limits<T>::quiet_NaN();

// The common base of most rules: the state is one number, to which and from which values are cast.
template <class T, class S>
struct PlainRule {
  using State = S;
  template <class X>
  FW_FN static State of(X x) {
    return fw::cast<State>(x);
  }
  FW_FN static T result(State state) { return fw::cast<T>(state); }
};

// A rule describes one reduction: the type of its state, its identity, and how two states are
// joined. T is the type of the elements.
template <class T>
struct SumRule : PlainRule<T, Wide<T>> {
  using State = Wide<T>;
  FW_FN static State identity() { return State(0); }
  FW_FN static State join(State a, State b) { return fw::add(a, b); }
};
#if defined(__CUDACC__)
// A float sum with the sum of its rounding errors (Knuth's two-sum). A plain sum of many equal
// terms loses a bit each time their number doubles. The plain sum alone decides whether the result
// is infinite.
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

// Joins an array as a binary tree: short dependency chains, which vectorise, in a fixed order.
template <class Rule, int kN, class State>
FW_FN State halved(State* state) {
  if constexpr (kN > 1) {
    constexpr int kHalf = (kN + 1) / 2;
    for (int v = 0; v < kN - kHalf; ++v) state[v] = Rule::join(state[v], state[v + kHalf]);
    return halved<Rule, kHalf>(state);
  }
  return state[0];
}

// A float sum without correction.
struct PlainSum {
  FW_FN static float join(float a, float b) { return a + b; }
};

// The plain sums of a few elements per lane, which a compensated sum takes at once.
template <int V>
struct FewSummed {
  float sum[V] = {};
  FW_FN void add(int v, float x) { sum[v] += x; }
  template <int kLanes>
  FW_FN void add_all(float (&x)[kLanes]) {
    add(0, halved<PlainSum, kLanes>(x));
  }
};

template <template <class> class Rule, class T, int V>
struct Running {
  static constexpr int kLanes = V;
  static constexpr bool kMeets = false;
  using State = typename Rule<T>::State;
  State state[V];

  FW_FN Running() {
#if !defined(__CUDACC__)
    // Unrolled: g++ would turn the loop into `rep stos`, which takes 30 ns, a third of the time for
    // the sum of 1024 floats.
#pragma GCC unroll 64
#endif
    for (int v = 0; v < V; ++v) state[v] = Rule<T>::identity();
  }
  template <class X>
  FW_FN void add(int v, X x) {
    state[v] = Rule<T>::join(state[v], Rule<T>::of(x));
  }
#if !defined(__CUDACC__)
  // The same for the first n lanes, from memory. Eight floats at once: by itself g++ 12 reads
  // sixteen and takes them apart again.
  FW_FN void add_run(const float* x, int n) {
    int v = 0;
    for (; v + 8 <= n; v += 8) add_eight(v, floats_at(x + v));
    for (; v < n; ++v) add(v, x[v]);
  }
  // The same for two values per lane, which are added as floats before they are converted to
  // double: conversions limit the speed of sums over data in cache. This rounds once; a sum in
  // float rounds with every addition.
  FW_FN void add_two(const float* x, const float* y, int n) {
    int v = 0;
    for (; v + 8 <= n; v += 8) add_eight(v, floats_at(x + v) + floats_at(y + v));
    for (; v < n; ++v) add(v, x[v] + y[v]);
  }
  // A run of lanes that are joined into one at the end: the two halves of the run are added first
  // (1 M floats by rows, two threads: 52 us instead of 75).
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
  // The lanes of one row's vector are added as a binary tree, and the running sum takes the total.
  // These few plain additions lose little precision, and each step of the running sum is seven
  // additions.
  template <int kLanes>
  FW_FN void add_all(float (&x)[kLanes]) {
    add(0, halved<PlainSum, kLanes>(x));
  }
  // What takes the next few elements instead of these accumulators, and then is taken by them. Each
  // step of a compensated sum is seven additions, and a few plain ones lose little precision. (H200,
  // sums down columns of 128 x 4096 x 4095 floats: 2.88 ms with each element compensated, while a
  // maximum of the same takes 2.05.)
  FW_FN auto few() const {
    if constexpr (std::is_same_v<Rule<T>, SumRule<float>>) {
      return FewSummed<V>{};
    } else {
      return *this;
    }
  }
  FW_FN void take(const FewSummed<V>& few) {
    for (int v = 0; v < V; ++v) add(v, few.sum[v]);
  }
  FW_FN void take(const Running& few) { *this = few; }
  FW_FN void combine(const Running& other) {
    for (int v = 0; v < V; ++v) state[v] = Rule<T>::join(state[v], other.state[v]);
  }
  FW_FN Running<Rule, T, 1> lane(int v) const {
    Running<Rule, T, 1> one;
    one.state[0] = state[v];
    return one;
  }
  // All lanes joined into one; lanes without elements hold the identity.
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

// Mean and sum of squared deviations. All lanes have the same count, so `step` needs one division
// for V lanes. `combine` is Chan's formula, which also holds when one side is empty.
template <class T, int V>
struct Welford {
  static constexpr int kLanes = V;
  static constexpr bool kMeets = false;
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
  // Takes the lanes of one row's vector together, with their own mean first: half as many
  // instructions as one by one, and no lanes to join at the end. The mean is a sum of x / kLanes,
  // since the sum of x could overflow.
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
    // Not delta * delta * (share * before): for large equal values delta * delta is infinite, and
    // times 0, for the first vector, it would give NaN.
    spread[0] += fused(delta * share * before, delta, squares);
  }
  FW_FN static float fused(float a, float b, float c) { return ::fmaf(a, b, c); }
  FW_FN static double fused(double a, double b, double c) { return ::fma(a, b, c); }
  FW_FN Welford few() const { return *this; }
  FW_FN void take(const Welford& few) { *this = few; }
  FW_FN void combine(const Welford& other) {
    const State total = count + other.count;
    const State weight = total > State(0) ? quick_div(other.count, total) : State(0);
    for (int v = 0; v < V; ++v) {
      const State delta = other.center[v] - center[v];
      // An empty side holds zeros and has a weight of 0 or 1. Its center must not enter as inf * 0.
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
// On the host, floats need no running mean. Sums of x - shift and of its square in double lose at
// most a factor n of 2^-53, because the shift is one of the elements, and no step waits for a
// division.
template <int V>
struct Welford<float, V> {
  static constexpr int kLanes = V;
  static constexpr bool kMeets = false;
  double count;
  double shift[V], sum[V], squares[V];

  FW_FN Welford() : count(0) {
    for (int v = 0; v < V; ++v) shift[v] = sum[v] = squares[v] = 0;
  }
  FW_FN void step() { count += 1; }
  template <class X>
  FW_FN void add(int v, X x) {
    const double wide = static_cast<double>(x);
    // The shift is the first element of a lane, or 0 if it is infinite, which would make the mean
    // NaN. All lanes share the test, so later loops run without it (layer norm: 1.0 times eager's
    // time instead of 1.2).
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
  FW_FN Welford few() const { return *this; }
  FW_FN void take(const Welford& few) { *this = few; }
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
  // The first n lanes joined into one. They have seen the same number of elements, the others none.
  FW_FN Welford<float, 1> folded(int n) const {
    Welford<float, 1> one;
    if (!(count > 0)) return one;
    const double share = 1 / count;
    double means[V], deviations[V];
    for (int v = 0; v < V; ++v) means[v] = shift[v] + sum[v] * share;
    const double whole = halved<SumRule<double>, V>(means) / n;  // overwrites means
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
  // Chan's formula, for lanes that hold a mean and squared deviations, as `lane` and `folded`
  // return them.
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
