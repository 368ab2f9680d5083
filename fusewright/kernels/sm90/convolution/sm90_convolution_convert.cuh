// How a convolution's operand is converted to rows of fp16 in shared memory: a row for each
// position, 64 channels in 128 bytes, swizzled as wgmma expects it.
//
// Warps share the rows. A thread converts 32 elements at a time; meanwhile the next 32 are in
// flight, those of the next stage, too. All rows that are read together have one scale: the last
// one, and if that does not fit, which is rare, they are filled again.
#pragma once

#include "convolution/computed_input.cuh"
#include "sm90/isa/sm90_fp16_split.cuh"
#include "convolution/tiling.cuh"

namespace fw {

// 1, 128 and 61000 as fp16 bits: what is below the last is finite.
constexpr uint32_t kFp16One = 0x3c00, kFp16Few = 0x5800, kFp16Many = 0x7b72;

// Where a row goes in shared memory: to one address, or to two.
struct RowPosition {
  uint32_t to;
  int swizzle, twice_after;  // bytes to the second; 0: there is none
  bool there;

  template <int kTerms>
  FW_DEVICE void put(int column, const Fragment& eight, int lower_bytes) const {
    const uint32_t at = to + ((column ^ swizzle) << 4);
    if (!there) return;
    put_at<kTerms>(at, eight, lower_bytes);
    if (twice_after != 0) put_at<kTerms>(at + twice_after, eight, lower_bytes);
  }

 private:
  template <int kTerms>
  FW_DEVICE static void put_at(uint32_t at, const Fragment& eight, int lower_bytes) {
    store_four_pairs(at, eight.hi);
    if constexpr (kTerms == 3) store_four_pairs(at + lower_bytes, eight.lo);
  }
};

// A ring of rows in shared memory that is filled from row `first` on. Its first rows are stored
// again after its last, as many as wgmma reads in a row. Low parts are stored `lower_bytes` after
// high parts.
struct RingRows {
  uint32_t memory;
  int first, rows, overlap, lower_bytes;

  FW_DEVICE RowPosition position(int row, int end) const {
    int at = first + row;
    if (at >= rows) at -= rows;
    return {memory + at * 128, int(at % 8u), at < overlap ? rows * 128 : 0, row < end};
  }
};

// Where the element is that a position reads in one channel, and whether it is inside the input. It
// is of a plane that begins as a TapPhase or an InputPlane does.
template <class Input, class Begins>
FW_DEVICE auto input_location(const ConvTiling& sizes, const Input& x, const ConvPosition& position,
                              int channel, const Begins& begins, bool& inside) {
  const ConvAxis &along_z = sizes.shape.z, &along_y = sizes.shape.y, &along_x = sizes.shape.x;
  const int z = kVolumes ? position.z * along_z.stride - along_z.padding + begins.z : 0;
  const int y = position.y * along_y.stride - along_y.padding + begins.y;
  const int column = position.column * along_x.stride - along_x.padding + begins.x;
  inside = (position.image < sizes.shape.images) & (unsigned(y) < unsigned(along_y.in)) &
           (unsigned(column) < unsigned(along_x.in)) &
           (!kVolumes || unsigned(z) < unsigned(along_z.in));
  return x.location(position.image, channel, z, y, column);
}

// Loads an element of an input that is not read again soon, or four neighbouring ones.
FW_DEVICE float once(const ConvInput&, const float* from) { return load_once(from); }
FW_DEVICE float once_if(const ConvInput&, const float* from, bool inside) {
  return load_if(from, inside);
}
FW_DEVICE void four_if(float* x, const ConvInput&, const float* from, bool inside) {
  load_four_if(x, from, inside);
}
template <class Body, bool kByFour>
FW_DEVICE float once_if(const ComputedInput<Body, kByFour>& input,
                        const typename ComputedInput<Body, kByFour>::Location& from, bool inside) {
  return input.at(from, inside);
}
template <class Body, bool kByFour>
FW_DEVICE void four_if(float* x, const ComputedInput<Body, kByFour>& input,
                       const typename ComputedInput<Body, kByFour>::Location& from, bool inside) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = input.at(from + i, inside);
}

// What is read of the input in one phase: rows from `first` up to `rows`, some channels. A source
// says where the first channel of a row is, and whether the row is inside.
struct ConvRowSource {
  uint32_t band, in_plane;  // of row 0's position
  int channel, channels;    // the first, of all groups'; how many
  int phase, first, rows;

  template <class Input>
  FW_DEVICE auto at(const ConvTiling& sizes, const Input& x, int row, bool& inside) const {
    const auto from = input_location(sizes, x, sizes.position(band, in_plane, row), channel,
                                     sizes.shape.phase[phase], inside);
    inside &= row < rows;
    return from;
  }
};

// What a thread converts at a time: four times eight channels. If channels are contiguous, they are
// of four rows, and eight threads have a row; otherwise they are of one row, and 32 threads have
// neighbouring rows. Either way the stores of eight threads meet all banks.
template <bool kByChannels>
struct FillUnit {
  static constexpr int kRows = kByChannels ? 16 : 32;  // of a warp
  int first_row, first_column;                         // a column is eight channels

  template <class RowSource>
  FW_DEVICE FillUnit(const RowSource& source, int index) {
    const int lane = threadIdx.x % 32;
    const bool two = halved(source);
    first_row = source.first + (two ? index / 2 : index) * kRows + (kByChannels ? lane / 8 : lane);
    first_column = kByChannels ? lane % 8 : two ? index % 2 * 4 : 0;
  }
  // Whether rows have more channels than a unit.
  template <class RowSource>
  FW_DEVICE static bool halved(const RowSource& source) {
    return !kByChannels && source.channels > 32;
  }
  template <class RowSource>
  FW_DEVICE static int count(const RowSource& source) {
    return (source.rows - source.first + kRows - 1) / kRows << int(halved(source));
  }
  FW_DEVICE int row(int k) const { return first_row + (kByChannels ? 4 * k : 0); }
  FW_DEVICE int column(int k) const { return first_column + (kByChannels ? 0 : k); }
};

// A unit's elements, and what is known of it while it is loaded.
template <bool kByChannels, class Input>
struct FillParts {
  using Unit = FillUnit<kByChannels>;
  float x[4][8];
  typename Input::Location from;
  int left;    // channels from there on; 0 if the row is outside
  bool whole;  // all rows of the warp are inside, and so are the channels

  template <class RowSource>
  FW_DEVICE void load(int k, const ConvTiling& sizes, const Input& input, int stride,
                      const RowSource& source, const Unit& unit) {
    if (kByChannels || k == 0) {
      bool inside;
      from = source.at(sizes, input, unit.row(k), inside);
      left = inside ? source.channels - 8 * unit.column(0) : 0;
    }
    if constexpr (kByChannels) {
      four_if(x[k], input, from + 8 * unit.column(k), left > 0);
      four_if(x[k] + 4, input, from + 8 * unit.column(k) + 4, left > 4);
    } else {
      if (k == 0) {
        from += int64_t(stride) * (8 * unit.column(0));
        whole = __all_sync(0xffffffffu, left >= 32);
      }
      load_eight(x[k], input, stride, 8 * k);
      from += int64_t(stride) * 8;
    }
  }

 private:
  FW_DEVICE void load_eight(float (&to)[8], const Input& input, int stride, int first) {
    if constexpr (Input::kInMemory) {
      if (whole) {
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = once(input, from + int64_t(stride) * i);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      to[i] = once_if(input, from + int64_t(stride) * i, first + i < left);
    }
  }
};

FW_DEVICE Fragment fp16_parts_of(const float (&x)[8], float scale) {
  Fragment eight;
#pragma unroll
  for (int i = 0; i < 4; ++i) eight.split(i, x[2 * i] * scale, x[2 * i + 1] * scale);
  return eight;
}
FW_DEVICE float largest_finite(const float (&x)[8]) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = isfinite(x[i]) ? fmaxf(most, fabsf(x[i])) : most;
  return most;
}

// The warps that convert one operand. `found` is in shared memory. What changes from stage to stage
// holds no references: the compiler would no longer know that these refer to the kernel's
// arguments.
template <int kTerms, bool kByChannels, int kWarps, class Input>
struct InputConverter {
  using Unit = FillUnit<kByChannels>;
  const ConvTiling& sizes;
  const Input& input;
  uint32_t (&found)[2][kWarps];
  int barrier, warp;
  int stride;  // between channels
  int parity = 0;
  FillParts<kByChannels, Input> parts;

  // The largest value that any of them has; all stores are published then.
  FW_DEVICE uint32_t largest_of_all(uint32_t mine) {
    const uint32_t of_warp = __reduce_max_sync(0xffffffffu, mine);
    if (threadIdx.x % 32 == 0) found[parity][warp] = of_warp;
    publish_stores();
    meet(barrier, 32 * kWarps);
    uint32_t most = 0;
#pragma unroll
    for (int each = 0; each < kWarps; ++each) most = max(most, found[parity][each]);
    parity ^= 1;
    return most;
  }
  template <class RowSource>
  FW_DEVICE void begin(const RowSource& source) {
    const Unit unit(source, warp);
#pragma unroll
    for (int k = 0; k < 4; ++k) parts.load(k, sizes, input, stride, source, unit);
  }

  // Fills rows from the source whose first elements are in flight, and starts the loads of the next
  // source, which `advance` returns. Returns the largest magnitudes, as a pair of fp16.
  template <class RowSource, class Advance>
  FW_DEVICE uint32_t fill(const RingRows& to, RowSource& source, float scale,
                          const Advance& advance) {
    const int units = Unit::count(source), rows = source.rows;
    uint32_t largest = 0;
    Unit unit(source, warp);
    bool more = true;
#pragma unroll 1
    for (int index = warp + kWarps; more; index += kWarps) {
      more = index < units;
      if (!more) source = advance();
      const Unit next(source, more ? index : warp);
      Fragment eight[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        eight[k] = fp16_parts_of(parts.x[k], scale);
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = larger_fp16_pair(largest, eight[k].hi[i]);
      }
      // All loads of the next unit start at once: to wait for some is to wait for all.
#pragma unroll
      for (int k = 0; k < 4; ++k) parts.load(k, sizes, input, stride, source, next);
      RowPosition position = to.position(unit.row(0), rows);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (kByChannels && k > 0) position = to.position(unit.row(k), rows);
        position.template put<kTerms>(unit.column(k), eight[k], to.lower_bytes);
      }
      unit = next;
    }
    return largest;
  }

  // Converts a stage. `whole` returns its source from row 0 on; `clear` waits until nobody reads
  // the rows that are to be overwritten.
  template <class RowSource, class Advance, class Whole, class Clear>
  FW_DEVICE float convert(const RingRows& to, RowSource& source, float scale,
                          const Advance& advance, const Whole& whole, const Clear& clear) {
    const uint32_t pairs = fill(to, source, scale, advance);
    const uint32_t most = largest_of_all(max(pairs & 0xffffu, pairs >> 16));
    if (most < kFp16Few || most > kFp16Many) {
      // All zero, too large, too small, or something is not finite.
      scale = convert_again(to, whole(), scale, clear);
      begin(source);
    }
    return scale;
  }

 private:
  // Finds the scale that fits and, if it is another one, fills all rows with it. This need not be
  // fast.
  template <class RowSource, class Clear>
  FW_DEVICE float convert_again(const RingRows& to, const RowSource& source, float scale,
                                const Clear& clear) {
    const int units = Unit::count(source);
    float largest = 0.f;
#pragma unroll 1
    for (bool fills = false;; fills = true) {
#pragma unroll 1
      for (int index = warp; index < units; index += kWarps) {
        const Unit unit(source, index);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          parts.load(k, sizes, input, stride, source, unit);
          if (!fills) {
            largest = fmaxf(largest, largest_finite(parts.x[k]));
          } else {
            const RowPosition position = to.position(unit.row(k), source.rows);
            position.template put<kTerms>(unit.column(k), fp16_parts_of(parts.x[k], scale),
                                          to.lower_bytes);
          }
        }
      }
      largest = __uint_as_float(largest_of_all(__float_as_uint(largest)));
      if (fills || largest == 0.f || scale == scale_for(largest)) return scale;
      scale = scale_for(largest);
      clear();
    }
  }
};

}  // namespace fw
