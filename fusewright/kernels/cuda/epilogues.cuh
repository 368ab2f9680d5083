// Applies an epilogue, a functor of the generated code, to the elements of a matmul or a
// convolution, and reduces what it returns for a tile.
//   ByColumn  a thread keeps the same columns: values that depend on the column alone are computed
//             before the first row, and a reduction down the columns runs from row to row
//   ByRow     the threads of a row combine, to reduce it
// A reduction writes partial results into a workspace, one partial for each tile along the reduced
// axis; in a convolution, one for each warp or part of a warp. `join` adds the partials in order.
#pragma once

#include "cuda/groups.cuh"

namespace fw {

template <class Body, int V>
using Sums = decltype(std::declval<Body>().template accumulators<V>(Phase<0>{}));

// Quotient and remainder of indices. 64-bit indices mostly fit 32 bits, and a division by 126 then
// takes 5 instructions instead of 19.
template <typename I, typename By>
FW_DEVICE I over(I index, By by) {
  if (sizeof(I) == 8 && (uint64_t(index) | uint64_t(by)) >> 32 == 0) {
    return uint32_t(index) / uint32_t(by);
  }
  return index / I(by);
}
template <typename I, typename By>
FW_DEVICE I rest(I index, By by) {
  if (sizeof(I) == 8 && (uint64_t(index) | uint64_t(by)) >> 32 == 0) {
    return uint32_t(index) % uint32_t(by);
  }
  return index % I(by);
}

template <class Body>
struct Parts {
  using IndexType = decltype(std::declval<Body>().outer_extent());
  using Part = Sums<Body, 1>;
  static_assert(sizeof(Part) <= Body::kPartBytes, "the workspace was sized for less");

  Body body;
  void* workspace;

  template <int V>
  FW_DEVICE void enter(typename Body::template Row<V>& row, IndexType at) const {
    const IndexType extent = body.outer_lane_extent();
    const IndexType q = Body::kOuterRest ? over(at, extent) : IndexType(0);
    body.begin(row, q, at - q * extent, V);
  }
  FW_DEVICE void put(int partial, IndexType at, const Part& part) const {
    static_cast<Part*>(workspace)[partial * static_cast<int64_t>(body.outer_extent()) + at] = part;
  }
  template <int kGroup>
  void join_partials(int partials, void* stream) const {
    if (body.outer_extent() == 0) return;
    combine<IndexType, kGroup>(body, static_cast<const Part*>(workspace), partials, stream);
  }
};

template <class Body>
struct ByColumn : Parts<Body> {
  static constexpr bool kByRow = false, kReduces = !Sums<Body, 1>::kEmpty;
  using IndexType = typename Parts<Body>::IndexType;
  using Factors = typename Body::Factors;
  // The inputs of an element: its own values, and the factors of its row.
  template <int V>
  struct Elem : Body::template Elem<V>, Factors {};
  template <int V>
  struct Column {
    typename Body::template Row<V> row;
    Sums<Body, V> acc;
  };

  // `position` is that of the column: its index, and in a convolution its image, y and x.
  template <int V, class Position>
  FW_DEVICE void begin(Column<V>& down, const Position& position) const {
    if constexpr (Body::kByPosition) {
      this->body.begin(down.row, position.image, position.y, position.x, V);
    } else {
      this->enter(down.row, IndexType(position.column));
    }
  }
  template <int V>
  FW_DEVICE void load(Elem<V>& elem, const Column<V>& down, int row, IndexType) const {
    load_factors(elem, row);
    load_own(elem, down, row);
  }
  FW_DEVICE void load_factors(Factors& factors, int row) const {
    this->body.template compute<1>(factors, IndexType(row), IndexType(0));
  }
  template <int V>
  FW_DEVICE void load_own(Elem<V>& elem, const Column<V>& down, int row) const {
    typename Body::template Elem<V>& own = elem;
    this->body.load(Phase<0>{}, own, down.row, IndexType(row), IndexType(0));
  }
  template <int V>
  FW_DEVICE void give(Elem<V>& elem, int v, float x) const {
    typename Body::template Elem<V>& own = elem;
    this->body.give(own, v, x);
  }
  template <int V>
  FW_DEVICE void visit(const Elem<V>& elem, Column<V>& down, int row) const {
    const typename Body::template Elem<V>& own = elem;
    this->body.visit(Phase<0>{}, own, elem, down.row, down.acc, IndexType(row), IndexType(0), V);
  }
  template <int V>
  FW_DEVICE void leave(const Column<V>& down, int partial, IndexType column) const {
#pragma unroll
    for (int v = 0; v < V; ++v) this->put(partial, column + v, down.acc.lane(v));
  }
  void join(int partials, void* stream) const {
    if constexpr (kReduces) {
      // Where partials are few, columns are many: a thread takes a column. Otherwise 32 threads
      // share the partials of a column.
      if (partials <= 64) {
        this->template join_partials<1>(partials, stream);
      } else {
        this->template join_partials<32>(partials, stream);
      }
    }
  }
};

template <class Body>
struct ByRow : Parts<Body> {
  static constexpr bool kByRow = true, kReduces = true;
  using IndexType = typename Parts<Body>::IndexType;
  template <int V>
  struct Elem {
    typename Body::template Elem<V> elem;
    typename Body::template Row<1> row;
  };
  template <int V>
  struct Column {};

  template <int V, class Position>
  FW_DEVICE void begin(Column<V>&, const Position&) const {}
  template <int V>
  FW_DEVICE void load(Elem<V>& at, const Column<V>&, int row, int column) const {
    this->enter(at.row, row);
    this->body.load(Phase<0>{}, at.elem, at.row, IndexType(0), IndexType(column));
  }
  template <int V>
  FW_DEVICE void give(Elem<V>& at, int v, float x) const {
    this->body.give(at.elem, v, x);
  }
  // kThreads neighbouring threads share a row. All threads of a warp call this; those outside
  // contribute nothing.
  template <int kThreads, int V>
  FW_DEVICE void visit_row(const Elem<V>& at, bool inside, int row, int column) const {
    Sums<Body, V> acc = this->body.template accumulators<V>(Phase<0>{});
    if (inside)
      this->body.visit(Phase<0>{}, at.elem, at.row, acc, IndexType(0), IndexType(column), V);
    const auto total = warp_total<kThreads>(acc.folded(V));
    if (inside && threadIdx.x % kThreads == 0) this->put(column / (kThreads * V), row, total);
  }
  void join(int partials, void* stream) const {
    this->template join_partials<32>(partials, stream);
  }
};

// Finishes a result without elements, which may still be reduced.
template <class Epilogue>
int end_nothing(const Epilogue& end, int device, void* stream) {
  if (!Epilogue::kReduces) return 0;
  const OnDevice here(device);
  end.join(0, stream);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
