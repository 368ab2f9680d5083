// Loads with bounds: lanes outside the tensor take a given value instead. A run that is inside as a
// whole is read in place. Of any other run, the inside lanes are copied into a buffer that has the
// given value elsewhere. Loops over lanes then have no conditions, which would stop the vectoriser.
#pragma once

#include "host/loops.hpp"

namespace fw {

// Lane v is inside where 0 <= at + kStep * v < size.
template <int kStep, typename I>
struct Bound {
  I at, size;
  // Narrows [first, last) to the lanes that are inside.
  FW_FN void narrow(int64_t& first, int64_t& last) const {
    if constexpr (kStep == 0) {
      if (!inside<I>(at, size)) last = 0;
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

// A buffer for one run of lanes, for each thread and each guarded load of a kernel.
template <class T, int kSlot>
inline T* run_memory() {
  static thread_local T memory[kLongestRun];
  return memory;
}
template <class T, int kSlot>
__attribute__((noinline)) T* copied_run(const T* from, int64_t stride, T outside, int64_t first,
                                        int64_t last, int64_t lanes) {
  T* const to = run_memory<T, kSlot>();
  first = std::min(first, lanes);
  last = std::max(first, last);
  for (int64_t v = 0; v < first; ++v) to[v] = outside;
  if (stride == 1) {
    std::memcpy(to + first, from + first, (last - first) * sizeof(T));
  } else {
    const T* next = from + first * stride;
    const int n = static_cast<int>(last - first);
    FW_LANES(v, 1, n) to[first + v] = next[v * stride];
  }
  for (int64_t v = last; v < lanes; ++v) to[v] = outside;
  return to;
}

template <class Held, int kSlot>
struct Guarded : Held {
  template <class T, class... Bounds>
  FW_FN void read(const T* from, int64_t stride, T outside, int64_t lanes, Bounds... bounds) {
    int64_t first = 0, last = lanes;
    (bounds.narrow(first, last), ...);
    const bool whole = first == 0 && last == lanes;
    if (!whole) from = copied_run<T, kSlot>(from, stride, outside, first, last, lanes);
    set(*this, from, whole ? stride : 1);
  }

 private:
  template <class T, int V>
  FW_FN static void set(Unit<T, V>& held, const T* from, int64_t) {
    held.read(from);
  }
  template <class T, int V>
  FW_FN static void set(Same<T, V>& held, const T* from, int64_t) {
    held.read(from);
  }
  template <class T, int V>
  FW_FN static void set(Strided<T, V>& held, const T* from, int64_t stride) {
    held.read(from, stride);
  }
};

}  // namespace fw
