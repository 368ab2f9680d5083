// Launching a kernel that takes all of a processor's shared memory.
#pragma once

#include <atomic>

#include "cuda/lanes.cuh"

namespace fw {

constexpr int kSharedBytes = 227 * 1024;  // what a block can have

// Each kernel has one of its own: what the driver has to be told or asked, it is once a device. It
// lives in a function that is static, or the linker would share it among all modules of a process.
class Persistent {
 public:
  // Before a launch; returns how many processors there are.
  template <class Kernel>
  int ready(Kernel kernel, int device) {
    const bool kept = device >= 0 && device < kMostDevices;
    int processors = kept ? processors_[device].load(std::memory_order_relaxed) : 0;
    if (processors == 0) {
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      if (kept) processors_[device].store(processors, std::memory_order_relaxed);
    }
    return processors;
  }
  // The blocks to launch for so many tiles: at most one for each processor, where they stay.
  template <class Kernel>
  int blocks(Kernel kernel, int64_t tiles, int device) {
    const int processors = ready(kernel, device);
    return tiles < processors ? int(tiles) : processors;
  }

 private:
  std::atomic<int> processors_[kMostDevices] = {};
};

#if defined(__CUDACC__)
// Launches a kernel that calls `await_kernel_before` before it reads what the last kernel of the stream
// has made, or writes anything. Where that kernel is ours and called `let_next_begin`, the blocks of
// this one begin as soon as its own leave room (H200: 3 to 6 us for a convolution of three kernels).
template <class... Taken, class... Given>
void launch_behind(void (*kernel)(Taken...), int blocks, int threads, int shared_bytes,
                   void* stream, const Given&... given) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(blocks), launch.blockDim = dim3(threads);
  launch.dynamicSmemBytes = shared_bytes, launch.stream = static_cast<cudaStream_t>(stream);
  launch.attrs = &early, launch.numAttrs = 1;
  cudaLaunchKernelEx(&launch, kernel, Taken(given)...);
}
#endif

}  // namespace fw
