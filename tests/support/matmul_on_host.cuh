// fw::fp16x3_matmul and fw::half_matmul for tests without a GPU: the same declarations, with three
// loops in double precision.
#pragma once

#include "cuda/epilogues.cuh"
#include "sm90/matmul/matmul_operands.cuh"

namespace fw {

template <bool kContractedRowsB>
float sum_at(const RawOperand& a, const SplitOperand& b, const MatmulExtents& of, int64_t batch,
             int64_t q, int64_t p, bool lower) {
  const float* from = a.data + batch * a.batch_stride + p * a.free_stride;
  double sum = 0;
  for (int64_t r = 0; r < of.contracted; ++r) {
    const int64_t row = kContractedRowsB ? batch * of.contracted + r : batch * of.rows + q;
    const int64_t at = row * b.row_stride + (kContractedRowsB ? q : r);
    const double split = value(b.hi[at]) + (lower ? double(value(b.lo[at])) : 0.0);
    sum += from[r * a.contracted_stride] * split * b.inverse[row];
  }
  return static_cast<float>(sum);
}

// Gives every element of the result, `sum(q, p)`, to the epilogue.
template <int V, class Body, class Sum>
void end_in(const ByColumn<Body>& end, int64_t rows, int64_t columns, const Sum& sum) {
  for (int64_t p = 0; p < columns; p += V) {
    typename ByColumn<Body>::template Column<V> down;
    struct {
      int64_t column;
    } const at = {p};
    end.begin(down, at);
    for (int64_t q = 0; q < rows; ++q) {
      typename ByColumn<Body>::template Elem<V> elem;
      end.load(elem, down, q, p);
      for (int v = 0; v < V; ++v) end.give(elem, v, sum(q, p + v));
      end.visit(elem, down, q);
    }
    if constexpr (ByColumn<Body>::kReduces) end.leave(down, 0, p);
  }
  end.join(1, nullptr);
}

template <int V, class Body, class Sum>
void end_in(const ByRow<Body>& end, int64_t rows, int64_t columns, const Sum& sum) {
  using IndexType = typename ByRow<Body>::IndexType;
  for (int64_t q = 0; q < rows; ++q) {
    auto acc = end.body.template accumulators<V>(Phase<0>{});
    for (int64_t p = 0; p < columns; p += V) {
      typename ByRow<Body>::template Elem<V> at;
      end.load(at, {}, q, p);
      for (int v = 0; v < V; ++v) end.give(at, v, sum(q, p + v));
      end.body.visit(Phase<0>{}, at.elem, at.row, acc, IndexType(0), IndexType(p), V);
    }
    end.put(0, q, folded(acc, V));
  }
  end.join(1, nullptr);
}

// The memory is only written, to show that it is there.
struct SplitKParts {
  void* memory = nullptr;
  int64_t bytes = 0;
};

template <int kTerms, int kTileRows, bool kFreeMajorA, bool kContractedRowsB, class Epilogue>
int fp16x3_matmul(const Epilogue& end, bool vectors, const RawOperand& a, const SplitOperand& b,
                  const MatmulExtents& of, int device, void* stream,
                  const SplitKParts& parts = {}) {
  if (parts.bytes > 0) memset(parts.memory, 0xff, parts.bytes);
  if ((kFreeMajorA && a.free_stride != 1) || b.row_stride % 8 != 0) return 1;
  const auto sum = [&](int64_t q, int64_t p) {
    return sum_at<kContractedRowsB>(a, b, of, q / of.rows, q % of.rows, p, kTerms == 3);
  };
  if (vectors) end_in<4>(end, of.batches * of.rows, of.columns, sum);
  else end_in<1>(end, of.batches * of.rows, of.columns, sum);
  return 0;
}

// Rounds nothing. Its memory is only written, too.
template <int kTerms, int kTileRows, bool kFreeMajorA, bool kContractedRowsB, class Epilogue>
int rounded_matmul(const Epilogue& end, bool vectors, const RawOperand& a, const SplitOperand& b,
                   const MatmulExtents& of, int64_t least_rows, void* memory, int device,
                   void* stream, const SplitKParts& parts = {}) {
  const bool shared = a.batch_stride == 0 && !kContractedRowsB;
  const int64_t rows = of.rows * (shared ? of.batches : 1);
  if (kTerms == 1 && rows >= least_rows) {
    const int64_t layers = shared ? 1 : of.batches;
    memset(memory, 0xff, layers * of.columns * of.contracted * 2);
  }
  return fp16x3_matmul<kTerms, kTileRows, kFreeMajorA, kContractedRowsB>(end, vectors, a, b, of,
                                                                         device, stream, parts);
}

template <class T>
double half_operand_at(const HalfOperand<T>& of, bool free_major, int64_t batch, int64_t free,
                       int64_t r) {
  const int64_t row = free_major ? r : free, column = free_major ? free : r;
  return value(of.data[batch * of.batch_stride + row * of.row_stride + column]);
}

template <class T, bool kFreeMajorA, bool kFreeMajorB, int kTileRows, class Epilogue>
int half_matmul(const Epilogue& end, bool vectors, const HalfOperand<T>& a, const HalfOperand<T>& b,
                const MatmulExtents& of, int device, void* stream) {
  const auto sum = [&](int64_t q, int64_t p) {
    double total = 0;
    for (int64_t r = 0; r < of.contracted; ++r) {
      total += half_operand_at(a, kFreeMajorA, q / of.rows, p, r) *
               half_operand_at(b, kFreeMajorB, q / of.rows, q % of.rows, r);
    }
    return static_cast<float>(total);
  };
  if (vectors) end_in<4>(end, of.batches * of.rows, of.columns, sum);
  else end_in<1>(end, of.batches * of.rows, of.columns, sum);
  return 0;
}

}  // namespace fw
