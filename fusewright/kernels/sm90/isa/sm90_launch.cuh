// Launches kernels that take all of an SM's shared memory.
#pragma once

#include <atomic>

#include "cuda/lanes.cuh"

namespace fw {

constexpr int kSharedBytes = 227 * 1024;  // the most that a thread block can have

// Each kernel has one of its own: it tells or asks the driver what is needed once for each device.
// It must be a static variable of a static function, or the linker would share it among all modules
// of a process.
class Persistent {
 public:
  // Called before a launch; returns the number of SMs.
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
  // How many thread blocks to launch for so many tiles: at most one for each SM, where it stays.
  template <class Kernel>
  int blocks(Kernel kernel, int64_t tiles, int device) {
    const int processors = ready(kernel, device);
    return tiles < processors ? int(tiles) : processors;
  }

 private:
  std::atomic<int> processors_[kMostDevices] = {};
};

// Launches a kernel that calls `await_kernel_before` before it reads what the last kernel of the
// stream has written, or writes anything itself. If that kernel is ours and called
// `let_next_begin`, the thread blocks of this one begin as soon as there is room beside it (H200:
// this saves 3 to 6 us in a convolution of three kernels).
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

}  // namespace fw
