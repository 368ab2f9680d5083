// From the sums of a tile to the epilogue, each where it lies: the other way is by shared memory
// (sm90_finish.cuh, where `Result` is explained). A thread has two columns, eight apart, and takes
// one after the other; eight threads have neighbours, which is a sector of memory. Nothing waits for
// other threads.
#pragma once

#include "sm90_finish.cuh"

namespace fw {

constexpr int kDirectSums = 8;  // at a time, of one column: two in each eighth row's pair of rows

// Those of column `at` from number 16·turn on; `total` stays in registers.
template <int kFrom, int kSums>
__device__ __forceinline__ void take_sums(const float (&total)[kSums], int turn, int at,
                                          float (&x)[kDirectSums]) {
  constexpr int kTurn = kFrom / 2, kAt = kFrom % 2;
  if (turn * 2 + at == kFrom) {
#pragma unroll
    for (int i = 0; i < kDirectSums; ++i) x[i] = total[16 * kTurn + i / 2 * 4 + 2 * kAt + i % 2];
  } else if constexpr (16 * ((kFrom + 1) / 2) < kSums) {
    take_sums<kFrom + 1>(total, turn, at, x);
  }
}

// Sum i is of row q + 8·(i / 2) + i mod 2. kWhole: all are inside.
template <bool kWhole, class End, class Result, class Place>
__device__ __forceinline__ void finish_sums(float (&x)[kDirectSums], int p, int q,
                                            const Place& place, const End& end,
                                            typename End::template Column<1>& down,
                                            const Result& result) {
  typename End::template Elem<1> elem[kDirectSums];
  uint32_t broken = 0;
  const auto row = [&](int i) { return q + i / 2 * 8 + i % 2; };
  const auto inside = [&](int i) { return kWhole || row(i) < result.rows; };
#pragma unroll
  for (int i = 0; i < kDirectSums; ++i) {
    if (!inside(i)) continue;
    end.load(elem[i], down, result.row(place, row(i)), place.column);
    x[i] *= result.scale(place, row(i));
    if (Result::kMends && !isfinite(x[i])) broken |= 1u << i;
  }
  if constexpr (Result::kMends) {
#pragma unroll 1
    while (broken != 0) {
      const int which = __ffs(broken) - 1;
      broken &= broken - 1;
      const float mended = result.plain(p, row(which));
#pragma unroll
      for (int i = 0; i < kDirectSums; ++i) x[i] = i == which ? mended : x[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kDirectSums; ++i) {
    if (!inside(i)) continue;
    end.give(elem[i], 0, x[i]);
    end.visit(elem[i], down, result.row(place, row(i)));
  }
}

// The 64 columns of a warpgroup from p on, all rows of a tile from q on; as finish_tile.
template <int kSums, class End, class Result>
__device__ __forceinline__ void finish_directly(const float (&total)[kSums], int column, int p,
                                                int q, const End& end, const Result& result) {
  static_assert(End::kDirect, "threads would have to meet");
  q += threadIdx.x % 4 * 2;
#pragma unroll 1
  for (int at = 0; at < 2; ++at) {
    const int here = p + column + 8 * at;
    const auto place = result.place(here);
    if (!place.inside) continue;
    typename End::template Column<1> down;
    end.begin(down, place.column);
#pragma unroll 1
    for (int turn = 0; 16 * turn < kSums; ++turn) {
      float x[kDirectSums];
      take_sums<0>(total, turn, at, x);
      const int first = q + 32 * turn;
      if (first + 25 < result.rows) {
        finish_sums<true>(x, here, first, place, end, down, result);
      } else {
        finish_sums<false>(x, here, first, place, end, down, result);
      }
    }
  }
  __syncwarp();  // the tensor cores take a warp together
}

}  // namespace fw
