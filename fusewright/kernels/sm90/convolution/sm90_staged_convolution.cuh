// The convolution kernel for staged input (staged_input.cuh). No warp converts, so the multiplying
// warpgroups have registers for a tile of 64 channels and kPositions positions, and work in
// ping-pong. A tile of one stage has all output channels, others have 64 of them.
#pragma once

#include "sm90/convolution/sm90_implicit_gemm.cuh"
#include "convolution/staged_input.cuh"

namespace fw {

// As ConvKind. (H200, 64 input and 128 output channels: 0.66 ms with two warpgroups of 256
// positions, 0.75 with two of 128, 0.68 with three and 0.69 with four.)
template <int kPositions_, int kBeside_ = 0>
struct StagedConvKind {
  static constexpr int kTerms = 1, kParts = 1, kBeside = kBeside_;
  static constexpr bool kPingPong = true, kStaged = true, kHasPart = true;
  static constexpr int kGroups = 2, kConvertWarps = 0;
  static constexpr int kFirstLoad = 128 * kGroups;
  static constexpr int kThreads = kFirstLoad + 128;
  static constexpr int kRegisters = 65536 / kThreads / 8 * 8, kLoad = 40;
  static constexpr int kMultiply = (kThreads * kRegisters - 128 * kLoad) / (128 * kGroups) / 8 * 8;
  static constexpr int kTilePositions = kPositions_, kPositions = kPositions_;
  static constexpr int kBoxChannels = 64, kBoxBytes = kBoxChannels * 128;
  static constexpr int kBoxBits = 3, kBoxes = 1 << kBoxBits;
};

template <class Kind, int kLanes, class Epilogue, class Input>
__global__ void __launch_bounds__(Kind::kThreads, 1)
    staged_convolution_kernel(const Epilogue end, const __grid_constant__ Input x,
                              const __grid_constant__ SplitFilter w,
                              const __grid_constant__ ConvTiling sizes, const float* scales,
                              const __grid_constant__ CUtensorMap map_w,
                              const __grid_constant__ CUtensorMap map_staged) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<ConvShared<Kind>*>(memory);
  start_barriers(shared, memory, sizes);
  await_kernel_before();
  if (threadIdx.x < Kind::kFirstLoad) {
    take_registers<Kind::kMultiply>();
    multiply_stages<kLanes>(shared, end, x, w, sizes, scales);
  } else {
    leave_registers<Kind::kLoad>();
    if (threadIdx.x == Kind::kFirstLoad) load_weights(shared, &map_w, &map_w, sizes);
    if (threadIdx.x == Kind::kFirstLoad + 32) load_staged(shared, &map_staged, sizes);
  }
#else
  __trap();  // compiled for another architecture than sm_90a
#endif
}

// What cost/conv_staged.py counts on for two stages.
constexpr int kStagedBytes = 137 * 1024;

// Divides `room` rows of shared memory into stages, which are copied in equal boxes of at most 256
// rows.
inline bool divide_staged(ConvTiling& sizes, int room) {
  const int rows = sizes.shape.stage_rows, boxes = (rows + 255) / 256;
  sizes.staged_box = ((rows + boxes - 1) / boxes + 7) / 8 * 8;
  sizes.ring_rows = boxes * sizes.staged_box;
  sizes.stages = sizes.rings = min(kMostStages, room / sizes.ring_rows);
  return sizes.stages > 0;
}

template <class Input>
void lay_out_all(const Input& x, const ConvTiling& sizes, const StagedInput& staged, void* stream) {
  const StagedSizes of(sizes);
  Input::by_layout(sizes.by_channels, [&](auto by_channels) {
    constexpr int kThreads = 32 * StagedSizes::kWarps;
    const int chunks = sizes.shape.images * sizes.shape.groups * of.planes * of.chunks;
    const auto kernel = lay_out_staged<decltype(by_channels)::value, Input>;
    launch_behind(kernel, chunks, kThreads, 0, stream, x, sizes, of, staged);
  });
}

// As tensor_core_convolution; it writes `staged` first.
template <class Kind, int kLanes, bool kAlways = false, class Epilogue, class Input>
static int staged_convolution(const Epilogue& end, bool vectors, const Input& x,
                              const SplitFilter& w, const ConvShape& shape,
                              const StagedInput& staged, int device, void* stream) {
  using Shared = ConvShared<Kind>;
  if (!x.has_near_channels()) return static_cast<int>(cudaErrorInvalidValue);
  if constexpr (kLanes > 1) {
    if (!vectors || !goes_by_lanes(shape, kLanes)) {
      if constexpr (kAlways) return static_cast<int>(cudaErrorMisalignedAddress);
      else return staged_convolution<Kind, 1>(end, false, x, w, shape, staged, device, stream);
    }
  }
  const OnDevice here(device);
  int stages = 0;  // of a tile, at the most
  bool fits = true;
  for (int of_class = 0; of_class < shape.classes; ++of_class) {
    stages = max(stages, shape.stages(of_class));
    fits &= shape.stages(of_class) > 0;
  }
  const int parts = stages == 1 ? (shape.channels_out + 63) / 64 : 1;
  ConvTiling sizes(shape, Kind::kTilePositions, 64 * parts);
  sizes.parts = parts;
  sizes.by_channels = x.by_channels(shape.channels);
  constexpr int kRoom = kSharedBytes - int(sizeof(Shared));
  static_assert(kRoom >= kStagedBytes, "stages would not fit");
  const int64_t all_rows = sizes.positions() * sizes.blocks() * shape.planes * shape.groups;
  fits &= all_rows < (int64_t(1) << 31) && divide_staged(sizes, kRoom / 128);
  const int64_t weight_rows = int64_t(shape.groups) * sizes.tile_boxes * shape.channels_out;
  CUtensorMap map_w{}, map_staged{};
  if (!fits || !matrix_map(map_w, w.hi, {64, weight_rows, 64, 1, 0}, 64, Kind::kBoxChannels) ||
      !matrix_map(map_staged, staged.rows, {64, all_rows, 64, 1, 0}, 64, sizes.staged_box)) {
    return static_cast<int>(cudaErrorInvalidValue);
  }
  lay_out_all(x, sizes, staged, stream);
  const int shared_bytes = int(sizeof(Shared)) + sizes.stages * sizes.ring_bytes();
  const auto kernel = staged_convolution_kernel<Kind, kLanes, Epilogue, Input>;
  static Persistent persistent;
  const int blocks = persistent.blocks(kernel, sizes.tiles, device);
  sizes.take_turns(blocks);
  constexpr int kThreads = Kind::kThreads;
  launch_behind(kernel, blocks, kThreads, shared_bytes, stream, end, x, w, sizes, staged.scales,
                map_w, map_staged);
  if (Epilogue::kReduces) end.join(partials_of<Epilogue>(sizes), stream);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
