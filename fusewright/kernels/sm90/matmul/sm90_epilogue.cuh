// From the sums of a tile to the epilogue. A warpgroup writes some rows at a time to shared memory,
// so that its threads then have neighbouring columns of one row: whole cache lines for all that the
// epilogue reads and writes. Sums that are not finite are recomputed on the way.
//
// A class `ResultTile` says what a kind of matmul knows of its result:
//   vectors, rows        whether kLanes columns, if more than one, may be processed together; the
//                        number of rows q
//   position(p)          where column p is, and whether it exists
//   row(position, q)     the epilogue's row of its element q; position.column is its column
//   scale(q)             what the sums of row q are multiplied by
//   partial              the tile's index among those of its columns, for reductions down them
//   kWords               registers that elements may take
//   kAlone               whether threads run the epilogue alone if it reduces nothing
//   kMends, plain(p, q)  whether a sum that is not finite is recomputed, as a plain fp32 sum
#pragma once

#include "cuda/epilogues.cuh"
#include "sm90/isa/sm90_instructions.cuh"
#include "sm90/isa/sm90_launch.cuh"

namespace fw {

// Rows of 64 columns in shared memory; the stride avoids bank conflicts of the stores.
constexpr int kFinishStride = 68;
template <int kRows>
using FinishRows = float[kRows][kFinishStride];

// V neighbouring elements of a row.
template <int V>
FW_DEVICE Packed<float, V> take_row(const float* from) {
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
  static constexpr int kStep = 128 / kAcross;                   // from a thread's row to its next
  static constexpr int kStride = kFinishStride;

  FW_DEVICE static Packed<float, V> take(const float* from) { return take_row<V>(from); }
};

// How many of a thread's `rows` rows are processed together: as many as there are registers for.
template <class Elem, class ResultTile>
FW_FN constexpr int rows_together(int rows) {
  while (rows > 1 && rows * int(sizeof(Elem)) > 4 * ResultTile::kWords) rows /= 2;
  return rows;
}

// Finishes some rows of V columns, which begin at `from`. Each step is done for all of them before
// the next, so that no row waits for another; if all are inside (kWhole), there is no branch
// either. `rows` of the rows from q on are inside the result. `load` reads what the epilogue reads
// of a row.
template <class Shape, int V, int kTogether, bool kWhole, class Load, class Epilogue,
          class ResultTile, class Position>
FW_DEVICE void finish_rows(const float* from, int first, int rows, int q, const Position& position,
                           const Load& load, const Epilogue& end,
                           typename Epilogue::template Column<V>& down, const ResultTile& result) {
  typename Epilogue::template Elem<V> elem[kTogether];
  const auto row = [&](int k) { return first + k * Shape::kStep; };
  const auto inside = [&](int k) { return kWhole || (row(k) < rows && position.inside); };
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
    const auto at = result.row(position, q + row(k));
    if constexpr (Epilogue::kByRow) {
      end.template visit_row<Shape::kThreads>(elem[k], inside(k), at, position.column);
    } else {
      if (inside(k)) end.visit(elem[k], down, at);
    }
  }
}

// Finishes what is in shared memory; `rows` of its rows are inside the result.
template <int V, int kRows, class Epilogue, class ResultTile, class Position>
FW_DEVICE void finish_slice(const FinishRows<kRows>& finished, int rows, int q,
                            const Position& position, const Epilogue& end,
                            typename Epilogue::template Column<V>& down, const ResultTile& result) {
  using Shape = FinishShape<V>;
  constexpr int kTogether =
      rows_together<typename Epilogue::template Elem<V>, ResultTile>(kRows / Shape::kStep);
  constexpr int kReach = Shape::kStep * (kTogether - 1);
  const int part = threadIdx.x % Shape::kAcross * V;
  const auto load = [&](auto& elem, int row) {
    end.load(elem, down, result.row(position, q + row), position.column);
  };
  if (!Epilogue::kByRow && !position.inside) return;
  // Threads that reduce a row together take the same branch.
  const bool whole = Epilogue::kByRow && rows == kRows && __all_sync(~0u, position.inside);
#pragma unroll 1
  for (int row = threadIdx.x % 128 / Shape::kAcross; row < kRows; row += Shape::kStep * kTogether) {
    const float* const from = &finished[row][part];
    if (Epilogue::kByRow ? whole : row + kReach < rows) {
      finish_rows<Shape, V, kTogether, true>(from, row, rows, q, position, load, end, down, result);
    } else {
      finish_rows<Shape, V, kTogether, false>(from, row, rows, q, position, load, end, down,
                                              result);
    }
  }
}

// Combines what threads have reduced of the same columns; the tile leaves one partial.
template <int V, int kRows, class Epilogue, class Position>
FW_DEVICE void leave_columns(FinishRows<kRows>& memory, int barrier, int partial,
                             const Position& position, const Epilogue& end,
                             typename Epilogue::template Column<V>& down) {
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
  if (row == 0 && position.inside) end.leave(down, partial, position.column);
}

// The row and column of a thread's sum i of a slice, relative to the first.
FW_DEVICE constexpr int sum_row(int i) { return i / 4 * 8 + i % 2; }
FW_DEVICE constexpr int sum_column(int i) { return i / 2 % 2 * 8; }

// Writes the sums of a slice, times their scales, to shared memory, from row q on. Each slice has
// stores of its own, so that `total` stays in registers. Returns zero, or NaN if one is not finite.
template <int kFrom, int kPerSlice, int kSums, class ResultTile>
FW_DEVICE float lay_out(const float (&total)[kSums], int slice, uint32_t to, int q,
                        const ResultTile& result) {
  float zero = 0.f;
  if constexpr (kFrom < kSums) {
    if (slice * kPerSlice == kFrom) {
      constexpr int kCount = kSums - kFrom < kPerSlice ? kSums - kFrom : kPerSlice;
      float scale[(kCount + 1) / 2];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int row = min(q + sum_row(i), result.rows - 1);
        if (sum_column(i) == 0) scale[i / 4 * 2 + i % 2] = result.scale(row);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float x = total[kFrom + i] * scale[i / 4 * 2 + i % 2];
        if (ResultTile::kMends) zero = __fmaf_rn(x, 0.f, zero);
        store_shared<kFrom>(to + 4 * (sum_row(i) * kFinishStride + sum_column(i)), x);
      }
    } else {
      zero = lay_out<kFrom + kPerSlice, kPerSlice>(total, slice, to, q, result);
    }
  }
  return zero;
}

// Recomputes those of a thread's `count` elements that are not finite: rare. The first is in column
// p and row q; `row` and `column` say how far after it element i is, `number` returns the element.
template <class Number, class Row, class Column, class ResultTile>
FW_DEVICE void mend(const Number& number, int count, const Row& row, const Column& column, int p,
                    int q, const ResultTile& result) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    auto& x = number(i);
    const bool there = q + row(i) < result.rows && result.position(p + column(i)).inside;
    if (there && !isfinite(x)) x = result.plain(p + column(i), q + row(i));
  }
}

// Finishes the 64 columns of a warpgroup from p on: all slices of a tile's rows from q on.
template <int V, int kRows, int kSums, class Epilogue, class ResultTile>
FW_DEVICE void finish_slices(const float (&total)[kSums], int column, FinishRows<kRows>& finished,
                             int barrier, int p, int q, const Epilogue& end,
                             const ResultTile& result) {
  constexpr int kPerSlice = kRows / 2;  // sums of a thread
  const int pair = threadIdx.x % 4 * 2;
  const auto position = result.position(p + threadIdx.x % FinishShape<V>::kAcross * V);
  typename Epilogue::template Column<V> down;
  if (position.inside) end.begin(down, position);
#pragma unroll 1
  for (int slice = 0; slice * kPerSlice < kSums; ++slice, q += kRows) {
    float* const mine = &finished[pair][column];
    const float zero = lay_out<0, kPerSlice>(total, slice, shared_address(mine), q + pair, result);
    const int sums = min(kPerSlice, kSums - slice * kPerSlice);
    if constexpr (ResultTile::kMends) {
      if (zero != 0.f) {
        const auto number = [&](int i) -> float& {
          return mine[sum_row(i) * kFinishStride + sum_column(i)];
        };
        mend(number, sums, sum_row, sum_column, p + column, q + pair, result);
      }
      __syncwarp();
    }
    meet(barrier, 128);
    finish_slice<V>(finished, min(2 * sums, result.rows - q), q, position, end, down, result);
    meet(barrier, 128);
  }
  if constexpr (Epilogue::kReduces && !Epilogue::kByRow) {
    leave_columns<V>(finished, barrier, result.partial, position, end, down);
  }
}

// The same for elements in registers. They go through local memory, so that an index may vary.
template <int kSums, class Row, class Column, class ResultTile>
FW_DEVICE void mend_in_memory(float (&numbers)[kSums], const Row& row, const Column& column, int p,
                              int q, const ResultTile& result) {
  volatile float held[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) held[i] = numbers[i];
  const auto number = [&](int i)->volatile float& { return held[i]; };
  mend(number, kSums, row, column, p, q, result);
#pragma unroll
  for (int i = 0; i < kSums; ++i) numbers[i] = held[i];
}

// Multiplies a thread's sums by their scales; recomputes those that are not finite, which is rare.
template <int kSums, class ResultTile>
FW_DEVICE void scale_sums(float (&total)[kSums], int p, int q, const ResultTile& result) {
  float zero[4] = {};  // four, so that none waits for another
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    total[i] *= result.scale(min(q + sum_row(i), result.rows - 1));
    zero[i % 4] = __fmaf_rn(total[i], 0.f, zero[i % 4]);
  }
  if (ResultTile::kMends && (zero[0] + zero[1]) + (zero[2] + zero[3]) != 0.f) {
    mend_in_memory(total, sum_row, sum_column, p, q, result);
  }
  __syncwarp();  // mend() makes its threads diverge
}

// From registers straight to the epilogue, which reduces nothing. A thread has columns p and p + 8
// and every fourth pair of rows from q on; eight threads have neighbouring columns, which are whole
// sectors of memory. No thread waits for another.
template <int kSums, class Epilogue, class ResultTile>
FW_DEVICE void finish_alone(float (&total)[kSums], int p, int q, const Epilogue& end,
                            const ResultTile& result) {
  using Elem = typename Epilogue::template Elem<1>;
  constexpr int kTogether = rows_together<Elem, ResultTile>(8);
  const decltype(result.position(p)) position[2] = {result.position(p), result.position(p + 8)};
  typename Epilogue::template Column<1> down[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if (position[c].inside) end.begin(down[c], position[c]);
  }
  scale_sums(total, p, q, result);
#pragma unroll
  for (int first = 0; first < kSums; first += kTogether) {
    Elem elem[kTogether];
    const auto inside = [&](int i) {
      return i < kSums && q + sum_row(i) < result.rows && position[i / 2 % 2].inside;
    };
    const auto row = [&](int i) { return result.row(position[i / 2 % 2], q + sum_row(i)); };
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int i = first + k, c = i / 2 % 2;
      if (inside(i)) end.load(elem[k], down[c], row(i), position[c].column);
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

// `column` is the column of a thread's first sum among the warpgroup's 64, q the tile's first row.
// Sum i is of column `column` + 8·(i / 2 mod 2) and row 8·(i / 4) + 2·(lane mod 4) + i mod 2. Named
// barrier `barrier` belongs to the warpgroup alone.
template <int kLanes, int kRows, int kSums, class Epilogue, class ResultTile>
FW_DEVICE void finish_tile(float (&total)[kSums], int column, FinishRows<kRows>& finished,
                           int barrier, int p, int q, const Epilogue& end,
                           const ResultTile& result) {
  if constexpr (ResultTile::kAlone && !Epilogue::kReduces) {
    return finish_alone(total, p + column, q + threadIdx.x % 4 * 2, end, result);
  }
  if constexpr (kLanes > 1) {
    if (result.vectors) {
      return finish_slices<kLanes>(total, column, finished, barrier, p, q, end, result);
    }
  }
  finish_slices<1>(total, column, finished, barrier, p, q, end, result);
}

}  // namespace fw
