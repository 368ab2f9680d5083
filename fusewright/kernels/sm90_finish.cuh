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
  }
  return sum;
}

// Some rows of one column: undoes b's scale, mends what is not finite, runs the epilogue. The loads
// of all these rows travel together.
template <bool kContractedRowsB, class Body>
__device__ __forceinline__ void finish_rows(const float (*finished)[kFinishStride], int part,
                                            int row, int count, int p, int q, const Body& body,
                                            const RawOperand& a, const SplitOperand& b,
                                            const ProductSizes& sizes) {
  constexpr int kTogether = 8;
  typename Body::template Elem<1> elem[kTogether];
  const int rows = min(count, sizes.rows - q);
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const int here = row + 2 * k;
    if (here < rows) body.load(elem[k], q + here, p);
  }
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const int here = row + 2 * k;
    if (here >= rows) break;
    float x = finished[here][part];
    if (!kContractedRowsB) x *= b.inverse[q + here];
    if (!isfinite(x)) x = plain_product<kContractedRowsB>(a, b, p, q + here, sizes.contracted);
    body.give(elem[k], 0, x);
    body.visit(elem[k], q + here, p, 1);
  }
}

// The sums of a turn to shared memory. By hand and with kFrom as an immediate: the compiler would
// otherwise merge the turns, index `total` by turn, and keep it in memory.
template <int kFrom, int kSums>
__device__ __forceinline__ void lay_out(const float (&total)[kSums], int turn, uint32_t to) {
  constexpr int kPerTurn = kFinishRows / 2;
  if constexpr (kFrom < kSums) {
    if (turn * kPerTurn == kFrom) {
#pragma unroll
      for (int i = 0; i < kPerTurn && kFrom + i < kSums; ++i) {
        const int at = (i / 4 * 8 + i % 2) * kFinishStride + i / 2 % 2 * 8;
        asm volatile("st.shared.f32 [%0], %1;  // %2"
                     :: "r"(to + 4 * at), "f"(total[kFrom + i]), "n"(kFrom) : "memory");
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
  const int part = threadIdx.x % 64, first = threadIdx.x / 64 % 2;
  p += 64 * group;
  row -= 64 * group;
#pragma unroll 1
  for (int turn = 0; turn * kPerTurn < kSums; ++turn, q += kFinishRows) {
    lay_out<0>(total, turn, shared_address(&finished[pair][row]));
    meet(barrier, 128);
    const int count = min(kFinishRows, 2 * (kSums - turn * kPerTurn));
    if (p + part < sizes.columns) {
#pragma unroll 1
      for (int half = first; half < kFinishRows; half += 16) {
        finish_rows<kContractedRowsB>(finished, part, half, count, p + part, q, body, a, b, sizes);
      }
    }
    meet(barrier, 128);
  }
}

}  // namespace fw
