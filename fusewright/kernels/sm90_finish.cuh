// From the sums of a tile to the epilogue. A warpgroup lays 32 rows at a time into shared memory, so
// that its threads then have neighbouring columns of one row: whole lines of memory for all that the
// epilogue reads and writes.
//
// What a kind of product knows of its result is a class of its own, `Result`:
//   vectors, rows        whether four columns may go together, and the number of rows q
//   place(p)             where column p lies, and whether there is such a column
//   row(place, q)        the epilogue's row of element q of it; the epilogue's column is place.column
//   scale(place, q)      what the sum at (place, q) is to be multiplied by
//   kMends, plain(p, q)  whether a sum that is not finite is made anew, as a plain fp32 sum
#pragma once

#include "sm90.cuh"
#include "sm90_launch.cuh"

namespace fw {

// Finished sums go to the epilogue through shared memory, for each warpgroup some rows of its 64
// columns at a time; the stride keeps the writes out of each other's banks.
constexpr int kFinishRows = 32, kFinishStride = 68;

// How a warpgroup's threads share kFinishRows rows of 64 columns: V neighbouring columns each.
template <int V>
struct FinishShape {
  static constexpr int kAcross = 64 / V;
  static constexpr int kStep = 128 / kAcross;          // rows between two of a thread's
  static constexpr int kTogether = V == 1 ? 8 : 32 / kStep;  // rows whose loads travel together
};

// Some rows of V columns: undoes the scale, mends what is not finite, runs the epilogue. Each step
// is done for all of them before the next, so that none waits; where all are inside (kWhole) there
// is no branch either. `rows` of those that begin at q are inside the result.
template <int V, bool kWhole, class Body, class Result, class Place>
__device__ __forceinline__ void finish_rows(const float (*finished)[kFinishStride], int part,
                                            int first, int rows, int p, int q, const Place& place,
                                            const Body& body, const Result& result) {
  constexpr int kStep = FinishShape<V>::kStep, kTogether = FinishShape<V>::kTogether;
  typename Body::template Elem<V> elem[kTogether];
  Packed<float, V> x[kTogether];
  uint32_t broken = 0;
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const int row = first + k * kStep;
    if (kWhole || row < rows) body.load(elem[k], result.row(place, q + row), place.column);
  }
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    using Word = typename Packed<float, V>::Word;
    x[k].words[0] = *reinterpret_cast<const Word*>(&finished[first + k * kStep][part]);
  }
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const int row = first + k * kStep;
    const bool inside = kWhole || row < rows;
    const float scale = inside ? result.scale(place, q + row) : 1.f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      x[k].lanes[v] *= scale;
      if (Result::kMends && inside && !isfinite(x[k].lanes[v])) broken |= 1u << (k * V + v);
    }
  }
  if constexpr (Result::kMends) {
#pragma unroll 1
    while (broken != 0) {
      const int which = __ffs(broken) - 1;
      broken &= broken - 1;
      const float mended = result.plain(p + which % V, q + first + which / V * kStep);
#pragma unroll
      for (int i = 0; i < kTogether * V; ++i) {
        x[i / V].lanes[i % V] = i == which ? mended : x[i / V].lanes[i % V];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const int row = first + k * kStep;
#pragma unroll
    for (int v = 0; v < V; ++v) body.give(elem[k], v, x[k].lanes[v]);
    if (kWhole || row < rows) body.visit(elem[k], result.row(place, q + row), place.column, V);
  }
}

// What lies in shared memory: `rows` rows of it are inside the result.
template <int V, class Body, class Result>
__device__ __forceinline__ void finish_turn(const float (*finished)[kFinishStride], int rows, int p,
                                            int q, const Body& body, const Result& result) {
  using Shape = FinishShape<V>;
  constexpr int kReach = Shape::kStep * (Shape::kTogether - 1);
  const int part = threadIdx.x % Shape::kAcross * V;
  const auto place = result.place(p + part);
  if (!place.inside) return;
#pragma unroll 1
  for (int row = threadIdx.x % 128 / Shape::kAcross; row < kFinishRows;
       row += Shape::kStep * Shape::kTogether) {
    if (row + kReach < rows) {
      finish_rows<V, true>(finished, part, row, rows, p + part, q, place, body, result);
    } else {
      finish_rows<V, false>(finished, part, row, rows, p + part, q, place, body, result);
    }
  }
}

// The sums of a turn to shared memory; each turn's stores are its own, so that `total` stays in
// registers.
template <int kFrom, int kSums>
__device__ __forceinline__ void lay_out(const float (&total)[kSums], int turn, uint32_t to) {
  constexpr int kPerTurn = kFinishRows / 2;
  if constexpr (kFrom < kSums) {
    if (turn * kPerTurn == kFrom) {
#pragma unroll
      for (int i = 0; i < kPerTurn && kFrom + i < kSums; ++i) {
        const int at = (i / 4 * 8 + i % 2) * kFinishStride + i / 2 % 2 * 8;
        store_shared<kFrom>(to + 4 * at, total[kFrom + i]);
      }
    } else {
      lay_out<kFrom + kPerTurn>(total, turn, to);
    }
  }
}

// The 64 columns of a warpgroup from p on. `column` is where among them a thread holds its first sum,
// q the tile's first row; sum i is of column `column` + 8·(i / 2 mod 2) and row 8·(i / 4) + 2·lane +
// i mod 2. The warpgroup has named barrier `barrier` to itself.
template <int kSums, class Body, class Result>
__device__ __forceinline__ void finish_tile(const float (&total)[kSums], int column,
                                            float (*finished)[kFinishStride], int barrier, int p,
                                            int q, const Body& body, const Result& result) {
  constexpr int kPerTurn = kFinishRows / 2;  // sums of a thread
  const int pair = threadIdx.x % 4 * 2;
#pragma unroll 1
  for (int turn = 0; turn * kPerTurn < kSums; ++turn, q += kFinishRows) {
    lay_out<0>(total, turn, shared_address(&finished[pair][column]));
    meet(barrier, 128);
    const int rows = min(min(kFinishRows, 2 * (kSums - turn * kPerTurn)), result.rows - q);
    if (result.vectors) {
      finish_turn<4>(finished, rows, p, q, body, result);
    } else {
      finish_turn<1>(finished, rows, p, q, body, result);
    }
    meet(barrier, 128);
  }
}

}  // namespace fw
