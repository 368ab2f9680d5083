// The gradient of a convolution by its weights (sm90_weight_gradient.cuh) where both operands come from
// lines of halves in memory (staged_input.cuh): x has been laid out for it, dy for the gradient by the
// input, with the same rows and pitch. So what a position reads of dy lies a fixed number of rows
// `ahead` of it, zeros for positions in halos, and the copy engine brings both; no warp converts.
//
// In lines every image has a scale of its own. Where a slab has images of several, the warp that loads
// it multiplies dy's rows by powers of two, so that all products have the scale of the largest ones.
#pragma once

#include "sm90/convolution/sm90_convolution.cuh"
#include "sm90/gradient/sm90_weight_gradient.cuh"

namespace fw {

// Rows of x that are copied at once; its ring has a multiple of them, and the first ones twice.
constexpr int kLineBox = 32;

// What is known of both operands' lines, by image and group.
struct LinePair {
  const float *scales_x, *scales_dy;
  const LineCounts *counts_x, *counts_dy;
  int ahead;

  // Whether it adds anything: the scale of what is zero says nothing.
  __device__ __forceinline__ bool adds(int place) const {
    return counts_x[place].largest > 0 && counts_dy[place].largest > 0;
  }

  // Of a product, as a sum of exponents.
  __device__ __forceinline__ int exponent(int place) const {
    return int(__float_as_uint(scales_x[place]) >> 23) + int(__float_as_uint(scales_dy[place]) >> 23);
  }
};

// What a slab's products are multiplied by: scales of the image with the largest, and whether all that
// add something have them.
struct SlabScales {
  float x, dy;
  int exponent;
  bool same;
};

// The warp that brings slabs.
struct SlabLoader {
  using Shared = GradientShared<1>;
  Shared& shared;
  const CUtensorMap *lines_x, *lines_dy;
  const LinePair& lines;
  const GradientSizes& sizes;

  __device__ __forceinline__ int place(const Slabs& at, int row) const {
    const int image = min(sizes.position(at.band, at.place, row).image, sizes.shape.images - 1);
    return image * sizes.shape.groups + shared.work.group;
  }
  // Lanes look at an image each, and a slab has no more images than positions. Where none adds anything
  // it is as before.
  __device__ __forceinline__ SlabScales scales(const Slabs& at, const SlabScales& before) const {
    const int groups = sizes.shape.groups, first = place(at, 0);
    const int last = place(at, sizes.tile_positions - 1);
    uint32_t largest = 0;
#pragma unroll 1
    for (int i = threadIdx.x % 32; first + i * groups <= last; i += 32) {
      const int here = first + i * groups;
      const uint32_t size = uint32_t(1023 - lines.exponent(here)) << 8 | uint32_t(i);
      largest = max(largest, lines.adds(here) ? size : 0u);
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (largest == 0) return {before.x, before.dy, 0, true};
    const int of = first + int(largest & 255u) * groups;
    const float x = lines.scales_x[of], dy = lines.scales_dy[of];
    bool same = true;
#pragma unroll 1
    for (int i = threadIdx.x % 32; first + i * groups <= last; i += 32) {
      const int here = first + i * groups;
      same &= !lines.adds(here) || (lines.scales_x[here] == x && lines.scales_dy[here] == dy);
    }
    return {x, dy, lines.exponent(of), __all_sync(0xffffffffu, same) != 0};
  }

  // By one thread.
  __device__ __forceinline__ void copy(const Slabs& at, uint64_t* loaded) const {
    const GradientWork& work = shared.work;
    const WindowShape& shape = sizes.shape;
    const WindowPhase& phase = shape.phase[work.set.phase];
    const int tile = sizes.tile_positions, chunks = sizes.tile_channels / 64;
    const int reach = sizes.ring_rows - kSlabStages * tile, first = at.count > 0 ? reach : 0;
    const int position = int(int64_t(at.band) * sizes.plane.divisor + at.place);
    const int line_x = (work.group * sizes.blocks() + work.in / 64) * shape.planes + phase.plane;
    const int line_dy = work.group * ((shape.channels_out + 63) / 64) + work.out / 64;
    const int from = position + phase.deeper + shape.shift[work.set.first];
    const auto ring_row = [&](int row) {
      return at.row + row < sizes.ring_rows ? at.row + row : at.row + row - sizes.ring_rows;
    };
    const bool twice = ring_row(first) == 0 || ring_row(first) > ring_row(tile + reach - kLineBox);
    const int boxes = (tile + reach - first) / kLineBox + int(twice);
    arrive_expecting(loaded, boxes * kLineBox * 128 + chunks * Shared::kChunkBytes);
    for (int row = first; row < tile + reach; row += kLineBox) {
      const int to = ring_row(row);
      copy_box(shared.ring() + to * 128, lines_x, loaded, 0, from + row, line_x);
      if (to == 0) {
        copy_box(shared.ring() + sizes.ring_rows * 128, lines_x, loaded, 0, from + row, line_x);
      }
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
      copy_box(shared.dy(sizes, at.stage(), chunk), lines_dy, loaded, 0, position + lines.ahead,
               line_dy + chunk);
    }
  }

  // Rare. A power of two that is less than 1 costs a number what its sum would lose anyway.
  __device__ __forceinline__ void even_out(const Slabs& at, int exponent) const {
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < sizes.tile_positions; row += 32) {
      const int less = max(lines.exponent(place(at, row)) - exponent, 0);
      const float by = less > 100 ? 0.f : __uint_as_float(uint32_t(127 - less) << 23);
#pragma unroll 1
      for (int i = 0; i < sizes.tile_channels / 8; ++i) {
        char* const eight = shared.dy(sizes, at.stage(), i / 8) + row * 128 + i % 8 * 16;
        const half* x = reinterpret_cast<const half*>(eight);
        uint32_t pairs[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          pairs[k] = two_halves(value(x[2 * k]) * by, value(x[2 * k + 1]) * by);
        }
        store_four_pairs(shared_address(eight), pairs);
      }
    }
    publish_stores();
    __syncwarp();
  }

  __device__ __forceinline__ void load() const {
    const GradientWork& work = shared.work;
    const bool first_lane = threadIdx.x % 32 == 0;
    int uneven = 0;
    SlabScales of = {1.f, 1.f, 0, true};
#pragma unroll 1
    for (Slabs at = {work.band, work.place, work.slabs}; at.left > 0; at.advance(sizes)) {
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
    line_gradient_kernel(float* workspace, const __grid_constant__ GradientSizes sizes,
                         const LinePair lines, const __grid_constant__ CUtensorMap lines_x,
                         const __grid_constant__ CUtensorMap lines_dy) {
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
    if (threadIdx.x < 256 + 32) SlabLoader{shared, &lines_x, &lines_dy, lines, sizes}.load();
  }
#else
  __trap();  // built for another architecture than sm_90a, and yet called
#endif
}

// `back` is the gradient by the input, a convolution that has laid out dy, which begins at `lines_dy`;
// `lines_x` has room for the lines of x, `workspace` window_gradient_bytes.
template <class Taps = AnyTaps, class X, class Dy>
static int line_gradient(const X& x, const Dy& dy, const WindowGradient& dw,
                         const ConvolutionSizes& of, const ConvolutionSizes& back, int parts,
                         void* workspace, void* lines_x, void* lines_dy, int device, void* stream) {
  GradientResult<Dy> result = {x, dy, dw};
  WindowShape &shape = result.shape, of_dy{};
  TapOrder order;
  const bool fits = lay_out(of, 4, true, shape, result.order) && lay_out(back, 4, true, of_dy, order);
  if (!fits || shape.pitch != of_dy.pitch || shape.rows != of_dy.rows || shape.depth != of_dy.depth ||
      of_dy.planes != 1 || of.band_width != shape.x.out || !x.has_near_channels()) {
    return static_cast<int>(cudaErrorInvalidValue);
  }
  const int64_t elements = window_gradient_bytes(of, 1) / 4;
  if (elements == 0) return 0;
  const OnDevice here(device);
  float* const sums = static_cast<float*>(workspace);
  if (!of.has_outputs()) {
    parts = 0;
  } else {
    GradientSizes sizes = gradient_sizes(shape, 1, x.by_channels(of.channels), false);
    const int reach = sizes.ring_rows - kSlabStages * sizes.tile_positions;
    sizes.ring_rows = kSlabStages * sizes.tile_positions + (reach + kLineBox - 1) / kLineBox * kLineBox;
    sizes.overlap = kLineBox, sizes.parts = parts;
    const int64_t shared_bytes = GradientShared<1>::bytes(sizes), rows = sizes.positions();
    const int64_t all_x = int64_t(shape.groups) * sizes.blocks() * shape.planes;
    const int64_t all_dy = int64_t(shape.groups) * of_dy.channel_blocks();
    const WindowLines xs = lines_at(lines_x, shape, true), dys = lines_at(lines_dy, of_dy, true);
    CUtensorMap map_x{}, map_dy{};
    if (shared_bytes > kSharedBytes || rows >= (int64_t(1) << 31) || !has_all_taps<Taps>(sizes) ||
        !matrix_map(map_x, xs.rows, {64, rows, 64, all_x, rows * 64}, 64, kLineBox) ||
        !matrix_map(map_dy, dys.rows, {64, rows, 64, all_dy, rows * 64}, 64, sizes.tile_positions)) {
      return static_cast<int>(cudaErrorInvalidValue);
    }
    lay_out_sampled(x, sizes, xs, stream);
    const WindowPlane& begins = of_dy.plane[0];
    const int ahead = -((begins.z * shape.rows + begins.y) * shape.pitch + begins.x);
    const LinePair lines = {xs.scales, dys.scales, xs.counts, dys.counts, ahead};
    const auto kernel = line_gradient_kernel<Taps>;
    static Persistent once;
    once.ready(kernel, device);
    launch_behind(kernel, sizes.work_units() * parts, kGradientThreads, int(shared_bytes), stream, sums,
                  sizes, lines, map_x, map_dy);
  }
  add_all_parts(result, sums, parts, elements, stream);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
