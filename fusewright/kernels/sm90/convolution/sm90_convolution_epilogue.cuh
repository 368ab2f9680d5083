// From the sums of a convolution's tile to the epilogue. A warp has 16 out channels of a tile and all
// positions of its warpgroup. It lays some of them at a time into its own part of shared memory, so
// that its threads then have neighbouring positions of one channel: whole lines of memory, and no
// other warp to wait for. What is not finite is made anew on the way there.
//
// What is reduced down the channels runs on in a thread through all of the warp's; what is reduced over
// positions is taken from the same part of shared memory (sm90_convolution_reduce.cuh).
#pragma once

#include "sm90/convolution/sm90_convolution_reduce.cuh"

namespace fw {

// Where thread and register lie in a product of 64 channels: sum i of a thread is of channel
// 16·warp + lane / 4 + 8·(i / 2 mod 2) and position 8·(i / 4) + 2·(lane mod 4) + i mod 2.
__device__ __forceinline__ int sums_channel() {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

// What a warp lays out in a turn: 16 channels of 32 columns; or 8 of 64, where threads take V of these
// at a time or reduce over positions. Where rows go by eight (operands.cuh), a warp has 8 channels:
// with kBeside 1 half of a thread's sums are nothing, with 2 they are columns beside the others, and a row
// has its even columns first. The stride keeps stores out of each other's banks.
template <int V, int kBeside, int kColumns_ = V == 1 ? 32 : 64>
struct WarpTurn {
  static constexpr int kColumns = kColumns_;
  static constexpr bool kWide = kColumns == 64;
  static constexpr int kChannels = kBeside == 0 ? 16 : 8;  // of a warp
  static constexpr int kOfPosition = kBeside == 2 ? 2 : 1;  // columns
  static constexpr int kRows = kWide ? 8 : kChannels;
  static constexpr int kStride = kColumns + 8, kOdd = kColumns / 2;
  static constexpr int kAcross = kColumns / V < 32 ? kColumns / V : 32;  // threads of a row
  static constexpr int kTimes = kColumns / V / kAcross;   // that they go over it
  static constexpr int kStep = 32 / kAcross;              // rows between two of a thread's
  static constexpr int kSame = kChannels / kRows;         // turns with the same positions
  static constexpr int kNumbers = kColumns * kRows / 32;  // of a thread
  static constexpr int kSumsOfTurn = kNumbers * (kBeside == 1 ? 2 : 1);  // of a thread, all of them

  // Of number i of a thread: which sum it is, and its row and column after the thread's first.
  __device__ __forceinline__ static constexpr int sum(int turn, int i) {
    if (kBeside == 1) return 4 * ((turn * kNumbers + i) / 2) + i % 2;
    if (!kWide || kBeside == 2) return turn * kNumbers + i;
    return 4 * (turn / 2 * 8 + i / 2) + turn % 2 * 2 + i % 2;
  }
  __device__ __forceinline__ static constexpr int row(int i) {
    return !kWide && kBeside == 0 ? i / 2 % 2 * 8 : 0;
  }
  __device__ __forceinline__ static constexpr int column(int i) {
    if (kBeside == 2) return i / 4 * 16 + i % 2 * 2 + i / 2 % 2;
    return (!kWide && kBeside == 0 ? i / 4 : i / 2) * 8 + i % 2;
  }
  // Where a column lies in its row.
  __device__ __forceinline__ static constexpr int place(int column) {
    return kBeside == 2 ? column / 2 + column % 2 * kOdd : column;
  }
  // The V numbers from a place on.
  __device__ __forceinline__ static Packed<float, V> take(const float* from) {
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

// A warp's part of shared memory: the numbers of a turn, and what the epilogue computes of its
// channels alone.
struct alignas(16) WarpRows {
  float numbers[640];
  char factors[512];
};

// The sums of a turn, times the scales of both of a thread's channels, to shared memory; each turn's
// stores are its own, so that `total` stays in registers. Returns zero, or NaN if one is not finite.
template <class Turn, int kTurn, int kSums>
__device__ __forceinline__ float lay_out_turn(const float (&total)[kSums], int turn, uint32_t to,
                                              const float (&scale)[2]) {
  float zero = 0.f;
  if constexpr (Turn::kSumsOfTurn * kTurn < kSums) {
    if (turn == kTurn) {
#pragma unroll
      for (int i = 0; i < Turn::kNumbers; i += 2) {
        const int at = Turn::sum(kTurn, i);
        const float x = total[at] * scale[at / 2 % 2], y = total[at + 1] * scale[at / 2 % 2];
        zero = __fmaf_rn(x, 0.f, __fmaf_rn(y, 0.f, zero));
        const int place = Turn::row(i) * Turn::kStride + Turn::place(Turn::column(i));
        store_two_shared<kTurn>(to + 4 * place, x, y);
      }
    } else {
      zero = lay_out_turn<Turn, kTurn + 1>(total, turn, to, scale);
    }
  }
  return zero;
}

// A warp's way through the epilogue, tile after tile; a thread takes V neighbouring columns at a
// time. Result is as in sm90_epilogue.cuh; kBeside is that of its rows' order.
template <int V, class End, class Result>
struct WarpFinisher {
  using Turn = WarpTurn<V, Result::kBeside, V == 1 && !End::kByRow ? 32 : 64>;
  using Stores = StoresOf<End>;
  using Column = typename Stores::template Column<V>;
  using Elem = typename Stores::template Elem<V>;
  using Sweeps = std::conditional_t<End::kByRow, Sweeper<V == 1 ? 1 : 2, End, Result>,
                                    NoSweeper<End, Result>>;
  static constexpr bool kStores = !std::is_same_v<Stores, Nothing>;
  using Factors = typename Stores::Factors;
  static constexpr bool kKeepsFactors = !std::is_empty_v<Factors> && sizeof(Factors) <= 32;
  static constexpr int kTogether = rows_together<Elem, Result>(Turn::kRows / Turn::kStep);
  WarpRows& memory;

  // From channel q on.
  __device__ __forceinline__ void keep_factors(int q, const End& end, const Result& result) const {
    if constexpr (kKeepsFactors) {
      const int row = threadIdx.x % 32;
      __syncwarp();
      if (row < Turn::kChannels && q + row < result.rows) {
        stores_of(end).load_factors(factors()[row], result.row({}, q + row));
      }
      __syncwarp();
    }
  }

  // Columns from p on; `scale` belongs to both of a thread's channels.
  template <int kSums>
  __device__ __forceinline__ void finish(const float (&total)[kSums], int p, int q,
                                         const float (&scale)[2], const End& end,
                                         const Result& result) const {
    const int lane = threadIdx.x % 32;
    float* const mine = &memory.numbers[lane / 4 * Turn::kStride + lane % 4 * 2];
    typename Result::Place place;
    Column down;
    Sweeps sweeps(end, result);
#pragma unroll 1
    for (int turn = 0; Turn::kSumsOfTurn * turn < kSums; ++turn) {
      const int column = p + turn / Turn::kSame * Turn::kColumns;
      const int first = q + turn % Turn::kSame * Turn::kRows;
      const bool anew = turn % Turn::kSame == 0;  // other positions than before
      if (anew) sweeps.begin_part(column);
      sweeps.enter(first);
      if (anew && Turn::kTimes == 1) begin_columns(down, place, column, 0, end, result);
      const float zero = lay_out_turn<Turn, 0>(total, turn, shared_address(mine), scale);
      if (zero != 0.f) {
        const auto number = [&](int i) -> float& {
          return mine[Turn::row(i) * Turn::kStride + Turn::place(Turn::column(i))];
        };
        const int mine_from = column + lane % 4 * 2 * Turn::kOfPosition;
        mend(number, Turn::kNumbers, Turn::row, Turn::column, mine_from, first + lane / 4, result);
      }
      __syncwarp();
      sweeps.sweep(mine, column);
      if constexpr (kStores) {
#pragma unroll 1
        for (int time = 0; time < Turn::kTimes; ++time) {
          if (Turn::kTimes > 1) begin_columns(down, place, column, time, end, result);
          if (place.inside) finish_turn(across(time), first, q, place, end, down, result);
        }
      }
      __syncwarp();
      if (turn % Turn::kSame == Turn::kSame - 1) leave_columns(down, place, q, end, result);
    }
  }

 private:
  __device__ __forceinline__ Factors* factors() const {
    return reinterpret_cast<Factors*>(memory.factors);
  }

  // A thread's columns among those of a turn.
  __device__ __forceinline__ static int across(int time) {
    return (time * Turn::kAcross + threadIdx.x % Turn::kAcross) * V;
  }
  template <class Place>
  __device__ __forceinline__ void begin_columns(Column& down, Place& place, int column, int time,
                                                const End& end, const Result& result) const {
    if constexpr (kStores) {
      place = result.place(column + across(time));
      if (place.inside) stores_of(end).begin(down, place);
      if constexpr (Stores::kReduces) down.acc = decltype(down.acc)();
    }
  }
  // What a thread has reduced down the warp's channels, which begin at q.
  template <class Place>
  __device__ __forceinline__ void leave_columns(Column& down, const Place& place, int q,
                                                const End& end, const Result& result) const {
    if constexpr (Stores::kReduces) {
      // Half warps have every other channel of the same columns.
      static_assert(Turn::kStep <= 2, "at most two threads have the same columns");
      if constexpr (Turn::kStep == 2) down.acc.combine(shuffled_down(down.acc, 16, 32));
      const bool leaves = threadIdx.x % 32 < Turn::kAcross && place.inside && q < result.rows;
      if (leaves) stores_of(end).leave(down, result.line, place.column);
    }
  }

  // The rows of a turn from channel `first` on, in a warp whose channels begin at q.
  template <class Place>
  __device__ __forceinline__ void finish_turn(int across, int first, int q, const Place& place,
                                              const End& of, Column& down,
                                              const Result& result) const {
    const Stores& end = stores_of(of);
    const auto load = [&](Elem& elem, int row) {
      if constexpr (kKeepsFactors) {
        Factors& of_row = elem;
        of_row = factors()[first - q + row];
        end.load_own(elem, down, result.row(place, first + row));
      } else {
        end.load(elem, down, result.row(place, first + row), place.column);
      }
    };
    constexpr int kReach = Turn::kStep * (kTogether - 1);
    const int rows = result.rows - first;
#pragma unroll 1
    for (int row = threadIdx.x % 32 / Turn::kAcross; row < Turn::kRows;
         row += Turn::kStep * kTogether) {
      const float* const from = &memory.numbers[row * Turn::kStride + Turn::place(across)];
      if (row + kReach < rows) {
        finish_rows<Turn, V, kTogether, true>(from, row, rows, first, place, load, end, down,
                                              result);
      } else {
        finish_rows<Turn, V, kTogether, false>(from, row, rows, first, place, load, end, down,
                                               result);
      }
    }
  }
};

}  // namespace fw
