// Kernels whose tensors differ in their contiguous axis. A block takes a tile of kTile lanes by
// kTile indices of the transposed axis. Tensors that are contiguous along the transposed axis go
// through shared memory: they are loaded and stored with the threads along that axis, so that every
// access covers whole cache lines.
#pragma once

#include "cuda/groups.cuh"
#include "cuda/tile.cuh"

namespace fw {

// The position in the tile of vector u of this thread: `near` along the contiguous axis, `far`
// along the other. A warp takes 32 neighbours of V rows at a time, which are whole cache lines, and
// then the next 32 of the same rows. `row` numbers the rows in which a thread takes part.
template <int V, int kTile, int kThreads>
struct Spot {
  static constexpr int kChunks = kTile / 32, kVectors = kTile * kTile / (V * kThreads);
  static constexpr int kRows = kVectors / kChunks, kAcross = 32 / V;
  int near, far;
  FW_DEVICE explicit Spot(int u) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    near = u % kChunks * 32 + lane % kAcross * V;
    far = (row(u) * (kThreads / 32) + warp) * V + lane / kAcross;
  }
  static FW_DEVICE int row(int u) { return u / kChunks; }
};

// Processes one tile. `moves` defines what is done at m along the transposed axis and l along the
// lanes. `again` means that shared memory holds an earlier tile, which all threads must have
// finished.
template <typename I, int V, int kTile, int kThreads, class Body, class Moves>
FW_DEVICE void transpose_tile(const Body&, Moves& moves, I m0, I transposed, I l0, I lanes,
                              bool again) {
  using Spots = Spot<V, kTile, kThreads>;
  constexpr int kPitch = kTile + 1, kSlots = kTile * kPitch, kBytes = Body::kSlotBytes;
  using Along = Tile<kSlots, kBytes, 1>;
  using Across = Tile<kSlots, kBytes, kPitch>;
  __shared__ __align__(16) unsigned char memory[Body::kTiles * kSlots * kBytes];
  typename Body::template Elem<V> elem[Spots::kVectors];
  typename Body::template Fetched<V> fetched[Spots::kVectors];
#pragma unroll
  for (int u = 0; u < Spots::kVectors; ++u) {
    const Spots at(u);
    if (m0 + at.near < transposed && l0 + at.far < lanes) {
      moves.fetch(fetched[u], m0 + at.near, l0 + at.far);
    }
    if (l0 + at.near < lanes && m0 + at.far < transposed) {
      moves.load(elem[u], Spots::row(u), m0 + at.far, l0 + at.near);
    }
  }
  if (again) __syncthreads();
  if constexpr (Body::kFetches) {
#pragma unroll
    for (int u = 0; u < Spots::kVectors; ++u) {
      const Spots at(u);
      if (m0 + at.near < transposed && l0 + at.far < lanes) {
        moves.body.stage(fetched[u], Across{memory, at.near * kPitch + at.far});
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int u = 0; u < Spots::kVectors; ++u) {
    const Spots at(u);
    if (l0 + at.near < lanes && m0 + at.far < transposed) {
      const Along tile{memory, at.far * kPitch + at.near};
      moves.visit(elem[u], tile, Spots::row(u), m0 + at.far, l0 + at.near);
    }
  }
  if constexpr (Body::kFlushes) {
    __syncthreads();
#pragma unroll
    for (int u = 0; u < Spots::kVectors; ++u) {
      const Spots at(u);
      if (m0 + at.near < transposed && l0 + at.far < lanes) {
        moves.template flush<V>(Across{memory, at.near * kPitch + at.far}, m0 + at.near,
                                l0 + at.far);
      }
    }
  }
}

// Without reductions: a block has one tile.
template <class Body, typename I, int V>
struct PointMoves {
  const Body& body;
  I q;
  template <class Fetched>
  FW_DEVICE void fetch(Fetched& fetched, I m, I l) const {
    body.fetch(fetched, q, m, l);
  }
  template <class Elem>
  FW_DEVICE void load(Elem& elem, int, I m, I l) const {
    body.load(elem, q, m, l);
  }
  template <class Elem, class Tile>
  FW_DEVICE void visit(const Elem& elem, const Tile& tile, int, I m, I l) const {
    body.visit(elem, tile, q, m, l, V);
  }
  template <int W, class Tile>
  FW_DEVICE void flush(const Tile& tile, I m, I l) const {
    body.template flush<W>(tile, q, m, l);
  }
};

template <class Body, typename I, int V, int kTile, int kThreads>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const Body body, I lane_tiles, I transposed_tiles) {
  const I strip = static_cast<I>(blockIdx.x) / transposed_tiles;
  const I m0 = (static_cast<I>(blockIdx.x) - strip * transposed_tiles) * kTile;
  const I q = strip / lane_tiles, l0 = (strip - q * lane_tiles) * kTile;
  PointMoves<Body, I, V> moves{body, q};
  transpose_tile<I, V, kTile, kThreads>(body, moves, m0, body.transposed_extent(), l0,
                                        body.lane_extent(), false);
}

template <typename I, int V, int kTile, int kThreads, class Body>
int transpose(const Body& body, int device, void* stream) {
  const I lanes = body.lane_extent(), transposed = body.transposed_extent();
  if (body.rest_extent() * lanes * transposed == 0) return 0;
  const OnDevice here(device);
  const I lane_tiles = blocks_for<I>(lanes, kTile),
          transposed_tiles = blocks_for<I>(transposed, kTile);
  const unsigned blocks = static_cast<unsigned>(body.rest_extent() * lane_tiles * transposed_tiles);
  transpose_kernel<Body, I, V, kTile, kThreads>
      <<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(body, lane_tiles,
                                                                   transposed_tiles);
  return static_cast<int>(cudaGetLastError());
}

// For reductions in one sweep with rows along the transposed axis. A block has kTile rows and
// processes its share of the tiles of the inner extent; a thread takes part in kRows rows.
template <class Body, typename I, int V, int kRows>
struct RowMoves {
  const Body& body;
  I p, q;
  typename Body::template Row<1> row[kRows];
  decltype(body.template accumulators<V>(Phase<0>{})) acc[kRows];
  template <class Fetched>
  FW_DEVICE void fetch(Fetched& fetched, I m, I l) const {
    body.fetch(fetched, p, m, q, l);
  }
  template <class Elem>
  FW_DEVICE void load(Elem& elem, int r, I, I l) const {
    body.load(Phase<0>{}, elem, row[r], q, l);
  }
  template <class Elem, class Tile>
  FW_DEVICE void visit(const Elem& elem, const Tile& tile, int r, I, I l) {
    body.visit(Phase<0>{}, elem, row[r], acc[r], tile, q, l, V);
  }
  template <int W, class Tile>
  FW_DEVICE void flush(const Tile& tile, I m, I l) const {
    body.template flush<W>(tile, p, m, q, l);
  }
};

template <class Body, typename I, int V, int kTile, int kThreads, class Part>
__global__ void __launch_bounds__(kThreads)
    transpose_row_kernel(const Body body, Part* parts, I lane_tiles, I transposed_tiles,
                         I per_split) {
  using Spots = Spot<V, kTile, kThreads>;
  const I p = static_cast<I>(blockIdx.x) / transposed_tiles;
  const I m0 = (static_cast<I>(blockIdx.x) - p * transposed_tiles) * kTile;
  const I lanes = body.lane_extent(), transposed = body.outer_lane_extent();
  RowMoves<Body, I, V, Spots::kRows> moves{body, p};
#pragma unroll
  for (int r = 0; r < Spots::kRows; ++r) {
    const I m = m0 + Spots(r * Spots::kChunks).far;
    body.begin(moves.row[r], p, m < transposed ? m : transposed - 1, 1);
  }
  const I first = blockIdx.y * per_split;
  I end = body.rest_extent() * lane_tiles;
  if (first + per_split < end) end = first + per_split;
  for (I index = first; index < end; ++index) {
    moves.q = index / lane_tiles;
    const I l0 = (index - moves.q * lane_tiles) * kTile;
    transpose_tile<I, V, kTile, kThreads>(body, moves, m0, transposed, l0, lanes, index > first);
  }
#pragma unroll
  for (int r = 0; r < Spots::kRows; ++r) {
    const auto total = warp_total<Spots::kAcross>(moves.acc[r].folded(V));
    const I m = m0 + Spots(r * Spots::kChunks).far;
    if (threadIdx.x % 32 % Spots::kAcross != 0 || m >= transposed) continue;
    if constexpr (Body::kSplit) {
      parts[blockIdx.y * static_cast<int64_t>(body.outer_extent()) + p * transposed + m] = total;
    } else {
      body.finish(Phase<0>{}, moves.row[r], total, 1);
      body.store(moves.row[r], 1);
    }
  }
}

template <typename I, int V, int kTile, int kThreads, class Body>
int transpose_row(const Body& body, int splits, void* workspace, int device, void* stream) {
  using Part = decltype(body.template accumulators<1>(Phase<0>{}));
  static_assert(sizeof(Part) <= Body::kPartBytes, "the workspace was sized for less");
  const I outer = body.outer_extent();
  if (outer == 0) return 0;
  const OnDevice here(device);
  const I transposed_tiles = blocks_for<I>(body.outer_lane_extent(), kTile);
  const I lane_tiles = blocks_for<I>(body.lane_extent(), kTile);
  const I per_split = (body.rest_extent() * lane_tiles + splits - 1) / splits;
  Part* parts = static_cast<Part*>(workspace);
  const dim3 grid(static_cast<unsigned>(outer / body.outer_lane_extent() * transposed_tiles),
                  splits);
  transpose_row_kernel<Body, I, V, kTile, kThreads>
      <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(body, parts, lane_tiles,
                                                                 transposed_tiles, per_split);
  if constexpr (Body::kSplit) combine<I, 128>(body, parts, splits, stream);
  return static_cast<int>(cudaGetLastError());
}

// For reductions over the transposed axis: a block has one row, and all its threads combine to one
// result.
template <class Body, typename I, int V>
struct WithinMoves {
  const Body& body;
  I q;
  typename Body::template Row<1> row;
  decltype(body.template accumulators<V>(Phase<0>{})) acc;
  template <class Fetched>
  FW_DEVICE void fetch(Fetched& fetched, I m, I l) const {
    body.fetch(fetched, row, q, m, l);
  }
  template <class Elem>
  FW_DEVICE void load(Elem& elem, int, I m, I l) const {
    body.load(Phase<0>{}, elem, row, q, m, l);
  }
  template <class Elem, class Tile>
  FW_DEVICE void visit(const Elem& elem, const Tile& tile, int, I m, I l) {
    body.visit(Phase<0>{}, elem, row, acc, tile, q, m, l, V);
  }
  template <int W, class Tile>
  FW_DEVICE void flush(const Tile& tile, I m, I l) const {
    body.template flush<W>(tile, row, q, m, l);
  }
};

template <class Body, typename I, int V, int kTile, int kThreads, class Part>
__global__ void __launch_bounds__(kThreads)
    transpose_within_kernel(const Body body, Part* parts, I lane_tiles, I transposed_tiles,
                            I per_split) {
  const I p = blockIdx.x, lanes = body.lane_extent(), transposed = body.transposed_extent();
  WithinMoves<Body, I, V> moves{body};
  I outer_q, outer_l;
  locate<Body::kOuterRest>(p, body.outer_lane_extent(), outer_q, outer_l);
  body.begin(moves.row, outer_q, outer_l, 1);
  const I first = blockIdx.y * per_split;
  I end = body.rest_extent() * lane_tiles * transposed_tiles;
  if (first + per_split < end) end = first + per_split;
  for (I index = first; index < end; ++index) {
    const I strip = index / transposed_tiles, m0 = (index - strip * transposed_tiles) * kTile;
    moves.q = strip / lane_tiles;
    const I l0 = (strip - moves.q * lane_tiles) * kTile;
    transpose_tile<I, V, kTile, kThreads>(body, moves, m0, transposed, l0, lanes, index > first);
  }
  const auto total = group_total<kThreads>(moves.acc.folded(V));
  if (threadIdx.x != 0) return;
  if constexpr (Body::kSplit) {
    parts[blockIdx.y * static_cast<int64_t>(body.outer_extent()) + p] = total;
  } else {
    body.finish(Phase<0>{}, moves.row, total, 1);
    body.store(moves.row, 1);
  }
}

template <typename I, int V, int kTile, int kThreads, class Body>
int transpose_within(const Body& body, int splits, void* workspace, int device, void* stream) {
  using Part = decltype(body.template accumulators<1>(Phase<0>{}));
  static_assert(sizeof(Part) <= Body::kPartBytes, "the workspace was sized for less");
  const I outer = body.outer_extent();
  if (outer == 0) return 0;
  const OnDevice here(device);
  const I transposed_tiles = blocks_for<I>(body.transposed_extent(), kTile);
  const I lane_tiles = blocks_for<I>(body.lane_extent(), kTile);
  const I tiles = body.rest_extent() * lane_tiles * transposed_tiles;
  const I per_split = (tiles + splits - 1) / splits;
  Part* parts = static_cast<Part*>(workspace);
  const dim3 grid(static_cast<unsigned>(outer), splits);
  transpose_within_kernel<Body, I, V, kTile, kThreads>
      <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(body, parts, lane_tiles,
                                                                 transposed_tiles, per_split);
  if constexpr (Body::kSplit) combine<I, 128>(body, parts, splits, stream);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
