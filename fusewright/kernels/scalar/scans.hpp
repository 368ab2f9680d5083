// The operators of scans: running sums and running products.
#pragma once

#include "scalar/accumulators.hpp"

namespace fw {

// Joins the results of two adjacent ranges. T is the type of the elements, State that of the
// running value.
template <class T>
struct RunningSum {
  using Value = T;
  using State = Wide<T>;
  FW_FN static State identity() { return State(0); }
  FW_FN static State join(State a, State b) { return fw::add(a, b); }
};
template <class T>
struct RunningProd {
  using Value = T;
  using State = Wide<T>;
  FW_FN static State identity() { return State(1); }
  FW_FN static State join(State a, State b) { return fw::mul(a, b); }
};

}  // namespace fw
