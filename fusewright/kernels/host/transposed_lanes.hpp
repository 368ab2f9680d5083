// Strided lanes that are contiguous along the rows of a tile. They are read in that direction, some
// rows at once, and transposed in the tile's own memory. Where rows are a power of two apart in
// memory, a cache line that is read one element at a time would be evicted before its next element
// is read.
#pragma once

#include "scalar/types.hpp"

namespace fw {

constexpr int kTile = 64;  // the edge of a tile
constexpr int kTransposedRows = 16;
constexpr int kTransposedBytes = kTransposedRows * kTile * 8;
template <class T>
struct TransposedLanes {
  const T* from;
  int64_t stride;
  FW_FN void read(const T* at, int64_t step) {
    from = at;
    stride = step;
  }
  FW_FN T operator[](int v) const { return from[v]; }
};

#if defined(__AVX512F__) && !defined(__clang__)
using Sixteen = uint32_t __attribute__((vector_size(64)));
// Exchanges halves of two vectors, then quarters within them, and so on.
template <int kStep>
FW_FN void exchange(Sixteen (&row)[16]) {
  Sixteen low, high;
  for (unsigned v = 0; v < 16; ++v) {
    low[v] = (v & kStep) == 0 ? v : v - kStep + 16;
    high[v] = low[v] + kStep;
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if ((i & kStep) != 0) continue;
    const Sixteen a = row[i], b = row[i + kStep];
    row[i] = __builtin_shuffle(a, b, low);
    row[i + kStep] = __builtin_shuffle(a, b, high);
  }
}
FW_FN void transpose_square(const void* from, int64_t stride_bytes, void* to, int64_t step_bytes) {
  Sixteen row[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    std::memcpy(&row[i], static_cast<const char*>(from) + i * stride_bytes, sizeof row[i]);
  exchange<8>(row);
  exchange<4>(row);
  exchange<2>(row);
  exchange<1>(row);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    std::memcpy(static_cast<char*>(to) + i * step_bytes, &row[i], sizeof row[i]);
}
#endif

// Copies the first n lanes of some rows to `memory`, with rows kTile elements apart, and lets the
// elements read them there.
template <class Elem, class Field>
FW_FN void transpose_tile(Elem* elems, Field Elem::* field, int rows, int n, char* memory) {
  using T = std::remove_const_t<std::remove_pointer_t<decltype(Field::from)>>;
  T* to = reinterpret_cast<T*>(memory);
  const T* from = (elems[0].*field).from;
  const int64_t stride = (elems[0].*field).stride;
  bool beside = rows == kTransposedRows;
  for (int j = 1; j < rows; ++j) beside &= (elems[j].*field).from == from + j;
  int v = 0;
#if defined(__AVX512F__) && !defined(__clang__)
  if constexpr (sizeof(T) == 4) {
    for (; beside && v + 16 <= n; v += 16)
      transpose_square(from + v * stride, stride * 4, to + v, kTile * 4);
  }
#endif
  for (; v < n; ++v)
    for (int j = 0; j < rows; ++j) to[j * kTile + v] = (elems[j].*field).from[v * stride];
  for (int j = 0; j < rows; ++j) (elems[j].*field).from = to + j * kTile;
}

}  // namespace fw
