// What the elements of a product end in: a functor of the generated code, and how its results leave
// a tile.
//   Pointwise  the functor stores what belongs to an element; that is all
//   Down       it also reduces each column, over a tile's rows
//   Across     it also reduces each row, over kAcrossColumns of its columns
// A reduction leaves the parts of tiles in a workspace; `join` adds them up in their order.
#pragma once

#include "groups.cuh"

namespace fw {

constexpr int kAcrossColumns = 32;  // at least: no more parts than that has the workspace room for

template <class Body>
struct Pointwise {
  static constexpr bool kDown = false, kAcross = false;
  template <int V>
  using Elem = typename Body::template Elem<V>;
  template <int V>
  struct Column {};

  Body body;

  template <int V>
  __device__ __forceinline__ void begin(Column<V>&, int) const {}
  template <int V>
  __device__ __forceinline__ void load(Elem<V>& elem, const Column<V>&, int row, int column) const {
    body.load(elem, row, column);
  }
  template <int V>
  __device__ __forceinline__ void give(Elem<V>& elem, int v, float x) const {
    body.give(elem, v, x);
  }
  template <int V>
  __device__ __forceinline__ void visit(const Elem<V>& elem, Column<V>&, int row, int column) const {
    body.visit(elem, row, column, V);
  }
  void join(int, void*) const {}
};

// What the two kinds of reduction share: partial results, of which each tile writes a line.
template <class Body>
struct Parts {
  using Index = decltype(std::declval<Body>().outer_extent());
  using Part = decltype(std::declval<Body>().template accumulators<1>(Phase<0>{}));
  static_assert(sizeof(Part) <= Body::kPartBytes, "the workspace was sized for less");

  Body body;
  void* workspace;

  template <int V>
  __device__ __forceinline__ void enter(typename Body::template Row<V>& row, int at) const {
    Index q, l;
    locate<Body::kOuterRest>(Index(at), body.outer_lane_extent(), q, l);
    body.begin(row, q, l, V);
  }
  __device__ __forceinline__ void put(int line, int at, const Part& part) const {
    static_cast<Part*>(workspace)[line * static_cast<int64_t>(body.outer_extent()) + at] = part;
  }
  template <int kGroup>
  void join_lines(int lines, void* stream) const {
    if (body.outer_extent() == 0) return;
    combine<Index, kGroup>(body, static_cast<const Part*>(workspace), lines, stream);
  }
};

template <class Body>
struct Down : Parts<Body> {
  static constexpr bool kDown = true, kAcross = false;
  using Index = typename Parts<Body>::Index;
  template <int V>
  using Elem = typename Body::template Elem<V>;
  template <int V>
  struct Column {
    typename Body::template Row<V> row;
    decltype(std::declval<Body>().template accumulators<V>(Phase<0>{})) acc;
  };

  template <int V>
  __device__ __forceinline__ void begin(Column<V>& down, int column) const {
    this->enter(down.row, column);
  }
  template <int V>
  __device__ __forceinline__ void load(Elem<V>& elem, const Column<V>& down, int row, int) const {
    this->body.load(Phase<0>{}, elem, down.row, Index(row), Index(0));
  }
  template <int V>
  __device__ __forceinline__ void give(Elem<V>& elem, int v, float x) const {
    this->body.give(elem, v, x);
  }
  template <int V>
  __device__ __forceinline__ void visit(const Elem<V>& elem, Column<V>& down, int row, int) const {
    this->body.visit(Phase<0>{}, elem, down.row, down.acc, Index(row), Index(0), V);
  }
  template <int V>
  __device__ __forceinline__ void leave(const Column<V>& down, int line, int column) const {
#pragma unroll
    for (int v = 0; v < V; ++v) this->put(line, column + v, down.acc.lane(v));
  }
  void join(int lines, void* stream) const { this->template join_lines<1>(lines, stream); }
};

template <class Body>
struct Across : Parts<Body> {
  static constexpr bool kDown = false, kAcross = true;
  using Index = typename Parts<Body>::Index;
  template <int V>
  struct Elem {
    typename Body::template Elem<V> elem;
    typename Body::template Row<1> row;
  };
  template <int V>
  struct Column {};

  template <int V>
  __device__ __forceinline__ void begin(Column<V>&, int) const {}
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
  __device__ __forceinline__ void visit_row(const Elem<V>& at, bool inside, int row, int column,
                                            int line) const {
    auto acc = this->body.template accumulators<V>(Phase<0>{});
    if (inside) this->body.visit(Phase<0>{}, at.elem, at.row, acc, Index(0), Index(column), V);
    const auto total = warp_total<kThreads>(folded(acc, V));
    if (inside && threadIdx.x % kThreads == 0) this->put(line, row, total);
  }
  void join(int lines, void* stream) const { this->template join_lines<32>(lines, stream); }
};

}  // namespace fw
