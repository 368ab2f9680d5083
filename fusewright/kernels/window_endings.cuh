// How a window's result is reduced over its positions. Positions of a row are walked in a line, with
// what lies in halos between them (window_operands.cuh), and threads meet in parts of that line. A
// part may reach over several images; where each image is reduced apart, it leaves something for
// each of them.
#pragma once

#include "endings.cuh"

namespace fw {

// Positions of a part, as a power of two: as many as a row part of sm90_finish.cuh has columns.
constexpr int kPartBits = 5;

// How many parts an image of so many positions can touch.
FW_FN int image_parts(int64_t positions) {
  return int((positions + (1 << kPartBits) - 2) >> kPartBits) + 1;
}

// A part of the line: the images that it touches, and its number among the parts of all positions
// or among those of the first image. Each class of outputs has such parts.
struct WindowPart {
  int of_all, of_first;
  int first, last;  // images; none where the line is at its end
  int of_image;     // parts that each image has a line for
  bool whole;       // whether the last image has no further part
  int classes = 1, of_class = 0;

  // `start` is its first position among all, `positions` those of an image.
  __device__ __forceinline__ WindowPart(int64_t start, int first_image, int last_image,
                                        int images, int64_t positions)
      : of_all(int(start >> kPartBits)),
        of_first(of_all - int(first_image * positions >> kPartBits)),
        first(first_image),
        last(last_image < images ? last_image : images - 1),
        of_image(image_parts(positions)),
        whole(last_image >= images || (last_image + 1) * positions <= start + (1 << kPartBits)) {}
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

// What an element's row is to ByChannel.
template <class Place>
struct WindowRow {
  const Place& place;
  int channel, height;  // of all groups; rows of an image
  bool exists;          // there is such a channel
};

// Reduces over positions: kTogether neighbouring out channels as one, all images as one or each
// apart. The body's inner axes are images (where they are reduced), channels (where several go
// together), y and x; a channel that goes together with others has lines of its own.
template <class Body, bool kPerImage, int kTogether>
struct ByChannel : ByRow<Body> {
  using Index = typename Parts<Body>::Index;
  using Part = typename Parts<Body>::Part;
  template <int V>
  using Elem = typename ByRow<Body>::template Elem<V>;
  template <int V>
  using Column = typename ByRow<Body>::template Column<V>;

  static int lines(int64_t positions, int64_t of_image) {
    return (kPerImage ? image_parts(of_image) : int(positions >> kPartBits)) * kTogether;
  }
  __device__ __forceinline__ Index outer(int image, int channel) const {
    const Index row = channel / kTogether;
    return kPerImage ? Index(image) * this->body.outer_lane_extent() + row : row;
  }
  template <class At>
  __device__ __forceinline__ Index inner(const At& row) const {
    const Index channels = row.channel % kTogether;
    const Index image = kPerImage ? Index(0) : Index(row.place.image) * kTogether;
    return (image + channels) * row.height + row.place.y;
  }
  template <int V, class At>
  __device__ __forceinline__ void load(Elem<V>& at, const Column<V>&, const At& row,
                                       int column) const {
    this->enter(at.row, outer(row.place.image, row.channel));
    this->body.load(Phase<0>{}, at.elem, at.row, inner(row), Index(column));
  }
  // As ByRow's; a row whose first thread is in a halo leaves its part, too.
  template <int kThreads, int V, class At>
  __device__ __forceinline__ void visit_row(const Elem<V>& at, bool inside, const At& row,
                                            int column) const {
    Sums<Body, V> acc = this->body.template accumulators<V>(Phase<0>{});
    if (inside) {
      this->body.visit(Phase<0>{}, at.elem, at.row, acc, inner(row), Index(column), V);
    }
    const Part mine = acc.folded(V), nothing = this->body.template accumulators<1>(Phase<0>{});
    const bool leads = row.exists && threadIdx.x % kThreads == 0;
    const auto& part = row.place.part;
    const auto leave = [&](int image, int line, const Part& total) {
      const int of_class = line * part.classes + part.of_class;
      const int member = row.channel % kTogether;
      this->put(of_class * kTogether + member, outer(image, row.channel), total);
    };
    if constexpr (!kPerImage) {
      const Part total = warp_total<kThreads>(mine);
      if (leads) leave(0, part.of_all, total);
    } else {
#pragma unroll 1
      for (int image = part.first; image <= part.last; ++image) {
        const Part total = warp_total<kThreads>(image == row.place.image ? mine : nothing);
        if (!leads) continue;
        int line = image == part.first ? part.of_first : 0;
        leave(image, line, total);
        if (image == part.last && !part.whole) continue;
        while (++line < part.of_image) leave(image, line, nothing);  // images touch one part less
      }
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
      ByChannel{{{this->body, folded}}}.template join_lines<128>(left, stream);
    }
  }
};

}  // namespace fw
