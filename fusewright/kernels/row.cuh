// Kernels that reduce along a row: kGroup threads share one, kRows rows share a block. A cached
// row is read once and held in registers for all its sweeps; otherwise each sweep reads again.
#pragma once

#include "groups.cuh"

namespace fw {

// What a cached row loads at first, and (minus the phase) what a later sweep adds: values that
// only it needs and that all rows share, such as weights, are not worth registers until then.
constexpr int kEarly = -1;
constexpr int kLate = -1;

template <class Body, typename I, int V, int kGroup, int kUnroll>
struct RowThread {
  using Elem = typename Body::template Elem<V>;
  const Body& body;
  typename Body::template Row<1> row;
  I begin, end;  // the part of the row that the group takes
  Elem elem[kUnroll];

  template <int kPhase>
  __device__ __forceinline__ void load(I base) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const I r = base + u * (kGroup * V);
      I q, l;
      locate<Body::kRest>(r, body.lane_extent(), q, l);
      if (r < end) body.load(Phase<kPhase>{}, elem[u], row, q, l);
    }
  }

  template <int kPhase, class Acc>
  __device__ __forceinline__ void visit(I base, Acc& acc) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const I r = base + u * (kGroup * V);
      I q, l;
      locate<Body::kRest>(r, body.lane_extent(), q, l);
      if (r < end) body.visit(Phase<kPhase>{}, elem[u], row, acc, q, l, V);
    }
  }

  // One sweep; what it accumulated, over the whole group.
  template <int kPhase, bool kCached>
  __device__ __forceinline__ auto sweep() {
    auto acc = body.template accumulators<V>(Phase<kPhase>{});
    const I first = begin + static_cast<I>(threadIdx.x % kGroup) * V;
    if constexpr (kCached) {
      if constexpr (kPhase > 0) load<kLate - kPhase>(first);
      visit<kPhase>(first, acc);
    } else {
      for (I base = first; base < end; base += kGroup * V * kUnroll) {
        load<kPhase>(base);
        visit<kPhase>(base, acc);
      }
    }
    if constexpr (decltype(acc)::kEmpty) {
      return acc.lane(0);
    } else {
      return group_total<kGroup>(folded(acc, V));
    }
  }

  template <int kPhase, bool kCached>
  __device__ __forceinline__ void sweeps() {
    const auto total = sweep<kPhase, kCached>();
    body.finish(Phase<kPhase>{}, row, total, 1);
    if constexpr (kPhase + 1 < Body::kPhases) sweeps<kPhase + 1, kCached>();
  }
};

template <class Body, typename I, int V, int kGroup, int kRows, int kUnroll, bool kCached,
          class Part>
__global__ void __launch_bounds__(kGroup* kRows)
    row_kernel(const Body body, Part* parts, I per_split) {
  const I outer = body.outer_extent();
  const I index = static_cast<I>(blockIdx.x) * kRows + threadIdx.x / kGroup;
  const bool active = index < outer;
  const I p = active ? index : outer - 1;  // idle groups still take part in shuffles
  const bool leads = active && threadIdx.x % kGroup == 0;
  RowThread<Body, I, V, kGroup, kUnroll> thread{body};
  I q, l;
  locate<Body::kOuterRest>(p, body.outer_lane_extent(), q, l);
  body.begin(thread.row, q, l, 1);
  thread.begin = 0;
  thread.end = active ? body.inner_extent() : 0;
  if constexpr (Body::kSplit) {
    thread.begin = blockIdx.y * per_split;
    if (thread.begin + per_split < thread.end) thread.end = thread.begin + per_split;
    const auto total = thread.template sweep<0, false>();
    if (leads) parts[blockIdx.y * static_cast<int64_t>(outer) + p] = total;
  } else {
    if constexpr (kCached) {
      thread.template load<kEarly>(static_cast<I>(threadIdx.x % kGroup) * V);
    }
    thread.template sweeps<0, kCached>();
    if (leads) body.store(thread.row, 1);
  }
}

template <typename I, int V, int kGroup, int kRows, int kUnroll, bool kCached, class Body>
int row(const Body& body, int splits, void* workspace, int device, void* stream) {
  using Part = decltype(body.template accumulators<1>(Phase<0>{}));
  static_assert(sizeof(Part) <= Body::kPartBytes, "the workspace was sized for less");
  const I outer = body.outer_extent();
  if (outer == 0) return 0;
  const OnDevice here(device);
  const I stride = kGroup * V * kUnroll;
  const I strides = (body.inner_extent() + stride - 1) / stride;
  const I per_split = (strides + splits - 1) / splits * stride;
  Part* parts = static_cast<Part*>(workspace);
  const dim3 grid(blocks_for<I>(outer, kRows), splits);
  row_kernel<Body, I, V, kGroup, kRows, kUnroll, kCached>
      <<<grid, kGroup * kRows, 0, static_cast<cudaStream_t>(stream)>>>(body, parts, per_split);
  if constexpr (Body::kSplit) combine<I, 128>(body, parts, splits, stream);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
