// A convolution as a model gives it: the weights are split into halves in the order in which the
// window kernel reads them, and the taps laid out over the phases of the stride.
#pragma once

#include "convolution/convolution_sizes.cuh"
#include "scalar/fp16_scale.hpp"
#include "sm90/convolution/sm90_staged_convolution.cuh"
#include "convolution/taps.cuh"

namespace fw {

__device__ __forceinline__ float other_lane(float mine, int by) {
  return __shfl_xor_sync(0xffffffffu, mine, by);
}
__device__ __forceinline__ LineSample other_lane(const LineSample& mine, int by) {
  return {other_lane(mine.largest, by), other_lane(mine.count, by),
          other_lane(mine.exponents, by)};
}

// What all threads have together.
template <int kMostThreads, class Value, class Join>
__device__ __forceinline__ Value of_all(Value mine, const Join& join) {
  __shared__ Value of_warp[kMostThreads / 32];
#pragma unroll
  for (int by = 16; by > 0; by /= 2) mine = join(mine, other_lane(mine, by));
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  mine = of_warp[0];
#pragma unroll 1
  for (int warp = 1; warp < int(blockDim.x) / 32; ++warp) mine = join(mine, of_warp[warp]);
  return mine;
}

// A block for each out channel of all groups, which keeps its numbers in shared memory where that has
// room for so many. `lo` may be null: not wanted. The `samples` blocks before those find scales for
// lines, of an image and group each. All are to run at once: registers for as many threads as there are.
constexpr int kSplitThreads = 512;
template <class Input>
__global__ void __launch_bounds__(kSplitThreads, 2048 / kSplitThreads)
    split_filter(const WindowFilter filter, const WindowShape shape, const TapOrder order, half* hi,
                 half* lo, float* inverse, int room, const Input x, const WindowLines lines,
                 int samples) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ int64_t place_of[kMostTaps];
  float* const kept = reinterpret_cast<float*>(memory);
  const auto larger = [](float x, float y) { return fmaxf(x, y); };
  let_next_begin();
  const int thread = threadIdx.x, threads = blockDim.x, out = int(blockIdx.x) - samples;
  if (out < 0) {
    const int place = blockIdx.x, image = place / shape.groups;
    const LineSample mine = sampled(x, shape, image, place - image * shape.groups);
    const LineSample sample = of_all<kSplitThreads>(mine, LineSample::joined);
    if (thread == 0) lines.scales[place] = sample.scale(), lines.counts[place] = {};
    return;
  }
  const int group = out / shape.channels_out, of_group = out % shape.channels_out;
  const int channel_out = shape.channel_of(of_group);
  const bool exists = channel_out < shape.results();
  const float* from = filter.data + group * filter.group_stride + channel_out * filter.out_stride;
  const int numbers = shape.channels * shape.taps;
  if (thread < shape.taps) {
    const uint32_t tap_x = shape.tap_x(order.x[thread], shape.column_of(of_group));
    const bool there = exists && tap_x != kNoTap;
    place_of[thread] = there ? shape.tap_z(thread) * filter.z_stride +
                                   order.y[thread] * filter.y_stride + tap_x * filter.x_stride
                             : int64_t(-1);
  }
  __syncthreads();
  const auto number = [&](int channel, int tap) {
    return place_of[tap] < 0 ? 0.f : from[channel * filter.in_stride + place_of[tap]];
  };
  float largest = 0.f;
  int channel = thread / shape.taps, tap = thread % shape.taps;
  const int channels_on = threads / shape.taps, taps_on = threads % shape.taps;
#pragma unroll 4
  for (int i = thread; i < numbers; i += threads) {
    const float x = number(channel, tap);
    largest = fmaxf(largest, finite_magnitude(x));
    if (i < room) kept[i] = x;
    channel += channels_on, tap += taps_on;
    if (tap >= shape.taps) tap -= shape.taps, ++channel;
  }
  largest = of_all<kSplitThreads>(largest, larger);
  const float scale = half_scale(largest);
  if (thread == 0) inverse[out] = largest > 0.f ? 1.f / scale : 1.f;
  int64_t box = int64_t(group) * shape.boxes_between(0, shape.phases);
  // Eight channels of a tap, to the place `at` after the first of a box; zeros if it is not there.
  const auto split_eight = [&](bool there, int from_channel, int tap, int64_t of_box, int at) {
    float x[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int channel = from_channel + k, i = channel * shape.taps + tap;
      x[k] = !there || channel >= shape.channels ? 0.f : i < room ? kept[i] : number(channel, tap);
    }
    const Fragment eight = halves_of(x, scale);
    const int64_t to = (of_box * shape.channels_out + of_group) * 64 + at;
    const auto put = [&](half* halves, const uint32_t (&pairs)[4]) {
      *reinterpret_cast<uint4*>(halves + to) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    };
    put(hi, eight.hi);
    if (lo != nullptr) put(lo, eight.lo);
  };
  const int whole = shape.channels / 64, steps = (shape.channels % 64 + 15) / 16;
  for (int of_class = 0; of_class < shape.classes; ++of_class) {
    if (shape.stages(of_class) == 0) continue;
    // With all 64 channels a box is a tap, one phase after the other.
    const int first_tap = shape.first_tap(of_class), taps = shape.taps_of(of_class);
#pragma unroll 1
    for (int i = thread; i < whole * taps * 8; i += threads) {
      const int at = i / 8, block = at / taps;
      split_eight(true, 64 * block + i % 8 * 8, first_tap + at - block * taps, box + at, i % 8 * 8);
    }
    box += whole * taps;
    for (int at = shape.first_phase(of_class); steps > 0 && at < shape.end_phase(of_class); ++at) {
      const WindowPhase& phase = shape.phase[at];
      const int boxes = shape.boxes(at, shape.channels % 64);
      for (int i = thread; i < boxes * 8; i += threads) {
        const int tap = i / 2 / steps, channel = (i / 2 - tap * steps) * 16 + i % 2 * 8;
        split_eight(tap < phase.taps, 64 * whole + channel, phase.first + tap, box + i / 8,
                    i % 8 * 8);
      }
      box += boxes;
    }
  }
}

// Where lines lie in a workspace: whole images, then what is known of each.
inline WindowLines lines_at(void* from, const WindowShape& shape, bool keep_all) {
  const WindowSizes sizes(shape, 1, 1);
  const int64_t places = int64_t(shape.images) * shape.groups;
  const int64_t numbers = sizes.positions() * shape.groups * sizes.blocks() * shape.planes * 64;
  half* const rows = static_cast<half*>(from);
  float* const scales = reinterpret_cast<float*>(rows + numbers);
  return {rows, scales, reinterpret_cast<LineCounts*>(scales + places), keep_all};
}

// A block for each image and group.
template <class Input>
__global__ void __launch_bounds__(256)
    sample_lines(const Input x, const WindowShape shape, const WindowLines lines) {
  await_kernel_before();
  let_next_begin();
  const int place = blockIdx.x, image = place / shape.groups;
  const LineSample mine = sampled(x, shape, image, place - image * shape.groups);
  const LineSample sample = of_all<256>(mine, LineSample::joined);
  if (threadIdx.x == 0) lines.scales[place] = sample.scale(), lines.counts[place] = {};
}

// Lines whose scales are not known yet.
template <class Input>
void lay_out_sampled(const Input& x, const WindowSizes& sizes, const WindowLines& lines,
                     void* stream) {
  const int blocks = sizes.shape.images * sizes.shape.groups;
  const auto kernel = sample_lines<Input>;
  launch_behind(kernel, blocks, 256, 0, stream, x, sizes.shape, lines);
  lay_out_all(x, sizes, lines, stream);
}

// The lines of a convolution that shares them, which is to do nothing else, or goes about it in another
// way.
template <class Input>
static int leave_lines(const Input& x, const ConvolutionSizes& of, void* memory, int device,
                       void* stream) {
  WindowShape shape{};
  TapOrder order{};
  if (!lay_out(of, 4, true, shape, order)) return static_cast<int>(cudaErrorInvalidValue);
  if (!of.has_outputs()) return 0;
  const OnDevice here(device);
  WindowSizes sizes(shape, 1, 1);
  sizes.by_channels = x.by_channels(shape.channels);
  lay_out_sampled(x, sizes, lines_at(memory, shape, of.shares_lines), stream);
  return static_cast<int>(cudaGetLastError());
}

// How a convolution goes about it with one half of each number: tiles of so many out channels; or all of
// them, by warpgroups in turns; or with the input from lines, so many positions in a tile. kBeside is
// that of the sizes' order of rows.
template <int kTileChannels, int kBeside = 0>
struct ByTiles {
  template <int kTerms>
  using Kind = WindowKind<kTerms, kTileChannels, false, kBeside>;
};
template <int kTileChannels, int kBeside = 0>
struct InTurns {
  template <int kTerms>
  using Kind = WindowKind<kTerms, kTileChannels, kTerms == 1, kBeside>;
};
template <int kTileChannels, int kPositions, int kBeside = 0>
struct ByLines {
  template <int kTerms>
  using Kind = std::conditional_t<kTerms == 1, LineKind<kPositions, kBeside>,
                                  WindowKind<kTerms, kTileChannels, false, kBeside>>;
};

// `workspace` has room for both halves and the scales of all weights, `memory` for lines.
template <int kTerms, class Way, int kLanes, bool kAlways = false, class End, class Input>
int convolution(const End& end, bool vectors, const Input& x, const WindowFilter& filter,
                const ConvolutionSizes& of, void* workspace, void* memory, int device,
                void* stream) {
  using Kind = typename Way::template Kind<kTerms>;
  constexpr bool kLines = Kind::kLines;
  if (!of.has_outputs()) return end_nothing(end, device, stream);
  WindowShape shape{};
  TapOrder order{};
  if (Kind::kBeside != of.row_order.beside || !lay_out(of, 4, kLines, shape, order)) {
    return static_cast<int>(cudaErrorInvalidValue);
  }
  int reach = 0;
  for (int phase = 0; phase < shape.phases; ++phase) reach = max(reach, shape.phase[phase].reach);
  shape.stage_rows = (Kind::kTilePositions + reach + 7) / 8 * 8;

  const OnDevice here(device);
  const int outs = of.groups * of.channels_out;
  const int64_t numbers = int64_t(outs) * shape.boxes_between(0, shape.phases) * 64;
  half* const hi = static_cast<half*>(workspace);
  half* const lo = hi + numbers;
  float* const inverse = reinterpret_cast<float*>(lo + numbers);
  const WindowLines lines = kLines ? lines_at(memory, shape, of.shares_lines) : WindowLines{};
  const int samples = kLines ? shape.images * shape.groups : 0, blocks = samples + outs;
  const int room = min(of.channels * shape.taps, 8192);  // with 32 KB, several blocks a processor
  if (outs > 0) {
    static_assert(kSplitThreads >= kMostTaps, "a thread for each tap");
    const int threads = of.channels * shape.taps < 1024 ? kMostTaps : kSplitThreads;
    // An ordinary launch: the next kernels read x before they wait for this one, so x has to be there.
    const auto kernel = split_filter<Input>;
    kernel<<<blocks, threads, 4 * room, static_cast<cudaStream_t>(stream)>>>(
        filter, shape, order, hi, kTerms == 1 ? nullptr : lo, inverse, room, x, lines, samples);
  }
  const WindowWeights w = {hi, lo, inverse, filter, order};
  if constexpr (kLines) {
    return line_window<Kind, kLanes, kAlways>(end, vectors, x, w, shape, lines, device, stream);
  } else {
    return window<Kind, kLanes, kAlways>(end, vectors, x, w, shape, device, stream);
  }
}

}  // namespace fw
