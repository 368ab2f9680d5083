// log Σ e^x as one reduction: a number, the base, and the sum of e^(x - base). A sum alone would
// overflow, and to know the largest number first would be a sweep of its own.
#pragma once

#include "accumulators.hpp"
#include "logarithm.hpp"
#include "transcendental.hpp"

namespace fw {

template <class T>
FW_FN T scaled(T sum, T by) {
  return sum * by;
}
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
  // A base gives way to a number that lies further above it. To follow each that is larger would
  // round the sum as often as numbers rise; by this much, what was rounded before soon counts for
  // little. The base itself adds 1 to the sum, which is then never small.
  static constexpr T kStep = T(1);

  // How a state and a number's or another state's base go together: one exponential for both.
  struct Meeting {
    bool moves;
    T exponent;  // of what lies lower, seldom of what lies up to a step higher
    FW_FN Meeting(T base, T x) : moves(x > base + kStep) {
      const T above = x - base;
      exponent = x == base ? T(0) : moves ? -above : above;  // the same infinity is no distance
    }
    FW_FN T mine(T power) const { return moves ? power : T(1); }
    FW_FN T other(T power) const { return moves ? T(1) : power; }
  };

  FW_FN static State identity() { return {kLowest<T>, Sum::identity()}; }
  FW_FN static State added(State a, T x, const Meeting& meeting, T power) {
    return {meeting.moves ? x : a.base,
            Sum::join(scaled(a.sum, Wide<T>(meeting.mine(power))), Wide<T>(meeting.other(power)))};
  }
  FW_FN static State join(State a, T x) {
    const Meeting meeting(a.base, x);
    return added(a, x, meeting, exp(meeting.exponent));
  }
  FW_FN static State join(State a, State b) {
    const Meeting meeting(a.base, b.base);
    const T power = exp(meeting.exponent);
    return {meeting.moves ? b.base : a.base,
            Sum::join(scaled(a.sum, Wide<T>(meeting.mine(power))),
                      scaled(b.sum, Wide<T>(meeting.other(power))))};
  }
  FW_FN static T result(State state) {
#if defined(__CUDACC__)
    return state.base + log(Sum::result(state.sum));
#else
    return static_cast<T>(state.base + log(state.sum));
#endif
  }
};

// A plain sum of the terms of a vector, of which each is 1 at most.
template <class T>
struct FewTerms {
  FW_FN static T join(T a, T b) { return a + b; }
};

template <class T, int V>
struct LogSumExp {
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
  // The lanes of one row's vector, their own largest first: one exponential for each and one more.
  template <int kLanes>
  FW_FN void add_all(const T (&x)[kLanes]) {
    T most = x[0], terms[kLanes];
    for (int v = 1; v < kLanes; ++v) most = fw::fmax(most, x[v]);
    for (int v = 0; v < kLanes; ++v) terms[v] = exp(x[v] == most ? T(0) : x[v] - most);
    State few = Rule::identity();
    few.base = most;
    few.sum = Rule::Sum::join(few.sum, Wide<T>(halved<FewTerms<T>, kLanes>(terms)));
    set(0, Rule::join(state(0), few));
  }
#if !defined(__CUDACC__)
  // The first n lanes, the exponentials of all at once.
  FW_FN void add_run(const T* x, int n) {
    T powers[V];
    for (int v = 0; v < n; ++v) powers[v] = typename Rule::Meeting(base[v], x[v]).exponent;
    exp_run(powers, powers, n);
    for (int v = 0; v < n; ++v) {
      const typename Rule::Meeting meeting(base[v], x[v]);
      set(v, Rule::added(state(v), x[v], meeting, powers[v]));
    }
  }
#endif
  FW_FN void combine(const LogSumExp& other) {
    for (int v = 0; v < V; ++v) set(v, Rule::join(state(v), other.state(v)));
  }
  FW_FN LogSumExp<T, 1> lane(int v) const {
    LogSumExp<T, 1> one;
    one.set(0, state(v));
    return one;
  }
  // All lanes as one; those that saw nothing hold the identity.
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
