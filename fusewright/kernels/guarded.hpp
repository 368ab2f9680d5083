// Lanes that are read where there are elements, and have another value elsewhere. The lanes of a run
// that lie inside are side by side: two numbers say which.
#pragma once

#include "host.hpp"

namespace fw {

// Inside where 0 <= at + kStep * v < size, in lane v.
template <int kStep, typename I>
struct Bound {
  I at, size;
  FW_FN void narrow(int64_t& first, int64_t& last) const {
    if constexpr (kStep == 0) {
      if (at < 0 || at >= size) last = 0;
    } else {
      if (at < 0) first = std::max<int64_t>(first, (kStep - 1 - at) / kStep);
      last = std::min<int64_t>(last, at < size ? (size - at + kStep - 1) / kStep : 0);
    }
  }
};
template <int kStep, typename I>
FW_FN Bound<kStep, I> bound(I at, I size) {
  return {at, size};
}

template <class T, int V>
FW_FN void read_held(Unit<T, V>& held, const T* from, int64_t) {
  held.read(from);
}
template <class T, int V>
FW_FN void read_held(Same<T, V>& held, const T* from, int64_t) {
  held.read(from);
}
template <class T, int V>
FW_FN void read_held(Strided<T, V>& held, const T* from, int64_t stride) {
  held.read(from, stride);
}

template <class Held, class T, int V>
struct Guarded {
  Held held{};
  T outside;
  int first, count;
  template <class... Bounds>
  FW_FN void read(const T* from, int64_t stride, T other, Bounds... bounds) {
    int64_t least = 0, most = kLongestRun;
    (bounds.narrow(least, most), ...);
    first = static_cast<int>(std::min<int64_t>(least, kLongestRun));
    count = static_cast<int>(std::max<int64_t>(0, most - least));
    outside = other;
    if (count > 0) read_held(held, from, stride);
  }
  FW_FN T operator[](int v) const {
    return static_cast<unsigned>(v - first) < static_cast<unsigned>(count) ? held[v] : outside;
  }
  FW_FN void widen(float* to, int n) const {
    FW_LANES(v, V, n) to[v] = value((*this)[v]);
  }
};

}  // namespace fw
