// The host's scans: threads share the rows and scan each from one end to the other, or they share
// tiles of columns and scan the columns of a tile together.
#pragma once

#include "host/loops.hpp"
#include "scalar/scans.hpp"

namespace fw {

// V neighbouring elements: first the inputs of the scan, then its results.
template <class Rule, int V>
struct Scanned {
  typename Rule::Value at[V];
};

// The running values: one along the lanes, or one for each lane.
template <class Rule, int V>
struct Carry {
  using State = typename Rule::State;
  State at[V];
  Carry() {
    for (int v = 0; v < V; ++v) at[v] = Rule::identity();
  }
  template <bool kBackward, int W>
  FW_FN void along(Scanned<Rule, W>& scanned, int n) {
    using Value = typename Rule::Value;
    State state = at[0];
    int w = 0;
    // Four elements are joined before they wait for the running value: otherwise every addition
    // would wait for the one before. Not doubles, which could overflow on the way.
    for (; !std::is_same_v<Value, double> && w + 4 <= n; w += 4) {
      const int first = kBackward ? n - 1 - w : w;
      constexpr int kStep = kBackward ? -1 : 1;
      Value* const to = scanned.at + first;
      const State a = to[0], b = Rule::join(a, State(to[kStep]));
      const State c = State(to[2 * kStep]), d = Rule::join(c, State(to[3 * kStep]));
      to[0] = static_cast<Value>(Rule::join(state, a));
      to[kStep] = static_cast<Value>(Rule::join(state, b));
      to[2 * kStep] = static_cast<Value>(Rule::join(state, Rule::join(b, c)));
      state = Rule::join(state, Rule::join(b, d));
      to[3 * kStep] = static_cast<Value>(state);
    }
    for (; w < n; ++w) {
      const int v = kBackward ? n - 1 - w : w;
      state = Rule::join(state, State(scanned.at[v]));
      scanned.at[v] = static_cast<Value>(state);
    }
    at[0] = state;
  }
  FW_FN void across(Scanned<Rule, V>& scanned, int n) {
    for (int v = 0; v < n; ++v) {
      at[v] = Rule::join(at[v], State(scanned.at[v]));
      scanned.at[v] = static_cast<typename Rule::Value>(at[v]);
    }
  }
};

// The next n lanes of a row.
template <int V, class Body, class Row, class Carried>
FW_FN void scan_run(const Body& body, const Row& row, Carried& carry, int64_t q, int64_t l, int n) {
  typename Body::template Elem<V> elem;
  typename Body::template Scanned<V> scanned;
  body.load(Phase<0>{}, elem, row, q, l);
  body.visit(Phase<0>{}, elem, row, scanned, q, l, n);
  carry.along(scanned, n);
  body.load(Phase<1>{}, elem, row, q, l);
  body.visit(Phase<1>{}, elem, row, scanned, q, l, n);
}

template <int V, class Body>
int scan(const Body& body, int threads) {
  const int64_t outer = body.outer_extent(), inner = body.inner_extent();
  const int64_t lanes = body.lane_extent(), each = ceil_div(lanes, V);
  const int64_t runs = inner == 0 ? 0 : inner / lanes * each;
  parallel(outer, outer * inner, threads, [&](int64_t p) {
    typename Body::template Row<1> row;
    begin_at(body, row, p);
    typename Body::template Carry<1> carry;
    for (int64_t at = 0; at < runs; ++at) {
      const int64_t run = Body::kBackward ? runs - 1 - at : at;
      const int64_t q = run / each, l = run % each * V;
      // Loops with a constant length are faster.
      if (lanes - l >= V) {
        scan_run<V>(body, row, carry, q, l, V);
      } else {
        scan_run<V>(body, row, carry, q, l, static_cast<int>(lanes - l));
      }
    }
    body.store(row, 1);
  });
  return 0;
}

template <int V, class Body>
int scan_column(const Body& body, int threads) {
  const int64_t outer = body.outer_extent(), inner = body.inner_extent();
  if (outer == 0) return 0;
  const int64_t lanes = body.outer_lane_extent(), tiles = ceil_div(lanes, V);
  parallel(outer / lanes * tiles, outer * inner, threads, [&](int64_t tile) {
    const int64_t q = tile / tiles, l = tile % tiles * V;
    const int n = static_cast<int>(std::min<int64_t>(lanes - l, V));
    typename Body::template Row<V> row;
    body.begin(row, q, l, n);
    typename Body::template Carry<V> carry;
    for (int64_t at = 0; at < inner; ++at) {
      const int64_t r = Body::kBackward ? inner - 1 - at : at;
      typename Body::template Elem<V> elem;
      typename Body::template Scanned<V> scanned;
      body.load(Phase<0>{}, elem, row, r, int64_t(0));
      body.visit(Phase<0>{}, elem, row, scanned, r, int64_t(0), n);
      carry.across(scanned, n);
      body.load(Phase<1>{}, elem, row, r, int64_t(0));
      body.visit(Phase<1>{}, elem, row, scanned, r, int64_t(0), n);
    }
    body.store(row, n);
  });
  return 0;
}

}  // namespace fw
