// From the sums of a tile to the epilogue. A warpgroup lays some rows at a time into shared memory, so
// that its threads then have neighbouring columns of one row: whole lines of memory for all that the
// epilogue reads and writes. What is not finite is made anew on the way there.
//
// What a kind of product knows of its result is a class of its own, `Result`:
//   vectors, rows        whether kLanes columns may go together, if more than one, and how many rows
//                        q there are
//   place(p)             where column p lies, and whether there is such a column
//   row(place, q)        the epilogue's row of element q of it; the epilogue's column is place.column
//   scale(q)             what the sums of row q are to be multiplied by
//   line                 the tile's number among those of its columns, for what reduces down
//   kWords               registers that elements may take
//   kAlone               whether threads end alone where nothing is reduced
//   kMends, plain(p, q)  whether a sum that is not finite is made anew, as a plain fp32 sum
#pragma once

#include "cuda/epilogues.cuh"
#include "sm90/isa/sm90_instructions.cuh"
#include "sm90/isa/sm90_launch.cuh"

namespace fw {

// Rows of 64 columns in shared memory; the stride keeps the writes out of each other's banks.
constexpr int kFinishStride = 68;
template <int kRows>
using FinishRows = float[kRows][kFinishStride];

// V neighbouring numbers of a row.
template <int V>
__device__ __forceinline__ Packed<float, V> take_row(const float* from) {
  Packed<float, V> x;
  x.words[0] = *reinterpret_cast<const typename Packed<float, V>::Word*>(from);
  return x;
}

// How a warpgroup's threads share kRows rows of 64 columns: V neighbouring columns each.
template <int V>
struct FinishShape {
  static constexpr int kAcross = 64 / V;
  static constexpr int kThreads = kAcross < 32 ? kAcross : 32;  // of a warp, in one row
  static constexpr int kRowPart = kThreads * V;                 // the columns they have together
  static constexpr int kStep = 128 / kAcross;                   // rows between two of a thread's
  static constexpr int kStride = kFinishStride;

  __device__ __forceinline__ static Packed<float, V> take(const float* from) {
    return take_row<V>(from);
  }
};

// Rows of a thread that go together, of so many: as many as there are registers for.
template <class Elem, class Result>
FW_FN constexpr int rows_together(int rows) {
  while (rows > 1 && rows * int(sizeof(Elem)) > 4 * Result::kWords) rows /= 2;
  return rows;
}

// Some rows of V columns, which lie from `from` on. Each step is done for all of them before the
// next, so that none waits; where all are inside (kWhole) there is no branch either. `rows` of those
// that begin at q are inside the result; `load` reads what the epilogue reads of a row.
template <class Shape, int V, int kTogether, bool kWhole, class Load, class End, class Result,
          class Place>
__device__ __forceinline__ void finish_rows(const float* from, int first, int rows, int q,
                                            const Place& place, const Load& load, const End& end,
                                            typename End::template Column<V>& down,
                                            const Result& result) {
  typename End::template Elem<V> elem[kTogether];
  const auto row = [&](int k) { return first + k * Shape::kStep; };
  const auto inside = [&](int k) { return kWhole || (row(k) < rows && place.inside); };
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    if (inside(k)) load(elem[k], row(k));
  }
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const Packed<float, V> x = Shape::take(from + k * Shape::kStep * Shape::kStride);
#pragma unroll
    for (int v = 0; v < V; ++v) end.give(elem[k], v, x.lanes[v]);
  }
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const auto at = result.row(place, q + row(k));
    if constexpr (End::kByRow) {
      end.template visit_row<Shape::kThreads>(elem[k], inside(k), at, place.column);
    } else {
      if (inside(k)) end.visit(elem[k], down, at);
    }
  }
}

// What lies in shared memory: `rows` rows of it are inside the result.
template <int V, int kRows, class End, class Result, class Place>
__device__ __forceinline__ void finish_turn(const FinishRows<kRows>& finished, int rows, int q,
                                            const Place& place, const End& end,
                                            typename End::template Column<V>& down,
                                            const Result& result) {
  using Shape = FinishShape<V>;
  constexpr int kTogether =
      rows_together<typename End::template Elem<V>, Result>(kRows / Shape::kStep);
  constexpr int kReach = Shape::kStep * (kTogether - 1);
  const int part = threadIdx.x % Shape::kAcross * V;
  const auto load = [&](auto& elem, int row) {
    end.load(elem, down, result.row(place, q + row), place.column);
  };
  if (!End::kByRow && !place.inside) return;
  // Threads that meet in a row go the same way.
  const bool whole = End::kByRow && rows == kRows && __all_sync(~0u, place.inside);
#pragma unroll 1
  for (int row = threadIdx.x % 128 / Shape::kAcross; row < kRows; row += Shape::kStep * kTogether) {
    const float* const from = &finished[row][part];
    if (End::kByRow ? whole : row + kReach < rows) {
      finish_rows<Shape, V, kTogether, true>(from, row, rows, q, place, load, end, down, result);
    } else {
      finish_rows<Shape, V, kTogether, false>(from, row, rows, q, place, load, end, down, result);
    }
  }
}

// Columns that threads have reduced, joined among those of the same column; one part for the tile.
template <int V, int kRows, class End, class Place>
__device__ __forceinline__ void leave_columns(FinishRows<kRows>& memory, int barrier, int line,
                                              const Place& place, const End& end,
                                              typename End::template Column<V>& down) {
  using Shape = FinishShape<V>;
  using Acc = decltype(down.acc);
  static_assert(Shape::kStep / 2 * Shape::kAcross * sizeof(Acc) <= sizeof(memory),
                "more results than a warpgroup has shared memory for");
  Acc* const held = reinterpret_cast<Acc*>(memory);
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

// Where a thread has its sum i of a turn, after the first: rows, and columns.
__device__ __forceinline__ constexpr int sum_row(int i) { return i / 4 * 8 + i % 2; }
__device__ __forceinline__ constexpr int sum_column(int i) { return i / 2 % 2 * 8; }

// The sums of a turn, times their scales, to shared memory, from row q on; each turn's stores are its
// own, so that `total` stays in registers. Returns zero, or NaN if one is not finite.
template <int kFrom, int kPerTurn, int kSums, class Result>
__device__ __forceinline__ float lay_out(const float (&total)[kSums], int turn, uint32_t to, int q,
                                         const Result& result) {
  float zero = 0.f;
  if constexpr (kFrom < kSums) {
    if (turn * kPerTurn == kFrom) {
      constexpr int kCount = kSums - kFrom < kPerTurn ? kSums - kFrom : kPerTurn;
      float scale[(kCount + 1) / 2];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int row = min(q + sum_row(i), result.rows - 1);
        if (sum_column(i) == 0) scale[i / 4 * 2 + i % 2] = result.scale(row);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float x = total[kFrom + i] * scale[i / 4 * 2 + i % 2];
        if (Result::kMends) zero = __fmaf_rn(x, 0.f, zero);
        store_shared<kFrom>(to + 4 * (sum_row(i) * kFinishStride + sum_column(i)), x);
      }
    } else {
      zero = lay_out<kFrom + kPerTurn, kPerTurn>(total, turn, to, q, result);
    }
  }
  return zero;
}

// Those of a thread's `count` numbers that are not finite: rare. The first is of column p and row q;
// `row` and `column` say how far after it number i is, `number` where it lies.
template <class Number, class Row, class Column, class Result>
__device__ __forceinline__ void mend(const Number& number, int count, const Row& row,
                                     const Column& column, int p, int q, const Result& result) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    auto& x = number(i);
    const bool there = q + row(i) < result.rows && result.place(p + column(i)).inside;
    if (there && !isfinite(x)) x = result.plain(p + column(i), q + row(i));
  }
}

// The 64 columns of a warpgroup from p on, all turns of a tile's rows from q on.
template <int V, int kRows, int kSums, class End, class Result>
__device__ __forceinline__ void finish_turns(const float (&total)[kSums], int column,
                                             FinishRows<kRows>& finished, int barrier, int p, int q,
                                             const End& end, const Result& result) {
  constexpr int kPerTurn = kRows / 2;  // sums of a thread
  const int pair = threadIdx.x % 4 * 2;
  const auto place = result.place(p + threadIdx.x % FinishShape<V>::kAcross * V);
  typename End::template Column<V> down;
  if (place.inside) end.begin(down, place);
#pragma unroll 1
  for (int turn = 0; turn * kPerTurn < kSums; ++turn, q += kRows) {
    float* const mine = &finished[pair][column];
    const float zero =
        lay_out<0, kPerTurn>(total, turn, shared_address(mine), q + pair, result);
    const int sums = min(kPerTurn, kSums - turn * kPerTurn);
    if constexpr (Result::kMends) {
      if (zero != 0.f) {
        const auto number = [&](int i) -> float& {
          return mine[sum_row(i) * kFinishStride + sum_column(i)];
        };
        mend(number, sums, sum_row, sum_column, p + column, q + pair, result);
      }
      __syncwarp();
    }
    meet(barrier, 128);
    finish_turn<V>(finished, min(2 * sums, result.rows - q), q, place, end, down, result);
    meet(barrier, 128);
  }
  if constexpr (End::kReduces && !End::kByRow) {
    leave_columns<V>(finished, barrier, result.line, place, end, down);
  }
}

// The same for numbers in registers; they go through memory, so that an index may vary.
template <int kSums, class Row, class Column, class Result>
__device__ __forceinline__ void mend_in_memory(float (&numbers)[kSums], const Row& row,
                                               const Column& column, int p, int q,
                                               const Result& result) {
  volatile float held[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) held[i] = numbers[i];
  const auto number = [&](int i) -> volatile float& { return held[i]; };
  mend(number, kSums, row, column, p, q, result);
#pragma unroll
  for (int i = 0; i < kSums; ++i) numbers[i] = held[i];
}

// The sums of a thread times their scales; what is not finite is made anew, which is rare.
template <int kSums, class Result>
__device__ __forceinline__ void scale_sums(float (&total)[kSums], int p, int q,
                                           const Result& result) {
  float zero[4] = {};  // none of these waits for another
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    total[i] *= result.scale(min(q + sum_row(i), result.rows - 1));
    zero[i % 4] = __fmaf_rn(total[i], 0.f, zero[i % 4]);
  }
  if (Result::kMends && (zero[0] + zero[1]) + (zero[2] + zero[3]) != 0.f) {
    mend_in_memory(total, sum_row, sum_column, p, q, result);
  }
  __syncwarp();  // mending parts its threads
}

// From the registers straight to the epilogue, which reduces nothing. A thread has columns p and
// p + 8 and every fourth pair of rows from q on; eight threads have neighbouring columns, whole
// sectors of memory. No one waits for anyone.
template <int kSums, class End, class Result>
__device__ __forceinline__ void finish_alone(float (&total)[kSums], int p, int q, const End& end,
                                             const Result& result) {
  using Elem = typename End::template Elem<1>;
  constexpr int kTogether = rows_together<Elem, Result>(8);
  const decltype(result.place(p)) place[2] = {result.place(p), result.place(p + 8)};
  typename End::template Column<1> down[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if (place[c].inside) end.begin(down[c], place[c]);
  }
  scale_sums(total, p, q, result);
#pragma unroll
  for (int first = 0; first < kSums; first += kTogether) {
    Elem elem[kTogether];
    const auto inside = [&](int i) {
      return i < kSums && q + sum_row(i) < result.rows && place[i / 2 % 2].inside;
    };
    const auto row = [&](int i) { return result.row(place[i / 2 % 2], q + sum_row(i)); };
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int i = first + k, c = i / 2 % 2;
      if (inside(i)) end.load(elem[k], down[c], row(i), place[c].column);
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int i = first + k;
      if (!inside(i)) continue;
      end.give(elem[k], 0, total[i]);
      end.visit(elem[k], down[i / 2 % 2], row(i));
    }
  }
}

// `column` is where among them a thread holds its first sum, q the tile's first row; sum i is of
// column `column` + 8·(i / 2 mod 2) and row 8·(i / 4) + 2·lane + i mod 2. The warpgroup has named
// barrier `barrier` to itself.
template <int kLanes, int kRows, int kSums, class End, class Result>
__device__ __forceinline__ void finish_tile(float (&total)[kSums], int column,
                                            FinishRows<kRows>& finished, int barrier, int p, int q,
                                            const End& end, const Result& result) {
  if constexpr (Result::kAlone && !End::kReduces) {
    return finish_alone(total, p + column, q + threadIdx.x % 4 * 2, end, result);
  }
  if constexpr (kLanes > 1) {
    if (result.vectors) {
      return finish_turns<kLanes>(total, column, finished, barrier, p, q, end, result);
    }
  }
  finish_turns<1>(total, column, finished, barrier, p, q, end, result);
}

}  // namespace fw
