// y[n, q, oy, ox] = epilogue(Σ x[n, c, oy·sy − top + ky·dy, ox·sx − left + kx·dx]·w[q, c, ky, kx])
// on Hopper's tensor cores; x is zero outside of its bounds. Transposed,
// y[n, q, iy·sy − top + ky·dy, ix·sx − left + kx·dx] = epilogue(Σ x[n, c, iy, ix]·w[q, c, ky, kx]).
//
// For each tap this is a matmul of positions and output channels over the input channels, and all
// taps of a phase read the same stage of shared memory. x is fp32 in any layout and is rounded to
// scaled fp16 on its way there. With `terms` 1 that is all: TF32's accuracy. With 3 a low part
// keeps what rounding leaves: fp32's accuracy. A stage has one scale, so elements 2^28 times
// smaller than others near them keep fewer bits. Results that are Inf or NaN are recomputed in
// plain fp32.
//
// A thread block processes many tiles. Some warpgroups multiply (sm90_convolution_multiply.cuh),
// each a part of a tile's channels or positions; others convert and load
// (sm90_convolution_load.cuh, which says how many there are of each kind).
#pragma once

#include "sm90/convolution/sm90_convolution_multiply.cuh"
#include "convolution/position_reductions.cuh"

namespace fw {

// A tile of the result; p counts from the tile's first position.
template <class Input>
struct ConvResultTile {
  struct Position {
    bool inside;
    int64_t column;   // index among the outputs of all images
    int image, y, x;  // y counts the rows of all z
  };
  static constexpr bool kMends = true;
  static constexpr int kWords = 32, kBeside = 0;
  const Input& x;
  const SplitFilter& w;
  const ConvTiling& sizes;
  ConvTile tile;
  int rows, partial;

  FW_DEVICE int channel_out(int q) const { return tile.group * rows + q; }
  // A position as an output: outputs of a class are a stride apart.
  FW_DEVICE ConvPosition output(int p) const {
    const ConvPosition at = sizes.position(tile, p);
    const ConvShape& shape = sizes.shape;
    const ResidueClass& here = shape.class_[tile.of_class];
    return {at.image, kVolumes ? at.z * shape.out_z.apart + here.z : 0,
            at.y * shape.out_y.apart + here.y, at.column * shape.out_x.apart + here.x, at.in_band};
  }
  FW_DEVICE bool inside(const ConvPosition& at) const {
    const ConvShape& shape = sizes.shape;
    return at.in_band && at.image < shape.images && (!kVolumes || at.z < shape.out_z.count) &&
           at.y < shape.out_y.count && at.column < shape.out_x.count;
  }
  // Among the rows of all z.
  FW_DEVICE int row_of(const ConvPosition& at) const {
    return at.z * sizes.shape.out_y.count + at.y;
  }
  FW_DEVICE Position position(int p) const { return position_of(output(p)); }
  FW_DEVICE Position position_of(const ConvPosition& at) const {
    const ConvShape& shape = sizes.shape;
    const int y = row_of(at);
    const int64_t row = int64_t(at.image) * shape.out_rows() + y;
    return {inside(at), row * shape.out_x.count + at.column, at.image, y, at.column};
  }
  // The part that begins at p. All threads of a warp call this, and each looks at two of the
  // positions.
  FW_DEVICE PositionPart part(int p) const {
    const int lane = threadIdx.x % 32;
    const ConvPosition low = output(p + lane), high = output(p + 32 + lane);
    const uint64_t lower = __ballot_sync(~0u, inside(low));
    const uint64_t upper = __ballot_sync(~0u, inside(high));
    const int first = __shfl_sync(~0u, low.image, 0, 32);
    const int last = min(int(__shfl_sync(~0u, high.image, 31, 32)), sizes.shape.images - 1);
    return {int((sizes.start(tile) + p) >> kPartBits),
            first,
            last,
            upper << 32 | lower,
            sizes.shape.classes,
            tile.of_class};
  }
  FW_DEVICE int row(const Position&, int q) const { return channel_out(q); }
  // Of a row of weights.
  FW_DEVICE float scale(int row) const {
    return w.inverse[tile.group * sizes.shape.channels_out + row];
  }
  // An element as a plain fp32 sum, for sums that overflowed or have an operand that is not finite.
  // Outside of x a convolution has zeros, which give NaN with an infinite weight; a transposed one
  // has nothing there.
  FW_DEVICE float plain(int p, int q) const { return plain(p, q, 0); }
  // For one of the columns that a position stands for.
  FW_DEVICE float plain(int p, int q, int beside) const {
    const ConvShape& shape = sizes.shape;
    const ConvPosition at = sizes.position(tile, p);
    const int top = at.y * shape.y.stride, left = at.column * shape.x.stride;
    const int front = kVolumes ? at.z * shape.z.stride - shape.z.padding : 0;
    const int first = shape.first_phase(tile.of_class), end = shape.end_phase(tile.of_class);
    float sum = 0.f;
#pragma unroll 1
    for (int c = 0; c < shape.channels; ++c) {
      const float* weight =
          w.raw.data + tile.group * w.raw.group_stride + q * w.raw.out_stride + c * w.raw.in_stride;
#pragma unroll 1
      for (int at_phase = first; at_phase < end; ++at_phase) {
        const TapPhase& phase = shape.phase[at_phase];
        const int z = kVolumes ? front + phase.z : 0;
#pragma unroll 1
        for (int tap = phase.first; tap < phase.first + phase.taps; ++tap) {
          const int y = top + w.order.far_y[tap], column = left + w.order.far_x[tap];
          const bool inside = unsigned(z) < unsigned(shape.z.in) &&
                              unsigned(y) < unsigned(shape.y.in) &&
                              unsigned(column) < unsigned(shape.x.in);
          const uint32_t tap_x = shape.tap_x(w.order.x[tap], beside);
          if ((!inside && shape.transposed) || tap_x == kNoTap) continue;
          const int channel = tile.group * shape.channels + c;
          const float number = inside ? x.at(x.location(at.image, channel, z, y, column)) : 0.f;
          sum = __fmaf_rn(number,
                          weight[phase.tap_z * w.raw.z_stride + w.order.y[tap] * w.raw.y_stride +
                                 tap_x * w.raw.x_stride],
                          sum);
        }
      }
      if (sum != sum) break;  // it stays NaN
    }
    return sum;
  }
};

// The same if rows come in groups of eight: p counts columns, kBeside_ for a position, q channels.
template <int kBeside_, class Input>
struct ByEight : ConvResultTile<Input> {
  using Of = ConvResultTile<Input>;
  static constexpr int kBeside = kBeside_;

  FW_DEVICE explicit ByEight(const Of& of) : Of(of) {}
  FW_DEVICE typename Of::Position position(int p) const {
    ConvPosition at = Of::output(p / kBeside);
    at.column = kBeside * at.column + p % kBeside;
    return Of::position_of(at);
  }
  FW_DEVICE float plain(int p, int q) const { return Of::plain(p / kBeside, q, p % kBeside); }
};

template <class Kind, class Input>
using ConvResultTileOf =
    std::conditional_t<Kind::kBeside != 0, ByEight<Kind::kBeside, Input>, ConvResultTile<Input>>;

// Reductions down the channels: each warp, which has 16 of them, leaves a partial.
FW_FN int partials_of_group(int channels) { return (channels + 15) / 16; }

// How many partials a reduction of the result leaves.
template <class Epilogue>
int partials_of(const ConvTiling& sizes) {
  if constexpr (Epilogue::kByRow) {
    const int classes = sizes.shape.classes;
    const int64_t all = int64_t(sizes.tiles_p.divisor) * sizes.tile_positions;
    return classes * decltype(Epilogue::reduces)::partials(all, sizes.image_positions());
  } else {
    return sizes.shape.groups * partials_of_group(sizes.shape.channels_out);
  }
}

// What a tile's total has yet to be multiplied by: the inverse of the scale that its images have in
// the staged input. If they have several scales, the total is multiplied by their inverses here,
// and 1 is returned.
template <class Kind>
FW_DEVICE float settle_images(ConvMultiplier<Kind>& multiplier, const float* scales,
                              const ConvTile& tile) {
  const ConvTiling& sizes = multiplier.sizes;
  const int first = sizes.position(tile, 0).image, groups = sizes.shape.groups;
  const int last = sizes.position(tile, Kind::kTilePositions - 1).image;
  const auto scale = [&](int image) {
    return scales[min(image, sizes.shape.images - 1) * groups + tile.group];
  };
  bool same = true;
#pragma unroll 1
  for (int image = first + 1; image <= last; ++image) same &= scale(image) == scale(first);
  if (same) return inverse_of(scale(first));
  const int64_t of_image = sizes.image_positions(), start = sizes.start(tile);
#pragma unroll 1
  for (int image = first; image <= last; ++image) {
    const int from = int(max(image * of_image - start, int64_t(0)));
    const int to = int(min((image + 1) * of_image - start, int64_t(Kind::kTilePositions)));
    multiplier.multiply_total(inverse_of(scale(image)), from, to);
  }
  return 1.f;
}

// The warpgroups that multiply and run the epilogue, V positions at a time. `scales` are those of
// the staged input, if there is one.
template <int V, class Kind, class Epilogue, class Input>
FW_DEVICE void multiply_stages(ConvShared<Kind>& shared, const Epilogue& end, const Input& x,
                               const SplitFilter& w, const ConvTiling& sizes,
                               const float* scales = nullptr) {
  using ResultTile = ConvResultTileOf<Kind, Input>;
  static_assert(Kind::kBeside == 0 || !Epilogue::kReduces, "what is reduced has channels as rows");
  static_assert(!Epilogue::kByRow || Kind::kPositions % kPartPositions == 0, "parts are whole");
  using Slice = WarpSlice<V, Kind::kBeside>;
  ConvMultiplier<Kind> multiplier(shared, sizes);
  const int warpgroup = multiplier.warpgroup, warp = of_warp(threadIdx.x / 32 % 4);
  const WarpFinisher<V, Epilogue, ResultTile> finisher = {shared.rows[warpgroup][warp]};
  int channel = -1;  // the first one of the previous tile
  float scale[2];    // of a thread's channels
#pragma unroll 1
  for (; !multiplier.run.ended(); multiplier.go_on()) {
    const ConvTile tile = sizes.tile(multiplier.run.index());
    const int q = tile.q + multiplier.first_channel(), rows = sizes.shape.channels_out;
    const int mine = (q / 16 + warp) * Slice::kChannels;  // the warp's first channel
    const int partial = tile.group * partials_of_group(rows) + mine / 16;
    const ResultTile result(
        ConvResultTile<Input>{x, w, sizes, tile, sizes.shape.results(), partial});
    if (tile.group * rows + q != channel) {
      channel = tile.group * rows + q;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        scale[i] = result.scale(min(q + sums_channel() + 8 * i, rows - 1));
      finisher.keep_factors(mine, end, result);
    }
    multiplier.add_tile(tile.of_class);
    const int p = multiplier.first_position();
    float factor = multiplier.factor();
    if constexpr (Kind::kStaged) factor = settle_images(multiplier, scales, tile);
    float by[2] = {scale[0] * factor, scale[1] * factor};
    // Both factors may be small, and their product too small.
    if (Kind::kTerms == 1 && !(min(by[0], by[1]) >= 0x1p-126f)) {
      multiplier.multiply_total(factor);
      by[0] = scale[0], by[1] = scale[1];
    }
    finisher.finish(multiplier.total, p * Slice::kOfPosition, mine, by, end, result);
  }
}

template <class Kind>
FW_DEVICE void start_barriers(ConvShared<Kind>& shared, const char* memory,
                              const ConvTiling& sizes) {
  if (threadIdx.x == 0) {
    if (shared_address(memory) % 1024 != 0) __trap();  // swizzles count from multiples of 1024
    for (int stage = 0; stage < sizes.stages; ++stage) {
      init_barrier(&shared.loaded_x[stage], 1);
      init_barrier(&shared.done_x[stage], Kind::kPingPong ? 4 * sizes.parts : 8);
    }
    for (int stage = 0; stage < Kind::kBoxes; ++stage) {
      init_barrier(&shared.loaded_w[stage], 1);
      init_barrier(&shared.done_w[stage], Kind::kPingPong ? 4 : 8);
    }
    publish_barriers();
  }
  __syncthreads();
}

template <class Kind, int kLanes, class Epilogue, class Input>
__global__ void __launch_bounds__(Kind::kThreads, 1)
    convolution_kernel(const Epilogue end, const __grid_constant__ Input x,
                       const __grid_constant__ SplitFilter w,
                       const __grid_constant__ ConvTiling sizes,
                       const __grid_constant__ CUtensorMap map_hi,
                       const __grid_constant__ CUtensorMap map_lo) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<ConvShared<Kind>*>(memory);
  start_barriers(shared, memory, sizes);
  if (threadIdx.x < Kind::kFirstConvert) {
    take_registers<Kind::kMultiply>();
    await_kernel_before();
    multiply_stages<kLanes>(shared, end, x, w, sizes);
  } else if (threadIdx.x < Kind::kFirstLoad) {
    // The input was complete before the weights were split: there is nothing to wait for.
    leave_registers<Kind::kConvert>();
    Input::by_layout(sizes.by_channels, [&](auto by_channels) {
      convert_input<decltype(by_channels)::value>(shared, x, sizes);
    });
  } else {
    leave_registers<Kind::kLoad>();
    await_kernel_before();
    if (threadIdx.x == Kind::kFirstLoad) load_weights(shared, &map_hi, &map_lo, sizes);
  }
#else
  __trap();  // compiled for another architecture than sm_90a
#endif
}

// Divides `room` rows of shared memory among the input's stages. Rings pay if taps reach far; they
// have room for the next tiles, or for the other rings' rows while one is read. In ping-pong there
// is one ring of two or three stages. False if that does not fit, or if a tile is more than a
// stage.
inline bool divide_rows(ConvTiling& sizes, bool ping_pong, int overlap, int room) {
  const int tile = sizes.tile_positions, stage = sizes.shape.stage_rows;
  const int rings = sizes.shape.classes > 1 ? 0 : sizes.blocks() * sizes.shape.phases;
  const auto walk = [&](int stages) {
    const int rows = stage + (rings == 1 ? (stages - 1) * tile : 0);
    const bool fits = rings * (rows + overlap) <= room;
    if (fits) {
      sizes.stages = stages, sizes.rings = rings;
      sizes.ring_rows = rows, sizes.overlap = overlap;
    }
    return sizes.walks = fits;
  };
  if (ping_pong) return rings == 1 && (walk(3) || walk(2));
  if (stage > tile && rings > 1 && rings <= kMostStages && walk(rings)) return true;
  if (stage > tile && rings == 1 && (walk(2) || walk(1))) return true;
  sizes.stages = sizes.rings = 2 * stage <= room ? 2 : 1, sizes.ring_rows = stage;
  return true;
}

// Whether positions that go through the epilogue together are of one row.
inline bool goes_by_lanes(const ConvShape& shape, int lanes) {
  const int columns = shape.row_order.columns_of_position();
  return shape.out_x.apart == 1 && shape.out_x.count % lanes == 0 &&
         columns * shape.band_width % lanes == 0 && columns * shape.pitch % lanes == 0;
}

// `vectors`: kLanes neighbouring positions of an image may go through the epilogue together; if
// not, a kernel of its own takes them one by one. kAlways: they may, and that kernel is not
// compiled.
template <class Kind, int kLanes, bool kAlways = false, class Epilogue, class Input>
static int tensor_core_convolution(const Epilogue& end, bool vectors, const Input& x,
                                   const SplitFilter& w, const ConvShape& shape, int device,
                                   void* stream) {
  using Shared = ConvShared<Kind>;
  if (!shape.has_pixels()) return 0;
  if (!x.has_near_channels()) return static_cast<int>(cudaErrorInvalidValue);
  if constexpr (kLanes > 1) {
    if (!vectors || !goes_by_lanes(shape, kLanes)) {
      if constexpr (kAlways) return static_cast<int>(cudaErrorMisalignedAddress);
      else return tensor_core_convolution<Kind, 1>(end, false, x, w, shape, device, stream);
    }
  }
  const OnDevice here(device);
  const int parts = Kind::kPingPong ? (shape.channels_out + 63) / 64 : 1;
  const int tile_channels = Kind::kPingPong ? 64 * parts : Kind::kBoxChannels;
  ConvTiling sizes(shape, Kind::kTilePositions, tile_channels);
  sizes.parts = parts;
  sizes.by_channels = x.by_channels(shape.channels);
  constexpr int kBytes = kSharedBytes - int(sizeof(Shared));
  static_assert(kBytes >= (Kind::kPingPong ? kPingPongBytes : kStageBytes), "stages would not fit");
  if (!divide_rows(sizes, Kind::kPingPong, Kind::kPositions, kBytes / (Kind::kParts * 128))) {
    return static_cast<int>(cudaErrorInvalidValue);
  }
  const int shared_bytes = int(sizeof(Shared)) + sizes.rings * Kind::kParts * sizes.ring_bytes();
  // Boxes that are ahead are in stages that nothing can be loaded into. A class without taps has
  // none.
  sizes.lead = kLead;
  for (int of_class = 0; of_class < shape.classes; ++of_class) {  // at most a tile's first phase
    const bool empty = shape.stages(of_class) == 0;
    sizes.lead = min(sizes.lead, empty ? 0 : sizes.boxes(0, shape.first_phase(of_class)));
  }
  const int64_t boxes = shape.boxes_between(0, shape.phases);
  const int64_t weight_rows = shape.groups * boxes * shape.channels_out;
  const Matrices split_layout = {64, weight_rows, 64, 1, 0};
  CUtensorMap map_hi{}, map_lo{};
  const bool mapped =
      matrix_map(map_hi, w.hi, split_layout, 64, Kind::kBoxChannels) &&
      (Kind::kTerms == 1 || matrix_map(map_lo, w.lo, split_layout, 64, Kind::kBoxChannels));
  if (!mapped) return static_cast<int>(cudaErrorInvalidValue);
  const auto kernel = convolution_kernel<Kind, kLanes, Epilogue, Input>;
  static Persistent persistent;
  const int blocks = persistent.blocks(kernel, sizes.tiles, device);
  sizes.take_turns(blocks);
  constexpr int kThreads = Kind::kThreads;
  launch_behind(kernel, blocks, kThreads, shared_bytes, stream, end, x, w, sizes, map_hi, map_lo);
  if (Epilogue::kReduces) end.join(partials_of<Epilogue>(sizes), stream);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
