// From the sums of a tile to the epilogue. A warpgroup lays 32 rows at a time into shared memory, so
// that its threads then have neighbouring columns of one row: whole lines of memory for all that the
// epilogue reads and writes.
//
// What a kind of product knows of its result is a class of its own, `Result`:
//   vectors, rows        whether four columns may go together, and the number of rows q
//   place(p)             where column p lies, and whether there is such a column
//   row(place, q)        the epilogue's row of element q of it; the epilogue's column is place.column
//   scale(place, q)      what the sum at (place, q) is to be multiplied by
//   line                 the tile's number among those of its columns, for what reduces down
//   kSparing             how many times fewer rows go together, where registers are few
//   kMends, plain(p, q)  whether a sum that is not finite is made anew, as a plain fp32 sum
#pragma once

#include "endings.cuh"
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
  static constexpr int kThreads = kAcross < 32 ? kAcross : 32;  // of a warp, in one row
  static constexpr int kRowPart = kThreads * V;                 // the columns they have together
  static constexpr int kStep = 128 / kAcross;                   // rows between two of a thread's
  static constexpr int kTogether = V == 1 ? 8 : 32 / kStep;  // rows whose loads travel together
};

// Some rows of V columns: undoes the scale, mends what is not finite, runs the epilogue. Each step
// is done for all of them before the next, so that none waits; where all are inside (kWhole) there
// is no branch either. `rows` of those that begin at q are inside the result.
template <int V, bool kWhole, class End, class Result, class Place>
__device__ __forceinline__ void finish_rows(const float (*finished)[kFinishStride], int part,
                                            int first, int rows, int p, int q, const Place& place,
                                            const End& end, typename End::template Column<V>& down,
                                            const Result& result) {
  constexpr int kStep = FinishShape<V>::kStep;
  constexpr int kTogether = FinishShape<V>::kTogether / Result::kSparing;
  typename End::template Elem<V> elem[kTogether];
  Packed<float, V> x[kTogether];
  uint32_t broken = 0;
  const auto inside = [&](int k) { return kWhole || (first + k * kStep < rows && place.inside); };
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const int row = first + k * kStep;
    if (inside(k)) end.load(elem[k], down, result.row(place, q + row), place.column);
  }
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    using Word = typename Packed<float, V>::Word;
    x[k].words[0] = *reinterpret_cast<const Word*>(&finished[first + k * kStep][part]);
  }
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const float scale = inside(k) ? result.scale(place, q + first + k * kStep) : 1.f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      x[k].lanes[v] *= scale;
      if (Result::kMends && inside(k) && !isfinite(x[k].lanes[v])) broken |= 1u << (k * V + v);
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
    for (int v = 0; v < V; ++v) end.give(elem[k], v, x[k].lanes[v]);
    if constexpr (End::kByRow) {
      constexpr int kThreads = FinishShape<V>::kThreads;
      end.template visit_row<kThreads>(elem[k], inside(k), result.row(place, q + row), place.column);
    } else {
      if (inside(k)) end.visit(elem[k], down, result.row(place, q + row));
    }
  }
}

// What lies in shared memory: `rows` rows of it are inside the result.
template <int V, class End, class Result, class Place>
__device__ __forceinline__ void finish_turn(const float (*finished)[kFinishStride], int rows, int p,
                                            int q, const Place& place, const End& end,
                                            typename End::template Column<V>& down,
                                            const Result& result) {
  using Shape = FinishShape<V>;
  constexpr int kTogether = Shape::kTogether / Result::kSparing;
  constexpr int kReach = Shape::kStep * (kTogether - 1);
  const int part = threadIdx.x % Shape::kAcross * V;
  if (!End::kByRow && !place.inside) return;
  // Threads that meet in a row go the same way.
  const bool whole = End::kByRow && rows == kFinishRows && __all_sync(~0u, place.inside);
#pragma unroll 1
  for (int row = threadIdx.x % 128 / Shape::kAcross; row < kFinishRows;
       row += Shape::kStep * kTogether) {
    if (End::kByRow ? whole : row + kReach < rows) {
      finish_rows<V, true>(finished, part, row, rows, p + part, q, place, end, down, result);
    } else {
      finish_rows<V, false>(finished, part, row, rows, p + part, q, place, end, down, result);
    }
  }
}

// Columns that threads have reduced, joined among those of the same column; one part for the tile.
template <int V, class End, class Place>
__device__ __forceinline__ void leave_columns(void* memory, int barrier, int line,
                                              const Place& place, const End& end,
                                              typename End::template Column<V>& down) {
  using Shape = FinishShape<V>;
  using Acc = decltype(down.acc);
  static_assert(Shape::kStep / 2 * Shape::kAcross * sizeof(Acc) <= kFinishRows * kFinishStride * 4,
                "more results than a warpgroup has shared memory for");
  Acc* const held = static_cast<Acc*>(memory);
  const int across = threadIdx.x % Shape::kAcross, row = threadIdx.x % 128 / Shape::kAcross;
#pragma unroll 1
  for (int half = Shape::kStep / 2; half > 0; half /= 2) {
    if (row >= half && row < 2 * half) held[(row - half) * Shape::kAcross + across] = down.acc;
    meet(barrier, 128);
    if (row < half) down.acc.combine(held[row * Shape::kAcross + across]);
    meet(barrier, 128);
  }
  if (row == 0 && place.inside) end.leave(down, line, place.column);
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

// The 64 columns of a warpgroup from p on, all turns of a tile's rows from q on.
template <int V, int kSums, class End, class Result>
__device__ __forceinline__ void finish_turns(const float (&total)[kSums], int column,
                                             float (*finished)[kFinishStride], int barrier, int p,
                                             int q, const End& end, const Result& result) {
  constexpr int kPerTurn = kFinishRows / 2;  // sums of a thread
  const int pair = threadIdx.x % 4 * 2;
  const auto place = result.place(p + threadIdx.x % FinishShape<V>::kAcross * V);
  typename End::template Column<V> down;
  if (place.inside) end.begin(down, place.column);
#pragma unroll 1
  for (int turn = 0; turn * kPerTurn < kSums; ++turn, q += kFinishRows) {
    lay_out<0>(total, turn, shared_address(&finished[pair][column]));
    meet(barrier, 128);
    const int rows = min(min(kFinishRows, 2 * (kSums - turn * kPerTurn)), result.rows - q);
    finish_turn<V>(finished, rows, p, q, place, end, down, result);
    meet(barrier, 128);
  }
  if constexpr (End::kReduces && !End::kByRow) {
    leave_columns<V>(finished, barrier, result.line, place, end, down);
  }
}

// `column` is where among them a thread holds its first sum, q the tile's first row; sum i is of
// column `column` + 8·(i / 2 mod 2) and row 8·(i / 4) + 2·lane + i mod 2. The warpgroup has named
// barrier `barrier` to itself.
template <int kSums, class End, class Result>
__device__ __forceinline__ void finish_tile(const float (&total)[kSums], int column,
                                            float (*finished)[kFinishStride], int barrier, int p,
                                            int q, const End& end, const Result& result) {
  if (result.vectors) {
    finish_turns<4>(total, column, finished, barrier, p, q, end, result);
  } else {
    finish_turns<1>(total, column, finished, barrier, p, q, end, result);
  }
}

}  // namespace fw
