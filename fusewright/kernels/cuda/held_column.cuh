// Kernels that sweep over columns more than once. As in column.cuh, kAcross threads are placed
// along the contiguous outer axis with V columns each, and kDown rows of threads share the inner
// extent. Each thread holds kUnroll of its elements in registers from the first sweep to the last.
#pragma once

#include "cuda/groups.cuh"

namespace fw {

// The largest size in bytes of the accumulators of this sweep and of all later ones.
template <class Body, int V, int kPhase>
FW_FN constexpr int most_accumulated() {
  constexpr int kOwn =
      sizeof(decltype(std::declval<Body>().template accumulators<V>(Phase<kPhase>{})));
  if constexpr (kPhase + 1 < Body::kPhases) {
    constexpr int kLater = most_accumulated<Body, V, kPhase + 1>();
    return kOwn > kLater ? kOwn : kLater;
  } else {
    return kOwn;
  }
}

// Hands an element to the functor, which stores its results in place.
template <class Body>
struct VisitInPlace {
  const Body& body;
  template <int kPhase, int V, class Elem, class Row, class Acc, typename I>
  FW_DEVICE void visit(Elem& elem, const Row& row, Acc& acc, I inner) const {
    body.visit(Phase<kPhase>{}, elem, row, acc, inner, I(0), V);
  }
};

template <class Body, class Visitor, typename I, int V, int kAcross, int kDown, int kUnroll>
struct ColumnThread {
  const Body& body;
  const Visitor& visitor;
  unsigned char* memory;  // shared, to combine the threads of the same columns
  bool active;
  typename Body::template Row<V> row;
  typename Body::template Elem<V> elem[kUnroll];

  FW_DEVICE static I inner_index(int u) { return I(threadIdx.x / kAcross + u * kDown); }
  FW_DEVICE bool inside(int u) const { return active && inner_index(u) < body.inner_extent(); }
  // Phase -1 loads the values that are held for all sweeps. Other phases load values that only one
  // later sweep needs and that all columns share.
  template <int kPhase>
  FW_DEVICE void load() {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (inside(u)) body.load(Phase<kPhase>{}, elem[u], row, inner_index(u), I(0));
    }
  }
  // The accumulators of all threads of the same columns, combined in the order of the threads.
  template <class Acc>
  FW_DEVICE Acc joined(const Acc& mine) const {
    Acc* const all = reinterpret_cast<Acc*>(memory);
    const int across = threadIdx.x % kAcross;
    __syncthreads();  // all have read the totals of the previous sweep
    all[threadIdx.x] = mine;
    __syncthreads();
    Acc total = all[across];
    for (int down = 1; down < kDown; ++down) total.combine(all[down * kAcross + across]);
    return total;
  }
  template <int kPhase>
  FW_DEVICE void sweep() {
    auto acc = body.template accumulators<V>(Phase<kPhase>{});
    if constexpr (kPhase > 0) load<-1 - kPhase>();
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (inside(u)) visitor.template visit<kPhase, V>(elem[u], row, acc, inner_index(u));
    }
    if constexpr (!decltype(acc)::kEmpty) acc = joined(acc);
    if (active) body.finish(Phase<kPhase>{}, row, acc, V);
    if constexpr (kPhase + 1 < Body::kPhases) sweep<kPhase + 1>();
  }
};

// All sweeps of a block over its columns.
template <typename I, int V, int kAcross, int kDown, int kUnroll, class Body, class Visitor>
FW_DEVICE void hold_columns(const Body& body, const Visitor& visitor) {
  __shared__ __align__(16) unsigned char memory[kAcross * kDown * most_accumulated<Body, V, 0>()];
  const I p = (static_cast<I>(blockIdx.x) * kAcross + threadIdx.x % kAcross) * V;
  ColumnThread<Body, Visitor, I, V, kAcross, kDown, kUnroll> thread{body, visitor, memory,
                                                                    p < body.outer_extent()};
  if (thread.active) {
    I q, l;
    locate<Body::kOuterRest>(p, body.outer_lane_extent(), q, l);
    body.begin(thread.row, q, l, V);
  }
  thread.template load<-1>();
  thread.template sweep<0>();
  if (thread.active && threadIdx.x < kAcross) body.store(thread.row, V);
}

template <class Body, typename I, int V, int kAcross, int kDown, int kUnroll>
__global__ void __launch_bounds__(kAcross* kDown) held_column_kernel(const Body body) {
  let_next_begin();
  hold_columns<I, V, kAcross, kDown, kUnroll>(body, VisitInPlace<Body>{body});
}

template <typename I, int V, int kAcross, int kDown, int kUnroll, class Body>
static int held_column(const Body& body, int device, void* stream) {
  const I outer = body.outer_extent();
  if (outer == 0) return 0;
  const OnDevice here(device);
  const unsigned blocks = blocks_for<I>(outer, kAcross * V);
  held_column_kernel<Body, I, V, kAcross, kDown, kUnroll>
      <<<blocks, kAcross * kDown, 0, static_cast<cudaStream_t>(stream)>>>(body);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
