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

// Rows of any length of contiguous outputs: the vectors of a row begin where a cache line does, and
// the few elements before and behind them are computed one by one. A row is cut into `chunks` of a
// block each, so what depends on the row is computed once a thread.
template <class Body, typename I, int V, int kThreads, int kUnroll>
__global__ void __launch_bounds__(kThreads) flat_kernel(const Body body, unsigned chunks) {
  let_next_begin();
  const unsigned row = blockIdx.x / chunks, chunk = blockIdx.x - row * chunks;
  const I q = static_cast<I>(row), extent = body.lane_extent();
  constexpr int kLine = line_of<V, kThreads>;
  const int aligned = static_cast<int>(-static_cast<int64_t>(q) * extent) & (kLine - 1);
  const I head = aligned < extent ? aligned : extent, vectors = (extent - head) / V;
  const I first = static_cast<I>(chunk) * (kThreads * kUnroll) + threadIdx.x;
  typename Body::template Elem<V> elem[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const I vector = first + u * kThreads;
    if (vector < vectors) body.load(elem[u], q, head + vector * V);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const I vector = first + u * kThreads;
    if (vector < vectors) body.visit(elem[u], q, head + vector * V, V);
  }
  if (chunk == 0 && threadIdx.x < kLine + V) {
    const bool before = threadIdx.x < kLine;
    const I l = before ? I(threadIdx.x) : head + vectors * V + I(threadIdx.x - kLine);
    if (l < (before ? head : extent)) {
      typename Body::template Elem<1> one;
      body.load(one, q, l);
      body.visit(one, q, l, 1);
    }
  }
}

template <typename I, int V, int kThreads, int kUnroll, class Body>
int flat(const Body& body, int device, void* stream) {
  static_assert(kThreads >= line_of<V, kThreads> + V, "a thread has at most one such element");
  const I rows = body.rest_extent(), extent = body.lane_extent();
  if (rows * extent == 0) return 0;
  const OnDevice here(device);
  const unsigned chunks = blocks_for<I>(extent, kThreads * kUnroll * V);
  const unsigned blocks = static_cast<unsigned>(rows) * chunks;
  flat_kernel<Body, I, V, kThreads, kUnroll>
      <<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(body, chunks);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
