// dw[q, 0, ky, kx] = Σ dy[n, q, oy, ox]·x[n, c, oy·sy − top + ky·dy, ox·sx − left + kx·dx] over n, oy and ox,
// where a group has a single channel c: plain fp32 sums.
//
// A thread block has an out channel and a part of the rows of all images, a thread every
// kPlaneThreads-th position of them, for all taps. Threads meet in a fixed order, and a second kernel adds the parts up in
// theirs: the same bits each time.
#pragma once

#include "plane_convolution.cuh"

namespace fw {

struct PlaneGradient {
  float* data;
  int64_t out_stride, in_stride, z_stride, y_stride, x_stride;
};

template <class Taps>
__global__ void __launch_bounds__(kPlaneThreads)
    plane_gradient_kernel(const WindowInput x, const WindowInput dy, float* sums,
                          const ConvolutionSizes of, int64_t rows_each) {
  const int channel = blockIdx.x, group = channel / of.channels_out;
  const int64_t rows = of.images * of.y.out, first = int64_t(blockIdx.y) * rows_each;
  const int64_t last = first + rows_each < rows ? first + rows_each : rows;
  const float* const from = x.data + group * x.channel_stride;
  const float* const by = dy.data + channel * dy.channel_stride;
  float sum[Taps::kAll] = {};
  for (int64_t at = threadIdx.x, all = (last - first) * of.x.out; at < all; at += kPlaneThreads) {
    const int64_t below = over(at, of.x.out), row = first + below, image = over(row, of.y.out);
    const int across = int(at - below * of.x.out), y = int(row - image * of.y.out);
    const float change = by[image * dy.image_stride + y * dy.y_stride + across * dy.x_stride];
    const float* const plane = from + image * x.image_stride;
#pragma unroll
    for (int tap = 0; tap < Taps::kAll; ++tap) {
      const int at_y = y * Taps::kStepY - of.y.padding + tap / Taps::kX * Taps::kSpreadY;
      const int at_x = across * Taps::kStepX - of.x.padding + tap % Taps::kX * Taps::kSpreadX;
      const bool inside = unsigned(at_y) < unsigned(of.y.in) && unsigned(at_x) < unsigned(of.x.in);
      const float* const read = plane + at_y * x.y_stride + at_x * x.x_stride;
      sum[tap] = __fmaf_rn(plane_number<3>(inside, read), change, sum[tap]);
    }
  }
  __shared__ float met[kPlaneThreads / 32][Taps::kAll];
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
  for (int warp = 0; warp < kPlaneThreads / 32; ++warp) total += met[warp][threadIdx.x];
  sums[(int64_t(blockIdx.y) * gridDim.x + channel) * Taps::kAll + threadIdx.x] = total;
}

template <class Taps>
__global__ void __launch_bounds__(kPlaneThreads)
    add_plane_parts(const PlaneGradient dw, const float* sums, int channels, int parts) {
  const int64_t at = int64_t(blockIdx.x) * kPlaneThreads + threadIdx.x, all = channels * Taps::kAll;
  if (at >= all) return;
  float total = 0.f;
#pragma unroll 8
  for (int part = 0; part < parts; ++part) total += sums[part * all + at];
  const int64_t channel = at / Taps::kAll, tap = at % Taps::kAll;
  dw.data[channel * dw.out_stride + tap / Taps::kX * dw.y_stride + tap % Taps::kX * dw.x_stride] =
      total;
}

// `workspace` has room for the taps of all channels, `parts` times.
template <class Taps>
static int plane_gradient(const WindowInput& x, const WindowInput& dy, const PlaneGradient& dw,
                          const ConvolutionSizes& of, int parts, void* workspace, int device,
                          void* stream) {
  const int64_t channels = int64_t(of.groups) * of.channels_out;
  if (channels == 0) return 0;
  if (of.channels != 1 || !of.z.is_single() || channels > 0x7fffff || parts > 0xffff) {
    return static_cast<int>(cudaErrorInvalidValue);
  }
  const OnDevice here(device);
  const int64_t rows = of.images * of.y.out;
  float* const sums = static_cast<float*>(workspace);
  constexpr int kThreads = kPlaneThreads;
  {
    const auto kernel = plane_gradient_kernel<Taps>;
    const dim3 grid{unsigned(channels), unsigned(parts)};
    const int64_t each = (rows + parts - 1) / parts;
    kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(x, dy, sums, of, each);
  }
  const auto kernel = add_plane_parts<Taps>;
  const unsigned grid = unsigned((channels * Taps::kAll + kThreads - 1) / kThreads);
  kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(dw, sums, int(channels), parts);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
