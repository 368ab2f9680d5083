// How a warp reduces a convolution's result over positions, alone. It has written 8 channels of a
// part to its shared memory (sm90_convolution_epilogue.cuh). A thread takes back the 16 elements
// that it wrote itself, all of one channel: a loop can index these, but not registers. Then four
// threads combine what they have of their channel, in a fixed order.
#pragma once

#include "sm90/matmul/sm90_epilogue.cuh"
#include "convolution/position_reductions.cuh"

namespace fw {

// For an epilogue that reduces nothing over positions.
template <class Epilogue, class ResultTile>
struct NoPositionReducer {
  FW_DEVICE NoPositionReducer(const Epilogue&, const ResultTile&) {}
  FW_DEVICE void begin_part(int) {}
  FW_DEVICE void enter(int) {}
  FW_DEVICE void sweep(const float*, int) {}
};

// V is 2 if pairs of positions are neighbours in memory, else 1.
template <int V, class Epilogue, class ResultTile>
struct PositionReducer {
  using Reduces = decltype(Epilogue::reduces);
  using Body = typename Reduces::Body;
  using Elem = typename Body::template Elem<V>;
  // Pairs of elements whose loads are in flight together.
  static constexpr int kTogether = rows_together<Elem[2 / V], ResultTile>(4);

  const Reduces& end;
  const ResultTile& result;
  PositionPart part;
  typename Reduces::Row row;
  int q;  // the thread's channel

  FW_DEVICE PositionReducer(const Epilogue& of, const ResultTile& result)
      : end(of.reduces), result(result) {}

  // Begins the part that starts at position p of the tile.
  FW_DEVICE void begin_part(int p) { part = result.part(p); }
  // Called before the elements are written: what is read of a channel is then in flight.
  FW_DEVICE void enter(int first_channel) {
    q = first_channel + threadIdx.x % 32 / 4;
    if (!Reduces::kPerImage || part.first <= part.last) enter_image(part.first);
  }
  // The part begins at position p of the tile, and the thread's elements at `mine`.
  FW_DEVICE void sweep(const float* mine, int p) {
    if constexpr (!Reduces::kPerImage) {
      leave(0, total(mine, p, part.inside));
    } else {
#pragma unroll 1
      for (int image = part.first; image <= part.last; ++image) {
        if (image != part.first) enter_image(image);
        const uint64_t bits = part.inside & part.of_image(image, result.sizes.image_positions());
        leave(image, total(mine, p, bits));
      }
    }
  }

 private:
  FW_DEVICE void enter_image(int image) { end.enter(row, image, channel()); }
  // A thread without a channel computes with one that exists, and writes nothing.
  FW_DEVICE int channel() const { return result.channel_out(min(q, result.rows - 1)); }
  FW_DEVICE void leave(int image, const typename Reduces::Part& total) const {
    if (q < result.rows && threadIdx.x % 4 == 0) {
      end.leave(part, image, channel(), result.sizes.image_positions(), total);
    }
  }
  // Reduces over the positions whose bits are set; the first of four threads has the result.
  FW_DEVICE typename Reduces::Part total(const float* mine, int p, uint64_t bits) const {
    Sums<Body, V> acc = end.body.template accumulators<V>(Phase<0>{});
    const int column = threadIdx.x % 4 * 2;
#pragma unroll 1
    for (int at = 0; at < kPartPositions; at += 8 * kTogether) {
      visit(acc, mine + at, p + column + at, uint32_t(bits >> (column + at)));
    }
    return warp_joined<4>(acc.folded(V));
  }
  // Visits kTogether pairs, eight positions apart. The index of an element is not computed unless
  // it is used. Positions in a halo are visited, too, as if they were the first of their channel,
  // and then ignored: with branches one pair would wait for the loads of the other.
  FW_DEVICE void visit(Sums<Body, V>& acc, const float* from, int p, uint32_t bits) const {
    Elem elem[kTogether][2 / V];
    const auto inside = [&](int k, int v) { return (bits >> (8 * k + v) & 1) != 0; };
    const auto index = [&](int k, int v) {
      const ConvShape& shape = result.sizes.shape;
      const ConvPosition at = result.output(p + 8 * k + v);
      const bool there = inside(k, v);
      return end.inner(there ? at.image : 0, channel(), there ? result.row_of(at) : 0,
                       there ? at.column : 0, shape.out_rows(), shape.out_x.count);
    };
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
#pragma unroll
      for (int v = 0; v < 2; v += V) {
        const auto at = index(k, v);
        end.body.load(Phase<0>{}, elem[k][v / V], row, at.rest, at.last);
      }
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const Packed<float, 2> pair = take_row<2>(from + 8 * k);
#pragma unroll
      for (int v = 0; v < 2; v += V) {
#pragma unroll
        for (int i = 0; i < V; ++i) end.body.give(elem[k][v / V], i, pair.lanes[v + i]);
        const auto at = index(k, v);
        Sums<Body, V> next = acc;
        end.body.visit(Phase<0>{}, elem[k][v / V], row, next, at.rest, at.last, V);
        acc = chosen(inside(k, v), next, acc);
      }
    }
  }
};

}  // namespace fw
