// result[q][p] = epilogue(Σ_r b[q, r]·a[p, r]) of 16-bit matrices on Hopper's tensor cores.
//
// a and b are both float16 or both bfloat16 in memory, sums are fp32. Nothing is scaled or split on
// the way, so results that are not finite come out right by themselves. If the operands were
// rounded from fp32 (sm90_rounded_gemm.cuh), such results are recomputed.
//
// A thread block processes many tiles of 128 × kTileRows. Two warpgroups multiply, 64 of the tile's
// columns p each, both operands from shared memory. The third warpgroup loads, and goes on to the
// next tile while they run the epilogue of the last.
#pragma once

#include "sm90/matmul/sm90_half_load.cuh"

namespace fw {

// Recomputes an element that is not finite; this one does not.
struct NothingAnew {
  static constexpr bool kMends = false;
};

// A tile of the result, in one matmul of the batch.
template <class Anew>
struct HalfResultTile {
  struct Position {
    bool inside;
    int column;
  };
  static constexpr bool kMends = Anew::kMends, kAlone = false;
  static constexpr int kWords = 48;
  const Anew& anew;
  const float* inverse;  // of the batch's rows, or null
  int batch, columns, rows, contracted, partial;
  bool vectors;

  FW_DEVICE Position position(int p) const { return {p < columns, p}; }
  FW_DEVICE int row(const Position&, int q) const { return batch * rows + q; }
  FW_DEVICE float scale(int q) const { return inverse == nullptr ? 1.f : inverse[q]; }
  FW_DEVICE float plain(int p, int q) const { return anew.plain(batch, p, q, rows, contracted); }
};

// The factors of a batch for the free index, which has `extent` values; null if there are none.
template <class T>
FW_DEVICE const float* factors_of(const HalfOperand<T>& operand, int batch, int extent) {
  const bool own = operand.inverse != nullptr && operand.batch_stride != 0;
  return own ? operand.inverse + int64_t(batch) * extent : operand.inverse;
}

// A warpgroup that multiplies.
template <class T, int kTileRows, bool kFreeMajorA, bool kFreeMajorB, class Epilogue, class Anew>
FW_DEVICE void multiply_half_blocks(HalfShared<T, kTileRows, kFreeMajorA, kFreeMajorB>& shared,
                                    const Epilogue& end, const Anew& anew, const HalfOperand<T>& a,
                                    const HalfOperand<T>& b, const HalfSizes& sizes) {
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
    int last = 0;  // the stage of the previous block
#pragma unroll 1
    for (int block = 0; block < sizes.blocks; ++block, from.advance()) {
      const uint64_t at_a = BlockA::descriptor(shared.a[from.stage], 64 * mine);
      const uint64_t at_b = BlockB::descriptor(shared.b[from.stage], 0);
      wait(&shared.loaded[from.stage], from.parity);
      begin_wgmma();
      multiply_shared<T, kFreeMajorA, kFreeMajorB>(sum, at_a, at_b, block > 0);
      commit_wgmma();
      // Once this block's first wgmma is under way, the previous block is released as soon as
      // possible.
      await_wgmma<1>();
      if (speaks && block > 0) arrive(&shared.done[last]);
#pragma unroll
      for (int step = 1; step < kTileDepth / 16; ++step) {
        multiply_shared<T, kFreeMajorA, kFreeMajorB>(sum, at_a + step * BlockA::kStep,
                                                     at_b + step * BlockB::kStep, 1);
      }
      commit_wgmma();
      last = from.stage;
    }
    await_wgmma<0>();
    settle(sum);
    if (speaks) arrive(&shared.done[last]);

    int batch, p, q;
    sizes.locate(tile, batch, p, q);
    p += 64 * mine;
    if (const float* factors = factors_of(a, batch, sizes.columns)) {
      const float low = p + column < sizes.columns ? factors[p + column] : 0.f;
      const float high = p + column + 8 < sizes.columns ? factors[p + column + 8] : 0.f;
#pragma unroll
      for (int i = 0; i < kSums; ++i) sum[i] *= i / 2 % 2 ? high : low;
    }
    const HalfResultTile<Anew> result = {anew,
                                         factors_of(b, batch, sizes.rows),
                                         batch,
                                         sizes.columns,
                                         sizes.rows,
                                         sizes.contracted,
                                         sizes.partial(batch, q),
                                         sizes.vectors};
    finish_tile<4>(sum, column, shared.finished[mine], 1 + mine, p, q, end, result);
  }
}

template <class T, int kTileRows, bool kFreeMajorA, bool kFreeMajorB, class Epilogue, class Anew>
__global__ void __launch_bounds__(kMatmulThreads, 1)
    half_matmul_kernel(const Epilogue end, const Anew anew, const HalfOperand<T> a,
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
  if (threadIdx.x >= kMatmulThreads - kLoadThreads) {
    leave_registers<40>();
    load_half_blocks(shared, a, b, &map_a, &map_b, sizes);
  } else {
    take_registers<232>();
    multiply_half_blocks(shared, end, anew, a, b, sizes);
  }
#else
  __trap();  // compiled for another architecture than sm_90a
#endif
}

// Whether TMA can read this layout.
template <class T>
bool copyable(const HalfOperand<T>& operand, int64_t batches) {
  return reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 && operand.row_stride % 8 == 0 &&
         operand.row_stride > 0 &&
         (batches == 1 || (operand.batch_stride % 8 == 0 && operand.batch_stride >= 0));
}

// `vectors`: whether the epilogue's tensors are aligned for four columns at a time. Tiles have 256
// rows q; with 128, a small result has enough tiles for more of the GPU.
template <class T, bool kFreeMajorA, bool kFreeMajorB, int kTileRows = 256, class Epilogue,
          class Anew = NothingAnew>
static int half_matmul(const Epilogue& end, bool vectors, const HalfOperand<T>& a,
                       const HalfOperand<T>& b, const MatmulExtents& of, int device, void* stream,
                       const Anew& anew = {}) {
  using Shared = HalfShared<T, kTileRows, kFreeMajorA, kFreeMajorB>;
  static_assert(int(sizeof(Shared)) <= kSharedBytes, "more shared memory than a block can have");
  if (of.columns == 0 || of.rows == 0 || of.batches == 0) return end_nothing(end, device, stream);
  const OnDevice here(device);
  // An empty sum is one block of zeros; TMA has no map for it.
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
  const auto kernel = half_matmul_kernel<T, kTileRows, kFreeMajorA, kFreeMajorB, Epilogue, Anew>;
  static Persistent persistent;
  const int64_t all = int64_t(sizes.batches) * sizes.tiles_p * sizes.tiles_q;
  const int blocks = persistent.blocks(kernel, all, device);
  launch_behind(kernel, blocks, kMatmulThreads, int(sizeof(Shared)), stream, end, anew, a, b, sizes,
                map_a, map_b);
  end.join(partials_of<Epilogue>(sizes), stream);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fw
