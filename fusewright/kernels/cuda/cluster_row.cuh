// Kernels that reduce along long rows and read them once: kCluster blocks share a row. Each of them
// holds its part in its own shared memory, and tells the others its part of each reduction. kBlocks
// blocks share a multiprocessor. A GPU without thread block clusters reads the row in each sweep.
#pragma once

#include "cuda/row.cuh"

namespace fw {

// All threads of a cluster arrive, and those that wait go on when all have arrived. What a thread
// wrote to the shared memory of any block before it arrived is visible after the wait.
FW_DEVICE void arrive_in_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#elif !defined(__CUDACC__)
  emulation::arrive_in_cluster();
#endif
}
FW_DEVICE void await_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#elif !defined(__CUDACC__)
  emulation::await_cluster();
#endif
}
FW_DEVICE int rank_in_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#elif !defined(__CUDACC__)
  return emulation::rank_in_cluster();
#else
  return 0;
#endif
}
// Writes a word at the same place of another block's shared memory.
FW_DEVICE void store_in_block(uint32_t* place, int rank, uint32_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t mine = static_cast<uint32_t>(__cvta_generic_to_shared(place));
  asm volatile(
      "{ .reg .b32 theirs; mapa.shared::cluster.u32 theirs, %0, %1; "
      "st.shared::cluster.b32 [theirs], %2; }"
      :
      : "r"(mine), "r"(rank), "r"(word)
      : "memory");
#elif !defined(__CUDACC__)
  *emulation::in_block(place, rank) = word;
#endif
}

constexpr int kClusterPartBytes = 32;  // for one block's accumulators of one sweep

template <class Body, typename I, int V, int kGroup, int kUnroll, int kBlocks, int kCluster,
          bool kFlat, bool kStays>
struct ClusterThread : RowThread<Body, I, V, kGroup, kUnroll, 0, kBlocks> {
  static constexpr int kRowBytes = kGroup * kUnroll * sizeof(typename Body::template Held<V>);
  static constexpr int kSlotsBytes = Body::kPhases * kCluster * kClusterPartBytes;
  static constexpr int kBytes = kRowBytes + 2 * kSlotsBytes;
  using Row = typename Body::template Row<1>;
  using Edge = typename Body::template Elem<1>;
  bool first_row = true, odd_row = false;  // of those that this cluster takes
  // If rows begin at any address (kFlat), vectors begin where a cache line does. The first threads of
  // a cluster also take an element each of those before and behind the vectors.
  static constexpr int kLine = line_of<V, kGroup>;
  Edge edge;
  I edge_at = -1;

  FW_DEVICE void begin_row(Row& row, I p) const {
    I q, l;
    locate<Body::kOuterRest>(p, this->body.outer_lane_extent(), q, l);
    this->body.begin(row, q, l, 1);
  }
  // This block's part of a row, without elements beside the vectors.
  FW_DEVICE void find_part(I p, I& begin, I& end) const {
    const I extent = this->body.inner_extent(), head = kFlat ? head_of(p) : I(0);
    const I last = kFlat ? head + (extent - head) / V * V : extent;
    begin = head + static_cast<I>(rank_in_cluster()) * (kGroup * V * kUnroll);
    end = begin + kGroup * V * kUnroll;
    if (end > last) end = last;
  }
  FW_DEVICE I head_of(I p) const {
    const int64_t before = static_cast<int64_t>(p) * this->body.inner_extent();
    const int aligned = static_cast<int>(-before) & (kLine - 1);
    return aligned < this->body.inner_extent() ? I(aligned) : this->body.inner_extent();
  }
  FW_DEVICE void load_edge(const Row& row, I p, Edge& one, I& at) const {
    const I extent = this->body.inner_extent(), head = head_of(p);
    const int t = static_cast<int>(threadIdx.x);
    const bool before = t < kLine;
    at = before ? I(t) : head + (extent - head) / V * V + I(t - kLine);
    const bool mine = rank_in_cluster() == 0 && t < kLine + V && at < (before ? head : extent);
    if (!mine) at = -1;
    if (mine) this->body.load(Phase<kEarly>{}, one, row, I(0), at);
  }
  template <int kPhase, class Acc>
  FW_DEVICE void visit_edge(Acc& acc) {
    if (edge_at < 0) return;
    if constexpr (kPhase > 0) {
      this->body.load(Phase<kLate - kPhase>{}, edge, this->row, I(0), edge_at);
    }
    this->body.visit(Phase<kPhase>{}, edge, this->row, acc, I(0), edge_at, 1);
  }

  // The parts of all blocks, joined in their order. Each sweep has slots of its own, and so have two
  // rows in turn: nobody writes where another one still reads, and no block leaves before its last
  // slot is written.
  template <int kPhase, class Acc>
  FW_DEVICE Acc joined(const Acc& mine) const {
    extern __shared__ __align__(1024) char memory[];
    static_assert(sizeof(Acc) <= kClusterPartBytes, "a slot is too small");
    char* const slots =
        memory + kRowBytes + odd_row * kSlotsBytes + kPhase * kCluster * kClusterPartBytes;
    if (threadIdx.x < kCluster) {
      char* const slot = slots + rank_in_cluster() * kClusterPartBytes;
      constexpr int kWords = (sizeof(Acc) + 3) / 4;
      uint32_t words[kWords] = {};
      memcpy(words, &mine, sizeof(Acc));
      for (int w = 0; w < kWords; ++w) {
        store_in_block(reinterpret_cast<uint32_t*>(slot) + w, threadIdx.x, words[w]);
      }
    }
    __syncwarp();
    arrive_in_cluster();
    await_cluster();
    Acc total;
    memcpy(&total, slots, sizeof(Acc));
#pragma unroll
    for (int rank = 1; rank < kCluster; ++rank) {
      Acc part;
      memcpy(&part, slots + rank * kClusterPartBytes, sizeof(Acc));
      total.combine(part);
    }
    return total;
  }

  // The last sweep. As soon as a thread has used a vector, it copies that of the next row to the
  // same place.
  template <int kPhase, int kAt, class Acc>
  FW_DEVICE void visit_and_fetch(Acc& acc, const Row& next, I begin, I end) {
    this->template visit_shared<kPhase, kAt, kAt + 1>(acc);
    const I r = begin + static_cast<I>(threadIdx.x) * V + kAt * (kGroup * V);
    I q, l;
    locate<Body::kRest>(r, this->body.lane_extent(), q, l);
    if (r < end) this->body.fetch(this->shared(kAt), next, q, l);
    commit_copies();
    if constexpr (kAt + 1 < kUnroll) visit_and_fetch<kPhase, kAt + 1>(acc, next, begin, end);
  }
  template <int kPhase>
  FW_DEVICE auto sweep_in_block(Row& next, I after) {
    auto acc = this->body.template accumulators<V>(Phase<kPhase>{});
    if constexpr (!kStays || kPhase + 1 < Body::kPhases) {
      this->template visit_all_shared<kPhase, 0>(acc);
      if constexpr (kFlat) visit_edge<kPhase>(acc);
    } else {
      I begin = 0, end = 0, at = -1;
      Edge one;
      if (after < this->body.outer_extent()) {
        begin_row(next, after);
        find_part(after, begin, end);
        if constexpr (kFlat) load_edge(next, after, one, at);
      }
      visit_and_fetch<kPhase, 0>(acc, next, begin, end);
      if constexpr (kFlat) {
        visit_edge<kPhase>(acc);
        edge = one, edge_at = at;
      }
      this->begin = begin, this->end = end;
    }
    if constexpr (decltype(acc)::kEmpty) {
      return acc.folded(V);
    } else {
      return group_total<kGroup, kPhase>(acc.folded(V));
    }
  }
  template <int kPhase>
  FW_DEVICE void cluster_sweeps(Row& next, I after) {
    auto total = sweep_in_block<kPhase>(next, after);
    if (kPhase == 0 && first_row) await_cluster();  // all blocks have begun
    if constexpr (!decltype(total)::kEmpty) total = joined<kPhase>(total);
    this->body.finish(Phase<kPhase>{}, this->row, total, 1);
    if constexpr (kPhase + 1 < Body::kPhases) cluster_sweeps<kPhase + 1>(next, after);
  }
};

template <class Body, typename I, int V, int kGroup, int kUnroll, int kBlocks, int kCluster,
          bool kFlat, bool kStays>
__global__ void __launch_bounds__(kGroup, kBlocks)
    cluster_row_kernel(const Body body, unsigned clusters) {
  let_next_begin();
  arrive_in_cluster();
  const I outer = body.outer_extent(), step = static_cast<I>(clusters);
  ClusterThread<Body, I, V, kGroup, kUnroll, kBlocks, kCluster, kFlat, kStays> thread{{body}};
  I p = static_cast<I>(blockIdx.x) / kCluster;
  thread.begin_row(thread.row, p);
  thread.find_part(p, thread.begin, thread.end);
  thread.fetch_shared();
  if constexpr (kFlat) thread.load_edge(thread.row, p, thread.edge, thread.edge_at);
  for (bool more = true; more; p += step) {
    typename Body::template Row<1> next;
    thread.template cluster_sweeps<0>(next, p + step);
    if (rank_in_cluster() == 0 && threadIdx.x == 0) body.store(thread.row, 1);
    if constexpr (!kStays) return;
    more = p + step < outer;
    if (more) thread.row = next;
    thread.first_row = false, thread.odd_row = !thread.odd_row;
  }
}

// How many clusters of a kernel run at once; 0 if the device has none of this size with this much
// memory. The driver is asked once.
class Clusters {
 public:
  template <class Kernel>
  int at_once(Kernel kernel, const cudaLaunchConfig_t& launch, int device) {
    const bool kept = device >= 0 && device < kMostDevices;
    int found = kept ? found_[device].load(std::memory_order_relaxed) : -1;
    if (found < 0) {
      found = 0;
      // More than eight blocks are not on every GPU.
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (cudaOccupancyMaxActiveClusters(&found, kernel, &launch) != cudaSuccess) {
        found = 0;
        cudaGetLastError();  // a GPU without clusters: nothing has failed
      }
      if (kept) found_[device].store(found, std::memory_order_relaxed);
    }
    return found;
  }
  Clusters() {
    for (auto& each : found_) each.store(-1, std::memory_order_relaxed);
  }

 private:
  std::atomic<int> found_[kMostDevices];
};

// If the clusters are to stay, each of them takes several rows, and copies one while it computes the
// last sweep of the one before.
template <typename I, int V, int kGroup, int kUnroll, int kBlocks, int kCluster, bool kFlat,
          bool kStays, class Body>
static int cluster_row(const Body& body, void* workspace, int device, void* stream) {
  const I outer = body.outer_extent();
  if (outer == 0) return 0;
  const OnDevice here(device);
  using Thread = ClusterThread<Body, I, V, kGroup, kUnroll, kBlocks, kCluster, kFlat, kStays>;
  const auto kernel =
      cluster_row_kernel<Body, I, V, kGroup, kUnroll, kBlocks, kCluster, kFlat, kStays>;
  static Roomy roomy;
  static Clusters clusters;
  const bool ready = roomy.ready(kernel, Thread::kBytes, device) == 0;
  cudaLaunchAttribute shape{};
  shape.id = cudaLaunchAttributeClusterDimension;
  shape.val.clusterDim.x = kCluster, shape.val.clusterDim.y = 1, shape.val.clusterDim.z = 1;
  cudaLaunchConfig_t launch{};
  unsigned wanted = static_cast<unsigned>(outer);
  launch.gridDim = dim3(wanted * kCluster), launch.blockDim = dim3(kGroup);
  launch.dynamicSmemBytes = Thread::kBytes, launch.stream = static_cast<cudaStream_t>(stream);
  launch.attrs = &shape, launch.numAttrs = 1;
  const unsigned at_once = ready ? clusters.at_once(kernel, launch, device) : 0;
  if (at_once == 0) {
    cudaGetLastError();
    return row<I, kFlat ? 1 : V, kGroup, 1, kFlat ? 8 : 4, false, 0, 0>(body, 1, workspace, device,
                                                                        stream);
  }
  if (kStays && at_once < wanted) wanted = at_once;
  launch.gridDim = dim3(wanted * kCluster);
  cudaLaunchKernelEx(&launch, kernel, body, wanted);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
