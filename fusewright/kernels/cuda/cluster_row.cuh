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

template <class Body, typename I, int V, int kGroup, int kUnroll, int kBlocks, int kCluster>
struct ClusterThread : RowThread<Body, I, V, kGroup, kUnroll, 0, kBlocks> {
  static constexpr int kRowBytes = kGroup * kUnroll * sizeof(typename Body::template Held<V>);
  static constexpr int kSlotsBytes = Body::kPhases * kCluster * kClusterPartBytes;
  static constexpr int kBytes = kRowBytes + 2 * kSlotsBytes;
  using Row = typename Body::template Row<1>;
  bool first_row = true, odd_row = false;  // of those that this cluster takes

  FW_DEVICE void begin_row(Row& row, I p) const {
    I q, l;
    locate<Body::kOuterRest>(p, this->body.outer_lane_extent(), q, l);
    this->body.begin(row, q, l, 1);
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
  FW_DEVICE void visit_and_fetch(Acc& acc, const Row& next, bool more) {
    this->template visit_shared<kPhase, kAt, kAt + 1>(acc);
    const I r = this->first() + kAt * (kGroup * V);
    I q, l;
    locate<Body::kRest>(r, this->body.lane_extent(), q, l);
    if (more && r < this->end) this->body.fetch(this->shared(kAt), next, q, l);
    commit_copies();
    if constexpr (kAt + 1 < kUnroll) visit_and_fetch<kPhase, kAt + 1>(acc, next, more);
  }
  template <int kPhase>
  FW_DEVICE auto sweep_in_block(Row& next, I after) {
    if constexpr (kPhase + 1 < Body::kPhases) {
      return this->template sweep<kPhase, true>();
    } else {
      auto acc = this->body.template accumulators<V>(Phase<kPhase>{});
      const bool more = after < this->body.outer_extent();
      if (more) begin_row(next, after);
      visit_and_fetch<kPhase, 0>(acc, next, more);
      if constexpr (decltype(acc)::kEmpty) {
        return acc.folded(V);
      } else {
        return group_total<kGroup, kPhase>(acc.folded(V));
      }
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

template <class Body, typename I, int V, int kGroup, int kUnroll, int kBlocks, int kCluster>
__global__ void __launch_bounds__(kGroup, kBlocks)
    cluster_row_kernel(const Body body, unsigned clusters) {
  let_next_begin();
  arrive_in_cluster();
  const int rank = rank_in_cluster();
  const I outer = body.outer_extent(), extent = body.inner_extent();
  ClusterThread<Body, I, V, kGroup, kUnroll, kBlocks, kCluster> thread{{body}};
  thread.begin = static_cast<I>(rank) * (kGroup * V * kUnroll);
  thread.end = thread.begin + kGroup * V * kUnroll;
  if (thread.end > extent) thread.end = extent;
  I p = static_cast<I>(blockIdx.x) / kCluster;
  thread.begin_row(thread.row, p);
  thread.fetch_shared();
  for (bool done = false; !done; p += clusters) {
    typename Body::template Row<1> next;
    thread.template cluster_sweeps<0>(next, p + static_cast<I>(clusters));
    if (rank == 0 && threadIdx.x == 0) body.store(thread.row, 1);
    done = p + static_cast<I>(clusters) >= outer;
    if (!done) thread.row = next;
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
template <typename I, int V, int kGroup, int kUnroll, int kBlocks, int kCluster, class Body>
static int cluster_row(const Body& body, bool stays, void* workspace, int device, void* stream) {
  const I outer = body.outer_extent();
  if (outer == 0) return 0;
  const OnDevice here(device);
  using Thread = ClusterThread<Body, I, V, kGroup, kUnroll, kBlocks, kCluster>;
  const auto kernel = cluster_row_kernel<Body, I, V, kGroup, kUnroll, kBlocks, kCluster>;
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
    return row<I, V, kGroup, 1, 4, false, 0, 0>(body, 1, workspace, device, stream);
  }
  if (stays && at_once < wanted) wanted = at_once;
  launch.gridDim = dim3(wanted * kCluster);
  cudaLaunchKernelEx(&launch, kernel, body, wanted);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
