// Held columns whose results are contiguous along the columns. They go through shared memory: a warp
// that holds neighbouring columns would write a few bytes of each of many cache lines. The block
// writes them with its threads along the columns, where V elements are one access.
#pragma once

#include "cuda/held_column.cuh"
#include "cuda/tile.cuh"

namespace fw {

// The results of a block, one row per column. Lane v of all threads comes before lane v + 1: with
// an odd pitch, a warp that writes one element of each of its columns has no bank conflicts.
template <class Body, int V, int kAcross, int kDown, int kUnroll>
struct ColumnTiles {
  static constexpr int kColumns = kAcross * V, kPitch = kDown * kUnroll | 1;
  static constexpr int kSlots = kColumns * kPitch, kSlotBytes = Body::kSlotBytes;
  static constexpr int kBytes = Body::kTiles * kSlots * kSlotBytes;
  const Body& body;

  FW_DEVICE static unsigned char* shared() {
    extern __shared__ __align__(1024) char memory[];
    return reinterpret_cast<unsigned char*>(memory);
  }
  template <int kPhase, int kLanes, class Elem, class Row, class Acc, typename I>
  FW_DEVICE void visit(Elem& elem, const Row& row, Acc& acc, I inner) const {
    const int at = static_cast<int>(threadIdx.x) % kAcross * kPitch + static_cast<int>(inner);
    const Tile<kSlots, kSlotBytes, kAcross * kPitch> tile{shared(), at};
    body.visit(Phase<kPhase>{}, elem, row, acc, tile, inner, I(0), kLanes);
  }
  // Writes the columns from `first` on. There are at most kUnroll vectors for each thread.
  template <typename I>
  FW_DEVICE void flush(I first) const {
    const int each = static_cast<int>(body.inner_extent()) / V;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int vector = u * (kAcross * kDown) + static_cast<int>(threadIdx.x);
      const int column = vector / each, inner = (vector - column * each) * V;
      const I p = first + column;
      if (column >= kColumns || p >= body.outer_extent()) continue;
      I q, l;
      locate<Body::kOuterRest>(p, body.outer_lane_extent(), q, l);
      const int at = (column % V * kAcross + column / V) * kPitch + inner;
      body.template flush<V>(Tile<kSlots, kSlotBytes, 1>{shared(), at}, q, I(inner), l);
    }
  }
};

template <class Body, typename I, int V, int kAcross, int kDown, int kUnroll>
__global__ void __launch_bounds__(kAcross* kDown) transpose_column_kernel(const Body body) {
  let_next_begin();
  const ColumnTiles<Body, V, kAcross, kDown, kUnroll> tiles{body};
  hold_columns<I, V, kAcross, kDown, kUnroll>(body, tiles);
  __syncthreads();
  tiles.flush(static_cast<I>(blockIdx.x) * (kAcross * V));
}

template <typename I, int V, int kAcross, int kDown, int kUnroll, class Body>
static int transpose_column(const Body& body, int device, void* stream) {
  const I outer = body.outer_extent();
  if (outer == 0) return 0;
  const OnDevice here(device);
  const unsigned blocks = blocks_for<I>(outer, kAcross * V);
  const auto kernel = transpose_column_kernel<Body, I, V, kAcross, kDown, kUnroll>;
  constexpr int kBytes = ColumnTiles<Body, V, kAcross, kDown, kUnroll>::kBytes;
  static Roomy roomy;
  if (const int code = roomy.ready(kernel, kBytes, device)) return code;
  kernel<<<blocks, kAcross * kDown, kBytes, static_cast<cudaStream_t>(stream)>>>(body);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
