// The window kernel where its input comes from lines of halves in memory (staged_input.cuh): no warp
// converts, so that those that multiply have registers for a tile of 64 channels and kPositions, which
// they take in turns. A tile of one stage has all out channels, others have 64 of them.
#pragma once

#include "sm90/convolution/sm90_implicit_gemm.cuh"
#include "convolution/staged_input.cuh"

namespace fw {

// As WindowKind. (H200, 128 channels of 64: 0.66 ms with two warpgroups of 256 positions, 0.75 with two
// of 128, 0.68 with three and 0.69 with four.)
template <int kPositions_, int kBeside_ = 0>
struct LineKind {
  static constexpr int kTerms = 1, kHalves = 1, kBeside = kBeside_;
  static constexpr bool kTurns = true, kLines = true, kHasPart = true;
  static constexpr int kGroups = 2, kConvertWarps = 0;
  static constexpr int kFirstLoad = 128 * kGroups;
  static constexpr int kThreads = kFirstLoad + 128;
  static constexpr int kRegisters = 65536 / kThreads / 8 * 8, kLoad = 40;
  static constexpr int kMultiply = (kThreads * kRegisters - 128 * kLoad) / (128 * kGroups) / 8 * 8;
  static constexpr int kTilePositions = kPositions_, kPositions = kPositions_;
  static constexpr int kBoxChannels = 64, kBoxBytes = kBoxChannels * 128;
  static constexpr int kBoxBits = 3, kBoxes = 1 << kBoxBits;
};

template <class Kind, int kLanes, class End, class Input>
__global__ void __launch_bounds__(Kind::kThreads, 1)
    line_window_kernel(const End end, const __grid_constant__ Input x,
                       const __grid_constant__ WindowWeights w,
                       const __grid_constant__ WindowSizes sizes, const float* scales,
                       const __grid_constant__ CUtensorMap map_w,
                       const __grid_constant__ CUtensorMap map_lines) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<WindowShared<Kind>*>(memory);
  start_barriers(shared, memory, sizes);
  await_kernel_before();
  if (threadIdx.x < Kind::kFirstLoad) {
    take_registers<Kind::kMultiply>();
    multiply_windows<kLanes>(shared, end, x, w, sizes, scales);
  } else {
    leave_registers<Kind::kLoad>();
    if (threadIdx.x == Kind::kFirstLoad) load_weights(shared, &map_w, &map_w, sizes);
    if (threadIdx.x == Kind::kFirstLoad + 32) load_lines(shared, &map_lines, sizes);
  }
#else
  __trap();  // built for another architecture than sm_90a, and yet called
#endif
}

// What line_cost.py counts on for two stages.
constexpr int kLineBytes = 137 * 1024;

// Stages of lines, and how they are copied: equal boxes of at most 256 rows.
inline bool divide_lines(WindowSizes& sizes, int room) {
  const int rows = sizes.shape.stage_rows, boxes = (rows + 255) / 256;
  sizes.line_box = ((rows + boxes - 1) / boxes + 7) / 8 * 8;
  sizes.ring_rows = boxes * sizes.line_box;
  sizes.stages = sizes.rings = min(kMostStages, room / sizes.ring_rows);
  return sizes.stages > 0;
}

template <class Input>
void lay_out_all(const Input& x, const WindowSizes& sizes, const WindowLines& lines, void* stream) {
  const LineSizes of(sizes);
  Input::by_layout(sizes.by_channels, [&](auto by_channels) {
    constexpr int kThreads = 32 * LineSizes::kWarps;
    const int chunks = sizes.shape.images * sizes.shape.groups * of.planes * of.chunks;
    const auto kernel = lay_out_lines<decltype(by_channels)::value, Input>;
    launch_behind(kernel, chunks, kThreads, 0, stream, x, sizes, of, lines);
  });
}

// As `window`; `lines` are written here.
template <class Kind, int kLanes, bool kAlways = false, class End, class Input>
static int line_window(const End& end, bool vectors, const Input& x, const WindowWeights& w,
                       const WindowShape& shape, const WindowLines& lines, int device,
                       void* stream) {
  using Shared = WindowShared<Kind>;
  if (!x.has_near_channels()) return static_cast<int>(cudaErrorInvalidValue);
  if constexpr (kLanes > 1) {
    if (!vectors || !goes_by_lanes(shape, kLanes)) {
      if constexpr (kAlways) return static_cast<int>(cudaErrorMisalignedAddress);
      else return line_window<Kind, 1>(end, false, x, w, shape, lines, device, stream);
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
  WindowSizes sizes(shape, Kind::kTilePositions, 64 * parts);
  sizes.parts = parts;
  sizes.by_channels = x.by_channels(shape.channels);
  constexpr int kRoom = kSharedBytes - int(sizeof(Shared));
  static_assert(kRoom >= kLineBytes, "stages would not fit");
  const int64_t all_rows = sizes.positions() * sizes.blocks() * shape.planes * shape.groups;
  fits &= all_rows < (int64_t(1) << 31) && divide_lines(sizes, kRoom / 128);
  const int64_t weight_rows = int64_t(shape.groups) * sizes.tile_boxes * shape.channels_out;
  CUtensorMap map_w{}, map_lines{};
  if (!fits || !matrix_map(map_w, w.hi, {64, weight_rows, 64, 1, 0}, 64, Kind::kBoxChannels) ||
      !matrix_map(map_lines, lines.rows, {64, all_rows, 64, 1, 0}, 64, sizes.line_box)) {
    return static_cast<int>(cudaErrorInvalidValue);
  }
  lay_out_all(x, sizes, lines, stream);
  const int shared_bytes = int(sizeof(Shared)) + sizes.stages * sizes.ring_bytes();
  const auto kernel = line_window_kernel<Kind, kLanes, End, Input>;
  static Persistent persistent;
  const int blocks = persistent.blocks(kernel, sizes.tiles, device);
  sizes.take_turns(blocks);
  constexpr int kThreads = Kind::kThreads;
  launch_behind(kernel, blocks, kThreads, shared_bytes, stream, end, x, w, sizes, lines.scales, map_w,
                map_lines);
  if (End::kReduces) end.join(lines_of<End>(sizes), stream);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
