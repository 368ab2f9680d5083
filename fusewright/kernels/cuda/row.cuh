// Kernels that reduce along a row. kGroup threads share a row, and kRows rows share a block. A
// cached row is read once and held in registers for all sweeps; otherwise each sweep reads it
// again. If kBeyond > 0, a row is cached in part: each thread holds its first kUnroll vectors, and
// each sweep reads the others again, kBeyond at once. Then a second block fits on the
// multiprocessor, and its loads continue while the threads of the first wait for each other. If
// kShared > 0, a row is held in shared memory as it was loaded, for kShared blocks per
// multiprocessor: it takes no registers on its way there, and each sweep computes from it again.
#pragma once

#include "cuda/groups.cuh"

namespace fw {

// The phases of loads. A cached row first loads kEarly. A later sweep loads kLate minus its phase:
// values that only this sweep needs and that all rows share, such as weights. They would waste
// registers before.
constexpr int kEarly = -1;
constexpr int kLate = -1;
constexpr int kFew = 4;  // vectors of shared memory that are summed before a sum takes them

template <class Body, typename I, int V, int kGroup, int kUnroll, int kBeyond, int kShared>
struct RowThread {
  using Elem = typename Body::template Elem<V>;
  const Body& body;
  typename Body::template Row<1> row;
  I begin, end;  // the part of the row that the group takes
  Elem elem[kShared > 0 ? 1 : kUnroll];

  template <int kPhase>
  FW_DEVICE void load(Elem& one, I r) {
    I q, l;
    locate<Body::kRest>(r, body.lane_extent(), q, l);
    if (r < end) body.load(Phase<kPhase>{}, one, row, q, l);
  }
  template <int kPhase, class Acc>
  FW_DEVICE void visit(Elem& one, I r, Acc& acc) {
    I q, l;
    locate<Body::kRest>(r, body.lane_extent(), q, l);
    if (r < end) body.visit(Phase<kPhase>{}, one, row, acc, q, l, V);
  }

  FW_DEVICE I first() const { return begin + static_cast<I>(threadIdx.x % kGroup) * V; }
  template <int kPhase>
  FW_DEVICE void load_held() {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) load<kPhase>(elem[u], first() + u * (kGroup * V));
  }
  template <int kPhase, class Acc>
  FW_DEVICE void visit_held(Acc& acc) {
    constexpr bool kEach = kBeyond > 0;  // registers suffice for one at a time
    if constexpr (kPhase > 0 && !kEach) load_held<kLate - kPhase>();
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const I r = first() + u * (kGroup * V);
      if constexpr (kPhase > 0 && kEach) load<kLate - kPhase>(elem[u], r);
      visit<kPhase>(elem[u], r, acc);
    }
  }

  // Each thread reads only what it copied to shared memory itself, so no barrier is needed.
  FW_DEVICE static auto& shared(int u) {
    extern __shared__ __align__(1024) char memory[];
    return reinterpret_cast<typename Body::template Held<V>*>(memory)[u * kGroup + threadIdx.x];
  }
  FW_DEVICE void fetch_shared() {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const I r = first() + u * (kGroup * V);
      I q, l;
      locate<Body::kRest>(r, body.lane_extent(), q, l);
      if (r < end) body.fetch(shared(u), row, q, l);
      commit_copies();
    }
  }
  template <int kPhase, int kAt, int kEnd, class Acc>
  FW_DEVICE void visit_shared(Acc& acc) {
    if constexpr (kPhase == 0) await_copies<kUnroll - 1 - kAt>();
    const I r = first() + kAt * (kGroup * V);
    Elem one;
    body.take(one, shared(kAt));
    if constexpr (kPhase > 0) load<kLate - kPhase>(one, r);
    visit<kPhase>(one, r, acc);
    if constexpr (kAt + 1 < kEnd) visit_shared<kPhase, kAt + 1, kEnd>(acc);
  }
  template <int kPhase, int kAt, class Acc>
  FW_DEVICE void visit_all_shared(Acc& acc) {
    constexpr int kEnd = kAt + kFew < kUnroll ? kAt + kFew : kUnroll;
    auto few = acc.few();
    visit_shared<kPhase, kAt, kEnd>(few);
    acc.take(few);
    if constexpr (kEnd < kUnroll) visit_all_shared<kPhase, kEnd>(acc);
  }

  template <int kPhase, int kFlight, class Acc>
  FW_DEVICE void read_again(I from, Acc& acc) {
    for (I base = from; base < end; base += kGroup * V * kFlight) {
      Elem again[kFlight];
      auto few = acc.few();
#pragma unroll
      for (int u = 0; u < kFlight; ++u) load<kPhase>(again[u], base + u * (kGroup * V));
#pragma unroll
      for (int u = 0; u < kFlight; ++u) visit<kPhase>(again[u], base + u * (kGroup * V), few);
      acc.take(few);
    }
  }

  // One sweep. Returns what the whole group has accumulated.
  template <int kPhase, bool kCached>
  FW_DEVICE auto sweep() {
    auto acc = body.template accumulators<V>(Phase<kPhase>{});
    if constexpr (kShared > 0) {
      visit_all_shared<kPhase, 0>(acc);
    } else if constexpr (kCached) {
      visit_held<kPhase>(acc);
      if constexpr (kBeyond > 0) read_again<kPhase, kBeyond>(first() + kGroup * V * kUnroll, acc);
    } else {
      read_again<kPhase, kUnroll>(first(), acc);
    }
    if constexpr (decltype(acc)::kEmpty) {
      return acc.folded(V);
    } else {
      return group_total<kGroup, kPhase>(acc.folded(V));
    }
  }

  template <int kPhase, bool kCached>
  FW_DEVICE void sweeps() {
    const auto total = sweep<kPhase, kCached>();
    body.finish(Phase<kPhase>{}, row, total, 1);
    if constexpr (kPhase + 1 < Body::kPhases) sweeps<kPhase + 1, kCached>();
  }
};

template <class Body, typename I, int V, int kGroup, int kRows, int kUnroll, bool kCached,
          int kBeyond, int kShared, class Part>
__global__ void __launch_bounds__(kGroup* kRows, kBeyond > 0 ? 2 : kShared)
    row_kernel(const Body body, Part* parts, I per_split) {
  let_next_begin();
  const I outer = body.outer_extent();
  const I index = static_cast<I>(blockIdx.x) * kRows + threadIdx.x / kGroup;
  // Only groups smaller than a warp have idle threads that must stay, for shuffles. For the others
  // the loop bounds do not depend on `active`, and if a row fills the group, loops need no tests.
  const bool active = kGroup >= 32 || index < outer;
  if (kGroup == 32 && index >= outer) return;
  const I p = active ? index : outer - 1;
  const bool leads = active && threadIdx.x % kGroup == 0;
  RowThread<Body, I, V, kGroup, kUnroll, kBeyond, kShared> thread{body};
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
    if constexpr (kShared > 0) {
      thread.fetch_shared();
    } else if constexpr (kCached) {
      thread.template load_held<kEarly>();
    }
    thread.template sweeps<0, kCached>();
    if (leads) body.store(thread.row, 1);
  }
}

template <typename I, int V, int kGroup, int kRows, int kUnroll, bool kCached, int kBeyond,
          int kShared, class Body>
static int row(const Body& body, int splits, void* workspace, int device, void* stream) {
  using Part = decltype(body.template accumulators<1>(Phase<0>{}));
  static_assert(sizeof(Part) <= Body::kPartBytes, "the workspace was sized for less");
  const I outer = body.outer_extent();
  if (outer == 0) return 0;
  const OnDevice here(device);
  const unsigned blocks = blocks_for<I>(outer, kRows);
  const auto kernel =
      row_kernel<Body, I, V, kGroup, kRows, kUnroll, kCached, kBeyond, kShared, Part>;
  int shared_bytes = 0;
  if constexpr (kShared > 0) {
    static Roomy roomy;
    shared_bytes = kGroup * kUnroll * sizeof(typename Body::template Held<V>);
    if (const int code = roomy.ready(kernel, shared_bytes, device)) return code;
  }
  if constexpr (Body::kSplit) {
    static Waves waves;
    splits = waves.whole(kernel, kGroup * kRows, blocks, splits, device);
  }
  const I stride = kGroup * V * kUnroll;
  const I strides = (body.inner_extent() + stride - 1) / stride;
  const I per_split = (strides + splits - 1) / splits * stride;
  Part* parts = static_cast<Part*>(workspace);
  const dim3 grid(blocks, splits);
  kernel<<<grid, kGroup * kRows, shared_bytes, static_cast<cudaStream_t>(stream)>>>(body, parts,
                                                                                    per_split);
  if constexpr (Body::kSplit) combine<I, 128>(body, parts, splits, stream);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
