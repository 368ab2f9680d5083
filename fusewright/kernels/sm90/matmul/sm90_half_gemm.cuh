// result[q][p] = epilogue(Σ_r b[q, r]·a[p, r]) of 16-bit matrices on Hopper's tensor cores.
//
// a and b are both float16 or both bfloat16 in memory, sums are fp32. Nothing is scaled or split on
// the way, so what is not finite comes out as it should by itself. Not so where they are rounded
// from fp32 (sm90_rounded_gemm.cuh): then it is made anew.
//
// A thread block stays for many tiles of 128 × kTileRows. Two warpgroups multiply, 64 of the tile's
// columns p each, both operands from shared memory. The third warpgroup loads, and goes on to the
// next tile while they run the epilogue of the last.
#pragma once

#include "sm90/matmul/sm90_half_load.cuh"

namespace fw {

// What makes an element anew that is not finite; this does not.
struct NothingAnew {
  static constexpr bool kMends = false;
};

// The result of a batch's product.
template <class Anew>
struct HalfResult {
  struct Place {
    bool inside;
    int column;
  };
  static constexpr bool kMends = Anew::kMends, kAlone = false;
  static constexpr int kWords = 48;
  const Anew& anew;
  const float* inverse;  // of the batch's rows, or null
  int batch, columns, rows, contracted, line;
  bool vectors;

  __device__ __forceinline__ Place place(int p) const { return {p < columns, p}; }
  __device__ __forceinline__ int row(const Place&, int q) const { return batch * rows + q; }
  __device__ __forceinline__ float scale(int q) const {
    return inverse == nullptr ? 1.f : inverse[q];
  }
  __device__ __forceinline__ float plain(int p, int q) const {
    return anew.plain(batch, p, q, rows, contracted);
  }
};

// A batch's factors for the free index, which has `extent` values; null if there are none.
template <class T>
__device__ __forceinline__ const float* factors_of(const HalfOperand<T>& operand, int batch,
                                                   int extent) {
  const bool own = operand.inverse != nullptr && operand.batch_stride != 0;
  return own ? operand.inverse + int64_t(batch) * extent : operand.inverse;
}

// A warpgroup that multiplies.
template <class T, int kTileRows, bool kFreeMajorA, bool kFreeMajorB, class End, class Anew>
__device__ __forceinline__ void multiply_halves(
    HalfShared<T, kTileRows, kFreeMajorA, kFreeMajorB>& shared, const End& end, const Anew& anew,
    const HalfOperand<T>& a, const HalfOperand<T>& b, const HalfSizes& sizes) {
  using Shared = HalfShared<T, kTileRows, kFreeMajorA, kFreeMajorB>;
  using BlockA = typename Shared::BlockA;
  using BlockB = typename Shared::BlockB;
  constexpr int kSums = kTileRows / 2;
  const int mine = threadIdx.x / 128;
  const int column = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;  // of a thread's first sum
  const bool speaks = threadIdx.x % 32 == 0;
  Ring<Shared::kStages> from;
  float sum[kSums];
#pragma unroll 1
  for (int tile = blockIdx.x; tile < sizes.tiles(); tile += gridDim.x) {
    int last = 0;  // the stage of the block before
#pragma unroll 1
    for (int block = 0; block < sizes.blocks; ++block, from.advance()) {
      const uint64_t at_a = BlockA::descriptor(shared.a[from.stage], 64 * mine);
      const uint64_t at_b = BlockB::descriptor(shared.b[from.stage], 0);
      wait(&shared.loaded[from.stage], from.parity);
      begin_products();
      multiply_shared<T, kFreeMajorA, kFreeMajorB>(sum, at_a, at_b, block > 0);
      commit_products();
      // With this block's first product under way the last block is given back as soon as it can.
      await_products<1>();
      if (speaks && block > 0) arrive(&shared.done[last]);
#pragma unroll
      for (int step = 1; step < kTileDepth / 16; ++step) {
        multiply_shared<T, kFreeMajorA, kFreeMajorB>(sum, at_a + step * BlockA::kStep,
                                                     at_b + step * BlockB::kStep, 1);
      }
      commit_products();
      last = from.stage;
    }
    await_products<0>();
    settle(sum);
    if (speaks) arrive(&shared.done[last]);

    int batch, p, q;
    sizes.place(tile, batch, p, q);
    p += 64 * mine;
    if (const float* factors = factors_of(a, batch, sizes.columns)) {
      const float low = p + column < sizes.columns ? factors[p + column] : 0.f;
      const float high = p + column + 8 < sizes.columns ? factors[p + column + 8] : 0.f;
#pragma unroll
      for (int i = 0; i < kSums; ++i) sum[i] *= i / 2 % 2 ? high : low;
    }
    const HalfResult<Anew> result = {
        anew,       factors_of(b, batch, sizes.rows), batch, sizes.columns,
        sizes.rows, sizes.contracted,                 sizes.line(batch, q),
        sizes.vectors};
    finish_tile<4>(sum, column, shared.finished[mine], 1 + mine, p, q, end, result);
  }
}

template <class T, int kTileRows, bool kFreeMajorA, bool kFreeMajorB, class End, class Anew>
__global__ void __launch_bounds__(kProductThreads, 1)
    half_product_kernel(const End end, const Anew anew, const HalfOperand<T> a,
                        const HalfOperand<T> b, const HalfSizes sizes,
                        const __grid_constant__ CUtensorMap map_a,
                        const __grid_constant__ CUtensorMap map_b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shared = HalfShared<T, kTileRows, kFreeMajorA, kFreeMajorB>;
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    if (shared_address(memory) % 1024 != 0) __trap();  // swizzles count from multiples of 1024
    for (int stage = 0; stage < Shared::kStages; ++stage) {
      init_barrier(&shared.loaded[stage], 1 + (sizes.gather || sizes.gather_b ? kLoadThreads : 0));
      init_barrier(&shared.done[stage], 8);
    }
    publish_barriers();
  }
  __syncthreads();
  await_kernel_before();
  if (threadIdx.x >= kProductThreads - kLoadThreads) {
    leave_registers<40>();
    load_halves(shared, a, b, &map_a, &map_b, sizes);
  } else {
    take_registers<232>();
    multiply_halves(shared, end, anew, a, b, sizes);
  }
#else
  __trap();  // built for another architecture than sm_90a, and yet called
#endif
}

// Whether the copy engine takes this layout.
template <class T>
bool copyable(const HalfOperand<T>& operand, int64_t batches) {
  return reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 && operand.row_stride % 8 == 0 &&
         operand.row_stride > 0 &&
         (batches == 1 || (operand.batch_stride % 8 == 0 && operand.batch_stride >= 0));
}

// `vectors`: whether the epilogue's tensors are aligned for four columns at a time. Tiles have 256
// of the rows q; with 128 a small result makes enough tiles for more of the GPU.
template <class T, bool kFreeMajorA, bool kFreeMajorB, int kTileRows = 256, class End,
          class Anew = NothingAnew>
static int half_product(const End& end, bool vectors, const HalfOperand<T>& a,
                        const HalfOperand<T>& b, const ProductExtents& of, int device,
                        void* stream, const Anew& anew = {}) {
  using Shared = HalfShared<T, kTileRows, kFreeMajorA, kFreeMajorB>;
  static_assert(int(sizeof(Shared)) <= kSharedBytes, "more shared memory than a block can have");
  if (of.columns == 0 || of.rows == 0 || of.batches == 0) return end_nothing(end, device, stream);
  const OnDevice here(device);
  // A sum of nothing is one block of zeros, which the copy engine refuses to describe.
  const bool nothing = of.contracted == 0;
  const bool gather_a = nothing || !copyable(a, of.batches);
  const bool gather_b = nothing || !copyable(b, of.batches);
  const auto tiles = [](int64_t size, int tile) { return int((size + tile - 1) / tile); };
  const HalfSizes sizes = {
      {int(of.columns), int(of.rows), int(of.contracted), int(of.batches),
       tiles(of.columns, kTileColumns), tiles(of.rows, kTileRows),
       nothing ? 1 : tiles(of.contracted, kTileDepth), kTileRows, gather_a, vectors},
      gather_b};
  CUtensorMap map_a{}, map_b{};
  const bool mapped =
      (gather_a || Shared::BlockA::map(map_a, a, of.columns, of.contracted, of.batches)) &&
      (gather_b || Shared::BlockB::map(map_b, b, of.rows, of.contracted, of.batches));
  if (!mapped) return static_cast<int>(cudaErrorInvalidValue);
  const auto kernel = half_product_kernel<T, kTileRows, kFreeMajorA, kFreeMajorB, End, Anew>;
  static Persistent persistent;
  const int64_t all = int64_t(sizes.batches) * sizes.tiles_p * sizes.tiles_q;
  const int blocks = persistent.blocks(kernel, all, device);
  launch_behind(kernel, blocks, kProductThreads, int(sizeof(Shared)), stream, end, anew, a, b, sizes,
                map_a, map_b);
  end.join(lines_of<End>(sizes), stream);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
