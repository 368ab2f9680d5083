// From the sums of a tile to the epilogue. A warpgroup lays 32 rows at a time into shared memory, so
// that its threads then have neighbouring columns of one row: whole lines of memory for all that the
// epilogue reads and writes.
#pragma once

#include "sm90_load.cuh"

namespace fw {

// An element as a plain fp32 sum: what an overflow or a non-finite operand makes of it.
template <bool kContractedRowsB>
__device__ __forceinline__ float plain_product(const RawOperand& a, const SplitOperand& b, int p,
                                               int q, int contracted) {
  float sum = 0.f;
#pragma unroll 1
  for (int r = 0; r < contracted; ++r) {
    const int64_t at = kContractedRowsB ? r * b.row_stride + q : q * b.row_stride + r;
    const float hi = value(b.hi[at]), lo = value(b.lo[at]);
    const float whole = isfinite(hi) ? (hi + lo) * b.inverse[kContractedRowsB ? r : q] : hi;
    sum = __fmaf_rn(a.data[p * a.free_stride + r * a.contracted_stride], whole, sum);
    if (r % 16 == 0 && sum != sum) break;  // it stays NaN
  }
  return sum;
}

// How a warpgroup's threads share kFinishRows rows of 64 columns: V neighbouring columns each.
template <int V>
struct FinishShape {
  static constexpr int kAcross = 64 / V;
  static constexpr int kStep = 128 / kAcross;          // rows between two of a thread's
  static constexpr int kTogether = V == 1 ? 8 : 32 / kStep;  // rows whose loads travel together
};

// Some rows of V columns: undoes b's scale, mends what is not finite, runs the epilogue. Each step
// is done for all of them before the next, so that none waits; where all are inside (kWhole) there
// is no branch either.
template <int V, bool kContractedRowsB, bool kWhole, class Body>
__device__ __forceinline__ void finish_rows(const float (*finished)[kFinishStride], int part,
                                            int row, int rows, int p, int q, const Body& body,
                                            const RawOperand& a, const SplitOperand& b,
                                            const ProductSizes& sizes) {
  constexpr int kStep = FinishShape<V>::kStep, kTogether = FinishShape<V>::kTogether;
  typename Body::template Elem<V> elem[kTogether];
  Packed<float, V> x[kTogether];
  uint32_t broken = 0;
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    if (kWhole || row + k * kStep < rows) body.load(elem[k], q + row + k * kStep, p);
  }
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    using Word = typename Packed<float, V>::Word;
    x[k].words[0] = *reinterpret_cast<const Word*>(&finished[row + k * kStep][part]);
  }
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const bool inside = kWhole || row + k * kStep < rows;
    const float scale = !kContractedRowsB && inside ? b.inverse[q + row + k * kStep] : 1.f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      x[k].lanes[v] *= scale;
      if (inside && !isfinite(x[k].lanes[v])) broken |= 1u << (k * V + v);
    }
  }
#pragma unroll 1
  while (broken != 0) {
    const int which = __ffs(broken) - 1;
    broken &= broken - 1;
    const float mended = plain_product<kContractedRowsB>(
        a, b, p + which % V, q + row + which / V * kStep, sizes.contracted);
#pragma unroll
    for (int i = 0; i < kTogether * V; ++i) {
      x[i / V].lanes[i % V] = i == which ? mended : x[i / V].lanes[i % V];
    }
  }
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
#pragma unroll
    for (int v = 0; v < V; ++v) body.give(elem[k], v, x[k].lanes[v]);
    if (kWhole || row + k * kStep < rows) body.visit(elem[k], q + row + k * kStep, p, V);
  }
}

// What lies in shared memory: `rows` rows of it are inside the result.
template <int V, bool kContractedRowsB, class Body>
__device__ __forceinline__ void finish_turn(const float (*finished)[kFinishStride], int rows, int p,
                                            int q, const Body& body, const RawOperand& a,
                                            const SplitOperand& b, const ProductSizes& sizes) {
  using Shape = FinishShape<V>;
  constexpr int kReach = Shape::kStep * (Shape::kTogether - 1);
  const int part = threadIdx.x % Shape::kAcross * V;
  if (p + part >= sizes.columns) return;
#pragma unroll 1
  for (int row = threadIdx.x % 128 / Shape::kAcross; row < kFinishRows;
       row += Shape::kStep * Shape::kTogether) {
    if (row + kReach < rows) {
      finish_rows<V, kContractedRowsB, true>(finished, part, row, rows, p + part, q, body, a, b,
                                             sizes);
    } else {
      finish_rows<V, kContractedRowsB, false>(finished, part, row, rows, p + part, q, body, a, b,
                                              sizes);
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

// The 64 columns of a warpgroup. `row` is where a thread holds its first sum, `p` and `q` where
// the tile begins; sum i is of column row + 8·(i / 2 mod 2) and row 8·(i / 4) + 2·lane + i mod 2.
template <bool kContractedRowsB, int kSums, class Body>
__device__ __forceinline__ void finish_tile(const float (&total)[kSums], int row,
                                            float (*finished)[kFinishStride], int p, int q,
                                            const Body& body, const RawOperand& a,
                                            const SplitOperand& b, const ProductSizes& sizes) {
  constexpr int kPerTurn = kFinishRows / 2;  // sums of a thread
  const int group = threadIdx.x / 128, barrier = 3 + group, pair = threadIdx.x % 4 * 2;
  p += 64 * group;
  row -= 64 * group;
#pragma unroll 1
  for (int turn = 0; turn * kPerTurn < kSums; ++turn, q += kFinishRows) {
    lay_out<0>(total, turn, shared_address(&finished[pair][row]));
    meet(barrier, 128);
    const int rows = min(min(kFinishRows, 2 * (kSums - turn * kPerTurn)), sizes.rows - q);
    if (sizes.vectors) {
      finish_turn<4, kContractedRowsB>(finished, rows, p, q, body, a, b, sizes);
    } else {
      finish_turn<1, kContractedRowsB>(finished, rows, p, q, body, a, b, sizes);
    }
    meet(barrier, 128);
  }
}

}  // namespace fw
