// fw::product for tests without a GPU: the same declarations, three loops, double precision.
#pragma once

#include "lanes.cuh"

namespace fw {

struct RawOperand {
  const float* data;
  int64_t free_stride, contracted_stride;
};

struct SplitOperand {
  const half* hi;
  const half* lo;
  const float* inverse;
  int64_t row_stride;
};

template <int kTileRows, bool kFreeMajorA, bool kContractedRowsB, class Body>
int product(const Body& body, RawOperand a, SplitOperand b, int64_t columns, int64_t rows,
            int64_t contracted, int64_t terms, int device, void* stream) {
  if (kFreeMajorA != (a.free_stride == 1) || b.row_stride % 8 != 0) return 1;
  if (body.rest_extent() != rows || body.lane_extent() != columns) return 2;
  for (int64_t q = 0; q < rows; ++q) {
    for (int64_t p = 0; p < columns; ++p) {
      double sum = 0;
      for (int64_t r = 0; r < contracted; ++r) {
        const int64_t at = kContractedRowsB ? r * b.row_stride + q : q * b.row_stride + r;
        const double halves = value(b.hi[at]) + (terms == 3 ? double(value(b.lo[at])) : 0.0);
        sum += a.data[p * a.free_stride + r * a.contracted_stride] * halves *
               b.inverse[kContractedRowsB ? r : q];
      }
      typename Body::template Elem<1> elem;
      body.load(elem, q, p);
      body.give(elem, 0, static_cast<float>(sum));
      body.visit(elem, q, p, 1);
    }
  }
  return 0;
}

}  // namespace fw
