// dw[q, 0, ky, kx] = Σ dy[n, q, oy, ox]·x[n, c, oy·sy − top + ky·dy, ox·sx − left + kx·dx]
// over n, oy and ox, where a group has a single input channel c: plain fp32 sums.
//
// A thread block has one output channel and a part of all images' strips; a strip is some rows. A
// thread takes every kDepthwiseThreads-th column of these strips, for all taps. The threads' sums
// are added in a fixed order, and a second kernel adds the parts in order: the result is the same
// to the bit each time.
#pragma once

#include "convolution/depthwise_convolution.cuh"

namespace fw {

struct DepthwiseGradient {
  float* data;
  int64_t out_stride, in_stride, z_stride, y_stride, x_stride;
};

// For kRows positions of one column. Each element of the input is read once, for all taps.
template <int kRows, class Taps>
FW_DEVICE void add_grad_outputs(float (&sum)[Taps::kAll], int y, int across, const float* plane,
                                const ConvInput& x, const float* by, const ConvInput& dy,
                                const ConvolutionSizes& of) {
  float grad_output[kRows];
#pragma unroll
  for (int at = 0; at < kRows; ++at) {
    grad_output[at] = by[(y + at) * dy.y_stride + across * dy.x_stride];
  }
  read_taps<3, Taps, kRows>(y, across, plane, x, of,
                            [&](float number, int at, int tap_y, int tap_x) {
                              float& to = sum[tap_y * Taps::kX + tap_x];
                              to = __fmaf_rn(number, grad_output[at], to);
                            });
}

// The strips of an image have kRows rows each; the last one also has the remaining rows.
template <int kRows>
FW_FN int64_t strips_of(const ConvolutionSizes& of) {
  return of.y.out < kRows ? 1 : of.y.out / kRows;
}

template <class Taps, int kRows>
__global__ void __launch_bounds__(kDepthwiseThreads, Taps::kAll > 9 ? 2 : 3)
    depthwise_gradient_kernel(const ConvInput x, const ConvInput dy, float* sums,
                              const ConvolutionSizes of, int64_t strips_each) {
  const int channel = blockIdx.x, group = channel / of.channels_out;
  const int64_t strips = strips_of<kRows>(of), all = of.images * strips;
  const int64_t first = int64_t(blockIdx.y) * strips_each;
  const int64_t last = first + strips_each < all ? first + strips_each : all;
  const float* const from = x.data + group * x.channel_stride;
  const float* const by = dy.data + channel * dy.channel_stride;
  float sum[Taps::kAll] = {};
  for (int64_t at = threadIdx.x, end = (last - first) * of.x.out; at < end;
       at += kDepthwiseThreads) {
    const int64_t below = over(at, of.x.out), strip = first + below, image = over(strip, strips);
    const int across = int(at - below * of.x.out), which = int(strip - image * strips);
    const float* const plane = from + image * x.image_stride;
    const float* const grad_outputs = by + image * dy.image_stride;
    int y = which * kRows;
    if (y + kRows <= of.y.out) {
      add_grad_outputs<kRows, Taps>(sum, y, across, plane, x, grad_outputs, dy, of);
      y += kRows;
    }
    const int below_it = which + 1 < strips ? y : of.y.out;
    for (; y < below_it; ++y)
      add_grad_outputs<1, Taps>(sum, y, across, plane, x, grad_outputs, dy, of);
  }
  __shared__ float met[kDepthwiseThreads / 32][Taps::kAll];
#pragma unroll
  for (int tap = 0; tap < Taps::kAll; ++tap) {
#pragma unroll
    for (int far = 16; far > 0; far /= 2) sum[tap] += __shfl_xor_sync(0xffffffffu, sum[tap], far);
    if (threadIdx.x % 32 == 0) met[threadIdx.x / 32][tap] = sum[tap];
  }
  __syncthreads();
  if (threadIdx.x >= Taps::kAll) return;
  float total = 0.f;
#pragma unroll
  for (int warp = 0; warp < kDepthwiseThreads / 32; ++warp) total += met[warp][threadIdx.x];
  sums[(int64_t(blockIdx.y) * gridDim.x + channel) * Taps::kAll + threadIdx.x] = total;
}

template <class Taps>
__global__ void __launch_bounds__(kDepthwiseThreads)
    add_depthwise_parts(const DepthwiseGradient dw, const float* sums, int channels, int parts) {
  const int64_t at = int64_t(blockIdx.x) * kDepthwiseThreads + threadIdx.x,
                all = channels * Taps::kAll;
  if (at >= all) return;
  float total = 0.f;
#pragma unroll 8
  for (int part = 0; part < parts; ++part) total += sums[part * all + at];
  const int64_t channel = at / Taps::kAll, tap = at % Taps::kAll;
  dw.data[channel * dw.out_stride + tap / Taps::kX * dw.y_stride + tap % Taps::kX * dw.x_stride] =
      total;
}

// `workspace` has room for the taps of all channels, `parts` times.
template <class Taps, int kRows>
static int depthwise_gradient(const ConvInput& x, const ConvInput& dy, const DepthwiseGradient& dw,
                              const ConvolutionSizes& of, int parts, void* workspace, int device,
                              void* stream) {
  const int64_t channels = int64_t(of.groups) * of.channels_out;
  if (channels == 0) return 0;
  if (of.channels != 1 || !of.z.is_single() || channels > 0x7fffff || parts > 0xffff) {
    return static_cast<int>(cudaErrorInvalidValue);
  }
  const OnDevice here(device);
  const int64_t strips = of.images * strips_of<kRows>(of);
  float* const sums = static_cast<float*>(workspace);
  constexpr int kThreads = kDepthwiseThreads;
  {
    const auto kernel = depthwise_gradient_kernel<Taps, kRows>;
    const dim3 grid{unsigned(channels), unsigned(parts)};
    const int64_t each = (strips + parts - 1) / parts;
    kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(x, dy, sums, of, each);
  }
  const auto kernel = add_depthwise_parts<Taps>;
  const unsigned grid = unsigned((channels * Taps::kAll + kThreads - 1) / kThreads);
  kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(dw, sums, int(channels), parts);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
