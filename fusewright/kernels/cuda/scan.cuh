// Scans along rows and down columns, in a fixed order. A group of threads takes a chunk of its row
// at a time: each thread scans its own vectors, the threads' totals are scanned by shuffles, and
// every warp scans the totals of all warps for itself. The total of the chunk is carried over to
// the next one. Columns are scanned by kAcross threads side by side, each kUnroll rows at a time;
// kDown such rows of threads scan their totals in shared memory.
#pragma once

#include "cuda/groups.cuh"
#include "scalar/scans.hpp"

namespace fw {

// V neighbouring elements: first the inputs of the scan, then its results.
template <class Rule, int V>
struct Scanned {
  using T = typename Rule::Value;
  T at[V];
  FW_FN void clear() {
#pragma unroll
    for (int v = 0; v < V; ++v) at[v] = Rule::identity();
  }
  // Scans the lanes, starting with the last one if the scan runs backward.
  template <bool kBackward>
  FW_FN void along() {
#pragma unroll
    for (int w = 1; w < V; ++w) {
      const int v = kBackward ? V - 1 - w : w;
      at[v] = Rule::join(at[kBackward ? v + 1 : v - 1], at[v]);
    }
  }
  template <bool kBackward>
  FW_FN Scanned<Rule, 1> total() const {
    return {{at[kBackward ? 0 : V - 1]}};
  }
  // Joins the total of the range before: one for all lanes, or one for each lane.
  template <int W>
  FW_FN void follow(const Scanned<Rule, W>& before) {
#pragma unroll
    for (int v = 0; v < V; ++v) at[v] = Rule::join(before.at[W == 1 ? 0 : v], at[v]);
  }
};

// The scan over kWidth neighbouring threads. Every thread of the warp must call it.
template <int kWidth, class One>
FW_DEVICE One warp_scanned(One mine) {
#pragma unroll
  for (int by = 1; by < kWidth; by *= 2) {
    const One before = shuffled_up(mine, by, kWidth);
    if (static_cast<int>(threadIdx.x % kWidth) >= by) mine.follow(before);
  }
  return mine;
}

// The value of the thread before; for the first thread the identity.
template <int kWidth, class One>
FW_DEVICE One from_before(const One& scanned) {
  One before = shuffled_up(scanned, 1, kWidth);
  if (threadIdx.x % kWidth == 0) before.clear();
  return before;
}

// Replaces the totals of kCount ranges of each thread by the totals of all ranges before them,
// where the first ranges of all threads come before the second ones. `carry` is the total before
// this call, and afterwards the total before the next one. Calls alternate between the two halves
// of the buffer that holds `memory`, so one barrier is enough.
template <int kGroup, int kCount, class One>
FW_DEVICE void scan_totals(One (&mine)[kCount], One& carry, One* memory) {
  if constexpr (kGroup <= 32) {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const One scanned = warp_scanned<kGroup>(mine[u]);
      mine[u] = from_before<kGroup>(scanned);
      mine[u].follow(carry);
      One total = from_lane(scanned, kGroup - 1, kGroup);
      total.follow(carry);
      carry = total;
    }
  } else {
    constexpr int kWarps = kGroup / 32;
    static_assert(kWarps * kCount <= 32, "one warp scans all totals");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const One scanned = warp_scanned<32>(mine[u]);
      mine[u] = from_before<32>(scanned);
      if (lane == 31) memory[u * kWarps + warp] = scanned;
    }
    __syncthreads();
    One total;
    total.clear();
    if (lane < kWarps * kCount) total = memory[lane];
    total = warp_scanned<32>(total);
    const One before = from_before<32>(total);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      mine[u].follow(from_lane(before, u * kWarps + warp, 32));
      mine[u].follow(carry);
    }
    total = from_lane(total, kWarps * kCount - 1, 32);
    total.follow(carry);
    carry = total;
  }
}

// One thread's part in the scan of a row. Indices count in the order of the scan.
template <class Body, typename I, int V, int kGroup, int kUnroll>
struct ScanThread {
  using Elem = typename Body::template Elem<V>;
  using Lanes = typename Body::template Scanned<V>;
  using One = typename Body::template Scanned<1>;
  static constexpr int kEntries = kGroup <= 32 ? 1 : kGroup / 32 * kUnroll;
  const Body& body;
  typename Body::template Row<1> row;
  I inner, end;
  Elem elem[kUnroll];
  Lanes lanes[kUnroll];
  One before[kUnroll];

  FW_DEVICE void find(I m, I& q, I& l) const {
    locate<Body::kRest>(Body::kBackward ? inner - V - m : m, body.lane_extent(), q, l);
  }
  // Loads a chunk and scans each vector. `before` then has the vectors' totals.
  FW_DEVICE void gather(I base) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const I m = base + u * (kGroup * V);
      I q, l;
      find(m, q, l);
      if (m < end) body.load(Phase<-1>{}, elem[u], row, q, l);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const I m = base + u * (kGroup * V);
      I q, l;
      find(m, q, l);
      lanes[u].clear();
      if (m < end) body.visit(Phase<0>{}, elem[u], row, lanes[u], q, l, V);
      lanes[u].along();
      before[u] = lanes[u].total();
    }
  }
  FW_DEVICE void finish(I base) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const I m = base + u * (kGroup * V);
      I q, l;
      find(m, q, l);
      lanes[u].follow(before[u]);
      if (m < end) {
        body.load(Phase<-2>{}, elem[u], row, q, l);
        body.visit(Phase<1>{}, elem[u], row, lanes[u], q, l, V);
      }
    }
  }
};

// With kTotals, only the total of each part of a row is computed. Without it, a part begins with
// the totals of the parts before it.
template <class Body, typename I, int V, int kGroup, int kRows, int kUnroll, bool kTotals,
          class Part>
__global__ void __launch_bounds__(kGroup* kRows)
    scan_kernel(const Body body, Part* parts, I per_split) {
  let_next_begin();
  using Thread = ScanThread<Body, I, V, kGroup, kUnroll>;
  __shared__ __align__(16) unsigned char bytes[2 * Thread::kEntries * sizeof(Part)];
  Part* memory = reinterpret_cast<Part*>(bytes);
  const I outer = body.outer_extent();
  const I index = static_cast<I>(blockIdx.x) * kRows + threadIdx.x / kGroup;
  const bool active = index < outer;
  const I p = active ? index : outer - 1;
  const int member = threadIdx.x % kGroup;
  Thread thread{body};
  I q, l;
  locate<Body::kOuterRest>(p, body.outer_lane_extent(), q, l);
  body.begin(thread.row, q, l, 1);
  thread.inner = body.inner_extent();
  const I first = Body::kSplit ? blockIdx.y * per_split : 0;
  I last = thread.inner;
  if (Body::kSplit && last - first > per_split) last = first + per_split;
  thread.end = active ? last : 0;
  Part carry;
  carry.clear();
  int half = 0;
  if constexpr (Body::kSplit && !kTotals) {
    Part mine[1];
    mine[0].clear();
    for (int s = member; s < static_cast<int>(blockIdx.y); s += kGroup) {
      Part next = parts[s * static_cast<int64_t>(outer) + p];
      next.follow(mine[0]);
      mine[0] = next;
    }
    scan_totals<kGroup, 1>(mine, carry, memory);
    half = 1;
  }
  for (I base = first; base < last; base += kGroup * V * kUnroll) {
    const I mine = base + static_cast<I>(member) * V;
    thread.gather(mine);
    scan_totals<kGroup, kUnroll>(thread.before, carry, memory + half * Thread::kEntries);
    half ^= 1;
    if constexpr (!kTotals) thread.finish(mine);
  }
  if constexpr (kTotals) {
    if (member == 0) parts[blockIdx.y * static_cast<int64_t>(outer) + p] = carry;
  } else if (active && member == 0 && blockIdx.y == 0) {
    body.store(thread.row, 1);
  }
}

template <typename I, int V, int kGroup, int kRows, int kUnroll, class Body>
static int scan(const Body& body, int splits, void* workspace, int device, void* stream) {
  using Part = typename Body::template Scanned<1>;
  static_assert(sizeof(Part) <= Body::kPartBytes, "the workspace was sized for less");
  const I outer = body.outer_extent();
  if (outer == 0) return 0;
  const OnDevice here(device);
  const I stride = kGroup * V * kUnroll;
  const I strides = (body.inner_extent() + stride - 1) / stride;
  const I each = strides == 0 ? 1 : (strides + splits - 1) / splits;
  const I per_split = each * stride;
  if (Body::kSplit && strides > 0) splits = static_cast<int>((strides + each - 1) / each);
  Part* parts = static_cast<Part*>(workspace);
  const dim3 grid(blocks_for<I>(outer, kRows), splits);
  if constexpr (Body::kSplit) {
    scan_kernel<Body, I, V, kGroup, kRows, kUnroll, true>
        <<<grid, kGroup * kRows, 0, static_cast<cudaStream_t>(stream)>>>(body, parts, per_split);
  }
  scan_kernel<Body, I, V, kGroup, kRows, kUnroll, false>
      <<<grid, kGroup * kRows, 0, static_cast<cudaStream_t>(stream)>>>(body, parts, per_split);
  return static_cast<int>(cudaGetLastError());
}

template <class Body, typename I, int V, int kAcross, int kDown, int kUnroll, bool kTotals,
          class Part>
__global__ void __launch_bounds__(kAcross* kDown)
    scan_column_kernel(const Body body, Part* parts, I per_split) {
  let_next_begin();
  __shared__ __align__(16) unsigned char bytes[2 * kAcross * kDown * sizeof(Part)];
  Part* memory = reinterpret_cast<Part*>(bytes);
  const I outer = body.outer_extent(), inner = body.inner_extent();
  const int across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
  const I vector = static_cast<I>(blockIdx.x) * kAcross + across, vectors = outer / V;
  const bool active = vector < vectors;
  typename Body::template Row<V> row;
  I q, l;
  locate<Body::kOuterRest>(active ? vector * V : 0, body.outer_lane_extent(), q, l);
  body.begin(row, q, l, V);
  Part carry;
  carry.clear();
  I begin = 0, end = inner;
  if constexpr (Body::kSplit) {
    begin = blockIdx.y * per_split;
    if (end - begin > per_split) end = begin + per_split;
    for (int s = 0; !kTotals && active && s < static_cast<int>(blockIdx.y); ++s) {
      Part next = parts[s * static_cast<int64_t>(vectors) + vector];
      next.follow(carry);
      carry = next;
    }
  }
  int half = 0;
  for (I base = begin; base < end; base += kDown * kUnroll, half ^= kAcross * kDown) {
    typename Body::template Elem<V> elem[kUnroll];
    Part lanes[kUnroll];
    const I first = base + static_cast<I>(down) * kUnroll;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const I r = Body::kBackward ? inner - 1 - (first + u) : first + u;
      if (active && first + u < end) body.load(Phase<-1>{}, elem[u], row, r, I(0));
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const I r = Body::kBackward ? inner - 1 - (first + u) : first + u;
      lanes[u].clear();
      if (active && first + u < end) body.visit(Phase<0>{}, elem[u], row, lanes[u], r, I(0), V);
      if (u > 0) lanes[u].follow(lanes[u - 1]);
    }
    memory[half + threadIdx.x] = lanes[kUnroll - 1];
    __syncthreads();
    Part before = carry;
#pragma unroll
    for (int d = 0; d < kDown; ++d) {
      if (d == down) before = carry;
      Part total = memory[half + d * kAcross + across];
      total.follow(carry);
      carry = total;
    }
#pragma unroll
    for (int u = 0; u < kUnroll && !kTotals; ++u) {
      const I r = Body::kBackward ? inner - 1 - (first + u) : first + u;
      lanes[u].follow(before);
      if (active && first + u < end) {
        body.load(Phase<-2>{}, elem[u], row, r, I(0));
        body.visit(Phase<1>{}, elem[u], row, lanes[u], r, I(0), V);
      }
    }
  }
  if (!active || down != 0) return;
  if constexpr (kTotals) {
    parts[blockIdx.y * static_cast<int64_t>(vectors) + vector] = carry;
  } else if (blockIdx.y == 0) {
    body.store(row, V);
  }
}

template <typename I, int V, int kAcross, int kDown, int kUnroll, class Body>
static int scan_column(const Body& body, int splits, void* workspace, int device, void* stream) {
  using Part = typename Body::template Scanned<V>;
  static_assert(sizeof(Part) <= V * Body::kPartBytes, "the workspace was sized for less");
  const I outer = body.outer_extent();
  if (outer == 0) return 0;
  const OnDevice here(device);
  const I stride = kDown * kUnroll;
  const I strides = (body.inner_extent() + stride - 1) / stride;
  const I each = strides == 0 ? 1 : (strides + splits - 1) / splits;
  const I per_split = each * stride;
  if (Body::kSplit && strides > 0) splits = static_cast<int>((strides + each - 1) / each);
  Part* parts = static_cast<Part*>(workspace);
  const dim3 grid(blocks_for<I>(outer, kAcross * V), splits);
  if constexpr (Body::kSplit) {
    scan_column_kernel<Body, I, V, kAcross, kDown, kUnroll, true>
        <<<grid, kAcross * kDown, 0, static_cast<cudaStream_t>(stream)>>>(body, parts, per_split);
  }
  scan_column_kernel<Body, I, V, kAcross, kDown, kUnroll, false>
      <<<grid, kAcross * kDown, 0, static_cast<cudaStream_t>(stream)>>>(body, parts, per_split);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
