// How scans join what they meet: sums and products that run along.
#pragma once

#include "scalar/accumulators.hpp"

namespace fw {

// How two stretches join; T is what is scanned, State what runs along.
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
