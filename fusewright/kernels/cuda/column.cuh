// Kernels that reduce down the columns. kAcross threads are placed along the contiguous outer axis
// with V columns each; kDown rows of threads share the inner extent and combine in shared memory.
#pragma once

#include "cuda/groups.cuh"

namespace fw {

constexpr int kMostPartsOfThread = 64;

template <class Body, typename I, int V, int kDown, int kUnroll, class Row, class Acc>
FW_DEVICE void column_sweep(const Body& body, const Row& row, Acc& acc, I begin, I end) {
  for (I base = begin; base < end; base += kDown * kUnroll) {
    typename Body::template Elem<V> elem[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const I r = base + u * kDown;
      if (r < end) body.load(Phase<0>{}, elem[u], row, r, I(0));
    }
    auto few = acc.few();
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const I r = base + u * kDown;
      if (r < end) body.visit(Phase<0>{}, elem[u], row, few, r, I(0), V);
    }
    acc.take(few);
  }
}

template <class Body, typename I, int V, int kAcross, int kDown, int kUnroll, class Part>
__global__ void __launch_bounds__(kAcross* kDown)
    column_kernel(const Body body, Part* parts, I per_split) {
  let_next_begin();
  using Acc = decltype(body.template accumulators<V>(Phase<0>{}));
  __shared__ __align__(16) unsigned char memory[kAcross * kDown * sizeof(Acc)];
  Acc* shared = reinterpret_cast<Acc*>(memory);
  const I outer = body.outer_extent();
  const int across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
  const I p = (static_cast<I>(blockIdx.x) * kAcross + across) * V;
  typename Body::template Row<V> row;
  auto acc = body.template accumulators<V>(Phase<0>{});
  if (p < outer) {
    I q, l;
    locate<Body::kOuterRest>(p, body.outer_lane_extent(), q, l);
    body.begin(row, q, l, V);
    const I first = blockIdx.y * per_split;
    I end = body.inner_extent();
    if (first + per_split < end) end = first + per_split;
    column_sweep<Body, I, V, kDown, kUnroll>(body, row, acc, first + down, end);
  }
  shared[threadIdx.x] = acc;
  __syncthreads();
  if (down != 0 || p >= outer) return;
  for (int d = 1; d < kDown; ++d) acc.combine(shared[d * kAcross + across]);
  if constexpr (Body::kSplit) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      parts[blockIdx.y * static_cast<int64_t>(outer) + p + v] = acc.lane(v);
    }
  } else {
    body.finish(Phase<0>{}, row, acc, V);
    body.store(row, V);
  }
}

template <typename I, int V, int kAcross, int kDown, int kUnroll, class Body>
static int column(const Body& body, int splits, void* workspace, int device, void* stream) {
  using Part = decltype(body.template accumulators<1>(Phase<0>{}));
  static_assert(sizeof(Part) <= Body::kPartBytes, "the workspace was sized for less");
  const I outer = body.outer_extent();
  if (outer == 0) return 0;
  const OnDevice here(device);
  const unsigned blocks = blocks_for<I>(outer, kAcross * V);
  if constexpr (Body::kSplit) {
    static Waves waves;
    splits = waves.whole(column_kernel<Body, I, V, kAcross, kDown, kUnroll, Part>, kAcross * kDown,
                         blocks, splits, device);
  }
  const I per_split = (body.inner_extent() + splits - 1) / splits;
  Part* parts = static_cast<Part*>(workspace);
  const dim3 grid(blocks, splits);
  column_kernel<Body, I, V, kAcross, kDown, kUnroll>
      <<<grid, kAcross * kDown, 0, static_cast<cudaStream_t>(stream)>>>(body, parts, per_split);
  if constexpr (Body::kSplit) {
    // Few columns have many parts: one thread would read them one after the other, so threads share
    // them.
    if (splits > kMostPartsOfThread) {
      combine<I, 128>(body, parts, splits, stream);
    } else {
      combine<I, 1>(body, parts, splits, stream);
    }
  }
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
