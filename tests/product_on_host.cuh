// fw::product and fw::half_product for tests without a GPU: the same declarations, three loops,
// double precision.
#pragma once

#include "product_operands.cuh"

namespace fw {

template <bool kContractedRowsB>
float sum_at(const RawOperand& a, const SplitOperand& b, const ProductExtents& of, int64_t batch,
             int64_t q, int64_t p, bool lower) {
  const float* from = a.data + batch * a.batch_stride + p * a.free_stride;
  double sum = 0;
  for (int64_t r = 0; r < of.contracted; ++r) {
    const int64_t row = kContractedRowsB ? batch * of.contracted + r : batch * of.rows + q;
    const int64_t at = row * b.row_stride + (kContractedRowsB ? q : r);
    const double halves = value(b.hi[at]) + (lower ? double(value(b.lo[at])) : 0.0);
    sum += from[r * a.contracted_stride] * halves * b.inverse[row];
  }
  return static_cast<float>(sum);
}

template <int V, bool kContractedRowsB, class Body>
void rows_of(const Body& body, const RawOperand& a, const SplitOperand& b,
             const ProductExtents& of, bool lower) {
  for (int64_t q = 0; q < of.batches * of.rows; ++q) {
    for (int64_t p = 0; p < of.columns; p += V) {
      typename Body::template Elem<V> elem;
      body.load(elem, q, p);
      for (int v = 0; v < V; ++v) {
        const float sum =
            sum_at<kContractedRowsB>(a, b, of, q / of.rows, q % of.rows, p + v, lower);
        body.give(elem, v, sum);
      }
      body.visit(elem, q, p, V);
    }
  }
}

template <int kTileRows, bool kFreeMajorA, bool kContractedRowsB, class Body>
int product(const Body& body, bool vectors, const RawOperand& a, const SplitOperand& b,
            const ProductExtents& of, int64_t terms, int device, void* stream) {
  if ((kFreeMajorA && a.free_stride != 1) || b.row_stride % 8 != 0) return 1;
  if (body.rest_extent() != of.batches * of.rows || body.lane_extent() != of.columns) return 2;
  const auto run = vectors ? rows_of<4, kContractedRowsB, Body> : rows_of<1, kContractedRowsB, Body>;
  run(body, a, b, of, terms == 3);
  return 0;
}

template <class T>
double half_at(const HalfOperand<T>& of, bool free_major, int64_t batch, int64_t free, int64_t r) {
  const int64_t row = free_major ? r : free, column = free_major ? free : r;
  return value(of.data[batch * of.batch_stride + row * of.row_stride + column]);
}

template <int V, class T, bool kFreeMajorA, bool kFreeMajorB, class Body>
void half_rows_of(const Body& body, const HalfOperand<T>& a, const HalfOperand<T>& b,
                  const ProductExtents& of) {
  for (int64_t q = 0; q < of.batches * of.rows; ++q) {
    for (int64_t p = 0; p < of.columns; p += V) {
      typename Body::template Elem<V> elem;
      body.load(elem, q, p);
      for (int v = 0; v < V; ++v) {
        double sum = 0;
        for (int64_t r = 0; r < of.contracted; ++r) {
          sum += half_at(a, kFreeMajorA, q / of.rows, p + v, r) *
                 half_at(b, kFreeMajorB, q / of.rows, q % of.rows, r);
        }
        body.give(elem, v, static_cast<float>(sum));
      }
      body.visit(elem, q, p, V);
    }
  }
}

template <class T, bool kFreeMajorA, bool kFreeMajorB, int kTileRows, class Body>
int half_product(const Body& body, bool vectors, const HalfOperand<T>& a, const HalfOperand<T>& b,
                 const ProductExtents& of, int device, void* stream) {
  if (body.rest_extent() != of.batches * of.rows || body.lane_extent() != of.columns) return 2;
  const auto run = vectors ? half_rows_of<4, T, kFreeMajorA, kFreeMajorB, Body>
                           : half_rows_of<1, T, kFreeMajorA, kFreeMajorB, Body>;
  run(body, a, b, of);
  return 0;
}

}  // namespace fw
