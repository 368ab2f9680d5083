// From the sums of a convolution's tile to the epilogue. A warp has 16 output channels of a tile
// and all positions of its warpgroup. It writes some of them at a time to its own part of shared
// memory, so that its threads then have neighbouring positions of one channel: whole cache lines,
// and no other warp to wait for. Sums that are not finite are recomputed on the way.
//
// A thread reduces down all of the warp's channels, where the epilogue does that. Reductions over
// positions read the same part of shared memory (sm90_convolution_reduce.cuh).
#pragma once

#include "sm90/convolution/sm90_convolution_reduce.cuh"

namespace fw {

// Where a thread's sums belong in a tile of 64 channels: sum i is of channel 16·warp + lane / 4 +
// 8·(i / 2 mod 2) and position 8·(i / 4) + 2·(lane mod 4) + i mod 2.
FW_DEVICE int sums_channel() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// What a warp writes in a slice: 16 channels of 32 columns; or 8 of 64, if threads take V of these
// at a time or reduce over positions. If rows of weights come in groups of eight (RowOrder in
// operands.cuh), a warp has 8 channels: with kBeside 1 half of a thread's sums are unused; with 2
// they are columns beside the others, and a row has its even columns first. The stride avoids bank
// conflicts of the stores.
template <int V, int kBeside, int kColumns_ = V == 1 ? 32 : 64>
struct WarpSlice {
  static constexpr int kColumns = kColumns_;
  static constexpr bool kWide = kColumns == 64;
  static constexpr int kChannels = kBeside == 0 ? 16 : 8;   // of a warp
  static constexpr int kOfPosition = kBeside == 2 ? 2 : 1;  // columns of a position
  static constexpr int kRows = kWide ? 8 : kChannels;
  static constexpr int kStride = kColumns + 8, kOdd = kColumns / 2;
  static constexpr int kAcross = kColumns / V < 32 ? kColumns / V : 32;  // threads of a row
  static constexpr int kTimes = kColumns / V / kAcross;                  // that they go over a row
  static constexpr int kStep = 32 / kAcross;              // from a thread's row to its next
  static constexpr int kSame = kChannels / kRows;         // slices with the same positions
  static constexpr int kNumbers = kColumns * kRows / 32;  // of a thread
  static constexpr int kSumsOfSlice = kNumbers * (kBeside == 1 ? 2 : 1);  // of a thread, in all

  // For element i of a thread: which sum it is, and its row and column relative to the thread's
  // first.
  FW_DEVICE static constexpr int sum(int slice, int i) {
    if (kBeside == 1) return 4 * ((slice * kNumbers + i) / 2) + i % 2;
    if (!kWide || kBeside == 2) return slice * kNumbers + i;
    return 4 * (slice / 2 * 8 + i / 2) + slice % 2 * 2 + i % 2;
  }
  FW_DEVICE static constexpr int row(int i) { return !kWide && kBeside == 0 ? i / 2 % 2 * 8 : 0; }
  FW_DEVICE static constexpr int column(int i) {
    if (kBeside == 2) return i / 4 * 16 + i % 2 * 2 + i / 2 % 2;
    return (!kWide && kBeside == 0 ? i / 4 : i / 2) * 8 + i % 2;
  }
  // Where a column is stored in its row.
  FW_DEVICE static constexpr int slot(int column) {
    return kBeside == 2 ? column / 2 + column % 2 * kOdd : column;
  }
  // The V elements from `from` on.
  FW_DEVICE static Packed<float, V> take(const float* from) {
    if constexpr (kBeside != 2 || V == 1) {
      return take_row<V>(from);
    } else {
      const auto even = take_row<V / 2>(from), odd = take_row<V / 2>(from + kOdd);
      Packed<float, V> all;
#pragma unroll
      for (int v = 0; v < V; ++v) all.lanes[v] = v % 2 == 0 ? even.lanes[v / 2] : odd.lanes[v / 2];
      return all;
    }
  }
};

// A warp's part of shared memory: the elements of a slice, and what the epilogue computes from its
// channels alone.
struct alignas(16) WarpRows {
  float numbers[640];
  char factors[512];
};

// Writes the sums of a slice, times the scales of both of a thread's channels, to shared memory.
// Each slice has stores of its own, so that `total` stays in registers. Returns zero, or NaN if one
// is not finite.
template <class Slice, int kSlice, int kSums>
FW_DEVICE float lay_out_slice(const float (&total)[kSums], int slice, uint32_t to,
                              const float (&scale)[2]) {
  float zero = 0.f;
  if constexpr (Slice::kSumsOfSlice * kSlice < kSums) {
    if (slice == kSlice) {
#pragma unroll
      for (int i = 0; i < Slice::kNumbers; i += 2) {
        const int at = Slice::sum(kSlice, i);
        const float x = total[at] * scale[at / 2 % 2], y = total[at + 1] * scale[at / 2 % 2];
        zero = __fmaf_rn(x, 0.f, __fmaf_rn(y, 0.f, zero));
        const int offset = Slice::row(i) * Slice::kStride + Slice::slot(Slice::column(i));
        store_two_shared<kSlice>(to + 4 * offset, x, y);
      }
    } else {
      zero = lay_out_slice<Slice, kSlice + 1>(total, slice, to, scale);
    }
  }
  return zero;
}

// A warp's way through the epilogue, tile after tile; a thread takes V neighbouring columns at a
// time. ResultTile is as in sm90_epilogue.cuh; its kBeside is that of the row order.
template <int V, class Epilogue, class ResultTile>
struct WarpFinisher {
  using Slice = WarpSlice<V, ResultTile::kBeside, V == 1 && !Epilogue::kByRow ? 32 : 64>;
  using Stores = StoresOf<Epilogue>;
  using Column = typename Stores::template Column<V>;
  using Elem = typename Stores::template Elem<V>;
  using Sweeps =
      std::conditional_t<Epilogue::kByRow, PositionReducer<V == 1 ? 1 : 2, Epilogue, ResultTile>,
                         NoPositionReducer<Epilogue, ResultTile>>;
  static constexpr bool kStores = !std::is_same_v<Stores, Nothing>;
  using Factors = typename Stores::Factors;
  static constexpr bool kKeepsFactors = !std::is_empty_v<Factors> && sizeof(Factors) <= 32;
  static constexpr int kTogether = rows_together<Elem, ResultTile>(Slice::kRows / Slice::kStep);
  WarpRows& memory;

  // Computes what the epilogue needs of the warp's channels, which begin at q.
  FW_DEVICE void keep_factors(int q, const Epilogue& end, const ResultTile& result) const {
    if constexpr (kKeepsFactors) {
      const int row = threadIdx.x % 32;
      __syncwarp();
      if (row < Slice::kChannels && q + row < result.rows) {
        stores_of(end).load_factors(factors()[row], result.row({}, q + row));
      }
      __syncwarp();
    }
  }

  // Finishes columns from p on; `scale` is for both of a thread's channels.
  template <int kSums>
  FW_DEVICE void finish(const float (&total)[kSums], int p, int q, const float (&scale)[2],
                        const Epilogue& end, const ResultTile& result) const {
    const int lane = threadIdx.x % 32;
    float* const mine = &memory.numbers[lane / 4 * Slice::kStride + lane % 4 * 2];
    typename ResultTile::Position position;
    Column down;
    Sweeps sweeps(end, result);
#pragma unroll 1
    for (int slice = 0; Slice::kSumsOfSlice * slice < kSums; ++slice) {
      const int column = p + slice / Slice::kSame * Slice::kColumns;
      const int first = q + slice % Slice::kSame * Slice::kRows;
      const bool anew = slice % Slice::kSame == 0;  // other positions than before
      if (anew) sweeps.begin_part(column);
      sweeps.enter(first);
      if (anew && Slice::kTimes == 1) begin_columns(down, position, column, 0, end, result);
      const float zero = lay_out_slice<Slice, 0>(total, slice, shared_address(mine), scale);
      if (zero != 0.f) {
        const auto number = [&](int i) -> float& {
          return mine[Slice::row(i) * Slice::kStride + Slice::slot(Slice::column(i))];
        };
        const int mine_from = column + lane % 4 * 2 * Slice::kOfPosition;
        mend(number, Slice::kNumbers, Slice::row, Slice::column, mine_from, first + lane / 4,
             result);
      }
      __syncwarp();
      sweeps.sweep(mine, column);
      if constexpr (kStores) {
#pragma unroll 1
        for (int time = 0; time < Slice::kTimes; ++time) {
          if (Slice::kTimes > 1) begin_columns(down, position, column, time, end, result);
          if (position.inside) finish_slice(across(time), first, q, position, end, down, result);
        }
      }
      __syncwarp();
      if (slice % Slice::kSame == Slice::kSame - 1) leave_columns(down, position, q, end, result);
    }
  }

 private:
  FW_DEVICE Factors* factors() const { return reinterpret_cast<Factors*>(memory.factors); }

  // The first of a thread's columns, within a slice.
  FW_DEVICE static int across(int time) {
    return (time * Slice::kAcross + threadIdx.x % Slice::kAcross) * V;
  }
  template <class Position>
  FW_DEVICE void begin_columns(Column& down, Position& position, int column, int time,
                               const Epilogue& end, const ResultTile& result) const {
    if constexpr (kStores) {
      position = result.position(column + across(time));
      if (position.inside) stores_of(end).begin(down, position);
      if constexpr (Stores::kReduces) down.acc = decltype(down.acc)();
    }
  }
  // Writes what a thread has reduced down the warp's channels, which begin at q.
  template <class Position>
  FW_DEVICE void leave_columns(Column& down, const Position& position, int q, const Epilogue& end,
                               const ResultTile& result) const {
    if constexpr (Stores::kReduces) {
      // Half-warps have every other channel of the same columns.
      static_assert(Slice::kStep <= 2, "at most two threads have the same columns");
      if constexpr (Slice::kStep == 2) down.acc.combine(shuffled_down(down.acc, 16, 32));
      const bool leaves = threadIdx.x % 32 < Slice::kAcross && position.inside && q < result.rows;
      if (leaves) stores_of(end).leave(down, result.partial, position.column);
    }
  }

  // Finishes the rows of a slice from channel `first` on, in a warp whose channels begin at q.
  template <class Position>
  FW_DEVICE void finish_slice(int across, int first, int q, const Position& position,
                              const Epilogue& of, Column& down, const ResultTile& result) const {
    const Stores& end = stores_of(of);
    const auto load = [&](Elem& elem, int row) {
      if constexpr (kKeepsFactors) {
        Factors& of_row = elem;
        of_row = factors()[first - q + row];
        end.load_own(elem, down, result.row(position, first + row));
      } else {
        end.load(elem, down, result.row(position, first + row), position.column);
      }
    };
    constexpr int kReach = Slice::kStep * (kTogether - 1);
    const int rows = result.rows - first;
#pragma unroll 1
    for (int row = threadIdx.x % 32 / Slice::kAcross; row < Slice::kRows;
         row += Slice::kStep * kTogether) {
      const float* const from = &memory.numbers[row * Slice::kStride + Slice::slot(across)];
      if (row + kReach < rows) {
        finish_rows<Slice, V, kTogether, true>(from, row, rows, first, position, load, end, down,
                                               result);
      } else {
        finish_rows<Slice, V, kTogether, false>(from, row, rows, first, position, load, end, down,
                                                result);
      }
    }
  }
};

}  // namespace fw
