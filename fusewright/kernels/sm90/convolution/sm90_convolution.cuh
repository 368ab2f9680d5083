// A convolution as a model defines it: splits the weights into fp16 parts, in the order in which
// the kernel reads them, and orders the taps by the phases of the stride.
#pragma once

#include "convolution/convolution_sizes.cuh"
#include "scalar/fp16_scale.hpp"
#include "sm90/convolution/sm90_staged_convolution.cuh"
#include "convolution/taps.cuh"

namespace fw {

FW_DEVICE float other_lane(float mine, int by) { return __shfl_xor_sync(0xffffffffu, mine, by); }
FW_DEVICE InputSample other_lane(const InputSample& mine, int by) {
  return {other_lane(mine.largest, by), other_lane(mine.count, by), other_lane(mine.exponents, by)};
}

// Combines the values of all threads.
template <int kMostThreads, class Value, class Join>
FW_DEVICE Value of_all(Value mine, const Join& join) {
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

// A thread block for each output channel of all groups. It keeps the first `room` weights of its
// channel in shared memory. `lo` may be null: then low parts are not wanted. The first `samples`
// thread blocks choose the scales of the staged input instead, for an image and group each. All
// threads that an SM has room for are to run at once, which limits their registers.
constexpr int kSplitThreads = 512;
template <class Input>
__global__ void __launch_bounds__(kSplitThreads, 2048 / kSplitThreads)
    split_filter(const ConvFilter filter, const ConvShape shape, const TapOrder order, half* hi,
                 half* lo, float* inverse, int room, const Input x, const StagedInput staged,
                 int samples) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ int64_t offset_of[kMostTaps];
  float* const kept = reinterpret_cast<float*>(memory);
  const auto larger = [](float x, float y) { return fmaxf(x, y); };
  let_next_begin();
  const int thread = threadIdx.x, threads = blockDim.x, out = int(blockIdx.x) - samples;
  if (out < 0) {
    const int image_group = blockIdx.x, image = image_group / shape.groups;
    const InputSample mine = sampled(x, shape, image, image_group - image * shape.groups);
    const InputSample sample = of_all<kSplitThreads>(mine, InputSample::joined);
    if (thread == 0) staged.scales[image_group] = sample.scale(), staged.counts[image_group] = {};
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
    offset_of[thread] = there ? shape.tap_z(thread) * filter.z_stride +
                                    order.y[thread] * filter.y_stride + tap_x * filter.x_stride
                              : int64_t(-1);
  }
  __syncthreads();
  const auto number = [&](int channel, int tap) {
    return offset_of[tap] < 0 ? 0.f : from[channel * filter.in_stride + offset_of[tap]];
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
  const float scale = fp16_scale(largest);
  if (thread == 0) inverse[out] = largest > 0.f ? 1.f / scale : 1.f;
  int64_t box = int64_t(group) * shape.boxes_between(0, shape.phases);
  // Writes eight channels of a tap at offset `at` of a row of a box; zeros if `there` is false.
  const auto split_eight = [&](bool there, int from_channel, int tap, int64_t of_box, int at) {
    float x[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int channel = from_channel + k, i = channel * shape.taps + tap;
      x[k] = !there || channel >= shape.channels ? 0.f : i < room ? kept[i] : number(channel, tap);
    }
    const Fragment eight = fp16_parts_of(x, scale);
    const int64_t to = (of_box * shape.channels_out + of_group) * 64 + at;
    const auto put = [&](half* part, const uint32_t (&pairs)[4]) {
      *reinterpret_cast<uint4*>(part + to) = {pairs[0], pairs[1], pairs[2], pairs[3]};
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
      const TapPhase& phase = shape.phase[at];
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

// The staged input in a workspace: the rows of all images, then what is known of each image.
inline StagedInput staged_at(void* from, const ConvShape& shape, bool keep_all) {
  const ConvTiling sizes(shape, 1, 1);
  const int64_t image_groups = int64_t(shape.images) * shape.groups;
  const int64_t numbers = sizes.positions() * shape.groups * sizes.blocks() * shape.planes * 64;
  half* const rows = static_cast<half*>(from);
  float* const scales = reinterpret_cast<float*>(rows + numbers);
  return {rows, scales, reinterpret_cast<StagedCounts*>(scales + image_groups), keep_all};
}

// A thread block for each image and group.
template <class Input>
__global__ void __launch_bounds__(256)
    sample_input(const Input x, const ConvShape shape, const StagedInput staged) {
  await_kernel_before();
  let_next_begin();
  const int image_group = blockIdx.x, image = image_group / shape.groups;
  const InputSample mine = sampled(x, shape, image, image_group - image * shape.groups);
  const InputSample sample = of_all<256>(mine, InputSample::joined);
  if (threadIdx.x == 0)
    staged.scales[image_group] = sample.scale(), staged.counts[image_group] = {};
}

// Stages an input whose scales are not known yet.
template <class Input>
void lay_out_sampled(const Input& x, const ConvTiling& sizes, const StagedInput& staged,
                     void* stream) {
  const int blocks = sizes.shape.images * sizes.shape.groups;
  const auto kernel = sample_input<Input>;
  launch_behind(kernel, blocks, 256, 0, stream, x, sizes.shape, staged);
  lay_out_all(x, sizes, staged, stream);
}

// Stages the input of a convolution that shares it, if the convolution itself is not wanted, or is
// computed in another way.
template <class Input>
static int stage_input(const Input& x, const ConvolutionSizes& of, void* memory, int device,
                       void* stream) {
  ConvShape shape{};
  TapOrder order{};
  if (!lay_out(of, 4, true, shape, order)) return static_cast<int>(cudaErrorInvalidValue);
  if (!of.has_outputs()) return 0;
  const OnDevice here(device);
  ConvTiling sizes(shape, 1, 1);
  sizes.by_channels = x.by_channels(shape.channels);
  lay_out_sampled(x, sizes, staged_at(memory, shape, of.shares_staged), stream);
  return static_cast<int>(cudaGetLastError());
}

// How a convolution is computed: in tiles of kTileChannels output channels; or with one term, in
// tiles of all output channels, by warpgroups in ping-pong; or with one term, from staged input,
// kPositions positions in a tile. kBeside is that of the sizes' row order.
template <int kTileChannels, int kBeside = 0>
struct ByTiles {
  template <int kTerms>
  using Kind = ConvKind<kTerms, kTileChannels, false, kBeside>;
};
template <int kTileChannels, int kBeside = 0>
struct PingPong {
  template <int kTerms>
  using Kind = ConvKind<kTerms, kTileChannels, kTerms == 1, kBeside>;
};
template <int kTileChannels, int kPositions, int kBeside = 0>
struct ByStagedInput {
  template <int kTerms>
  using Kind = std::conditional_t<kTerms == 1, StagedConvKind<kPositions, kBeside>,
                                  ConvKind<kTerms, kTileChannels, false, kBeside>>;
};

// `workspace` has room for both parts and the scales of all weights, `memory` for the staged input.
template <int kTerms, class Way, int kLanes, bool kAlways = false, class Epilogue, class Input>
int convolution(const Epilogue& end, bool vectors, const Input& x, const ConvFilter& filter,
                const ConvolutionSizes& of, void* workspace, void* memory, int device,
                void* stream) {
  using Kind = typename Way::template Kind<kTerms>;
  constexpr bool kStaged = Kind::kStaged;
  if (!of.has_outputs()) return end_nothing(end, device, stream);
  ConvShape shape{};
  TapOrder order{};
  if (Kind::kBeside != of.row_order.beside || !lay_out(of, 4, kStaged, shape, order)) {
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
  const StagedInput staged = kStaged ? staged_at(memory, shape, of.shares_staged) : StagedInput{};
  const int samples = kStaged ? shape.images * shape.groups : 0, blocks = samples + outs;
  const int room = min(of.channels * shape.taps, 8192);  // 32 KB: several thread blocks share an SM
  if (outs > 0) {
    static_assert(kSplitThreads >= kMostTaps, "a thread for each tap");
    const int threads = of.channels * shape.taps < 1024 ? kMostTaps : kSplitThreads;
    // An ordinary launch: the next kernels read x before they wait for this one, so x must be
    // complete.
    const auto kernel = split_filter<Input>;
    kernel<<<blocks, threads, 4 * room, static_cast<cudaStream_t>(stream)>>>(
        filter, shape, order, hi, kTerms == 1 ? nullptr : lo, inverse, room, x, staged, samples);
  }
  const SplitFilter w = {hi, lo, inverse, filter, order};
  if constexpr (kStaged) {
    return staged_convolution<Kind, kLanes, kAlways>(end, vectors, x, w, shape, staged, device,
                                                     stream);
  } else {
    return tensor_core_convolution<Kind, kLanes, kAlways>(end, vectors, x, w, shape, device,
                                                          stream);
  }
}

}  // namespace fw
