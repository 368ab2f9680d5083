// Hopper's instructions under readable names: mbarriers, TMA copies, wgmma. None of them is
// assembled unless a kernel for sm_90a calls it.
#pragma once

#include <cuda.h>

#include "cuda/lanes.cuh"

namespace fw {

FW_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Barriers in shared memory --------------------------------------------------------------------

FW_DEVICE void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to TMA.
FW_DEVICE void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

FW_DEVICE void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               :
               : "r"(shared_address(barrier))
               : "memory");
}

// Arrives, and holds the phase open until `bytes` more have been copied in.
FW_DEVICE void arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Arrives once this thread's cp.async copies so far have landed.
FW_DEVICE void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
               :
               : "r"(shared_address(barrier))
               : "memory");
}

// Waits for the end of the phase of this parity.
FW_DEVICE void wait(uint64_t* barrier, int parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

// Copies ---------------------------------------------------------------------------------------

// Copies a box of a matrix to shared memory. What is outside of the matrix arrives as zeros.
FW_DEVICE void copy_box(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                        int layer) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];"
      :
      : "r"(shared_address(to)), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(layer)
      : "memory");
}

// Copies four bytes to shared memory, or zeros if `inside` is false.
FW_DEVICE void copy_word(uint32_t to, const float* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :
               : "r"(to), "l"(from), "r"(inside ? 4 : 0)
               : "memory");
}

// Rounds to TF32: ten bits after the leading one, ties away from zero.
FW_DEVICE float nearest_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits & 0xffffe000u);
}

// Loads from global memory that nobody writes meanwhile, and does not allocate in L1, which is
// small beside so much shared memory and better used for other data.
FW_DEVICE float load_once(const float* from) {
  float x;
  asm volatile("ld.global.nc.L1::no_allocate.f32 %0, [%1];" : "=f"(x) : "l"(from));
  return x;
}

// The same, or zeros if `inside` is false. There is no branch, so that many loads are in flight.
FW_DEVICE float load_if(const float* from, bool inside) {
  float x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.f32 %0, 0f00000000;\n"
      "@p ld.global.nc.L1::no_allocate.f32 %0, [%1];\n}"
      : "=f"(x)
      : "l"(from), "r"(int(inside)));
  return x;
}
FW_DEVICE void load_four_if(float* x, const float* from, bool inside) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "mov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\n"
      "mov.f32 %2, 0f00000000;\nmov.f32 %3, 0f00000000;\n"
      "@p ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
      : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
      : "l"(from), "r"(int(inside)));
}

// Stores to shared memory. Calls with different kSite are different instructions: the compiler
// cannot merge them into one whose source register it would have to index.
template <int kSite>
FW_DEVICE void store_shared(uint32_t to, float x) {
  asm volatile("st.shared.f32 [%0], %1;  // %2" : : "r"(to), "f"(x), "n"(kSite) : "memory");
}

template <int kSite>
FW_DEVICE void store_two_shared(uint32_t to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};  // %3"
               :
               : "r"(to), "f"(x), "f"(y), "n"(kSite)
               : "memory");
}

// Stores two 16-bit values to shared memory, or four times two.
FW_DEVICE void store_pair(uint32_t to, uint32_t pair) {
  asm volatile("st.shared.b32 [%0], %1;" : : "r"(to), "r"(pair) : "memory");
}
FW_DEVICE void store_four_pairs(uint32_t to, const uint32_t (&pairs)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(to), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

// wgmma reads shared memory through another proxy than threads use: it sees a thread's stores once
// the thread has published them and then arrived at a barrier.
FW_DEVICE void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for reads: TMA may overwrite what a thread has loaded once the thread has published its
// reads and then arrived. Without this, a load can happen after an arrival that follows it.
FW_DEVICE void publish_reads() { publish_stores(); }

// Two floats rounded to fp16, side by side.
FW_DEVICE uint32_t fp16_pair(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// For each element of two pairs, the larger magnitude; NaN is ignored.
FW_DEVICE uint32_t larger_fp16_pair(uint32_t magnitudes, uint32_t pair) {
  uint32_t larger;
  asm("{\n.reg .b32 x;\nabs.f16x2 x, %2;\nmax.f16x2 %0, %1, x;\n}"
      : "=r"(larger)
      : "r"(magnitudes), "r"(pair));
  return larger;
}

// Row-major matrices, in one or more layers, and the box that TMA copies at once: 128 bytes wide,
// with the 128-byte swizzle that wgmma expects.
struct Matrices {
  int64_t columns, rows, row_stride, layers, layer_stride;  // strides in elements
};
constexpr CUtensorMapDataType map_type(const float*) { return CU_TENSOR_MAP_DATA_TYPE_FLOAT32; }
constexpr CUtensorMapDataType map_type(const half*) { return CU_TENSOR_MAP_DATA_TYPE_FLOAT16; }
constexpr CUtensorMapDataType map_type(const bf16*) { return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16; }

template <class T>
static bool matrix_map(CUtensorMap& map, const T* data, const Matrices& of, int box_columns,
                       int box_rows) {
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                   const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                     &result);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    return reinterpret_cast<Encode>(found);
  }();
  if (encode == nullptr) return false;
  const int64_t layer_stride = of.layers > 1 ? of.layer_stride : of.row_stride;
  const cuuint64_t sizes[3] = {cuuint64_t(of.columns), cuuint64_t(of.rows), cuuint64_t(of.layers)};
  const cuuint64_t strides[2] = {of.row_stride * sizeof(T), layer_stride * sizeof(T)};
  const cuuint32_t box[3] = {cuuint32_t(box_columns), cuuint32_t(box_rows), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  return encode(&map, map_type(data), 3, const_cast<T*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// wgmma ----------------------------------------------------------------------------------------

// Sets the registers of a warpgroup from here on: more of them, or fewer.
template <int kRegisters>
FW_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}
template <int kRegisters>
FW_DEVICE void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

// A group of wgmma instructions. It begins once the registers that it reads and adds to are
// settled, and `commit_wgmma` closes it; `await_wgmma<n>` returns when all but the last n groups
// are finished.
FW_DEVICE void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FW_DEVICE void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
FW_DEVICE void await_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

// Sums are read only after the wait before this call; the compiler does not see that by itself.
template <int kSums>
FW_DEVICE void settle(float (&sum)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

// Registers that wgmma has read are written only after the wait before this call.
FW_DEVICE void move_after(uint32_t& to, uint32_t from) {
  asm volatile("mov.b32 %0, %1;" : "=r"(to) : "r"(from) : "memory");
}

// wgmma's descriptor of a tile of 128-byte rows, swizzled in groups of eight. `chunk_bytes` is the
// distance between 64-wide chunks if the free index is contiguous. Adding bytes / 16 moves a
// descriptor on. Where chunks do not matter, code computes with the address alone, in 32 bits.
constexpr uint64_t kRowGroups = uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
FW_DEVICE uint32_t tile_address(const void* tile) { return (shared_address(tile) & 0x3FFFF) >> 4; }
FW_DEVICE uint64_t rows_descriptor(uint32_t address) { return kRowGroups | address; }
FW_DEVICE uint64_t tile_descriptor(const void* tile, int chunk_bytes) {
  return rows_descriptor(tile_address(tile)) | uint64_t(chunk_bytes >> 4) << 16;
}

// A value that all threads of a warp have; the shuffle tells the compiler so.
FW_DEVICE int of_warp(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// sum = a·b (+ sum if `add`): 64 rows of a in registers, 16 deep, by twice as many columns of b as
// a thread has sums. kFreeMajorB: b's free index, not the contracted one, is contiguous.
#define FW_EIGHT(i)                                                                     \
  "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]), \
      "+f"(sum[i + 5]), "+f"(sum[i + 6]), "+f"(sum[i + 7])
#define FW_SIXTY_FOUR                                                                             \
  FW_EIGHT(0), FW_EIGHT(8), FW_EIGHT(16), FW_EIGHT(24), FW_EIGHT(32), FW_EIGHT(40), FW_EIGHT(48), \
      FW_EIGHT(56)
#define FW_SIXTY_FOUR_NAMES                                                              \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"   \
  "%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43," \
  "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

template <bool kFreeMajorB>
FW_DEVICE void multiply(float (&sum)[64], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" FW_SIXTY_FOUR_NAMES
      "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}"
      : FW_SIXTY_FOUR
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(int(kFreeMajorB)));
}

template <bool kFreeMajorB>
FW_DEVICE void multiply(float (&sum)[88], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %93, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n176k16.f32.f16.f16 {" FW_SIXTY_FOUR_NAMES
      ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,"
      "%85,%86,%87}, {%88,%89,%90,%91}, %92, p, 1, 1, %94;\n}"
      : FW_SIXTY_FOUR, FW_EIGHT(64), FW_EIGHT(72), FW_EIGHT(80)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(int(kFreeMajorB)));
}

// The same with a in shared memory, too. a and b are descriptors of tiles; either may have its free
// index contiguous. The macro takes the numbers of the operands, which follow those of the sums.
#define FW_THIRTY_TWO_NAMES                                                            \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22," \
  "%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FW_NEXT_SIXTY_FOUR                                                             \
  FW_EIGHT(64), FW_EIGHT(72), FW_EIGHT(80), FW_EIGHT(88), FW_EIGHT(96), FW_EIGHT(104), \
      FW_EIGHT(112), FW_EIGHT(120)
#define FW_NEXT_SIXTY_FOUR_NAMES                                                          \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,"  \
  "%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104," \
  "%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121," \
  "%122,%123,%124,%125,%126,%127"
#define FW_MULTIPLY_SHARED(shape, type, names, a_at, b_at, add_at, major_a_at, major_b_at, ...)  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add_at                                        \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" names "}, " a_at \
               ", " b_at ", p, 1, 1, " major_a_at ", " major_b_at ";\n}"                         \
               : __VA_ARGS__                                                                     \
               : "l"(a), "l"(b), "r"(add), "n"(int(kFreeMajorA)), "n"(int(kFreeMajorB)))
#define FW_MULTIPLY_64(type)                                                                    \
  FW_MULTIPLY_SHARED("m64n64k16", type, FW_THIRTY_TWO_NAMES, "%32", "%33", "%34", "%35", "%36", \
                     FW_EIGHT(0), FW_EIGHT(8), FW_EIGHT(16), FW_EIGHT(24))
#define FW_MULTIPLY_128(type)                                                                    \
  FW_MULTIPLY_SHARED("m64n128k16", type, FW_SIXTY_FOUR_NAMES, "%64", "%65", "%66", "%67", "%68", \
                     FW_SIXTY_FOUR)
#define FW_MULTIPLY_256(type)                                                                      \
  FW_MULTIPLY_SHARED("m64n256k16", type, FW_SIXTY_FOUR_NAMES "," FW_NEXT_SIXTY_FOUR_NAMES, "%128", \
                     "%129", "%130", "%131", "%132", FW_SIXTY_FOUR, FW_NEXT_SIXTY_FOUR)

template <bool kFreeMajorB>
FW_DEVICE void multiply(float (&sum)[128], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" FW_SIXTY_FOUR_NAMES
      "," FW_NEXT_SIXTY_FOUR_NAMES "}, {%128,%129,%130,%131}, %132, p, 1, 1, %134;\n}"
      : FW_SIXTY_FOUR, FW_NEXT_SIXTY_FOUR
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(int(kFreeMajorB)));
}

template <bool kFreeMajorA, bool kFreeMajorB, int kSums>
FW_DEVICE void multiply_of(const half*, float (&sum)[kSums], uint64_t a, uint64_t b, int add) {
  static_assert(kSums == 32 || kSums == 64 || kSums == 128, "64, 128 or 256 columns of b");
  if constexpr (kSums == 32) FW_MULTIPLY_64("f16");
  if constexpr (kSums == 64) FW_MULTIPLY_128("f16");
  if constexpr (kSums == 128) FW_MULTIPLY_256("f16");
}
template <bool kFreeMajorA, bool kFreeMajorB, int kSums>
FW_DEVICE void multiply_of(const bf16*, float (&sum)[kSums], uint64_t a, uint64_t b, int add) {
  static_assert(kSums == 64 || kSums == 128, "128 or 256 columns of b");
  if constexpr (kSums == 64) FW_MULTIPLY_128("bf16");
  if constexpr (kSums == 128) FW_MULTIPLY_256("bf16");
}
template <class T, bool kFreeMajorA, bool kFreeMajorB, int kSums>
FW_DEVICE void multiply_shared(float (&sum)[kSums], uint64_t a, uint64_t b, int add) {
  multiply_of<kFreeMajorA, kFreeMajorB>(static_cast<const T*>(nullptr), sum, a, b, add);
}

#undef FW_EIGHT
#undef FW_SIXTY_FOUR
#undef FW_SIXTY_FOUR_NAMES
#undef FW_THIRTY_TWO_NAMES
#undef FW_NEXT_SIXTY_FOUR
#undef FW_NEXT_SIXTY_FOUR_NAMES
#undef FW_MULTIPLY_SHARED
#undef FW_MULTIPLY_64
#undef FW_MULTIPLY_128
#undef FW_MULTIPLY_256

// Waits at a named barrier for so many threads.
FW_DEVICE void meet(int name, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" : : "r"(name), "r"(threads) : "memory");
}

// Two warpgroups alternate: one waits for its turn, by the name of a barrier, and the other gives
// it.
FW_DEVICE void await_turn(int name) {
  asm volatile("barrier.cta.sync.aligned %0, 256;" : : "r"(name) : "memory");
}
FW_DEVICE void give_turn(int name) {
  asm volatile("barrier.cta.arrive.aligned %0, 256;" : : "r"(name) : "memory");
}

}  // namespace fw
