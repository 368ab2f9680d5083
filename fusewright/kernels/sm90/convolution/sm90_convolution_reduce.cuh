// How a warp reduces a convolution's result over positions, alone. It has laid 8 channels of a part into
// its shared memory (sm90_convolution_epilogue.cuh); a thread takes back the 16 numbers that it has put there
// itself, all of one channel: a loop can go through these, through registers it could not. Four threads
// then join what they have of their channel, in a fixed order.
#pragma once

#include "sm90/matmul/sm90_epilogue.cuh"
#include "convolution/position_reductions.cuh"

namespace fw {

// An epilogue that has nothing to reduce over positions.
template <class End, class Result>
struct NoSweeper {
  __device__ __forceinline__ NoSweeper(const End&, const Result&) {}
  __device__ __forceinline__ void begin_part(int) {}
  __device__ __forceinline__ void enter(int) {}
  __device__ __forceinline__ void sweep(const float*, int) {}
};

// V is 2 where pairs of positions are neighbours in memory, else 1.
template <int V, class End, class Result>
struct Sweeper {
  using Reduces = decltype(End::reduces);
  using Body = typename Reduces::Body;
  using Elem = typename Body::template Elem<V>;
  // Pairs of numbers whose loads are on their way together.
  static constexpr int kTogether = rows_together<Elem[2 / V], Result>(4);

  const Reduces& end;
  const Result& result;
  WindowPart part;
  typename Reduces::Row row;
  int q;  // the thread's channel

  __device__ __forceinline__ Sweeper(const End& of, const Result& result)
      : end(of.reduces), result(result) {}

  // From position p of the tile on.
  __device__ __forceinline__ void begin_part(int p) { part = result.part(p); }
  // Before the numbers are laid out: what is read of a channel is then on its way.
  __device__ __forceinline__ void enter(int first_channel) {
    q = first_channel + threadIdx.x % 32 / 4;
    if (!Reduces::kPerImage || part.first <= part.last) enter_image(part.first);
  }
  // The part's positions begin at p of the tile; `mine` is where the thread's numbers do.
  __device__ __forceinline__ void sweep(const float* mine, int p) {
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
  __device__ __forceinline__ void enter_image(int image) {
    end.enter(row, image, channel());
  }
  // A thread without a channel goes along with one that there is, and leaves nothing.
  __device__ __forceinline__ int channel() const {
    return result.channel_out(min(q, result.rows - 1));
  }
  __device__ __forceinline__ void leave(int image, const typename Reduces::Part& total) const {
    if (q < result.rows && threadIdx.x % 4 == 0) {
      end.leave(part, image, channel(), result.sizes.image_positions(), total);
    }
  }
  // Over the positions whose bits are set; known to the first of four threads.
  __device__ __forceinline__ typename Reduces::Part total(const float* mine, int p,
                                                          uint64_t bits) const {
    Sums<Body, V> acc = end.body.template accumulators<V>(Phase<0>{});
    const int column = threadIdx.x % 4 * 2;
#pragma unroll 1
    for (int at = 0; at < kPartPositions; at += 8 * kTogether) {
      visit(acc, mine + at, p + column + at, uint32_t(bits >> (column + at)));
    }
    return warp_joined<4>(acc.folded(V));
  }
  // kTogether pairs, eight positions apart. Where an element lies is not computed unless it is read.
  // What is in a halo is visited, too, as if it were the first of its channel, and then not taken:
  // with branches one pair would wait for the loads of the other.
  __device__ __forceinline__ void visit(Sums<Body, V>& acc, const float* from, int p,
                                        uint32_t bits) const {
    Elem elem[kTogether][2 / V];
    const auto inside = [&](int k, int v) { return (bits >> (8 * k + v) & 1) != 0; };
    const auto place = [&](int k, int v) {
      const WindowShape& shape = result.sizes.shape;
      const WindowPosition at = result.output(p + 8 * k + v);
      const bool there = inside(k, v);
      return end.inner(there ? at.image : 0, channel(), there ? result.row_of(at) : 0,
                       there ? at.column : 0, shape.out_rows(), shape.out_x.count);
    };
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
#pragma unroll
      for (int v = 0; v < 2; v += V) {
        const auto at = place(k, v);
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
        const auto at = place(k, v);
        Sums<Body, V> next = acc;
        end.body.visit(Phase<0>{}, elem[k][v / V], row, next, at.rest, at.last, V);
        acc = chosen(inside(k, v), next, acc);
      }
    }
  }
};

}  // namespace fw
