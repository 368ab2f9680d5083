// dw[q, c, ky, kx] = Σ dy[n, q, oy, ox]·x[n, c, oy·sy − top + ky·dy, ox·sx − left + kx·dx]
// on Hopper's tensor cores, over n, oy and ox, and along a third axis z likewise; x is zero outside
// of its bounds.
//
// For each tap this is a matmul of output and input channels over the positions, which are the rows
// of both operands in shared memory: a tap reads x from `shift` rows further on. Elements become
// scaled fp16 as in sm90_implicit_gemm.cuh, with `terms` 1 to TF32's accuracy and with 3 to fp32's;
// here positions near each other share a scale.
//
// A thread block sums a part of the positions for 64 input channels and the taps of a set; two
// warpgroups multiply, one converts (sm90_weight_gradient_load.cuh). The parts' sums go to a
// workspace [part][tap][output channel][input channel], and a second kernel adds them in order: the
// result is the same to the bit each time. It also recomputes results that are Inf or NaN, in plain
// fp32.
#pragma once

#include "sm90/gradient/sm90_weight_gradient_multiply.cuh"

namespace fw {

struct WeightGradient {
  float* data;
  int64_t out_stride, in_stride, z_stride, y_stride, x_stride;
};

// A stage is loaded once `loading` threads have arrived.
template <int kTerms>
FW_DEVICE void start_slabs(GradientShared<kTerms>& shared, const char* memory,
                           const GradientTiling& sizes, int loading) {
  if (threadIdx.x == 0) {
    if (shared_address(memory) % 1024 != 0) __trap();  // swizzles count from multiples of 1024
    shared.work = sizes.work(blockIdx.x);
    const bool both = TapShare(sizes, shared.work.set.taps, 1).taps > 0;
    for (int stage = 0; stage < kSlabStages; ++stage) {
      init_barrier(&shared.loaded[stage], loading);
      init_barrier(&shared.done[stage], both ? 8 : 4);
    }
    init_barrier(&shared.arrived, 1);
    publish_barriers();
  }
  __syncthreads();
}

template <int kTerms, class Taps, class X, class Dy>
__global__ void __launch_bounds__(kGradientThreads, 1)
    gradient_kernel(const __grid_constant__ X x, const __grid_constant__ Dy dy, float* workspace,
                    const __grid_constant__ GradientTiling sizes) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shared = GradientShared<kTerms>;
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  start_slabs(shared, memory, sizes, 2);
  let_next_begin();
  // 384 threads begin with 168 registers each; together they never have more.
  if (threadIdx.x < 256) {
    take_registers<192>();
    const TapShare share(sizes, shared.work.set.taps, of_warp(threadIdx.x / 128));
    if (share.taps > 0) multiply_slabs<Taps>(shared, workspace, sizes, share);
  } else {
    leave_registers<120>();
    if (threadIdx.x < 256 + 32 * kGradientWarps) {
      X::by_layout(sizes.by_channels, [&](auto by_channels) {
        convert_x<decltype(by_channels)::value>(shared, x, sizes);
      });
    } else {
      Dy::by_layout(sizes.dy_by_channels, [&](auto by_channels) {
        convert_dy<decltype(by_channels)::value>(shared, dy, sizes);
      });
    }
  }
#else
  __trap();  // compiled for another architecture than sm_90a
#endif
}

// Adding up the parts ----------------------------------------------------------------------------

template <class Dy>
struct GradientResultTile {
  ConvInput x;
  Dy dy;
  WeightGradient dw;
  ConvShape shape;
  TapOrder order;

  struct Element {
    int group, out, in, z, y, x;  // channels within the group

    FW_DEVICE int tap(const ConvShape& shape) const {
      return (z * shape.y.kernel + y) * shape.x.kernel + x;
    }
  };
  // By its index in the workspace: tap after tap, in the order of phases.
  FW_DEVICE Element summed(int out, int in, int tap) const {
    return {out / shape.channels_out,
            out % shape.channels_out,
            in,
            shape.tap_z(tap),
            order.y[tap],
            order.x[tap]};
  }
  // By its index among the filter's taps.
  FW_DEVICE Element stored(int out, int in, int tap) const {
    const int row = tap / shape.x.kernel, z = row / shape.y.kernel;
    return {out / shape.channels_out, out % shape.channels_out,  in, z,
            row - z * shape.y.kernel, tap - row * shape.x.kernel};
  }
  FW_DEVICE float& at(const Element& of) const {
    return dw
        .data[(of.group * int64_t(shape.channels_out) + of.out) * dw.out_stride +
              of.in * dw.in_stride + of.z * dw.z_stride + of.y * dw.y_stride + of.x * dw.x_stride];
  }
  // An element as a plain fp32 sum by a warp, for sums that overflowed or have an operand that is
  // not finite.
  FW_DEVICE float plain(const Element& of) const {
    const ConvAxis &along_z = shape.z, &along_y = shape.y, &along_x = shape.x;
    const float* from_x = x.data + (of.group * shape.channels + of.in) * x.channel_stride;
    const int channel_dy = of.group * shape.channels_out + of.out;
    const int front = of.z * along_z.dilation - along_z.padding;
    const int top = of.y * along_y.dilation - along_y.padding;
    const int left = of.x * along_x.dilation - along_x.padding;
    float sum = 0.f;
#pragma unroll 1
    for (int row = 0; row < shape.images * along_z.out * along_y.out; ++row) {
      const int plane = row / along_y.out, out_y = row % along_y.out;
      const int image = plane / along_z.out, out_z = plane % along_z.out;
      const int in_z = out_z * along_z.stride + front, in_y = out_y * along_y.stride + top;
#pragma unroll 1
      for (int out_x = threadIdx.x % 32; out_x < along_x.out; out_x += 32) {
        const int in_x = out_x * along_x.stride + left;
        const bool inside = unsigned(in_z) < unsigned(along_z.in) &&
                            unsigned(in_y) < unsigned(along_y.in) &&
                            unsigned(in_x) < unsigned(along_x.in);
        const float number = load_if(from_x + image * x.image_stride + in_z * x.z_stride +
                                         in_y * x.y_stride + in_x * x.x_stride,
                                     inside);
        sum = __fmaf_rn(dy.at(dy.location(image, channel_dy, out_z, out_y, out_x)), number, sum);
      }
      if (sum != sum) break;  // it stays NaN
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    return sum;
  }
};

constexpr int kAddThreads = 256;

// Input channels of an output channel that a thread block adds up, with all taps: an element for
// each thread, or more.
FW_FN int ins_together(const ConvShape& shape) {
  return min(max(kAddThreads / shape.taps, 32), shape.channels);
}

// In the workspace input channels are contiguous, in the weights mostly taps: shared memory
// transposes them.
template <class Dy>
__global__ void __launch_bounds__(kAddThreads)
    add_parts(const __grid_constant__ GradientResultTile<Dy> result, const float* workspace,
              int parts, int64_t elements) {
  __shared__ float transposed[32 * kMostTaps];
  static_assert(kAddThreads <= 32 * kMostTaps, "room for all taps of the channels");
  await_kernel_before();
  const ConvShape& shape = result.shape;
  const int taps = shape.taps, together = ins_together(shape), channels = shape.channels;
  const int blocks = (channels + together - 1) / together, out = blockIdx.x / blocks;
  const int first = (blockIdx.x - out * blocks) * together, ins = min(together, channels - first);
  const int64_t tap_numbers = elements / taps, row = int64_t(out) * channels + first;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int warp = threadIdx.x - lane; warp < ins * taps; warp += kAddThreads) {
    const int index = warp + lane, tap = index / ins, in = index - tap * ins;
    const bool inside = index < ins * taps;
    const float* from = workspace + tap * tap_numbers + row + in;
    float sum = 0.f;
#pragma unroll 8
    for (int part = 0; part < (inside ? parts : 0); ++part) sum += from[part * elements];
    // The warp recomputes what is not finite, the last lane's element first.
    bool broken = !isfinite(sum);
#pragma unroll 1
    while (const int which = __reduce_max_sync(0xffffffffu, broken ? lane + 1 : 0)) {
      const int its = warp + which - 1, its_tap = its / ins;
      const float mended = result.plain(result.summed(out, first + its - its_tap * ins, its_tap));
      if (which == lane + 1) sum = mended, broken = false;
    }
    if (inside) transposed[in * taps + result.summed(out, first + in, tap).tap(shape)] = sum;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < ins * taps; i += kAddThreads) {
    const bool by_taps = result.dw.in_stride != 1;
    const int in = by_taps ? i / taps : i % ins, tap = by_taps ? i - in * taps : i / ins;
    result.at(result.stored(out, first + in, tap)) = transposed[in * taps + tap];
  }
}

// The host's part --------------------------------------------------------------------------------

template <class Dy>
void add_all_parts(const GradientResultTile<Dy>& result, const float* sums, int parts,
                   int64_t elements, void* stream) {
  const ConvShape& shape = result.shape;
  const int together = ins_together(shape), outs = shape.groups * shape.channels_out;
  const int blocks = outs * ((shape.channels + together - 1) / together);
  const auto kernel = add_parts<Dy>;
  launch_behind(kernel, blocks, kAddThreads, 0, stream, result, sums, parts, elements);
}

// What a part costs besides its slabs, as slabs; a guess until measured.
constexpr int kPartSlabs = 4;

// How a gradient is divided, into one part; `by_channels`: an operand is read four channels at a
// time.
inline GradientTiling gradient_sizes(const ConvShape& shape, int terms, bool by_channels,
                                     bool dy_by_channels) {
  int most_taps = 0, reach = 0;
  for (int phase = 0; phase < shape.phases; ++phase) {
    most_taps = max(most_taps, shape.phase[phase].taps);
  }
  const int taps_each = terms == 1 ? kTapsEach<1> : kTapsEach<3>;
  const int channels = shape.channels_out > 64 && most_taps <= taps_each ? 128 : 64;
  GradientTiling sizes(shape, terms == 1 ? kSlabPositions<1> : kSlabPositions<3>, channels);
  sizes.by_channels = by_channels, sizes.dy_by_channels = dy_by_channels;
  const int room = sizes.shares_taps() ? 2 * taps_each : taps_each;
  for (int phase = 0, first = 0; phase < shape.phases; first += shape.phase[phase++].taps) {
    const int taps = shape.phase[phase].taps, count = (taps + room - 1) / room;
    for (int i = 0; i < count; ++i) {
      const int from = taps * i / count, to = taps * (i + 1) / count;
      sizes.set[sizes.sets] = {phase, first + from, to - from};
      reach = max(reach, sizes.reach(sizes.set[sizes.sets++]));
    }
  }
  sizes.ring_rows = (kSlabStages * sizes.tile_positions + reach + 7) / 8 * 8;
  sizes.overlap = kRingOverlap;
  return sizes;
}

// Parts with which all SMs have work to the end: a few waves of thread blocks.
inline int weight_gradient_parts(const ConvolutionSizes& of, int terms, int processors) {
  ConvShape shape{};
  TapOrder order;
  if (!of.has_outputs() || !lay_out(of, 1, false, shape, order)) return 0;
  const GradientTiling sizes = gradient_sizes(shape, terms, false, false);
  int64_t best = 1, least = -1;
  for (int waves = 1; waves <= 4; ++waves) {
    const int64_t parts =
        min(int64_t(sizes.slabs()), int64_t(waves) * processors / sizes.work_units());
    if (parts == 0) continue;
    const int64_t slabs = waves * ((sizes.slabs() + parts - 1) / parts + kPartSlabs);
    if (least < 0 || slabs < least) best = parts, least = slabs;
  }
  return int(best);
}

// Room for the sum of every weight in every part.
inline int64_t weight_gradient_bytes(const ConvolutionSizes& of, int parts) {
  return int64_t(4) * parts * of.groups * of.channels_out * of.channels * of.taps();
}

// `workspace` has weight_gradient_bytes. Any number of parts is right; weight_gradient_parts is
// fast.
template <int kTerms, class Taps = AnyTaps, class X, class Dy>
static int weight_gradient(const X& x, const Dy& dy, const WeightGradient& dw,
                           const ConvolutionSizes& of, int parts, void* workspace, int device,
                           void* stream) {
  GradientResultTile<Dy> result = {x, dy, dw};
  ConvShape& shape = result.shape;
  const int64_t elements = weight_gradient_bytes(of, 1) / 4;
  if (!lay_out(of, 1, false, shape, result.order)) return static_cast<int>(cudaErrorInvalidValue);
  if (elements == 0) return 0;
  if (!x.has_near_channels() || !dy.has_near_channels()) {
    return static_cast<int>(cudaErrorInvalidValue);
  }
  const OnDevice here(device);
  float* const sums = static_cast<float*>(workspace);
  if (!of.has_outputs()) {
    parts = 0;
  } else {
    GradientTiling sizes =
        gradient_sizes(shape, kTerms, x.by_channels(of.channels), dy.by_channels(of.channels_out));
    sizes.parts = parts;
    const int64_t shared_bytes = GradientShared<kTerms>::bytes(sizes);
    if (shared_bytes > kSharedBytes || (kTerms == 1 && !has_all_taps<Taps>(sizes))) {
      return static_cast<int>(cudaErrorInvalidValue);
    }
    const int blocks = sizes.work_units() * parts;
    const auto kernel = gradient_kernel<kTerms, Taps, X, Dy>;
    static Persistent once;
    once.ready(kernel, device);
    kernel<<<blocks, kGradientThreads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(
        x, dy, sums, sizes);
  }
  add_all_parts(result, sums, parts, elements, stream);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
