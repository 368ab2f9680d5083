// Elements in shared memory that are written along one axis and read along another.
#pragma once

#include "cuda/lanes.cuh"

namespace fw {

// A thread's V elements in each of the tiles in shared memory. A slot has at least 4 bytes: with an
// odd pitch, a warp has no bank conflicts along either axis.
template <int kSlots, int kSlotBytes, int kStep>
struct Tile {
  unsigned char* memory;
  int at;

  template <class T>
  struct Lanes {
    unsigned char* first;
    FW_DEVICE T operator[](int v) const {
      return *reinterpret_cast<const T*>(first + v * (kStep * kSlotBytes));
    }
    template <class X>
    FW_DEVICE void put(int v, X x) const {
      *reinterpret_cast<T*>(first + v * (kStep * kSlotBytes)) = Store<T>::from(x);
    }
    FW_DEVICE void keep(int v, T x) const {
      *reinterpret_cast<T*>(first + v * (kStep * kSlotBytes)) = x;
    }
  };

  template <class T>
  FW_DEVICE Lanes<T> of(int tile) const {
    return {memory + (tile * kSlots + at) * kSlotBytes};
  }
};

}  // namespace fw
