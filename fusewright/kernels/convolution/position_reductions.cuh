// How a convolution's result is reduced over its positions. Positions are numbered, halos included
// (operands.cuh), and a warp reduces parts of them. A part may cover several images; if each image
// is reduced separately, the part leaves a partial for each of them.
#pragma once

#include "cuda/epilogues.cuh"

namespace fw {

// Positions of a part, as a power of two. Every warpgroup has one or several whole parts.
constexpr int kPartBits = 6, kPartPositions = 1 << kPartBits;

// How many parts an image of `positions` positions can touch.
FW_FN int image_parts(int64_t positions) {
  return int((positions + kPartPositions - 2) >> kPartBits) + 1;
}

// A part of the positions of a class; its first position is number · kPartPositions.
struct PositionPart {
  int number;
  int first, last;  // images that it touches; none after the last position
  uint64_t inside;  // a bit for each position that is not in a halo
  int classes, of_class;

  // A bit for each of the part's positions that belongs to an image; images have `positions` each.
  FW_DEVICE uint64_t of_image(int image, int64_t positions) const {
    const int64_t begin = image * positions - (int64_t(number) << kPartBits);
    const int64_t end = begin + positions;
    uint64_t bits = ~uint64_t(0);
    if (begin > 0) bits <<= begin;  // the image begins in this part
    if (end < kPartPositions) bits &= (uint64_t(1) << end) - 1;
    return bits;
  }
};

// More partials than these are first folded to a few, by many threads: channels alone are too few.
constexpr int kMostPartials = 2048, kFoldedPartials = 256;

// Combines `each` neighbouring partials into one, in order.
template <class Body, class Part>
__global__ void __launch_bounds__(128)
    fold_kernel(const Body body, const Part* parts, Part* folded, int partials, int each) {
  const int64_t outer = body.outer_extent();
  const int64_t at = int64_t(blockIdx.x) * 128 + threadIdx.x;
  const int first = int(at / outer) * each, end = first + each < partials ? first + each : partials;
  if (first >= end) return;
  Part acc = body.template accumulators<1>(Phase<0>{});
  const Part* const from = parts + at % outer;
#pragma unroll 8
  for (int partial = first; partial < end; ++partial) acc.combine(from[partial * outer]);
  folded[at] = acc;
}

// Reduces over positions: kTogether neighbouring output channels as one, all images as one or each
// separately. The body's outer axes are images (if they are separate) and channels. Its inner axes
// are images (if they are reduced), channels (if several are reduced as one), y and x, or y and x
// as one axis (kPlanes). Each of several channels that are reduced as one has partials of its own.
template <class Body_, bool kPerImage_, int kTogether, bool kPlanes>
struct ByChannel : Parts<Body_> {
  static constexpr bool kPerImage = kPerImage_;
  using Body = Body_;
  using IndexType = typename Parts<Body>::IndexType;
  using Part = typename Parts<Body>::Part;
  using Row = typename Body::template Row<1>;

  static int partials(int64_t positions, int64_t of_image) {
    return (kPerImage ? image_parts(of_image) : int(positions >> kPartBits)) * kTogether;
  }
  FW_DEVICE void enter(Row& row, int image, int channel) const {
    this->body.begin(row, IndexType(kPerImage ? image : 0), IndexType(channel / kTogether), 1);
  }
  FW_DEVICE IndexType outer(int image, int channel) const {
    const IndexType row = channel / kTogether;
    return kPerImage ? IndexType(image) * this->body.outer_lane_extent() + row : row;
  }
  // An element's index along the inner axes, in images of height · width: over all axes but the
  // last, and along the last.
  struct InnerIndex {
    IndexType rest, last;
  };
  FW_DEVICE InnerIndex inner(int image, int channel, int y, int x, int height, int width) const {
    const IndexType plane =
        (kPerImage ? IndexType(0) : IndexType(image) * kTogether) + channel % kTogether;
    if (kPlanes) return {plane, IndexType(y) * width + x};
    return {plane * height + y, IndexType(x)};
  }
  // Writes what a part has of a channel, in an image of `positions` positions.
  FW_DEVICE void leave(const PositionPart& part, int image, int channel, int64_t positions,
                       const Part& total) const {
    const auto put_partial = [&](int partial, const Part& of_partial) {
      const int of_class = partial * part.classes + part.of_class;
      this->put(of_class * kTogether + channel % kTogether, outer(image, channel), of_partial);
    };
    if constexpr (!kPerImage) {
      put_partial(part.number, total);
    } else {
      int partial = part.number - int(image * positions >> kPartBits);
      put_partial(partial, total);
      if ((image + 1) * positions > int64_t(part.number + 1) << kPartBits) return;
      const Part nothing = this->body.template accumulators<1>(Phase<0>{});
      while (++partial < image_parts(positions)) put_partial(partial, nothing);  // one part fewer
    }
  }
  void join(int partials, void* stream) const {
    if (partials <= 8) {
      this->template join_partials<1>(partials, stream);
    } else if (partials <= 512) {
      this->template join_partials<32>(partials, stream);
    } else if (partials <= kMostPartials) {
      this->template join_partials<128>(partials, stream);
    } else {
      Part* const parts = static_cast<Part*>(this->workspace);
      const int64_t outer = this->body.outer_extent();
      Part* const folded = parts + partials * outer;
      const int each = (partials + kFoldedPartials - 1) / kFoldedPartials,
                left = (partials + each - 1) / each;
      const unsigned blocks = blocks_for<int64_t>(left * outer, 128);
      fold_kernel<Body, Part><<<blocks, 128, 0, static_cast<cudaStream_t>(stream)>>>(
          this->body, parts, folded, partials, each);
      ByChannel{{this->body, folded}}.template join_partials<128>(left, stream);
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

  void join(int partials, void* stream) const { reduces.join(partials, stream); }
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
template <class Epilogue>
using StoresOf = std::decay_t<decltype(stores_of(std::declval<Epilogue>()))>;

}  // namespace fw
