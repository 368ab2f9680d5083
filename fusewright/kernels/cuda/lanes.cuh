// How a CUDA thread handles V neighbouring elements: it loads them into registers by 16-byte
// accesses, computes lane by lane, and stores them the same way. host/loops.hpp has the host's
// versions of these names.
#pragma once

#include "scalar/functors.hpp"

// Functors define flags for every driver: no warning about those that a kernel does not use.
#pragma nv_diag_suppress 177

#define FW_LANES(v, V, n) _Pragma("unroll") for (int v = 0; v < (V); ++v)

namespace fw {

template <int kBytes>
using Chunk = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2,
                       std::conditional_t<kBytes == 4, uint32_t,
                                          std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>>;

// The elements of a cache line of 128 bytes. In rows of any length, vectors of 16 bytes begin where a
// line does: then a warp touches no more lines than it fills. A block must have a thread for each
// element before the first vector; in small blocks vectors begin where their own address is aligned.
constexpr int kLineVectors = 8;
template <int V, int kThreads>
constexpr int line_of = kLineVectors * V <= kThreads / 2 ? kLineVectors * V : V;

// Stores a word by one predicated instruction. In large kernels the compiler splits a plain
// assignment into two or four stores, and it turns a condition into a branch, across which it moves
// nothing.
template <class Word>
FW_DEVICE void store_whole(bool wanted, Word* to, const Word& word) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Word) == 16) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.v4.b32 [%0], {%1, %2, %3, %4}; }"
        :
        : "l"(to), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w), "r"(int(wanted))
        : "memory");
    return;
  } else if constexpr (sizeof(Word) == 8) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0; @p st.global.v2.b32 [%0], {%1, %2}; }"
                 :
                 : "l"(to), "r"(word.x), "r"(word.y), "r"(int(wanted))
                 : "memory");
    return;
  }
#endif
  if (wanted) *to = word;
}

// Starts to copy a word into shared memory, without a register in between; `await_copies` waits for
// it.
template <class Word>
FW_DEVICE void fetch_whole(Word* to, const Word* from) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Word) == 16) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"(address), "l"(from)
                 : "memory");
    return;
  } else if constexpr (sizeof(Word) >= 4) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                 :
                 : "r"(address), "l"(from), "n"(sizeof(Word))
                 : "memory");
    return;
  }
#endif
  *to = *from;
}
// The copies that this thread has started since the last call form a group. `await_copies<n>`
// returns when all groups but the last n have arrived.
FW_DEVICE void commit_copies() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending>
FW_DEVICE void await_copies() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
#endif
}

// V elements as raw words, so that one access moves up to 16 bytes.
template <class T, int V>
union Packed {
  static constexpr int kBytes = V * sizeof(T) < 16 ? V * sizeof(T) : 16;
  static constexpr int kWords = V * sizeof(T) / kBytes;
  using Word = Chunk<kBytes>;
  Word words[kWords];
  T lanes[V];
};

template <int V, class T>
FW_DEVICE T lane_of(const T* lanes, int v) {
  return lanes[v];
}
// A bf16 is the upper 16 bits of its float: one instruction on the word that holds two of them.
template <int V>
FW_DEVICE auto lane_of(const bf16* lanes, int v) {
  if constexpr (V % 2 == 0) {
    uint32_t word;
    memcpy(&word, lanes + v / 2 * 2, sizeof(word));
    return bits<float>(v % 2 == 0 ? word << 16 : word & 0xffff0000u);
  } else {
    return lanes[v];
  }
}

// Contiguous lanes; the entry point has checked the alignment.
template <class T, int V>
struct Unit {
  Packed<T, V> pack;
  FW_DEVICE void read(const T* from) {
    using Word = typename Packed<T, V>::Word;
#pragma unroll
    for (int w = 0; w < Packed<T, V>::kWords; ++w) {
      pack.words[w] = reinterpret_cast<const Word*>(from)[w];
    }
  }
  // The same for an object in shared memory, asynchronously.
  FW_DEVICE void fetch(const T* from) {
    using Word = typename Packed<T, V>::Word;
#pragma unroll
    for (int w = 0; w < Packed<T, V>::kWords; ++w) {
      fetch_whole(pack.words + w, reinterpret_cast<const Word*>(from) + w);
    }
  }
  FW_DEVICE auto operator[](int v) const { return lane_of<V>(pack.lanes, v); }
};

// The maximum or minimum, by Rule, of two pairs of 16-bit floats, element by element.
template <class Rule, class T>
FW_DEVICE uint32_t joined_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  constexpr bool kMost = std::is_same_v<Rule, MaxRule<float>>;
  uint32_t y;
  if constexpr (std::is_same_v<T, bf16>) {
    if constexpr (kMost) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    else asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else {
    if constexpr (kMost) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    else asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
#else
  T x[2], y[2];
  memcpy(x, &a, sizeof(x));
  memcpy(y, &b, sizeof(y));
  for (int v = 0; v < 2; ++v) x[v] = Store<T>::from(Rule::join(value(x[v]), value(y[v])));
  memcpy(&a, x, sizeof(x));
  return a;
#endif
}
// The maximum or minimum of a vector of 16-bit floats, two at a time: to convert each to float
// would take one instruction more than to compare them.
template <template <class> class Rule, class T, int V>
FW_DEVICE void add_half_pairs(Running<Rule, float, 1>& acc, const Unit<T, V>& x) {
  if constexpr (V % 2 == 0) {
    uint32_t words[V / 2];
    memcpy(words, &x.pack, sizeof(words));
#pragma unroll
    for (int w = 1; w < V / 2; ++w) words[0] = joined_pair<Rule<float>, T>(words[0], words[w]);
    Unit<T, 2> last;
    memcpy(&last.pack, words, sizeof(last.pack));
    acc.add(0, value(last[0]));
    acc.add(0, value(last[1]));
  } else {
    for (int v = 0; v < V; ++v) acc.add(0, value(x[v]));
  }
}

// Contiguous lanes that need not be aligned. A GPU reads the one or two aligned words that hold them
// and shifts them: a load of single elements by each lane would take as long as one of whole words.
template <class T, int V>
struct Loose {
  T lanes[V];
  FW_DEVICE void read(const T* from) {
#if defined(__CUDA_ARCH__) || !defined(__SANITIZE_ADDRESS__)  // words may begin before a tensor
    if constexpr (V * sizeof(T) == 16) {
      const uintptr_t at = reinterpret_cast<uintptr_t>(from);
      const unsigned shift = at % 16;
      const uint4* const words = reinterpret_cast<const uint4*>(at - shift);
      const uint4 a = words[0], b = words[shift != 0];  // each holds at least one of the lanes
      uint32_t w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 6; ++i) w[i] = shift & 8 ? w[i + 2] : w[i];
#pragma unroll
      for (int i = 0; i < 5; ++i) w[i] = shift & 4 ? w[i + 1] : w[i];
#pragma unroll
      for (int i = 0; i < 4 && sizeof(T) < 4; ++i) {
        const uint64_t both = static_cast<uint64_t>(w[i + 1]) << 32 | w[i];
        w[i] = static_cast<uint32_t>(both >> (8 * (shift % 4)));
      }
      memcpy(lanes, w, 16);
      return;
    }
#endif
#pragma unroll
    for (int v = 0; v < V; ++v) lanes[v] = from[v];
  }
  FW_DEVICE T operator[](int v) const { return lanes[v]; }
};

// The same element for all lanes.
template <class T, int V>
struct Same {
  T one;
  FW_DEVICE void read(const T* from) { one = *from; }
  FW_DEVICE void fetch(const T* from) { one = *from; }
  FW_DEVICE T operator[](int) const { return one; }
};

template <class T, int V>
struct Strided {
  T lanes[V];
  FW_DEVICE void read(const T* from, int64_t stride) {
#pragma unroll
    for (int v = 0; v < V; ++v) lanes[v] = from[v * stride];
  }
  FW_DEVICE void fetch(const T* from, int64_t stride) { read(from, stride); }
  FW_DEVICE T operator[](int v) const { return lanes[v]; }
};

// Lanes that come from the kernel's own registers instead of memory.
template <class T, int V>
struct Given {
  T lanes[V];
  FW_DEVICE void set(int v, T x) { lanes[v] = x; }
  FW_DEVICE T operator[](int v) const { return lanes[v]; }
};

template <class T, int V>
struct UnitOut {
  Packed<T, V> pack;
  T* base;  // null if the output is not wanted; the same for all elements
  int64_t offset;
  FW_DEVICE UnitOut(T* base, int64_t offset) : base(base), offset(offset) {}
  template <class X>
  FW_DEVICE void put(int v, X x) {
    pack.lanes[v] = Store<T>::from(x);
  }
  FW_DEVICE void write() const {
    using Word = typename Packed<T, V>::Word;
    const bool wanted = base != nullptr;
#pragma unroll
    for (int w = 0; w < Packed<T, V>::kWords; ++w) {
      store_whole(wanted, reinterpret_cast<Word*>(base + offset) + w, pack.words[w]);
    }
  }
};

// The values of V rows.
template <int V, class T, class X>
FW_DEVICE void put_row(T* base, int64_t offset, const X (&x)[V], int n) {
  UnitOut<T, V> out(base, offset);
  FW_LANES(v, V, n) out.put(v, x[v]);
  out.write();
}

template <class T, int V>
struct StridedOut {
  T lanes[V];
  T* base;
  int64_t offset, stride;
  FW_DEVICE StridedOut(T* base, int64_t offset, int64_t stride)
      : base(base), offset(offset), stride(stride) {}
  template <class X>
  FW_DEVICE void put(int v, X x) {
    lanes[v] = Store<T>::from(x);
  }
  FW_DEVICE void write() const {
    if (base == nullptr) return;
#pragma unroll
    for (int v = 0; v < V; ++v) base[offset + v * stride] = lanes[v];
  }
};

// Programmatic dependent launch. A kernel that is launched by `launch_behind` begins when all
// blocks of the previous kernel have called let_next_begin or have ended. await_kernel_before
// returns when the previous kernel has ended; an ordinary launch waits for that by itself.
FW_DEVICE void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
FW_DEVICE void await_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

constexpr int kMostDevices = 64;  // for which answers of the driver are cached

// Makes `device` current for a launch and restores the caller's device afterwards.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    // Also if it is the current device already: in a new thread, such as autograd's, calls to the
    // driver API find no context before this.
    moved_ = cudaSetDevice(device) == cudaSuccess && before_ != device;
  }
  ~OnDevice() {
    if (moved_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool moved_ = false;
};

// Splits a linear index into l, the position on the lane axis, and q, the index over the other
// axes.
template <bool kRest, typename I>
FW_DEVICE void locate(I index, I lane_extent, I& q, I& l) {
  if constexpr (kRest) {
    q = index / lane_extent;
    l = index - q * lane_extent;
  } else {
    q = 0;
    l = index;
  }
}

template <typename I>
inline unsigned blocks_for(I work, I per_block) {
  return static_cast<unsigned>((work + per_block - 1) / per_block);
}

// Whether V elements from base + offset can be moved by the widest accesses.
template <class T, int V>
inline bool aligned(const void* base, int64_t offset) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(base) + offset * sizeof(T);
  return base == nullptr || address % Packed<T, V>::kBytes == 0;
}
template <class T, int V, class... Bases>
inline bool all_aligned(Bases... each) {
  return (aligned<T, V>(each, 0) && ...);
}

// The part of a workspace that begins after so many bytes.
inline void* behind(void* workspace, int64_t bytes) {
  return static_cast<char*>(workspace) + (bytes + 255) / 256 * 256;
}

}  // namespace fw

// Instances for misaligned and huge tensors are half of what is compiled, and few calls need them.
// FW_RARE 0 leaves them out.
#ifndef FW_RARE
#define FW_RARE 1
#endif

// Weak, because each part of a divided text has it.
extern "C" __attribute__((weak)) const char* fw_error_text(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
