// The weight gradient of a convolution (sm90_weight_gradient.cuh) from staged operands
// (staged_input.cuh): x is staged for it, dy for the input gradient, with the same rows and pitch.
// So what a position reads of dy is a fixed number of rows `ahead` of it, zeros for positions in
// halos. TMA loads both; no warp converts.
//
// Each image of a staged operand has a scale of its own. If a slab has images of several scales,
// the warp that loads it multiplies dy's rows by powers of two, so that all products have the scale
// of the largest ones.
#pragma once

#include "sm90/convolution/sm90_convolution.cuh"
#include "sm90/gradient/sm90_weight_gradient.cuh"

namespace fw {

// Rows of x that are copied at once; its ring has a multiple of them, and the first ones twice.
constexpr int kStagedBox = 32;

// What is known of both staged operands, by image and group.
struct StagedPair {
  const float *scales_x, *scales_dy;
  const StagedCounts *counts_x, *counts_dy;
  int ahead;

  // Whether an image adds anything: the scale of zeros says nothing.
  FW_DEVICE bool adds(int image_group) const {
    return counts_x[image_group].largest > 0 && counts_dy[image_group].largest > 0;
  }

  // The scale of a product, as a sum of exponents.
  FW_DEVICE int exponent(int image_group) const {
    return int(__float_as_uint(scales_x[image_group]) >> 23) +
           int(__float_as_uint(scales_dy[image_group]) >> 23);
  }
};

// What a slab's products are scaled by: the scales of the image with the largest ones, and whether
// all images that add something have the same.
struct SlabScales {
  float x, dy;
  int exponent;
  bool same;
};

// The warp that loads slabs.
struct SlabLoader {
  using Shared = GradientShared<1>;
  Shared& shared;
  const CUtensorMap *staged_x, *staged_dy;
  const StagedPair& staged;
  const GradientTiling& sizes;

  FW_DEVICE int image_group(const Slabs& at, int row) const {
    const int image = min(sizes.position(at.band, at.in_plane, row).image, sizes.shape.images - 1);
    return image * sizes.shape.groups + shared.work.group;
  }
  // Each lane looks at an image at a time; a slab has no more images than positions. If none adds
  // anything, the scales stay as they were.
  FW_DEVICE SlabScales scales(const Slabs& at, const SlabScales& before) const {
    const int groups = sizes.shape.groups, first = image_group(at, 0);
    const int last = image_group(at, sizes.tile_positions - 1);
    uint32_t largest = 0;
#pragma unroll 1
    for (int i = threadIdx.x % 32; first + i * groups <= last; i += 32) {
      const int here = first + i * groups;
      const uint32_t size = uint32_t(1023 - staged.exponent(here)) << 8 | uint32_t(i);
      largest = max(largest, staged.adds(here) ? size : 0u);
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (largest == 0) return {before.x, before.dy, 0, true};
    const int of = first + int(largest & 255u) * groups;
    const float x = staged.scales_x[of], dy = staged.scales_dy[of];
    bool same = true;
#pragma unroll 1
    for (int i = threadIdx.x % 32; first + i * groups <= last; i += 32) {
      const int here = first + i * groups;
      same &= !staged.adds(here) || (staged.scales_x[here] == x && staged.scales_dy[here] == dy);
    }
    return {x, dy, staged.exponent(of), __all_sync(0xffffffffu, same) != 0};
  }

  // Called by one thread.
  FW_DEVICE void copy(const Slabs& at, uint64_t* loaded) const {
    const GradientWork& work = shared.work;
    const ConvShape& shape = sizes.shape;
    const TapPhase& phase = shape.phase[work.set.phase];
    const int tile = sizes.tile_positions, chunks = sizes.tile_channels / 64;
    const int reach = sizes.ring_rows - kSlabStages * tile, first = at.count > 0 ? reach : 0;
    const int position = int(int64_t(at.band) * sizes.plane.divisor + at.in_plane);
    const int staged_index_x =
        (work.group * sizes.blocks() + work.in / 64) * shape.planes + phase.plane;
    const int staged_index_dy = work.group * ((shape.channels_out + 63) / 64) + work.out / 64;
    const int from = position + phase.deeper + shape.shift[work.set.first];
    const auto ring_row = [&](int row) {
      return at.row + row < sizes.ring_rows ? at.row + row : at.row + row - sizes.ring_rows;
    };
    const bool twice =
        ring_row(first) == 0 || ring_row(first) > ring_row(tile + reach - kStagedBox);
    const int boxes = (tile + reach - first) / kStagedBox + int(twice);
    arrive_expecting(loaded, boxes * kStagedBox * 128 + chunks * Shared::kChunkBytes);
    for (int row = first; row < tile + reach; row += kStagedBox) {
      const int to = ring_row(row);
      copy_box(shared.ring() + to * 128, staged_x, loaded, 0, from + row, staged_index_x);
      if (to == 0) {
        copy_box(shared.ring() + sizes.ring_rows * 128, staged_x, loaded, 0, from + row,
                 staged_index_x);
      }
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
      copy_box(shared.dy(sizes, at.stage(), chunk), staged_dy, loaded, 0, position + staged.ahead,
               staged_index_dy + chunk);
    }
  }

  // Rare. A power of two that is less than 1 costs an element what its sum would lose anyway.
  FW_DEVICE void even_out(const Slabs& at, int exponent) const {
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < sizes.tile_positions; row += 32) {
      const int less = max(staged.exponent(image_group(at, row)) - exponent, 0);
      const float by = less > 100 ? 0.f : __uint_as_float(uint32_t(127 - less) << 23);
#pragma unroll 1
      for (int i = 0; i < sizes.tile_channels / 8; ++i) {
        char* const eight = shared.dy(sizes, at.stage(), i / 8) + row * 128 + i % 8 * 16;
        const half* x = reinterpret_cast<const half*>(eight);
        uint32_t pairs[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          pairs[k] = fp16_pair(value(x[2 * k]) * by, value(x[2 * k + 1]) * by);
        }
        store_four_pairs(shared_address(eight), pairs);
      }
    }
    publish_stores();
    __syncwarp();
  }

  FW_DEVICE void load() const {
    const GradientWork& work = shared.work;
    const bool first_lane = threadIdx.x % 32 == 0;
    int uneven = 0;
    SlabScales of = {1.f, 1.f, 0, true};
#pragma unroll 1
    for (Slabs at = {work.band, work.in_plane, work.slabs}; at.left > 0; at.advance(sizes)) {
      of = scales(at, of);
      uint64_t* const loaded = &shared.loaded[at.stage()];
      wait(&shared.done[at.stage()], at.parity() ^ 1);
      if (first_lane) {
        shared.scale_x[at.stage()] = of.x;
        shared.scale_dy[at.stage()][0] = shared.scale_dy[at.stage()][1] = of.dy;
        copy(at, of.same ? loaded : &shared.arrived);
      }
      if (of.same) continue;
      wait(&shared.arrived, uneven++ % 2);
      even_out(at, of.exponent);
      if (first_lane) arrive(loaded);
    }
  }
};

template <class Taps>
__global__ void __launch_bounds__(kGradientThreads, 1)
    staged_gradient_kernel(float* workspace, const __grid_constant__ GradientTiling sizes,
                           const StagedPair staged, const __grid_constant__ CUtensorMap staged_x,
                           const __grid_constant__ CUtensorMap staged_dy) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<GradientShared<1>*>(memory);
  start_slabs(shared, memory, sizes, 1);
  await_kernel_before();
  let_next_begin();
  if (threadIdx.x < 256) {
    take_registers<232>();
    const TapShare share(sizes, shared.work.set.taps, of_warp(threadIdx.x / 128));
    if (share.taps > 0) multiply_slabs<Taps>(shared, workspace, sizes, share);
  } else {
    leave_registers<40>();
    if (threadIdx.x < 256 + 32) SlabLoader{shared, &staged_x, &staged_dy, staged, sizes}.load();
  }
#else
  __trap();  // compiled for another architecture than sm_90a
#endif
}

// `back` is the input gradient, a convolution that has staged dy, at `staged_dy`. `staged_x` has
// room for the staged x, `workspace` has weight_gradient_bytes.
template <class Taps = AnyTaps, class X, class Dy>
static int staged_gradient(const X& x, const Dy& dy, const WeightGradient& dw,
                           const ConvolutionSizes& of, const ConvolutionSizes& back, int parts,
                           void* workspace, void* staged_x, void* staged_dy, int device,
                           void* stream) {
  GradientResultTile<Dy> result = {x, dy, dw};
  ConvShape &shape = result.shape, of_dy{};
  TapOrder order;
  const bool fits =
      lay_out(of, 4, true, shape, result.order) && lay_out(back, 4, true, of_dy, order);
  if (!fits || shape.pitch != of_dy.pitch || shape.rows != of_dy.rows ||
      shape.depth != of_dy.depth || of_dy.planes != 1 || of.band_width != shape.x.out ||
      !x.has_near_channels()) {
    return static_cast<int>(cudaErrorInvalidValue);
  }
  const int64_t elements = weight_gradient_bytes(of, 1) / 4;
  if (elements == 0) return 0;
  const OnDevice here(device);
  float* const sums = static_cast<float*>(workspace);
  if (!of.has_outputs()) {
    parts = 0;
  } else {
    GradientTiling sizes = gradient_sizes(shape, 1, x.by_channels(of.channels), false);
    const int reach = sizes.ring_rows - kSlabStages * sizes.tile_positions;
    sizes.ring_rows =
        kSlabStages * sizes.tile_positions + (reach + kStagedBox - 1) / kStagedBox * kStagedBox;
    sizes.overlap = kStagedBox, sizes.parts = parts;
    const int64_t shared_bytes = GradientShared<1>::bytes(sizes), rows = sizes.positions();
    const int64_t all_x = int64_t(shape.groups) * sizes.blocks() * shape.planes;
    const int64_t all_dy = int64_t(shape.groups) * of_dy.channel_blocks();
    const StagedInput xs = staged_at(staged_x, shape, true),
                      dys = staged_at(staged_dy, of_dy, true);
    CUtensorMap map_x{}, map_dy{};
    if (shared_bytes > kSharedBytes || rows >= (int64_t(1) << 31) || !has_all_taps<Taps>(sizes) ||
        !matrix_map(map_x, xs.rows, {64, rows, 64, all_x, rows * 64}, 64, kStagedBox) ||
        !matrix_map(map_dy, dys.rows, {64, rows, 64, all_dy, rows * 64}, 64,
                    sizes.tile_positions)) {
      return static_cast<int>(cudaErrorInvalidValue);
    }
    lay_out_sampled(x, sizes, xs, stream);
    const InputPlane& begins = of_dy.plane[0];
    const int ahead = -((begins.z * shape.rows + begins.y) * shape.pitch + begins.x);
    const StagedPair staged = {xs.scales, dys.scales, xs.counts, dys.counts, ahead};
    const auto kernel = staged_gradient_kernel<Taps>;
    static Persistent once;
    once.ready(kernel, device);
    launch_behind(kernel, sizes.work_units() * parts, kGradientThreads, int(shared_bytes), stream,
                  sums, sizes, staged, map_x, map_dy);
  }
  add_all_parts(result, sums, parts, elements, stream);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
