// fw::product for tests without a GPU: the same declarations, three loops, double precision.
#pragma once

#include "product_operands.cuh"

namespace fw {

template <bool kContractedRowsB>
float sum_at(RawOperand a, SplitOperand b, int64_t q, int64_t p, int64_t contracted, bool lower) {
  double sum = 0;
  for (int64_t r = 0; r < contracted; ++r) {
    const int64_t at = kContractedRowsB ? r * b.row_stride + q : q * b.row_stride + r;
    const double halves = value(b.hi[at]) + (lower ? double(value(b.lo[at])) : 0.0);
    sum += a.data[p * a.free_stride + r * a.contracted_stride] * halves *
           b.inverse[kContractedRowsB ? r : q];
  }
  return static_cast<float>(sum);
}

template <int V, bool kContractedRowsB, class Body>
void rows_of(const Body& body, RawOperand a, SplitOperand b, int64_t columns, int64_t rows,
             int64_t contracted, bool lower) {
  for (int64_t q = 0; q < rows; ++q) {
    for (int64_t p = 0; p < columns; p += V) {
      typename Body::template Elem<V> elem;
      body.load(elem, q, p);
      for (int v = 0; v < V; ++v) {
        body.give(elem, v, sum_at<kContractedRowsB>(a, b, q, p + v, contracted, lower));
      }
      body.visit(elem, q, p, V);
    }
  }
}

template <int kTileRows, bool kFreeMajorA, bool kContractedRowsB, class Body>
int product(const Body& body, bool vectors, RawOperand a, SplitOperand b, int64_t columns,
            int64_t rows, int64_t contracted, int64_t terms, int device, void* stream) {
  if ((kFreeMajorA && a.free_stride != 1) || b.row_stride % 8 != 0) return 1;
  if (body.rest_extent() != rows || body.lane_extent() != columns) return 2;
  const auto run = vectors ? rows_of<4, kContractedRowsB, Body> : rows_of<1, kContractedRowsB, Body>;
  run(body, a, b, columns, rows, contracted, terms == 3);
  return 0;
}

}  // namespace fw
