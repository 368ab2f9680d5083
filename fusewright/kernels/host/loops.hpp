// The host's drivers: OpenMP over rows, tiles or chunks, and loops over lanes that g++ vectorises.
// A lane reads and writes memory directly, so a run of lanes costs no copies. How work is divided
// never depends on the number of threads, so results are reproducible.
#pragma once

#include "scalar/functors.hpp"
#include "scalar/half_conversions.hpp"
#include "host/transposed_lanes.hpp"

#include <algorithm>
#include <vector>

namespace fw {

constexpr int64_t kGrain = 32768;  // with fewer elements, threads cost more than they save
constexpr int kLongestRun = 1024;

template <class T, int V>
struct Unit {
  const T* from;
  FW_FN void widen(float* to, int n) const { fw::widen(from, to, n); }
  FW_FN void read(const T* at) { from = at; }
  FW_FN T operator[](int v) const { return from[v]; }
};
template <class T, int V>
struct Same {
  T one;
  FW_FN void widen(float* to, int n) const {
    FW_LANES(v, V, n) to[v] = value(one);
  }
  FW_FN void read(const T* at) { one = *at; }
  FW_FN T operator[](int) const { return one; }
};
template <class T, int V>
struct TransposedRun : TransposedLanes<T> {
  FW_FN void widen(float* to, int n) const { fw::widen(this->from, to, n); }
};
template <class T, int V>
struct Strided {
  const T* from;
  int64_t stride;
  FW_FN void widen(float* to, int n) const {
    FW_LANES(v, V, n) to[v] = value(from[v * stride]);
  }
  FW_FN void read(const T* at, int64_t step) {
    from = at;
    stride = step;
  }
  FW_FN T operator[](int v) const { return from[v * stride]; }
};

// Memory for outputs that are not wanted: a branch per lane would stop the vectoriser.
template <class T>
inline T* nowhere() {
  static thread_local T memory[kLongestRun];
  return memory;
}
template <class T, int V>
struct UnitOut {
  T* to;
  FW_FN UnitOut(T* base, int64_t offset) : to(base == nullptr ? nowhere<T>() : base + offset) {}
  template <class X>
  FW_FN void put(int v, X x) const {
    to[v] = Store<T>::from(x);
  }
  FW_FN void narrow(const float* from, int n) const { fw::narrow(from, to, n); }
  FW_FN void write() const {}
};
// The values of V rows.
template <int V, class T, class X>
FW_FN void put_row(T* base, int64_t offset, const X (&x)[V], int n) {
  UnitOut<T, V> out(base, offset);
  FW_LANES(v, V, n) out.put(v, x[v]);
  out.write();
}

template <class T, int V>
struct StridedOut {
  T* to;
  int64_t stride;
  FW_FN StridedOut(T* base, int64_t offset, int64_t step)
      : to(base == nullptr ? nowhere<T>() : base + offset), stride(base == nullptr ? 1 : step) {}
  template <class X>
  FW_FN void put(int v, X x) const {
    to[v * stride] = Store<T>::from(x);
  }
  FW_FN void narrow(const float* from, int n) const {
    FW_LANES(v, V, n) put(v, from[v]);
  }
  FW_FN void write() const {}
};

// Runs task(0) to task(tasks - 1) on up to `threads` threads, or on one if there are few elements
// (`work`).
template <class Task>
void parallel(int64_t tasks, int64_t work, int threads, const Task& task) {
  if (threads <= 1 || tasks <= 1 || work < kGrain) {
    for (int64_t t = 0; t < tasks; ++t) task(t);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < tasks; ++t) task(t);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Runs of lanes in the order of memory. A task takes several of them, so that few divisions are
// needed.
template <class Body>
void pointwise_runs(const Body& body, int64_t first, int64_t last) {
  const int64_t lanes = body.lane_extent();
  const int64_t runs = ceil_div(lanes, Body::kRun);
  int64_t q = first / runs, l = first % runs * Body::kRun;
  for (int64_t run = first; run < last; ++run) {
    const int n = static_cast<int>(std::min<int64_t>(lanes - l, Body::kRun));
    typename Body::template Elem<1> elem;
    body.load(elem, q, l);
    // Short runs are processed by several loops, which are faster with a constant length (gelu of 1
    // M float16 values on one thread: 375 us instead of 435).
    if (Body::kRun < kLongestRun && n == Body::kRun) {
      body.visit(elem, q, l, Body::kRun);
    } else {
      body.visit(elem, q, l, n);
    }
    l += Body::kRun;
    if (l >= lanes) ++q, l = 0;
  }
}

// Strided lanes: square tiles, so that a cache line is used again while it is in cache.
template <class Body>
void pointwise_tile(const Body& body, int64_t tile) {
  const int64_t lanes = body.lane_extent(), across = ceil_div(lanes, kTile);
  const int64_t l = tile % across * kTile, first = tile / across * kTile;
  const int64_t last = std::min<int64_t>(body.rest_extent(), first + kTile);
  const int n = static_cast<int>(std::min<int64_t>(lanes - l, kTile));
  constexpr int kRows = Body::kTransposed > 0 ? kTransposedRows : 1;
  alignas(64) char memory[Body::kTransposed * kTransposedBytes + 1];
  for (int64_t q = first; q < last; q += kRows) {
    const int rows = static_cast<int>(std::min<int64_t>(last - q, kRows));
    typename Body::template Elem<1> elem[kRows];
    for (int j = 0; j < rows; ++j) body.load(elem[j], q + j, l);
    if constexpr (Body::kTransposed > 0) body.transpose_tile(elem, rows, n, memory);
    for (int j = 0; j < rows; ++j) body.visit(elem[j], q + j, l, n);
  }
}

template <class Body>
int pointwise(const Body& body, int threads) {
  const int64_t lanes = body.lane_extent(), work = body.rest_extent() * lanes;
  if (work == 0) return 0;
  if constexpr (Body::kStrided) {
    const int64_t tiles = ceil_div(lanes, kTile) * ceil_div(body.rest_extent(), kTile);
    parallel(tiles, work, threads, [&](int64_t tile) { pointwise_tile(body, tile); });
  } else {
    const int64_t runs = body.rest_extent() * ceil_div(lanes, Body::kRun);
    const int64_t share = std::max<int64_t>(1, runs * kGrain / work / 2);
    parallel(ceil_div(runs, share), work, threads, [&](int64_t task) {
      pointwise_runs(body, task * share, std::min(runs, (task + 1) * share));
    });
  }
  return 0;
}

// One sweep over the runs [first, last) of a row, V lanes at a time. The short run at the end of
// the lane axis has its own accumulators: all lanes of one must have seen the same number of
// elements.
template <int V, int kPhase, bool kTail, class Body, class Row>
FW_FN auto row_runs(const Body& body, const Row& row, int64_t first, int64_t last) {
  const int64_t lanes = body.lane_extent();
  const int64_t runs = ceil_div(lanes, V);
  const int rest = static_cast<int>(lanes - lanes / V * V);
  auto full = body.template accumulators<V>(Phase<kPhase>{});
  auto tail = body.template accumulators<kTail ? V : 1>(Phase<kPhase>{});
  typename Body::template Elem<V> elem;
  for (int64_t run = first; run < last;) {
    const int64_t q = run / runs;
    const int64_t stop = std::min(last, (q + 1) * runs);
    const int64_t whole = kTail ? std::min(stop, (q + 1) * runs - 1) : stop;
    int64_t l = (run - q * runs) * V;
    for (; run < whole; ++run, l += V) {
      body.load(Phase<kPhase>{}, elem, row, q, l);
      body.visit(Phase<kPhase>{}, elem, row, full, q, l, V);
    }
    if constexpr (kTail) {
      for (; run < stop; ++run) {
        body.load(Phase<kPhase>{}, elem, row, q, l);
        body.visit(Phase<kPhase>{}, elem, row, tail, q, l, rest);
      }
    }
  }
  auto total = full.folded(V);
  if constexpr (kTail) total.combine(tail.folded(rest));
  return total;
}

template <int V, int kPhase, class Body, class Row>
auto row_sweep(const Body& body, const Row& row, int64_t first, int64_t last) {
  return body.lane_extent() % V == 0 ? row_runs<V, kPhase, false>(body, row, first, last)
                                     : row_runs<V, kPhase, true>(body, row, first, last);
}

template <int V, int kPhase, class Body, class Row>
void row_sweeps(const Body& body, Row& row, int64_t runs) {
  const auto total = row_sweep<V, kPhase>(body, row, 0, runs);
  body.finish(Phase<kPhase>{}, row, total, 1);
  if constexpr (kPhase + 1 < Body::kPhases) row_sweeps<V, kPhase + 1>(body, row, runs);
}

template <class Body, class Row>
void begin_at(const Body& body, Row& row, int64_t p) {
  const int64_t lanes = body.outer_lane_extent();
  body.begin(row, Body::kOuterRest ? p / lanes : 0, Body::kOuterRest ? p % lanes : p, 1);
}

// Joins the partial results [splits][outer] in order and finishes each row. It takes 64
// neighbouring rows at once: the parts of one row may be a power of two apart in memory, and then
// they share few cache sets (columns of 1024 floats, one thread: 1.07 to 1.09 of eager's time
// instead of 1.09 to 1.12).
template <class Body, class Part>
void combine(const Body& body, const Part* parts, int splits, int threads) {
  constexpr int kBeside = 64;
  const int64_t outer = body.outer_extent();
  parallel(ceil_div(outer, kBeside), outer * splits, threads, [&](int64_t task) {
    const int64_t first = task * kBeside;
    const int n = static_cast<int>(std::min<int64_t>(outer - first, kBeside));
    Part acc[kBeside];
    for (int v = 0; v < n; ++v) acc[v] = parts[first + v];
    for (int s = 1; s < splits; ++s) {
      for (int v = 0; v < n; ++v) acc[v].combine(parts[s * outer + first + v]);
    }
    for (int v = 0; v < n; ++v) {
      typename Body::template Row<1> row;
      begin_at(body, row, first + v);
      body.finish(Phase<0>{}, row, acc[v], 1);
      body.store(row, 1);
    }
  });
}

// Memory of each thread for values that several sweeps over a row read; it grows to the longest
// row.
inline char* kept(int64_t bytes) {
  static thread_local std::vector<char> memory;
  if (static_cast<int64_t>(memory.size()) < bytes) memory.resize(bytes);
  return memory.data();
}

template <int V, class Body>
int row(const Body& body, int splits, void* workspace, int threads) {
  using Part = decltype(body.template accumulators<1>(Phase<0>{}));
  static_assert(sizeof(Part) <= Body::kPartBytes, "the workspace was sized for less");
  const int64_t outer = body.outer_extent(), inner = body.inner_extent();
  const int64_t lanes = body.lane_extent();
  const int64_t runs = inner == 0 ? 0 : inner / lanes * ceil_div(lanes, V);
  const int64_t per_split = ceil_div(runs, splits);
  Part* parts = static_cast<Part*>(workspace);
  parallel(outer * splits, outer * inner, threads, [&](int64_t task) {
    const int64_t p = Body::kSplit ? task / splits : task, split = task - p * splits;
    typename Body::template Row<1> row;
    begin_at(body, row, p);
    if constexpr (Body::kKeptBytes > 0) body.keep(row, kept(Body::kKeptBytes * inner));
    if constexpr (Body::kSplit) {
      const int64_t first = std::min(runs, split * per_split);
      const int64_t last = std::min(runs, first + per_split);
      parts[split * outer + p] = row_sweep<V, 0>(body, row, first, last);
    } else {
      row_sweeps<V, 0>(body, row, runs);
      body.store(row, 1);
    }
  });
  if constexpr (Body::kSplit) combine(body, parts, splits, threads);
  return 0;
}

// From this many rows on, sums of columns take two rows at a time.
constexpr int kManyRows = 64;

// Tiles of up to V columns; the inner extent is cut into `splits` parts.
template <int V, class Body>
int column(const Body& body, int splits, void* workspace, int threads) {
  using Part = decltype(body.template accumulators<1>(Phase<0>{}));
  static_assert(sizeof(Part) <= Body::kPartBytes, "the workspace was sized for less");
  const int64_t outer = body.outer_extent(), inner = body.inner_extent();
  if (outer == 0) return 0;
  const int64_t lanes = body.outer_lane_extent();
  const int64_t tiles = ceil_div(lanes, V);
  const int64_t per_split = ceil_div(inner, splits);
  Part* parts = static_cast<Part*>(workspace);
  parallel(outer / lanes * tiles * splits, outer * inner, threads, [&](int64_t task) {
    const int64_t split = task % splits, tile = task / splits;
    const int64_t q = tile / tiles, l = tile % tiles * V;
    const int n = static_cast<int>(std::min<int64_t>(lanes - l, V));
    typename Body::template Row<V> row;
    body.begin(row, q, l, n);
    auto acc = body.template accumulators<V>(Phase<0>{});
    const int64_t last = std::min(inner, (split + 1) * per_split);
    int64_t r = split * per_split;
    // A few rows are often terms of a sum that cancel: they are added one by one, exactly.
    if constexpr (Body::kByTwo) {
      for (; inner >= kManyRows && r + 1 < last; r += 2) {
        typename Body::template Elem<V> elem, next;
        body.load(Phase<0>{}, elem, row, r, int64_t(0));
        body.load(Phase<0>{}, next, row, r + 1, int64_t(0));
        body.visit_two(elem, next, acc, n);
      }
    }
    for (; r < last; ++r) {
      typename Body::template Elem<V> elem;
      body.load(Phase<0>{}, elem, row, r, int64_t(0));
      body.visit(Phase<0>{}, elem, row, acc, r, int64_t(0), n);
    }
    if constexpr (Body::kSplit) {
      for (int v = 0; v < n; ++v) parts[split * outer + q * lanes + l + v] = acc.lane(v);
    } else {
      body.finish(Phase<0>{}, row, acc, n);
      body.store(row, n);
    }
  });
  if constexpr (Body::kSplit) combine(body, parts, splits, threads);
  return 0;
}

}  // namespace fw

// Weak, because each part of a divided text has it.
extern "C" __attribute__((weak)) const char* fw_error_text(int code) {
  return code == 0 ? "no error" : "unknown error";
}
