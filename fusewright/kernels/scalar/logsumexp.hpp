// log Σ e^x as one reduction with two values: a base, and the sum of e^(x - base). A plain sum
// would overflow, and finding the maximum first would take a sweep of its own.
#pragma once

#include "scalar/accumulators.hpp"
#include "scalar/logarithm.hpp"
#include "scalar/transcendental.hpp"

namespace fw {

FW_FN float scaled(float sum, float by) { return sum * by; }
FW_FN double scaled(double sum, double by) { return sum * by; }
#if defined(__CUDACC__)
FW_FN Compensated scaled(Compensated x, float by) { return {x.sum * by, x.error * by}; }
#endif

template <class T>
struct LogSumExpRule {
  using Sum = SumRule<T>;
  struct State {
    T base;
    typename Sum::State sum;
  };
  // The base changes only for an element that exceeds it by more than this. Each change rounds the
  // sum: if the base followed every larger element, ascending elements would lose much precision
  // (4096 floats from 0 to 1: an error of 5e-5 instead of 2e-7). After a step of this size, earlier
  // rounding errors soon count for little. The base itself adds 1 to the sum, which is therefore
  // never small.
  static constexpr T kStep = T(1);

  // The factors of two sums whose bases become one; a single exponential gives both.
  struct Scales {
    T first, second;
    bool moves;
    FW_FN Scales(T base, T other) : moves(other > base + kStep) {
      const T above = other - base;
      // The distance of equal infinities is 0, not NaN.
      const T power = exp(other == base ? T(0) : moves ? -above : above);
      first = moves ? power : T(1);
      second = moves ? T(1) : power;
    }
  };
  FW_FN static State identity() { return {kLowest<T>, Sum::identity()}; }
  FW_FN static State join(State a, T x) {
    const Scales by(a.base, x);
    return {by.moves ? x : a.base, Sum::join(scaled(a.sum, by.first), Sum::of(by.second))};
  }
  FW_FN static State join(State a, State b) {
    const Scales by(a.base, b.base);
    return {by.moves ? b.base : a.base,
            Sum::join(scaled(a.sum, by.first), scaled(b.sum, by.second))};
  }
  FW_FN static T result(State state) {
#if defined(__CUDACC__)
    return state.base + log(Sum::result(state.sum));
#else
    return static_cast<T>(state.base + log(state.sum));  // in double
#endif
  }
};

// A plain sum of the terms of a vector, each at most 1.
template <class T>
struct FewTerms {
  FW_FN static T join(T a, T b) { return a + b; }
};

template <class T, int V>
struct LogSumExp {
  static constexpr int kLanes = V;
  static constexpr bool kMeets = true;
  using Rule = LogSumExpRule<T>;
  using State = typename Rule::State;
  T base[V];
  typename Rule::Sum::State sum[V];

  FW_FN LogSumExp() {
    for (int v = 0; v < V; ++v) set(v, Rule::identity());
  }
  FW_FN State state(int v) const { return {base[v], sum[v]}; }
  FW_FN void set(int v, const State& state) {
    base[v] = state.base;
    sum[v] = state.sum;
  }
  FW_FN void add(int v, T x) { set(v, Rule::join(state(v), x)); }
  // Takes the lanes of one row's vector together, with their maximum first: one exponential per
  // lane and one more.
  template <int kLanes>
  FW_FN void add_all(const T (&x)[kLanes]) {
    T most = x[0], terms[kLanes];
    for (int v = 1; v < kLanes; ++v) most = fw::fmax(most, x[v]);
    for (int v = 0; v < kLanes; ++v) terms[v] = exp(x[v] == most ? T(0) : x[v] - most);
    State few = Rule::identity();
    few.base = most;
    few.sum = Rule::Sum::join(few.sum, Rule::Sum::of(halved<FewTerms<T>, kLanes>(terms)));
    // Where the compiler sees that the state is empty, it omits the exponential.
    const bool empty = (base[0] == kLowest<T>) & (Rule::Sum::result(sum[0]) == T(0));
    set(0, empty ? few : Rule::join(state(0), few));
  }
  // For threads that join: `meet` brings their sums to the largest base, then `combine_met` only
  // adds them.
  template <class Largest>
  FW_FN void meet(const Largest& largest) {
    for (int v = 0; v < V; ++v) {
      const T most = largest(base[v]);
      sum[v] = scaled(sum[v], exp(base[v] == most ? T(0) : base[v] - most));
      base[v] = most;
    }
  }
  FW_FN void combine_met(const LogSumExp& other) {
    for (int v = 0; v < V; ++v) sum[v] = Rule::Sum::join(sum[v], other.sum[v]);
  }
  FW_FN LogSumExp few() const { return *this; }
  FW_FN void take(const LogSumExp& few) { *this = few; }
  FW_FN void combine(const LogSumExp& other) {
    for (int v = 0; v < V; ++v) set(v, Rule::join(state(v), other.state(v)));
  }
  FW_FN LogSumExp<T, 1> lane(int v) const {
    LogSumExp<T, 1> one;
    one.set(0, state(v));
    return one;
  }
  // All lanes joined into one; lanes without elements hold the identity.
  FW_FN LogSumExp<T, 1> folded(int) const {
    State lanes[V];
    for (int v = 0; v < V; ++v) lanes[v] = state(v);
    LogSumExp<T, 1> one;
    one.set(0, halved<Rule, V>(lanes));
    return one;
  }
  FW_FN T result(int v) const { return Rule::result(state(v)); }
};

}  // namespace fw
