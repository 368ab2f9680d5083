// result[q][p] = epilogue(Σ_r b[q, r]·a[p, r]) in fp32 accuracy on Hopper's tensor cores.
//
// a is fp32 in memory, in any layout, and is split into high and low fp16 parts on its way to the
// tensor cores; b is stored as such parts, with the inverse scale of each stored row. A block of 64
// contracted indices is the sum of three terms, a_lo·b_hi + a_hi·b_lo + a_hi·b_hi, the small ones
// first. Tensor cores truncate when they add, so each block starts from zero and is added to the
// running sum in fp32 (H200, K = 8192, normally distributed elements: error 2.4e-7, cuBLAS SGEMM
// 9e-7).
//
// A thread block processes many tiles of 128 × kTileRows. Two warpgroups split and multiply, 64 of
// the tile's columns p each, and take turns: while one multiplies, the other adds up its last
// block and splits its next. The third warpgroup loads. With kTerms 1 only a_hi·b_hi is computed
// (sm90_fp16x1_multiply.cuh).
#pragma once

#include "sm90/matmul/sm90_fp16x1_multiply.cuh"
#include "sm90/matmul/sm90_split_k.cuh"

namespace fw {

// An element as a plain fp32 sum, for sums that overflowed or have an operand that is not finite.
template <bool kContractedRowsB>
FW_DEVICE float plain_dot(const RawOperand& a, const SplitOperand& b, int64_t batch, int p, int q,
                          int rows, int contracted) {
  const int64_t first = batch * (kContractedRowsB ? contracted : rows);  // stored row of b
  const float* from = a.data + batch * a.batch_stride + p * a.free_stride;
  float sum = 0.f;
#pragma unroll 1
  for (int r = 0; r < contracted; ++r) {
    const int64_t row = first + (kContractedRowsB ? r : q);
    const int64_t at = row * b.row_stride + (kContractedRowsB ? q : r);
    const float hi = value(b.hi[at]), lo = value(b.lo[at]);
    const float whole = isfinite(hi) ? (hi + lo) * b.inverse[row] : hi;
    sum = __fmaf_rn(from[r * a.contracted_stride], whole, sum);
    if (r % 16 == 0 && sum != sum) break;  // it stays NaN
  }
  return sum;
}

// A tile of the result, in one matmul of the batch.
template <bool kContractedRowsB>
struct MatmulResultTile {
  struct Position {
    bool inside;
    int column;
  };
  static constexpr bool kMends = true, kAlone = true;
  static constexpr int kWords = 48;
  const RawOperand& a;
  const SplitOperand& b;
  int batch, columns, rows, contracted, partial;
  bool vectors;

  FW_DEVICE Position position(int p) const { return {p < columns, p}; }
  FW_DEVICE int row(const Position&, int q) const { return batch * rows + q; }
  FW_DEVICE float scale(int q) const {
    return kContractedRowsB ? 1.f : b.inverse[batch * rows + q];
  }
  FW_DEVICE float plain(int p, int q) const {
    return plain_dot<kContractedRowsB>(a, b, batch, p, q, rows, contracted);
  }
};

// Starts multiplying a block into `sum`, from zero. The terms with low parts are a group of their
// own.
template <bool kFreeMajorA, bool kFreeMajorB, int kSums>
FW_DEVICE void multiply_block(float (&sum)[kSums], const BlockFragments<kFreeMajorA>& a,
                              const char* b, int part_bytes) {
  constexpr int kStep = kFreeMajorB ? 128 : 2;
  const uint64_t hi = tile_descriptor(b, kFreeMajorB ? 64 * kTileDepth * 2 : 0);
  const uint64_t lo = hi + part_bytes / 16;
  begin_wgmma();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    multiply<kFreeMajorB>(sum, a.high_low[step].lo, hi + step * kStep, step > 0);
    multiply<kFreeMajorB>(sum, a.high_low[step].hi, lo + step * kStep, 1);
  }
  commit_wgmma();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    multiply<kFreeMajorB>(sum, a.high_low[step].hi, hi + step * kStep, 1);
  }
  commit_wgmma();
}

// A long sum of equal signs would lose bits: it is set aside after this many blocks.
constexpr int kBlocksPerPart = 128;

// A warpgroup that multiplies. `finish(total, row, item)` takes the sums of a tile or of a part.
template <bool kFreeMajorA, bool kContractedRowsB, int kTileRows, class Sizes, class Finish>
FW_DEVICE void multiply_blocks(MatmulShared<3, kTileRows>& shared, const Sizes& sizes,
                               const Finish& finish) {
  constexpr int kSums = kTileRows / 2;
  const int mine = 1 + threadIdx.x / 128, other = 3 - mine;
  const bool speaks = threadIdx.x % 32 == 0;
  const FragmentReader<kFreeMajorA> reader;
  Ring<shared.kStagesA> from_a;
  Ring<shared.kStagesB> from_b;
  BlockFragments<kFreeMajorA> fragments;
  float sum[kSums], total[kSums];
  volatile float parts[kSums];  // in local memory: touched once in kBlocksPerPart blocks
  const auto release_a = [&] {
    if constexpr (kContractedRowsB) fragments.fold(shared.factors[from_a.stage]);
    publish_reads();
    __syncwarp();
    if (speaks) arrive(&shared.read_a[from_a.stage]);
    from_a.advance();
  };
  // A short sum is multiplied in one turn: while one warpgroup finishes its part of a tile, which
  // then takes about as long, the other has the tensor cores. The other can fall behind by as many
  // blocks as a has stages, and one more that it has read, and by as many as b has stages.
  static_assert(shared.kStagesA < shared.kStagesB, "the other could not be so far behind");
  const bool short_sum = sizes.blocks <= shared.kStagesA + 1;
  if (mine == 2) give_turn(1);
  wait(&shared.loaded_a[0], 0);
  fragments.template read<0, 4>(reader, shared.a[0]);
  release_a();
#pragma unroll 1
  for (int item = blockIdx.x; item < sizes.items(); item += gridDim.x) {
    const int blocks = sizes.blocks_of(item);
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[i] = 0.f;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, from_b.advance()) {
      fragments.split(kContractedRowsB);
      const float low = fragments.inverse[0], high = fragments.inverse[1];
      wait(&shared.loaded_b[from_b.stage], from_b.parity);
      // A tile's first block is multiplied out of turn: the other warpgroup may still be finishing
      // its last tile.
      if (short_sum ? block == 0 : block > 0) await_turn(mine);
      multiply_block<kFreeMajorA, kContractedRowsB>(sum, fragments, shared.b[from_b.stage][0],
                                                    shared.kSplitBytes);
      await_wgmma<1>();
      if (short_sum ? block + 1 == blocks : block > 0) give_turn(other);
      // The next block is read as registers become free: those of low parts now, the others then.
      wait(&shared.loaded_a[from_a.stage], from_a.parity);
      fragments.template read<0, 2>(reader, shared.a[from_a.stage]);
      await_wgmma<0>();
      settle(sum);
      if (speaks) arrive(&shared.done_b[from_b.stage]);
      fragments.template read<2, 4>(reader, shared.a[from_a.stage]);
#pragma unroll
      for (int i = 0; i < kSums; ++i)
        total[i] = __fmaf_rn(sum[i], i / 2 % 2 ? high : low, total[i]);
      release_a();
      if (block % kBlocksPerPart == kBlocksPerPart - 1 && block + 1 < blocks) {
        const bool first = block < kBlocksPerPart;
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          parts[i] = first ? total[i] : parts[i] + total[i];
          total[i] = 0.f;
        }
      }
    }
    if (blocks > kBlocksPerPart) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) total[i] += parts[i];
    }
    finish(total, reader.row, item);
  }
  if (mine == 1) await_turn(1);  // the turn that the other gave last
}

template <int kTerms, int kTileRows, bool kFreeMajorA, bool kContractedRowsB, class Epilogue,
          class Parts>
__global__ void __launch_bounds__(kMatmulThreads, 1)
    matmul_kernel(const Epilogue end, const RawOperand a, const SplitOperand b,
                  const typename Parts::Sizes sizes, const Parts parts,
                  const __grid_constant__ CUtensorMap map_a,
                  const __grid_constant__ CUtensorMap map_hi,
                  const __grid_constant__ CUtensorMap map_lo) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shared = MatmulShared<kTerms, kTileRows>;
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    if (shared_address(memory) % 1024 != 0) __trap();  // swizzles count from multiples of 1024
    const int copies = kContractedRowsB || sizes.gather ? kLoadThreads : 0;
    for (int stage = 0; stage < Shared::kStagesA; ++stage) {
      init_barrier(&shared.loaded_a[stage], 1 + copies);
      init_barrier(&shared.read_a[stage], 8);
    }
    for (int stage = 0; stage < Shared::kStagesB; ++stage) {
      init_barrier(&shared.loaded_b[stage], 1);
      init_barrier(&shared.done_b[stage], 8);
    }
    publish_barriers();
  }
  __syncthreads();
  await_kernel_before();
  if (threadIdx.x >= kMatmulThreads - kLoadThreads) {
    leave_registers<40>();
    load_blocks<kFreeMajorA, kContractedRowsB>(shared, a, b.inverse, &map_a, &map_hi, &map_lo,
                                               sizes);
  } else {
    take_registers<232>();
    const int group = threadIdx.x / 128;
    const auto finish = [&](auto& total, int row, int item) {
      if (!parts.join(total, sizes, item, shared.finished[group], 3 + group)) return;
      int batch, p, q;
      sizes.locate(item / sizes.parts, batch, p, q);
      const MatmulResultTile<kContractedRowsB> result = {a,
                                                         b,
                                                         batch,
                                                         sizes.columns,
                                                         sizes.rows,
                                                         sizes.contracted,
                                                         sizes.partial(batch, q),
                                                         sizes.vectors};
      finish_tile<4>(total, row - 64 * group, shared.finished[group], 3 + group, p + 64 * group, q,
                     end, result);
    };
    if constexpr (kTerms == 3) {
      multiply_blocks<kFreeMajorA, kContractedRowsB>(shared, sizes, finish);
    } else {
      multiply_once<kFreeMajorA, kContractedRowsB>(shared, sizes, finish);
    }
  }
#else
  __trap();  // compiled for another architecture than sm_90a
#endif
}

template <int kTerms, int kTileRows, bool kFreeMajorA, bool kContractedRowsB, class Epilogue,
          class Parts>
static int launch_matmul(const Epilogue& end, bool vectors, const RawOperand& a,
                         const SplitOperand& b, const MatmulExtents& of, int device, void* stream,
                         const Parts& parts) {
  using Shared = MatmulShared<kTerms, kTileRows>;
  static_assert(int(sizeof(Shared)) <= kSharedBytes, "more shared memory than a block can have");
  const OnDevice here(device);
  const int64_t outer = kFreeMajorA ? a.contracted_stride : a.free_stride;
  const int64_t inner = kFreeMajorA ? a.free_stride : a.contracted_stride;
  const auto tiles = [](int64_t size, int tile) { return int((size + tile - 1) / tile); };
  const bool gather = inner != 1 || outer % 4 != 0 || outer <= 0 || a.batch_stride % 4 != 0 ||
                      a.batch_stride < 0 || reinterpret_cast<uintptr_t>(a.data) % 16 != 0;
  typename Parts::Sizes sizes = {{int(of.columns), int(of.rows), int(of.contracted),
                                  int(of.batches), tiles(of.columns, kTileColumns),
                                  tiles(of.rows, kTileRows), tiles(of.contracted, kTileDepth),
                                  kTileRows, gather, vectors}};
  CUtensorMap map_a{}, map_hi{}, map_lo{};
  const Matrices raw = {kFreeMajorA ? of.columns : of.contracted,
                        kFreeMajorA ? of.contracted : of.columns, outer,
                        a.batch_stride == 0 ? 1 : of.batches, a.batch_stride};
  const int64_t down = kContractedRowsB ? of.contracted : of.rows;
  const Matrices split_layout = {kContractedRowsB ? of.rows : of.contracted, down, b.row_stride,
                                 of.batches, down * b.row_stride};
  const int box_rows = kContractedRowsB ? kTileDepth : kTileRows;
  // An empty sum loads nothing, and TMA has no map for it.
  const bool mapped =
      of.contracted == 0 ||
      ((gather || matrix_map(map_a, a.data, raw, 32, kFreeMajorA ? kTileDepth : kTileColumns)) &&
       matrix_map(map_hi, b.hi, split_layout, 64, box_rows) &&
       (kTerms == 1 || matrix_map(map_lo, b.lo, split_layout, 64, box_rows)));
  if (!mapped) return static_cast<int>(cudaErrorInvalidValue);
  const auto kernel =
      matmul_kernel<kTerms, kTileRows, kFreeMajorA, kContractedRowsB, Epilogue, Parts>;
  static Persistent persistent;
  const int64_t all = int64_t(sizes.batches) * sizes.tiles_p * sizes.tiles_q;
  if (!parts.template divide<kTileRows>(sizes, all)) {
    const int blocks = persistent.blocks(kernel, all, device);
    launch_behind(kernel, blocks, kMatmulThreads, int(sizeof(Shared)), stream, end, a, b, sizes,
                  parts, map_a, map_hi, map_lo);
  } else {
    // An ordinary launch: what comes before it in the stream is no kernel.
    parts.forget(stream);
    const int blocks = persistent.blocks(kernel, all * sizes.parts, device);
    kernel<<<blocks, kMatmulThreads, sizeof(Shared), static_cast<cudaStream_t>(stream)>>>(
        end, a, b, sizes, parts, map_a, map_hi, map_lo);
  }
  end.join(partials_of<Epilogue>(sizes), stream);
  return static_cast<int>(cudaGetLastError());
}

// `vectors`: whether the epilogue's tensors are aligned for four columns at a time. `parts`: memory
// for split-K, if there are few tiles.
template <int kTerms, int kTileRows, bool kFreeMajorA, bool kContractedRowsB, class Epilogue,
          class Parts = NoParts>
int fp16x3_matmul(const Epilogue& end, bool vectors, const RawOperand& a, const SplitOperand& b,
                  const MatmulExtents& of, int device, void* stream, const Parts& parts = {}) {
  if (of.columns == 0 || of.rows == 0 || of.batches == 0) return end_nothing(end, device, stream);
  constexpr int kRows = kTerms == 3 || kTileRows == 128 ? kTileRows : 256;
  return launch_matmul<kTerms, kRows, kFreeMajorA, kContractedRowsB>(end, vectors, a, b, of, device,
                                                                     stream, parts);
}

}  // namespace fw
