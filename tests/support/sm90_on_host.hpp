// sm90/isa/sm90_instructions.cuh for g++ and fibers: the same names, so that tensor-core kernels
// run without a GPU. Copies finish at once, and matmuls are sums over fragments and swizzled tiles.
// Barriers and their phases are as on the GPU, and a thread that would wait for ever is reported.
#pragma once

#include <cmath>
#include <deque>
#include <map>

#include "cuda/lanes.cuh"

#define __CUDA_ARCH_FEAT_SM90_ALL 1
#define __grid_constant__

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct CUtensorMap {
  const char* data;
  int64_t columns, rows, row_bytes, layers, layer_bytes;
  int item, box_columns, box_rows;
};
constexpr int cudaErrorInvalidValue = 1, cudaErrorMisalignedAddress = 716;

using std::isfinite;
template <class A, class B>
auto min(A a, B b) -> decltype(a + b) {
  return a < b ? a : b;
}
template <class A, class B>
auto max(A a, B b) -> decltype(a + b) {
  return a < b ? b : a;
}
inline uint32_t __float_as_uint(float x) { return fw::bits<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return fw::bits<float>(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline void __trap() { std::abort(); }
inline float __shfl_xor_sync(unsigned, float x, int by) {
  const int lane = threadIdx.x % 32;
  return fw::bits<float>(emulation::exchanged(fw::bits<uint32_t>(x), lane ^ by));
}
inline bool __all_sync(unsigned, bool x) {
  int total = x;
  for (int by = 16; by > 0; by /= 2) total &= emulation::exchanged(total, threadIdx.x % 32 ^ by);
  return total;
}
inline uint32_t __ballot_sync(unsigned, bool x) {
  uint32_t bits = uint32_t(x) << threadIdx.x % 32;
  for (int by = 16; by > 0; by /= 2) bits |= emulation::exchanged(bits, threadIdx.x % 32 ^ by);
  return bits;
}
inline uint32_t __reduce_add_sync(unsigned, uint32_t x) {
  for (int by = 16; by > 0; by /= 2) x += emulation::exchanged(x, threadIdx.x % 32 ^ by);
  return x;
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t x) {
  for (int by = 16; by > 0; by /= 2) {
    x = std::max(x, emulation::exchanged(x, threadIdx.x % 32 ^ by));
  }
  return x;
}

namespace fw {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulated_shared);
}

// Barriers -------------------------------------------------------------------------------------

struct Barrier {
  int arrivals, pending, phase = 0;
  int64_t bytes = 0;
};
inline std::map<uint64_t*, Barrier> barriers;

inline void give_way() { emulation::pause(); }
inline void look_at(Barrier& barrier) {
  ++emulation::progress;
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  ++barrier.phase;
}
inline void init_barrier(uint64_t* name, int arrivals) { barriers[name] = {arrivals, arrivals}; }
inline void publish_barriers() {}
inline void arrive(uint64_t* name) {
  Barrier& barrier = barriers.at(name);
  if (--barrier.pending < 0) std::abort();
  look_at(barrier);
}
inline void arrive_expecting(uint64_t* name, int bytes) {
  barriers.at(name).bytes += bytes;
  arrive(name);
}
inline void arrive_after_copies(uint64_t* name) { arrive(name); }
inline void wait(uint64_t* name, int parity) {
  while (barriers.at(name).phase % 2 == parity) give_way();
}

inline emulation::Meeting named[16];
inline void meet(int name, int threads) { emulation::meet(named[name], threads); }
inline void await_turn(int name) { meet(name, 256); }
inline void give_turn(int name) {
  ++emulation::progress;
  if (++named[name].arrived == 256) named[name].arrived = 0, ++named[name].generation;
}

// Copies ---------------------------------------------------------------------------------------

inline uint32_t swizzled(uint32_t offset) { return offset ^ (offset >> 3 & 0x70); }

inline void copy_box(void* to, const CUtensorMap* map, uint64_t* name, int x, int y, int layer) {
  for (int row = 0; row < map->box_rows; ++row) {
    for (int column = 0; column < map->box_columns; ++column) {
      char* place = static_cast<char*>(to) + swizzled(row * 128 + column * map->item);
      const int64_t at_x = x + column, at_y = y + row;
      const bool inside =
          at_x < map->columns && at_y >= 0 && at_y < map->rows && layer < map->layers;
      const char* from =
          map->data + layer * map->layer_bytes + at_y * map->row_bytes + at_x * map->item;
      inside ? (void)memcpy(place, from, map->item) : (void)memset(place, 0, map->item);
    }
  }
  Barrier& barrier = barriers.at(name);
  barrier.bytes -= map->box_rows * map->box_columns * map->item;
  look_at(barrier);
}
inline void copy_word(uint32_t to, const float* from, bool inside) {
  const float x = inside ? *from : 0.f;
  memcpy(emulated_shared + to, &x, 4);
}
inline float nearest_tf32(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (std::isfinite(x)) bits = (bits + 0x1000u) & 0xffffe000u;
  memcpy(&x, &bits, 4);
  return x;
}
inline float load_once(const float* from) { return *from; }
inline float load_if(const float* from, bool inside) { return inside ? *from : 0.f; }
inline void load_four_if(float* x, const float* from, bool inside) {
  for (int i = 0; i < 4; ++i) x[i] = inside ? from[i] : 0.f;
}
template <int kSite>
void store_shared(uint32_t to, float x) {
  memcpy(emulated_shared + to, &x, 4);
}
template <int>
void store_two_shared(uint32_t to, float x, float y) {
  store_shared<0>(to, x);
  store_shared<0>(to + 4, y);
}
// Stores for matmuls wait here until they are published, thread by thread.
inline std::vector<std::pair<uint32_t, uint32_t>> unpublished[1024];
inline void store_pair(uint32_t to, uint32_t pair) {
  unpublished[threadIdx.x].push_back({to, pair});
}
inline void store_four_pairs(uint32_t to, const uint32_t (&pairs)[4]) {
  for (int i = 0; i < 4; ++i) store_pair(to + 4 * i, pairs[i]);
}
inline void publish_stores() {
  for (const auto& [to, pair] : unpublished[threadIdx.x]) memcpy(emulated_shared + to, &pair, 4);
  unpublished[threadIdx.x].clear();
}
inline void publish_reads() {}
struct Matrices {
  int64_t columns, rows, row_stride, layers, layer_stride;
};
template <class T>
bool matrix_map(CUtensorMap& map, const T* data, const Matrices& of, int box_columns,
                int box_rows) {
  const int64_t row_bytes = of.row_stride * sizeof(T);
  const int64_t layer_bytes = of.layers > 1 ? of.layer_stride * sizeof(T) : 0;
  map = {reinterpret_cast<const char*>(data),
         of.columns,
         of.rows,
         row_bytes,
         of.layers,
         layer_bytes,
         sizeof(T),
         box_columns,
         box_rows};
  return row_bytes % 16 == 0 && layer_bytes % 16 == 0 &&
         reinterpret_cast<uintptr_t>(data) % 16 == 0 && of.columns > 0 && of.rows > 0 &&
         of.layers > 0 && box_columns * sizeof(T) == 128 && box_rows <= 256;
}

// Matmuls --------------------------------------------------------------------------------------

template <int kRegisters>
void take_registers() {}
template <int kRegisters>
void leave_registers() {}
inline void begin_wgmma() {}

// Matmuls of tiles in shared memory run when they are waited for, after all other threads have run.
// A block that is released too soon, or sums that are read too soon, thus come out wrong.
struct Pending {
  std::vector<std::function<void()>> open;
  std::deque<std::vector<std::function<void()>>> groups;
};
inline Pending pending[1024];  // of each thread

inline void commit_wgmma() {
  Pending& mine = pending[threadIdx.x];
  mine.groups.push_back(std::move(mine.open));
  mine.open.clear();
}
template <int kPending>
void await_wgmma() {
  Pending& mine = pending[threadIdx.x];
  ++emulation::progress;
  give_way();
  for (; mine.groups.size() > kPending; mine.groups.pop_front()) {
    for (const auto& product : mine.groups.front()) product();
  }
  __syncwarp();
}
template <int kSums>
void settle(float (&)[kSums]) {}
inline void move_after(uint32_t& to, uint32_t from) { to = from; }

inline uint32_t fp16_pair(float low, float high) {
  return float_to_half(low) | static_cast<uint32_t>(float_to_half(high)) << 16;
}
inline uint32_t larger_fp16_pair(uint32_t magnitudes, uint32_t pair) {
  uint32_t larger = 0;
  for (int at = 0; at < 32; at += 16) {
    const uint32_t a = magnitudes >> at & 0x7fff, b = pair >> at & 0x7fff;
    larger |= (b > a && b <= 0x7c00 ? b : a) << at;
  }
  return larger;
}
inline uint32_t tile_address(const void* tile) { return shared_address(tile) >> 4; }
inline uint64_t rows_descriptor(uint32_t address) { return address; }
inline uint64_t tile_descriptor(const void* tile, int chunk_bytes) {
  return tile_address(tile) | static_cast<uint64_t>(chunk_bytes) << 32;
}
inline int of_warp(int x) { return x; }

// Sums as registers hold them, two rows by two columns, and their factors for all steps of 16.
using Quad = float __attribute__((vector_size(16)));
using QuadWords = uint32_t __attribute__((vector_size(16)));
using Factors = Quad[16];
inline Factors rows_of[32][8];       // of every warp: two rows for each four threads,
inline Factors columns_of[32][128];  // and all pairs of columns

FW_FN Quad numbers(QuadWords raw, half) {
  const Quad scaled = reinterpret_cast<Quad>((raw & 0x7fffu) << 13) * 0x1p112f;
  const QuadWords special = ((raw & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return reinterpret_cast<Quad>((raw & 0x8000u) << 16 | special |
                                reinterpret_cast<QuadWords>(scaled));
}
FW_FN Quad numbers(QuadWords raw, bf16) { return reinterpret_cast<Quad>(raw << 16); }

// A row of a tile: one free index, all contracted indices.
template <bool kFreeMajor>
FW_FN void read_row(uint16_t (&line)[16], uint64_t tile, int free) {
  const uint32_t base = static_cast<uint32_t>(tile) << 4;
  const uint32_t chunk_bytes = static_cast<uint32_t>(tile >> 32);
  constexpr int kTogether = kFreeMajor ? 1 : 8;  // swizzling keeps 16 bytes together
  for (int k = 0; k < 16; k += kTogether) {
    const uint32_t at =
        kFreeMajor ? free / 64 * chunk_bytes + k * 128 + free % 64 * 2 : free * 128 + k * 2;
    memcpy(line + k, emulated_shared + swizzled(base + at), kTogether * 2);
  }
}
template <class T, bool kFreeMajor>
FW_FN void read_rows(Factors& rows, uint64_t tile, int row) {
  uint16_t one[16], other[16];
  read_row<kFreeMajor>(one, tile, row);
  read_row<kFreeMajor>(other, tile, row + 8);
  for (int k = 0; k < 16; ++k) {
    rows[k] = numbers(QuadWords{one[k], one[k], other[k], other[k]}, T());
  }
}
template <class T, bool kFreeMajor>
FW_FN void read_columns(Factors& columns, uint64_t tile, int pair) {
  uint16_t one[16], other[16];
  read_row<kFreeMajor>(one, tile, 2 * pair);
  read_row<kFreeMajor>(other, tile, 2 * pair + 1);
  for (int k = 0; k < 16; ++k) {
    columns[k] = numbers(QuadWords{one[k], other[k], one[k], other[k]}, T());
  }
}
FW_FN void add_wgmma(float* sum, const Factors& rows, const Factors& columns, int add) {
  Quad total = {};
  if (add) memcpy(&total, sum, sizeof(total));
  for (int k = 0; k < 16; ++k) total += rows[k] * columns[k];
  memcpy(sum, &total, sizeof(total));
}

// Every element is converted once per warp: conversions took most of these tests' time.
template <bool kFreeMajorB, int kSums>
void multiply(float (&sum)[kSums], const uint32_t (&a)[4], uint64_t b, int add) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
  for (int i = 0; i < 8; ++i) {
    Quad& rows = rows_of[warp][group][i / 4 * 8 + part * 2 + i % 2];
    const int low = i / 2 % 2 * 2;
    rows[low] = rows[low + 1] = half_to_float(a[i / 2] >> i % 2 * 16 & 0xffffu);
  }
  for (int pair = lane; pair < kSums; pair += 32) {
    read_columns<half, kFreeMajorB>(columns_of[warp][pair], b, pair);
  }
  __syncwarp();
  for (int j = 0; j < kSums / 4; ++j) {
    add_wgmma(sum + 4 * j, rows_of[warp][group], columns_of[warp][4 * j + part], add);
  }
  __syncwarp();
}

template <class T, bool kFreeMajorA, bool kFreeMajorB, int kSums>
void multiply_shared(float (&sum)[kSums], uint64_t a, uint64_t b, int add) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, part = threadIdx.x % 4;
  pending[threadIdx.x].open.push_back([&sum, a, b, add, row, part] {
    Factors rows, columns;
    read_rows<T, kFreeMajorA>(rows, a, row);
    for (int j = 0; j < kSums / 4; ++j) {
      read_columns<T, kFreeMajorB>(columns, b, 4 * j + part);
      add_wgmma(sum + 4 * j, rows, columns, add);
    }
  });
}

}  // namespace fw
