// y[n, q, oy, ox] = epilogue(Σ x[n, c, oy·sy − top + ky·dy, ox·sx − left + kx·dx]·w[q, c, ky, kx])
// as plain fp32 sums, for thin convolutions, where tensor cores would mostly multiply zeros. With
// one term both operands are rounded to TF32, as cuDNN does then, so that results are close to
// cuDNN's.
//
// A thread block goes from tile to tile, each of one image and group, and computes all output
// channels of a tile, some at a time. What the taps read of the input channels is in shared memory,
// all channels or some at a time, and the next are loaded while these are read. The weights of the
// group are in shared memory, too. A thread computes kRows positions of one column, which share
// what they read, for kOuts channels. A tile of a volume has one z. What the taps of different z
// read of a channel are separate layers, as if they were channels.
#pragma once

#include "convolution/convolution_sizes.cuh"
#include "cuda/epilogues.cuh"
#include "sm90/isa/sm90_instructions.cuh"
#include "sm90/isa/sm90_launch.cuh"

namespace fw {

constexpr int kDirectThreads = 128;
constexpr int kDirectBytes = 112 * 1024;  // of shared memory: two thread blocks fit on an SM

// What the compiler knows of a convolution: taps, strides and dilations.
template <int kTapsY, int kTapsX, int kStrideY, int kStrideX, int kDilationY, int kDilationX>
struct DirectTaps {
  static constexpr int kY = kTapsY, kX = kTapsX, kAll = kTapsY * kTapsX;
  static constexpr int kSpreadY = kDilationY, kSpreadX = kDilationX;
  static constexpr int kStepY = kStrideY, kStepX = kStrideX;
  // How many elements `positions` neighbouring positions read.
  FW_FN static constexpr int across_y(int positions) {
    return (positions - 1) * kStrideY + (kTapsY - 1) * kDilationY + 1;
  }
  FW_FN static constexpr int across_x(int positions) {
    return (positions - 1) * kStrideX + (kTapsX - 1) * kDilationX + 1;
  }
};

// How a thread block covers its tile: kAcross threads in a row, kRows positions each.
template <int kTerms_, class Taps_, int kOuts_, int kRows_, int kAcross_>
struct DirectTile {
  using Taps = Taps_;
  static constexpr int kTerms = kTerms_;
  static constexpr int kOuts = kOuts_, kRows = kRows_, kAcross = kAcross_;
  static constexpr int kWidth = kAcross, kHeight = kDirectThreads / kAcross * kRows;
  static constexpr int kPatchRows = Taps::across_y(kHeight);
  static constexpr int kPatchColumns = Taps::across_x(kWidth);
  static constexpr int kPatch = kPatchRows * kPatchColumns;  // elements of a channel
  // Thread blocks per SM, by the registers that the sums take.
  static constexpr int kBlocks = kOuts * kRows <= 8 ? 8 : kOuts < 8 ? 5 : 4;
};

// How shared memory is divided: two buffers for the patches of some layers, and the weights of the
// only group or of two groups, this tile's and the next one's.
struct DirectSizes {
  ConvolutionSizes of;
  int tiles_x, tiles_y, tiles;  // of a plane; of all images and groups
  int layers;                   // of a group: channels times taps along z
  int together;                 // layers of a patch
  int outs;                     // output channels, rounded up to a multiple of kOuts
  int weights;                  // of a group, rounded up to a multiple of four

  FW_FN int weight_buffers() const { return of.groups > 1 ? 2 : 1; }
  template <class Tile>
  FW_FN int64_t bytes() const {
    return 4 * (int64_t(weight_buffers()) * weights + 2 * int64_t(together) * Tile::kPatch);
  }
};

// What is computed from one buffer: some layers of a tile and all output channels; or kOuts of
// these, if the layers do not fit at once.
template <class Tile>
struct DirectItem {
  const DirectSizes& sizes;
  int tile, out = 0, layer = 0, parity = 0;

  FW_DEVICE bool ended() const { return tile >= sizes.tiles; }
  FW_DEVICE bool begins_tile() const { return out == 0 && layer == 0; }
  FW_DEVICE int layers() const { return min(sizes.together, sizes.layers - layer); }
  FW_DEVICE bool is_last() const { return layer + sizes.together >= sizes.layers; }
  FW_DEVICE void advance() {
    layer += sizes.together;
    if (layer < sizes.layers) return;
    layer = 0;
    out += Tile::kOuts;
    if (sizes.together < sizes.layers && out < sizes.of.channels_out) return;
    out = 0, tile += gridDim.x, parity ^= 1;
  }
};

// The channel and the tap along z of a layer.
struct DirectLayer {
  int channel, tap_z;

  FW_DEVICE DirectLayer(const DirectSizes& sizes, int layer)
      : channel(kVolumes ? layer / sizes.of.z.kernel : layer),
        tap_z(kVolumes ? layer - channel * sizes.of.z.kernel : 0) {}
};

// The first position of a tile, its image and its group.
struct DirectPosition {
  int x, y, z, group, image;

  template <class Tile>
  FW_DEVICE static DirectPosition of(const DirectSizes& sizes, int tile) {
    const int row = tile / sizes.tiles_x, plane = row / sizes.tiles_y;
    const int deep = plane / sizes.of.groups, image = kVolumes ? deep / sizes.of.z.out : deep;
    return {(tile - row * sizes.tiles_x) * Tile::kWidth,
            (row - plane * sizes.tiles_y) * Tile::kHeight,
            kVolumes ? deep - image * sizes.of.z.out : 0, plane - deep * sizes.of.groups, image};
  }
};

// Loads the weights of a group: [layer][tap][out], zeros after the last output channel.
template <class Tile>
FW_DEVICE void load_direct_weights(float* to, const ConvFilter& w, int group,
                                   const DirectSizes& sizes) {
  using Taps = typename Tile::Taps;
  const float* const from = w.data + group * w.group_stride;
  for (int i = threadIdx.x; i < sizes.layers * Taps::kAll * sizes.outs; i += kDirectThreads) {
    const int row = i / sizes.outs, out = i - row * sizes.outs;
    const DirectLayer layer(sizes, row / Taps::kAll);
    const int tap = row % Taps::kAll;
    const bool there = out < sizes.of.channels_out;
    const float* const at = from + out * w.out_stride + layer.channel * w.in_stride +
                            layer.tap_z * w.z_stride + tap / Taps::kX * w.y_stride +
                            tap % Taps::kX * w.x_stride;
    copy_word(shared_address(to + i), there ? at : w.data, there);
  }
}

// Loads what a tile reads of an item's layers; zeros outside of the image.
template <class Tile>
FW_DEVICE void load_patch(float* to, const ConvInput& x, const DirectItem<Tile>& item,
                          const DirectPosition& here) {
  using Taps = typename Tile::Taps;
  const ConvolutionSizes& of = item.sizes.of;
  const float* const from =
      x.data + here.image * x.image_stride + int64_t(here.group) * of.channels * x.channel_stride;
  const int z = here.z * of.z.stride - of.z.padding;
  const int y = here.y * Taps::kStepY - of.y.padding, left = here.x * Taps::kStepX - of.x.padding;
  const int all = item.layers() * Tile::kPatch;
#pragma unroll 4
  for (int i = threadIdx.x; i < all; i += kDirectThreads) {
    const DirectLayer layer(item.sizes, item.layer + i / Tile::kPatch);
    const int at = i % Tile::kPatch, at_z = kVolumes ? z + layer.tap_z * of.z.dilation : 0;
    const int at_y = y + at / Tile::kPatchColumns, at_x = left + at % Tile::kPatchColumns;
    const bool inside = unsigned(at_y) < unsigned(of.y.in) && unsigned(at_x) < unsigned(of.x.in) &&
                        (!kVolumes || unsigned(at_z) < unsigned(of.z.in));
    const float* const source = from + layer.channel * x.channel_stride + at_z * x.z_stride +
                                at_y * x.y_stride + at_x * x.x_stride;
    copy_word(shared_address(to + i), inside ? source : x.data, inside);
  }
}

// Rounds to TF32, as tensor cores do: the elements that this thread copied, every
// kDirectThreads-th.
FW_DEVICE void round_copied(float* numbers, int count) {
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kDirectThreads) numbers[i] = nearest_tf32(numbers[i]);
}

// Adds one layer's share to kOuts results of kRows positions. `weights` are those of the layer; a
// tap has `outs` of them.
template <class Tile>
FW_DEVICE void add_layer(float (&sum)[Tile::kOuts][Tile::kRows], const float* patch,
                         const float* weights, int outs) {
  using Taps = typename Tile::Taps;
  constexpr int kOuts = Tile::kOuts, kRows = Tile::kRows, kDown = Taps::across_y(kRows);
#pragma unroll(Taps::kAll > 25 ? 1 : Taps::kX)
  for (int tap_x = 0; tap_x < Taps::kX; ++tap_x) {
    float down[kDown];
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
      down[i] = patch[i * Tile::kPatchColumns + tap_x * Taps::kSpreadX];
    }
#pragma unroll
    for (int tap_y = 0; tap_y < Taps::kY; ++tap_y) {
      const float* const from = weights + (tap_y * Taps::kX + tap_x) * outs;
      Packed<float, kOuts < 4 ? kOuts : 4> w[kOuts < 4 ? 1 : kOuts / 4];
#pragma unroll
      for (int i = 0; i < (kOuts < 4 ? 1 : kOuts / 4); ++i) {
        using Word = typename Packed<float, kOuts < 4 ? kOuts : 4>::Word;
        w[i].words[0] = *reinterpret_cast<const Word*>(from + 4 * i);
      }
#pragma unroll
      for (int out = 0; out < kOuts; ++out) {
        const float weight = w[out / 4].lanes[out % 4];
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          sum[out][row] =
              __fmaf_rn(down[row * Taps::kStepY + tap_y * Taps::kSpreadY], weight, sum[out][row]);
        }
      }
    }
  }
}

// Runs the epilogue on the sums of channels from `channel` on, `outs` of which are inside, for
// positions of one column.
template <int kOuts, int kRows, class Epilogue>
FW_DEVICE void end_sums(const float (&sum)[kOuts][kRows], const Epilogue& end, int channel,
                        int outs, const DirectPosition& here, int y, int x,
                        const ConvolutionSizes& of) {
  struct Position {
    int64_t column;
    int image, y, x;
  };
  // One channel after the other: what the epilogue computes from the channel alone is computed
  // once.
  using Elem = typename Epilogue::template Elem<1>;
  typename Epilogue::template Column<1> down[kRows];
  const int rows = x < of.x.out ? of.y.out - y : 0;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row >= rows) break;
    const int at_y = (kVolumes ? here.z * of.y.out : 0) + y + row;  // counts the rows of all z
    const int64_t output_row = int64_t(here.image) * of.y.out * (kVolumes ? of.z.out : 1) + at_y;
    end.begin(down[row], Position{output_row * of.x.out + x, here.image, at_y, x});
  }
#pragma unroll
  for (int out = 0; out < kOuts; ++out) {
    if (out >= outs) break;
    Elem elem;
    end.load_factors(elem, channel + out);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= rows) break;
      end.load_own(elem, down[row], channel + out);
      end.give(elem, 0, sum[out][row]);
      end.visit(elem, down[row], channel + out);
    }
  }
}

template <class Tile, class Epilogue>
__global__ void __launch_bounds__(kDirectThreads, Tile::kBlocks)
    direct_kernel(const Epilogue end, const ConvInput x, const ConvFilter w,
                  const DirectSizes sizes) {
  using Taps = typename Tile::Taps;
  constexpr int kOuts = Tile::kOuts, kRows = Tile::kRows;
  extern __shared__ __align__(1024) char memory[];
  const ConvolutionSizes& of = sizes.of;
  float* const all_weights = reinterpret_cast<float*>(memory);
  float* const patches = all_weights + sizes.weight_buffers() * sizes.weights;
  const int across = threadIdx.x % Tile::kAcross, below = threadIdx.x / Tile::kAcross * kRows;
  const int mine = below * Taps::kStepY * Tile::kPatchColumns + across * Taps::kStepX;
  const auto patch = [&](int buffer) { return patches + buffer * sizes.together * Tile::kPatch; };
  const auto weights = [&](const DirectItem<Tile>& item) {
    return all_weights + (of.groups > 1 ? item.parity * sizes.weights : 0);
  };
  const auto load = [&](const DirectItem<Tile>& item, int buffer, bool first) {
    const DirectPosition here = DirectPosition::of<Tile>(sizes, item.tile);
    if (first || (of.groups > 1 && item.begins_tile())) {
      load_direct_weights<Tile>(weights(item), w, here.group, sizes);
    }
    load_patch<Tile>(patch(buffer), x, item, here);
  };
  DirectItem<Tile> item = {sizes, int(blockIdx.x)};
  float sum[kOuts][kRows];
  if (!item.ended()) load(item, 0, true);
  commit_copies();
  bool has_weights = false;
#pragma unroll 1
  for (int buffer = 0; !item.ended(); buffer ^= 1) {
    DirectItem<Tile> next = item;
    next.advance();
    if (!next.ended()) load(next, buffer ^ 1, false);
    commit_copies();
    await_copies<1>();
    if constexpr (Tile::kTerms == 1) {
      const bool brings_weights = !has_weights || (of.groups > 1 && item.begins_tile());
      if (brings_weights) round_copied(weights(item), sizes.layers * Taps::kAll * sizes.outs);
      round_copied(patch(buffer), item.layers() * Tile::kPatch);
      has_weights = true;
    }
    __syncthreads();
    const int outs_end = sizes.together < sizes.layers ? item.out + 1 : of.channels_out;
#pragma unroll 1
    for (int out = item.out; out < outs_end; out += kOuts) {
      if (item.layer == 0) {
#pragma unroll
        for (int i = 0; i < kOuts * kRows; ++i) sum[i / kRows][i % kRows] = 0.f;
      }
      const float* const of_item = weights(item) + item.layer * Taps::kAll * sizes.outs + out;
#pragma unroll 1
      for (int i = 0; i < item.layers(); ++i) {
        add_layer<Tile>(sum, patch(buffer) + mine + i * Tile::kPatch,
                        of_item + i * Taps::kAll * sizes.outs, sizes.outs);
      }
      if (!item.is_last()) continue;
      const DirectPosition here = DirectPosition::of<Tile>(sizes, item.tile);
      end_sums(sum, end, here.group * of.channels_out + out, of.channels_out - out, here,
               here.y + below, here.x + across, of);
    }
    __syncthreads();  // everyone has read the buffer
    item.tile = next.tile, item.out = next.out;
    item.layer = next.layer, item.parity = next.parity;
  }
}

// A transposed convolution of stride 1 is a convolution with flipped taps.
template <class Taps>
inline void flip_taps(ConvolutionSizes& of, ConvFilter& w) {
  of.y.padding = (Taps::kY - 1) * Taps::kSpreadY - of.y.padding;
  of.x.padding = (Taps::kX - 1) * Taps::kSpreadX - of.x.padding;
  of.z.padding = (of.z.kernel - 1) * of.z.dilation - of.z.padding;
  w.data +=
      (of.z.kernel - 1) * w.z_stride + (Taps::kY - 1) * w.y_stride + (Taps::kX - 1) * w.x_stride;
  w.z_stride = -w.z_stride, w.y_stride = -w.y_stride, w.x_stride = -w.x_stride;
}

template <int kTerms, class Taps, int kOuts, int kRows, int kAcross, class Epilogue>
static int direct_convolution(const Epilogue& end, const ConvInput& x, ConvFilter w,
                              ConvolutionSizes of, int device, void* stream) {
  using Tile = DirectTile<kTerms, Taps, kOuts, kRows, kAcross>;
  static_assert(!Epilogue::kReduces, "tiles reduce nothing");
  if (!of.has_outputs()) return 0;
  if (!kVolumes && !of.z.is_single()) return static_cast<int>(cudaErrorInvalidValue);
  if (of.transposed) flip_taps<Taps>(of, w);
  const OnDevice here(device);
  const auto parts = [](int size, int part) { return (size + part - 1) / part; };
  DirectSizes sizes = {of, parts(of.x.out, Tile::kWidth), parts(of.y.out, Tile::kHeight)};
  const int64_t tiles = of.images * of.z.out * of.groups * sizes.tiles_x * sizes.tiles_y;
  sizes.tiles = int(tiles), sizes.layers = sizes.together = of.channels * of.z.kernel;
  sizes.outs = parts(of.channels_out, kOuts) * kOuts;
  sizes.weights = parts(sizes.layers * Taps::kAll * sizes.outs, 4) * 4;
  // All layers at once if two thread blocks then fit on an SM; else some at a time.
  while (sizes.together > 1 && sizes.template bytes<Tile>() > kDirectBytes) {
    sizes.together = (sizes.together + 1) / 2;
  }
  const int bytes = int(sizes.template bytes<Tile>());
  if (tiles > 0x7fffffff - 0xffff || bytes > kDirectBytes) {
    return static_cast<int>(cudaErrorInvalidValue);
  }
  const auto kernel = direct_kernel<Tile, Epilogue>;
  static Persistent persistent;
  const int64_t at_once =
      int64_t(persistent.ready(kernel, device)) * min(Tile::kBlocks, kSharedBytes / (bytes + 1024));
  constexpr int kThreads = kDirectThreads;
  const unsigned grid = unsigned(tiles < at_once ? tiles : at_once);
  kernel<<<grid, kThreads, bytes, static_cast<cudaStream_t>(stream)>>>(end, x, w, sizes);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
