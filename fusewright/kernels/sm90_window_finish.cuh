// From the sums of a convolution's tile to the epilogue. A warp has 16 out channels of a tile and all
// positions of its warpgroup. It lays some of them at a time into its own part of shared memory, so
// that its threads then have neighbouring positions of one channel: whole lines of memory, and no
// other warp to wait for. What is not finite is made anew on the way there.
//
// An epilogue that reduces meets other warps: those of a warpgroup lay 32 channels of 64 positions
// together (sm90_finish.cuh).
#pragma once

#include "sm90_finish.cuh"

namespace fw {

// Where thread and register lie in a product of 64 channels: sum i of a thread is of channel
// 16·warp + lane / 4 + 8·(i / 2 mod 2) and position 8·(i / 4) + 2·(lane mod 4) + i mod 2.
__device__ __forceinline__ int sums_channel() {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

// What a warp lays out in a turn: 16 channels of 32 columns, or, where threads take V of these at
// a time, 8 of 64. Where rows go by eight (window_operands.cuh), a warp has 8 channels: with kBeside 1
// half of a thread's sums are nothing, with 2 they are columns beside the others, and a row has its even
// columns first. The stride keeps stores out of each other's banks.
template <int V, int kBeside>
struct WarpTurn {
  static constexpr int kColumns = V == 1 ? 32 : 64;
  static constexpr int kChannels = kBeside == 0 ? 16 : 8;  // of a warp
  static constexpr int kOfPosition = kBeside == 2 ? 2 : 1;  // columns
  static constexpr int kRows = V == 1 ? kChannels : 8;
  static constexpr int kStride = kColumns + 8, kOdd = kColumns / 2;
  static constexpr int kAcross = kColumns / V;            // threads of a row
  static constexpr int kStep = 32 / kAcross;              // rows between two of a thread's
  static constexpr int kSame = kChannels / kRows;         // turns with the same positions
  static constexpr int kNumbers = kColumns * kRows / 32;  // of a thread
  static constexpr int kSumsOfTurn = kNumbers * (kBeside == 1 ? 2 : 1);  // of a thread, all of them

  // Of number i of a thread: which sum it is, and its row and column after the thread's first.
  __device__ __forceinline__ static constexpr int sum(int turn, int i) {
    if (kBeside == 1) return 4 * ((turn * kNumbers + i) / 2) + i % 2;
    if (V == 1 || kBeside == 2) return turn * kNumbers + i;
    return 4 * (turn / 2 * 8 + i / 2) + turn % 2 * 2 + i % 2;
  }
  __device__ __forceinline__ static constexpr int row(int i) {
    return V == 1 && kBeside == 0 ? i / 2 % 2 * 8 : 0;
  }
  __device__ __forceinline__ static constexpr int column(int i) {
    if (kBeside == 2) return i / 4 * 16 + i % 2 * 2 + i / 2 % 2;
    return (V == 1 && kBeside == 0 ? i / 4 : i / 2) * 8 + i % 2;
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

// A warp's part of shared memory: the numbers of a turn, and what the epilogue reads of its channels
// where that is the same for all positions.
struct alignas(16) WarpRows {
  float numbers[640];
  char factors[512];
};
static_assert(4 * sizeof(WarpRows) >= sizeof(FinishRows<32>), "a warpgroup's rows find room");

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
// time. Result is as in sm90_finish.cuh; kBeside is that of its rows' order.
template <int V, class End, class Result>
struct WarpFinisher {
  using Turn = WarpTurn<V, Result::kBeside>;
  using Elem = typename End::template Elem<V>;
  static constexpr bool kKeepsFactors = End::kSameForColumns && sizeof(Elem) <= 32;
  static constexpr int kTogether = rows_together<Elem, Result>(Turn::kRows / Turn::kStep);
  WarpRows& memory;

  // From channel q on.
  __device__ __forceinline__ void keep_factors(int q, const End& end, const Result& result) const {
    if constexpr (kKeepsFactors) {
      const int row = threadIdx.x % 32;
      __syncwarp();
      if (row < Turn::kChannels && q + row < result.rows) {
        typename End::template Column<V> none;
        end.load(factors()[row], none, result.row({}, q + row), 0);
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
    const int across = lane % Turn::kAcross * V;
    float* const mine = &memory.numbers[lane / 4 * Turn::kStride + lane % 4 * 2];
    typename Result::Place place;
    typename End::template Column<V> down;
#pragma unroll 1
    for (int turn = 0; Turn::kSumsOfTurn * turn < kSums; ++turn) {
      const int column = p + turn / Turn::kSame * Turn::kColumns;
      const int first = q + turn % Turn::kSame * Turn::kRows;
      if (turn % Turn::kSame == 0) {
        place = result.place(column + across);
        if (place.inside) end.begin(down, place);
      }
      const float zero = lay_out_turn<Turn, 0>(total, turn, shared_address(mine), scale);
      if (zero != 0.f) {
        const auto number = [&](int i) -> float& {
          return mine[Turn::row(i) * Turn::kStride + Turn::place(Turn::column(i))];
        };
        const int mine_from = column + lane % 4 * 2 * Turn::kOfPosition;
        mend(number, Turn::kNumbers, Turn::row, Turn::column, mine_from, first + lane / 4, result);
      }
      __syncwarp();
      if (place.inside) finish_turn(across, first, q, place, end, down, result);
      __syncwarp();
    }
  }

 private:
  __device__ __forceinline__ Elem* factors() const {
    return reinterpret_cast<Elem*>(memory.factors);
  }

  // The rows of a turn from channel `first` on, in a warp whose channels begin at q.
  template <class Place>
  __device__ __forceinline__ void finish_turn(int across, int first, int q, const Place& place,
                                              const End& end,
                                              typename End::template Column<V>& down,
                                              const Result& result) const {
    const auto load = [&](Elem& elem, int row) {
      if constexpr (kKeepsFactors) {
        elem = factors()[first - q + row];
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

// The sums of 64 positions from kFrom / 32 · 64 on, of the half of the warpgroup's warps whose turn
// it is; those that are not finite are made anew, which is rare.
template <int kFrom, int kSums, class Result>
__device__ __forceinline__ void lay_out_together(const float (&total)[kSums],
                                                 FinishRows<32>& finished, int turn, int p, int q,
                                                 const float (&scale)[2], const Result& result) {
  const int channel = sums_channel(), column = threadIdx.x % 4 * 2;
  if (channel / 32 != turn) return;
  const auto row = [](int i) { return i / 2 % 2 * 8; };
  const auto across = [](int i) { return i / 4 * 8 + i % 2; };
  float* const mine = &finished[channel % 32][column];
  float zero = 0.f;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float x = total[kFrom + i] * scale[i / 2 % 2];
    zero = __fmaf_rn(x, 0.f, zero);
    mine[row(i) * kFinishStride + across(i)] = x;
  }
  if (zero != 0.f) {
    const auto number = [&](int i) -> float& {
      return mine[row(i) * kFinishStride + across(i)];
    };
    mend(number, 32, row, across, p + column, q + channel, result);
  }
}

// For an epilogue that reduces: the warpgroup's channels from q on, positions from p on.
template <int kFrom, int kSums, class End, class Result>
__device__ __forceinline__ void finish_together(const float (&total)[kSums],
                                                FinishRows<32>& finished, int barrier, int p, int q,
                                                const float (&scale)[2], const End& end,
                                                const Result& result) {
  if constexpr (kFrom < kSums) {
    const auto place = result.place(p + threadIdx.x % 64);
    typename End::template Column<1> down;
    if (place.inside) end.begin(down, place);
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      lay_out_together<kFrom>(total, finished, turn, p, q, scale, result);
      __syncwarp();  // mending parts its threads
      meet(barrier, 128);
      const int first = q + 32 * turn;
      finish_turn<1>(finished, min(32, result.rows - first), first, place, end, down, result);
      meet(barrier, 128);
    }
    if constexpr (End::kReduces && !End::kByRow) {
      leave_columns<1>(finished, barrier, result.line, place, end, down);
    }
    finish_together<kFrom + 32>(total, finished, barrier, p + 64, q, scale, end, result);
  }
}

}  // namespace fw
