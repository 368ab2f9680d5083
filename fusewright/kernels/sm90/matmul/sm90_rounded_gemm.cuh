// A matmul of fp32 operands with TF32's accuracy, both of which are fp16 in memory when it begins.
// b is stored so. a is rounded first (sm90_round_operand.cuh) if enough rows of b share it;
// otherwise it is rounded on its way to the tensor cores (sm90_fp16x1_multiply.cuh).
#pragma once

#include "sm90/matmul/sm90_fp16x3_gemm.cuh"
#include "sm90/matmul/sm90_half_gemm.cuh"
#include "sm90/matmul/sm90_round_operand.cuh"

namespace fw {

// Recomputes elements from the operands as they were before rounding.
template <bool kContractedRowsB>
struct PlainSums {
  static constexpr bool kMends = true;
  RawOperand a;
  SplitOperand b;

  FW_DEVICE float plain(int64_t batch, int p, int q, int rows, int contracted) const {
    return plain_dot<kContractedRowsB>(a, b, batch, p, q, rows, contracted);
  }
};

// With one term, and at least `least_rows` rows that share an a, a is rounded first, into `memory`;
// rounded_bytes in ir/matmul.py says how much that takes.
template <int kTerms, int kTileRows, bool kFreeMajorA, bool kContractedRowsB, class Epilogue,
          class Parts = NoParts>
static int rounded_matmul(const Epilogue& end, bool vectors, const RawOperand& a,
                          const SplitOperand& b, const MatmulExtents& of, int64_t least_rows,
                          void* memory, int device, void* stream, const Parts& parts = {}) {
  const bool nothing = of.columns == 0 || of.rows == 0 || of.batches == 0 || of.contracted == 0;
  const int64_t rows = of.rows * (shares_rounding<kContractedRowsB>(a) ? of.batches : 1);
  if constexpr (kTerms == 1) {
    if (!nothing && rows >= least_rows) {
      const OnDevice here(device);
      const HalfOperand<half> fp16_a = rounded_operand<kFreeMajorA, kContractedRowsB>(
          a, kContractedRowsB ? b.inverse : nullptr, of, memory, stream);
      const int64_t down = kContractedRowsB ? of.contracted : of.rows;
      const HalfOperand<half> fp16_b = {b.hi, b.row_stride, down * b.row_stride,
                                        kContractedRowsB ? nullptr : b.inverse};
      const PlainSums<kContractedRowsB> anew = {a, b};
      return half_matmul<half, kFreeMajorA, kContractedRowsB>(end, vectors, fp16_a, fp16_b, of,
                                                              device, stream, anew);
    }
  }
  return fp16x3_matmul<kTerms, kTileRows, kFreeMajorA, kContractedRowsB>(end, vectors, a, b, of,
                                                                         device, stream, parts);
}

}  // namespace fw
