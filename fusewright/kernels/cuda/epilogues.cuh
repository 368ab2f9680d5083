// What the elements of a product end in: a functor of the generated code, and how its results leave
// a tile.
//   ByColumn  a thread stays with some columns: what belongs to a column alone is known before the
//             first row, and a reduction down the columns runs from row to row
//   ByRow     threads meet in each row, to reduce it
// Reductions leave their parts in a workspace, a line for each tile that they cross, of a window
// for each warp or part of one; `join` adds the lines up in their order.
#pragma once

#include "cuda/groups.cuh"

namespace fw {

template <class Body, int V>
using Sums = decltype(std::declval<Body>().template accumulators<V>(Phase<0>{}));

// Quotient and rest of indices: those of 64 bits mostly fit 32, and what is then done for a division by
// 126 are 5 instructions instead of 19.
template <typename I, typename By>
__device__ __forceinline__ I over(I index, By by) {
  if (sizeof(I) == 8 && (uint64_t(index) | uint64_t(by)) >> 32 == 0) {
    return uint32_t(index) / uint32_t(by);
  }
  return index / I(by);
}
template <typename I, typename By>
__device__ __forceinline__ I rest(I index, By by) {
  if (sizeof(I) == 8 && (uint64_t(index) | uint64_t(by)) >> 32 == 0) {
    return uint32_t(index) % uint32_t(by);
  }
  return index % I(by);
}

template <class Body>
struct Parts {
  using Index = decltype(std::declval<Body>().outer_extent());
  using Part = Sums<Body, 1>;
  static_assert(sizeof(Part) <= Body::kPartBytes, "the workspace was sized for less");

  Body body;
  void* workspace;

  template <int V>
  __device__ __forceinline__ void enter(typename Body::template Row<V>& row, Index at) const {
    const Index extent = body.outer_lane_extent();
    const Index q = Body::kOuterRest ? over(at, extent) : Index(0);
    body.begin(row, q, at - q * extent, V);
  }
  __device__ __forceinline__ void put(int line, Index at, const Part& part) const {
    static_cast<Part*>(workspace)[line * static_cast<int64_t>(body.outer_extent()) + at] = part;
  }
  template <int kGroup>
  void join_lines(int lines, void* stream) const {
    if (body.outer_extent() == 0) return;
    combine<Index, kGroup>(body, static_cast<const Part*>(workspace), lines, stream);
  }
};

template <class Body>
struct ByColumn : Parts<Body> {
  static constexpr bool kByRow = false, kReduces = !Sums<Body, 1>::kEmpty;
  using Index = typename Parts<Body>::Index;
  using Factors = typename Body::Factors;
  // What an element is computed of: some for itself, and its row's factors.
  template <int V>
  struct Elem : Body::template Elem<V>, Factors {};
  template <int V>
  struct Column {
    typename Body::template Row<V> row;
    Sums<Body, V> acc;
  };

  // `place` is the column's: its number, and of a window its image, y and x.
  template <int V, class Place>
  __device__ __forceinline__ void begin(Column<V>& down, const Place& place) const {
    if constexpr (Body::kByPosition) {
      this->body.begin(down.row, place.image, place.y, place.x, V);
    } else {
      this->enter(down.row, Index(place.column));
    }
  }
  template <int V>
  __device__ __forceinline__ void load(Elem<V>& elem, const Column<V>& down, int row,
                                       Index) const {
    load_factors(elem, row);
    load_own(elem, down, row);
  }
  __device__ __forceinline__ void load_factors(Factors& factors, int row) const {
    this->body.template compute<1>(factors, Index(row), Index(0));
  }
  template <int V>
  __device__ __forceinline__ void load_own(Elem<V>& elem, const Column<V>& down, int row) const {
    typename Body::template Elem<V>& own = elem;
    this->body.load(Phase<0>{}, own, down.row, Index(row), Index(0));
  }
  template <int V>
  __device__ __forceinline__ void give(Elem<V>& elem, int v, float x) const {
    typename Body::template Elem<V>& own = elem;
    this->body.give(own, v, x);
  }
  template <int V>
  __device__ __forceinline__ void visit(const Elem<V>& elem, Column<V>& down, int row) const {
    const typename Body::template Elem<V>& own = elem;
    this->body.visit(Phase<0>{}, own, elem, down.row, down.acc, Index(row), Index(0), V);
  }
  template <int V>
  __device__ __forceinline__ void leave(const Column<V>& down, int line, Index column) const {
#pragma unroll
    for (int v = 0; v < V; ++v) this->put(line, column + v, down.acc.lane(v));
  }
  void join(int lines, void* stream) const {
    if constexpr (kReduces) {
      // Columns are many and lines few, or threads had better share the lines.
      if (lines <= 64) {
        this->template join_lines<1>(lines, stream);
      } else {
        this->template join_lines<32>(lines, stream);
      }
    }
  }
};

template <class Body>
struct ByRow : Parts<Body> {
  static constexpr bool kByRow = true, kReduces = true;
  using Index = typename Parts<Body>::Index;
  template <int V>
  struct Elem {
    typename Body::template Elem<V> elem;
    typename Body::template Row<1> row;
  };
  template <int V>
  struct Column {};

  template <int V, class Place>
  __device__ __forceinline__ void begin(Column<V>&, const Place&) const {}
  template <int V>
  __device__ __forceinline__ void load(Elem<V>& at, const Column<V>&, int row, int column) const {
    this->enter(at.row, row);
    this->body.load(Phase<0>{}, at.elem, at.row, Index(0), Index(column));
  }
  template <int V>
  __device__ __forceinline__ void give(Elem<V>& at, int v, float x) const {
    this->body.give(at.elem, v, x);
  }
  // kThreads neighbours have a row together; all of a warp call this, those outside for nothing.
  template <int kThreads, int V>
  __device__ __forceinline__ void visit_row(const Elem<V>& at, bool inside, int row,
                                            int column) const {
    Sums<Body, V> acc = this->body.template accumulators<V>(Phase<0>{});
    if (inside) this->body.visit(Phase<0>{}, at.elem, at.row, acc, Index(0), Index(column), V);
    const auto total = warp_total<kThreads>(acc.folded(V));
    if (inside && threadIdx.x % kThreads == 0) this->put(column / (kThreads * V), row, total);
  }
  void join(int lines, void* stream) const { this->template join_lines<32>(lines, stream); }
};

// A result without elements may still be reduced.
template <class End>
int end_nothing(const End& end, int device, void* stream) {
  if (!End::kReduces) return 0;
  const OnDevice here(device);
  end.join(0, stream);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
