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
  static constexpr int kBytes = kRowBytes + Body::kPhases * kCluster * kClusterPartBytes;

  // The parts of all blocks, joined in their order. Each sweep has slots of its own, so nobody
  // writes where another one still reads, and no block leaves before its last slot is written.
  template <int kPhase, class Acc>
  FW_DEVICE Acc joined(const Acc& mine) const {
    extern __shared__ __align__(1024) char memory[];
    static_assert(sizeof(Acc) <= kClusterPartBytes, "a slot is too small");
    char* const slots = memory + kRowBytes + kPhase * kCluster * kClusterPartBytes;
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

  template <int kPhase>
  FW_DEVICE void cluster_sweeps() {
    auto total = this->template sweep<kPhase, true>();
    if constexpr (kPhase == 0) await_cluster();  // all blocks have begun
    if constexpr (!decltype(total)::kEmpty) total = joined<kPhase>(total);
    this->body.finish(Phase<kPhase>{}, this->row, total, 1);
    if constexpr (kPhase + 1 < Body::kPhases) cluster_sweeps<kPhase + 1>();
  }
};

template <class Body, typename I, int V, int kGroup, int kUnroll, int kBlocks, int kCluster>
__global__ void __launch_bounds__(kGroup, kBlocks) cluster_row_kernel(const Body body) {
  let_next_begin();
  arrive_in_cluster();
  const int rank = rank_in_cluster();
  const I p = static_cast<I>(blockIdx.x) / kCluster, extent = body.inner_extent();
  ClusterThread<Body, I, V, kGroup, kUnroll, kBlocks, kCluster> thread{{body}};
  I q, l;
  locate<Body::kOuterRest>(p, body.outer_lane_extent(), q, l);
  body.begin(thread.row, q, l, 1);
  thread.begin = static_cast<I>(rank) * (kGroup * V * kUnroll);
  thread.end = thread.begin + kGroup * V * kUnroll;
  if (thread.end > extent) thread.end = extent;
  thread.fetch_shared();
  thread.template cluster_sweeps<0>();
  if (rank == 0 && threadIdx.x == 0) body.store(thread.row, 1);
}

// Whether a device has clusters of this size with this much memory. The driver is asked once.
class Clusters {
 public:
  template <class Kernel>
  bool exist(Kernel kernel, const cudaLaunchConfig_t& launch, int device) {
    const bool kept = device >= 0 && device < kMostDevices;
    int found = kept ? found_[device].load(std::memory_order_relaxed) : 0;
    if (found == 0) {
      int at_once = 0;
      // More than eight blocks are not on every GPU.
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      const bool asked = cudaOccupancyMaxActiveClusters(&at_once, kernel, &launch) == cudaSuccess;
      if (!asked) cudaGetLastError();  // a GPU without clusters: nothing has failed
      found = asked && at_once > 0 ? 1 : -1;
      if (kept) found_[device].store(found, std::memory_order_relaxed);
    }
    return found > 0;
  }

 private:
  std::atomic<int> found_[kMostDevices] = {};
};

template <typename I, int V, int kGroup, int kUnroll, int kBlocks, int kCluster, class Body>
static int cluster_row(const Body& body, void* workspace, int device, void* stream) {
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
  launch.gridDim = dim3(static_cast<unsigned>(outer) * kCluster), launch.blockDim = dim3(kGroup);
  launch.dynamicSmemBytes = Thread::kBytes, launch.stream = static_cast<cudaStream_t>(stream);
  launch.attrs = &shape, launch.numAttrs = 1;
  if (!ready || !clusters.exist(kernel, launch, device)) {
    cudaGetLastError();
    return row<I, V, kGroup, 1, 4, false, 0, 0>(body, 1, workspace, device, stream);
  }
  cudaLaunchKernelEx(&launch, kernel, body);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
