// Loads with bounds: lanes outside the tensor take a given value instead. host/guarded.hpp has the
// host's versions of these names.
#pragma once

#include "cuda/lanes.cuh"

namespace fw {

// Lane v is inside where 0 <= at + kStep * v < size.
template <int kStep, typename I>
struct Bound {
  I at, size;
  FW_DEVICE bool holds(int v) const { return inside<I>(at + kStep * v, size); }
};
template <int kStep, typename I>
FW_FN Bound<kStep, I> bound(I at, I size) {
  return {at, size};
}

// Either all lanes are inside or none is; Held reads them.
template <class Held, class T, int V>
struct Guarded {
  Held held;
  template <class... Bounds>
  FW_DEVICE void read(const T* from, int64_t stride, T outside, Bounds... bounds) {
    if ((bounds.holds(0) && ...)) {
      read_held(held, from, stride);
    } else {
      fill(held, outside);
    }
  }
  template <class... Bounds>
  FW_DEVICE void fetch(const T* from, int64_t stride, T outside, Bounds... bounds) {
    read(from, stride, outside, bounds...);
  }
  FW_DEVICE auto operator[](int v) const { return held[v]; }

 private:
  FW_DEVICE static void read_held(Unit<T, V>& to, const T* from, int64_t) { to.read(from); }
  FW_DEVICE static void read_held(Same<T, V>& to, const T* from, int64_t) { to.read(from); }
  FW_DEVICE static void read_held(Strided<T, V>& to, const T* from, int64_t stride) {
    to.read(from, stride);
  }
  FW_DEVICE static void fill(Unit<T, V>& to, T x) {
#pragma unroll
    for (int v = 0; v < V; ++v) to.pack.lanes[v] = x;
  }
  FW_DEVICE static void fill(Same<T, V>& to, T x) { to.one = x; }
  FW_DEVICE static void fill(Strided<T, V>& to, T x) {
#pragma unroll
    for (int v = 0; v < V; ++v) to.lanes[v] = x;
  }
};

// Each lane is inside or not.
template <class T, int V>
struct GuardedLanes {
  T lanes[V];
  template <class... Bounds>
  FW_DEVICE void read(const T* from, int64_t stride, T outside, Bounds... bounds) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      lanes[v] = (bounds.holds(v) && ...) ? from[v * stride] : outside;
    }
  }
  template <class... Bounds>
  FW_DEVICE void fetch(const T* from, int64_t stride, T outside, Bounds... bounds) {
    read(from, stride, outside, bounds...);
  }
  FW_DEVICE T operator[](int v) const { return lanes[v]; }
};

}  // namespace fw
