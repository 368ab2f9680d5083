// A product with TF32's accuracy of fp32 operands that both are halves in memory when it begins. b
// comes so; a is rounded first (sm90_round_operand.cuh), where enough rows of b share it. Elsewhere it is
// rounded on its way to the tensor cores (sm90_fp16x1_multiply.cuh).
#pragma once

#include "sm90/matmul/sm90_fp16x3_gemm.cuh"
#include "sm90/matmul/sm90_half_gemm.cuh"
#include "sm90/matmul/sm90_round_operand.cuh"

namespace fw {

// Elements anew from the operands as they were before they were rounded.
template <bool kContractedRowsB>
struct PlainSums {
  static constexpr bool kMends = true;
  RawOperand a;
  SplitOperand b;

  __device__ __forceinline__ float plain(int64_t batch, int p, int q, int rows,
                                         int contracted) const {
    return plain_product<kContractedRowsB>(a, b, batch, p, q, rows, contracted);
  }
};

// With one term and at least so many rows that share an a, it is rounded first, into `memory`; what
// that takes is rounded_bytes of fusewright/product.py.
template <int kTerms, int kTileRows, bool kFreeMajorA, bool kContractedRowsB, class End,
          class Parts = NoParts>
static int rounded_product(const End& end, bool vectors, const RawOperand& a,
                           const SplitOperand& b, const ProductExtents& of, int64_t least_rows,
                           void* memory, int device, void* stream,
                           const Parts& parts = {}) {
  const bool nothing = of.columns == 0 || of.rows == 0 || of.batches == 0 || of.contracted == 0;
  const int64_t rows = of.rows * (shares_rounding<kContractedRowsB>(a) ? of.batches : 1);
  if constexpr (kTerms == 1) {
    if (!nothing && rows >= least_rows) {
      const OnDevice here(device);
      const HalfOperand<half> halves_a = rounded<kFreeMajorA, kContractedRowsB>(
          a, kContractedRowsB ? b.inverse : nullptr, of, memory, stream);
      const int64_t down = kContractedRowsB ? of.contracted : of.rows;
      const HalfOperand<half> halves_b = {b.hi, b.row_stride, down * b.row_stride,
                                          kContractedRowsB ? nullptr : b.inverse};
      const PlainSums<kContractedRowsB> anew = {a, b};
      return half_product<half, kFreeMajorA, kContractedRowsB>(end, vectors, halves_a, halves_b,
                                                               of, device, stream, anew);
    }
  }
  return product<kTerms, kTileRows, kFreeMajorA, kContractedRowsB>(end, vectors, a, b, of, device,
                                                                   stream, parts);
}

}  // namespace fw
