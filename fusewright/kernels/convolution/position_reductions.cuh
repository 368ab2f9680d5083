// How a window's result is reduced over its positions. Positions of a row are walked in a line, with
// what lies in halos between them (operands.cuh), and a warp reduces parts of that line. A
// part may reach over several images; where each image is reduced apart, it leaves something for
// each of them.
#pragma once

#include "cuda/epilogues.cuh"

namespace fw {

// Positions of a part, as a power of two: what every warpgroup has one or several of.
constexpr int kPartBits = 6, kPartPositions = 1 << kPartBits;

// How many parts an image of so many positions can touch.
FW_FN int image_parts(int64_t positions) {
  return int((positions + kPartPositions - 2) >> kPartBits) + 1;
}

// A part of the line, whose first position is number · kPartPositions of a class.
struct WindowPart {
  int number;
  int first, last;  // images that it touches; none where the line is at its end
  uint64_t inside;  // a bit for each position that is not in a halo
  int classes, of_class;

  // A bit for each position of an image, all of which have so many.
  __device__ __forceinline__ uint64_t of_image(int image, int64_t positions) const {
    const int64_t begin = image * positions - (int64_t(number) << kPartBits);
    const int64_t end = begin + positions;
    uint64_t bits = ~uint64_t(0);
    if (begin > 0) bits <<= begin;  // it begins in this part
    if (end < kPartPositions) bits &= (uint64_t(1) << end) - 1;
    return bits;
  }
};

// More lines than these are first folded to a few, by many threads: channels alone are too few.
constexpr int kMostLines = 2048, kFoldedLines = 256;

// `each` neighbouring lines as one, in their order.
template <class Body, class Part>
__global__ void __launch_bounds__(128)
    fold_kernel(const Body body, const Part* parts, Part* folded, int lines, int each) {
  const int64_t outer = body.outer_extent();
  const int64_t at = int64_t(blockIdx.x) * 128 + threadIdx.x;
  const int first = int(at / outer) * each, end = first + each < lines ? first + each : lines;
  if (first >= end) return;
  Part acc = body.template accumulators<1>(Phase<0>{});
  const Part* const from = parts + at % outer;
#pragma unroll 8
  for (int line = first; line < end; ++line) acc.combine(from[line * outer]);
  folded[at] = acc;
}

// Reduces over positions: kTogether neighbouring out channels as one, all images as one or each
// apart. The body's outer axes are images (where they stay apart) and channels; its inner ones are
// images (where they are reduced), channels (where several go together), y and x, or both of these
// as one (kPlanes). A channel that goes together with others has lines of its own.
template <class Body_, bool kPerImage_, int kTogether, bool kPlanes>
struct ByChannel : Parts<Body_> {
  static constexpr bool kPerImage = kPerImage_;
  using Body = Body_;
  using Index = typename Parts<Body>::Index;
  using Part = typename Parts<Body>::Part;
  using Row = typename Body::template Row<1>;

  static int lines(int64_t positions, int64_t of_image) {
    return (kPerImage ? image_parts(of_image) : int(positions >> kPartBits)) * kTogether;
  }
  __device__ __forceinline__ void enter(Row& row, int image, int channel) const {
    this->body.begin(row, Index(kPerImage ? image : 0), Index(channel / kTogether), 1);
  }
  __device__ __forceinline__ Index outer(int image, int channel) const {
    const Index row = channel / kTogether;
    return kPerImage ? Index(image) * this->body.outer_lane_extent() + row : row;
  }
  // Where an element lies along the inner axes, in images of height · width: all but the last axis,
  // and the last.
  struct Place {
    Index rest, last;
  };
  __device__ __forceinline__ Place inner(int image, int channel, int y, int x, int height,
                                         int width) const {
    const Index plane = (kPerImage ? Index(0) : Index(image) * kTogether) + channel % kTogether;
    if (kPlanes) return {plane, Index(y) * width + x};
    return {plane * height + y, Index(x)};
  }
  // What a part has of a channel, in an image of so many positions.
  __device__ __forceinline__ void leave(const WindowPart& part, int image, int channel,
                                        int64_t positions, const Part& total) const {
    const auto put_line = [&](int line, const Part& of_line) {
      const int of_class = line * part.classes + part.of_class;
      this->put(of_class * kTogether + channel % kTogether, outer(image, channel), of_line);
    };
    if constexpr (!kPerImage) {
      put_line(part.number, total);
    } else {
      int line = part.number - int(image * positions >> kPartBits);
      put_line(line, total);
      if ((image + 1) * positions > int64_t(part.number + 1) << kPartBits) return;
      const Part nothing = this->body.template accumulators<1>(Phase<0>{});
      while (++line < image_parts(positions)) put_line(line, nothing);  // it touches one part less
    }
  }
  void join(int lines, void* stream) const {
    if (lines <= 8) {
      this->template join_lines<1>(lines, stream);
    } else if (lines <= 512) {
      this->template join_lines<32>(lines, stream);
    } else if (lines <= kMostLines) {
      this->template join_lines<128>(lines, stream);
    } else {
      Part* const parts = static_cast<Part*>(this->workspace);
      const int64_t outer = this->body.outer_extent();
      Part* const folded = parts + lines * outer;
      const int each = (lines + kFoldedLines - 1) / kFoldedLines, left = (lines + each - 1) / each;
      const unsigned blocks = blocks_for<int64_t>(left * outer, 128);
      fold_kernel<Body, Part><<<blocks, 128, 0, static_cast<cudaStream_t>(stream)>>>(
          this->body, parts, folded, lines, each);
      ByChannel{{this->body, folded}}.template join_lines<128>(left, stream);
    }
  }
};

// Nothing is stored for single elements.
struct Nothing {
  static constexpr bool kReduces = false;
  struct Factors {};
  template <int V>
  struct Elem {};
  template <int V>
  struct Column {};
};

// What is stored for single elements, by columns, and what is reduced over positions.
template <class Stores, class Reduces>
struct StoredAndReduced {
  static constexpr bool kByRow = true, kReduces = true;
  Stores stores;
  Reduces reduces;

  void join(int lines, void* stream) const { reduces.join(lines, stream); }
};
template <class Stores, class Reduces>
StoredAndReduced(Stores, Reduces) -> StoredAndReduced<Stores, Reduces>;

template <class Body>
FW_FN const ByColumn<Body>& stores_of(const ByColumn<Body>& end) {
  return end;
}
template <class Stores, class Reduces>
FW_FN const Stores& stores_of(const StoredAndReduced<Stores, Reduces>& end) {
  return end.stores;
}
template <class End>
using StoresOf = std::decay_t<decltype(stores_of(std::declval<End>()))>;

}  // namespace fw
