// Pointwise kernels: each thread takes kUnroll vectors of V elements and loads all of them first.
#pragma once

#include "cuda/lanes.cuh"

namespace fw {

template <class Body, typename I, int V, int kThreads, int kUnroll>
__global__ void __launch_bounds__(kThreads) pointwise_kernel(const Body body) {
  let_next_begin();
  const I lane_vectors = body.lane_extent() / V;
  const I vectors = body.rest_extent() * lane_vectors;
  const I first = static_cast<I>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  typename Body::template Elem<V> elem[kUnroll];
  I q[kUnroll], l[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const I vector = first + u * kThreads;
    locate<Body::kRest>(vector, lane_vectors, q[u], l[u]);
    l[u] *= V;
    if (vector < vectors) body.load(elem[u], q[u], l[u]);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kThreads < vectors) body.visit(elem[u], q[u], l[u], V);
  }
  if constexpr (Body::kTail && V > 1) {
    // One axis with an extent that V does not divide: the last few elements, one thread each.
    const I l1 = vectors * V + threadIdx.x;
    if (blockIdx.x == 0 && l1 < body.lane_extent()) {
      typename Body::template Elem<1> one;
      body.load(one, I(0), l1);
      body.visit(one, I(0), l1, 1);
    }
  }
}

template <typename I, int V, int kThreads, int kUnroll, class Body>
int pointwise(const Body& body, int device, void* stream) {
  const I vectors = body.rest_extent() * (body.lane_extent() / V);
  if (body.rest_extent() * body.lane_extent() == 0) return 0;
  const OnDevice here(device);
  const unsigned blocks = vectors == 0 ? 1 : blocks_for<I>(vectors, kThreads * kUnroll);
  pointwise_kernel<Body, I, V, kThreads, kUnroll>
      <<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(body);
  return static_cast<int>(cudaGetLastError());
}

// Vectors of a contiguous output whose rows have any length: a vector may begin in one row and end
// in the next. Such a vector is computed element by element.
template <class Body, typename I, int V, int kThreads, int kUnroll>
__global__ void __launch_bounds__(kThreads) flat_kernel(const Body body) {
  let_next_begin();
  const I extent = body.lane_extent(), total = body.rest_extent() * extent;
  const I first = (static_cast<I>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x) * V;
  typename Body::template Elem<V> elem[kUnroll];
  I q[kUnroll], l[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const I at = first + u * (kThreads * V);
    locate<Body::kRest>(at, extent, q[u], l[u]);
    if (at < total && l[u] + V <= extent) body.load(elem[u], q[u], l[u]);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const I at = first + u * (kThreads * V);
    if (at < total && l[u] + V <= extent) {
      body.visit(elem[u], q[u], l[u], V);
    } else {
#pragma unroll 1
      for (int v = 0; v < V && at + v < total; ++v) {
        I q1, l1;
        locate<Body::kRest>(at + v, extent, q1, l1);
        typename Body::template Elem<1> one;
        body.load(one, q1, l1);
        body.visit(one, q1, l1, 1);
      }
    }
  }
}

template <typename I, int V, int kThreads, int kUnroll, class Body>
int flat(const Body& body, int device, void* stream) {
  const I total = body.rest_extent() * body.lane_extent();
  if (total == 0) return 0;
  const OnDevice here(device);
  const unsigned blocks = blocks_for<I>(total, kThreads * kUnroll * V);
  flat_kernel<Body, I, V, kThreads, kUnroll>
      <<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(body);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
