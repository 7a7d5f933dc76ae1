// Low-rank updates (LoRA) in a wide GEMM: further k of a tile. The helper warps of a CTA fill stages of the ring, with
// x A^T in bf16 in place of x, and B in place of W. Each block of 16 ranks of each adapter of the rows has 16 k of its own for
// each range of outputs of the tile. There x A^T is zero in rows with other adapters, and B in outputs of other ranges.
#pragma once

#include "hopper.h"
#include "low_rank.h"

namespace baton {
namespace {

constexpr int kHelpers = 3;  // warps
constexpr int kHelperThreads = kHelpers * WARP;

__device__ __forceinline__ void wait_for_helpers() { asm volatile("bar.sync 4, %0;" ::"n"(kHelperThreads) : "memory"); }

// S: Shape of wide_kernel.h.
template <class S>
struct UpdateSteps {
  static constexpr int kBlocks = S::KC * S::kChunk / SharedShrink::kBlock;  // blocks of columns of a step
  const baton_low_rank& update;
  int n;
  int2 at;  // first weight rows of the tile's halves
  int ranges;  // of the tile
  int first_range;

  __device__ __forceinline__ UpdateSteps(const baton_low_rank& update_, int n_, int2 at_) : update(update_), n(n_), at(at_) {
    first_range = range_of(update, at.x);
    ranges = range_of(update, min(at.y + S::BN / 2, n) - 1) - first_range + 1;
  }

  // Returns the steps for adapters with this many blocks of ranks.
  __device__ __forceinline__ int count(int blocks) const { return (ranges * blocks + kBlocks - 1) / kBlocks; }

  __device__ __forceinline__ int output(int row) const { return row < S::BN / 2 ? at.x + row : at.y + row - S::BN / 2; }
  __device__ __forceinline__ const bf16* b_of(RowAdapter adapter, int output) const {
    return static_cast<const bf16*>(update.b) + static_cast<int64_t>(adapter.slot) * n * update.rank_max +
           static_cast<int64_t>(output) * adapter.rank;
  }

  // Brings B of the tile into the L2 cache.
  __device__ __forceinline__ void prefetch_b(const SharedShrink& shrink) const {
    const int half = threadIdx.x % WARP, first = half == 0 ? at.x : at.y;
    shrink.for_each_adapter([&](RowAdapter adapter) {
      if (half < 2) prefetch(b_of(adapter, first), (min(first + S::BN / 2, n) - first) * adapter.rank * 2);
    });
  }

  // Returns the address of eight columns of a row: half `half` of a block of columns. A box has `rows` rows.
  __device__ __forceinline__ static uint32_t piece(uint32_t box, int rows, int row, int block, int half) {
    return box + (block / 4 * rows + row) * 128 + (((block % 4 * 2 + half) ^ (row & 7)) << 4);
  }
  __device__ __forceinline__ static void store_zeros(uint32_t to) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
  }

  // Starts to copy B into the box at `to`.
  __device__ __forceinline__ void copy_b(const SharedShrink& shrink, int thread, int begin, uint32_t to) const {
    const int end = begin + kBlocks;
    int block = 0;
#pragma unroll 1
    for (int range = first_range; range < first_range + ranges; ++range) {
      shrink.for_each_adapter([&](RowAdapter adapter) {
#pragma unroll 1
        for (int k = 0; k < adapter.rank; k += SharedShrink::kBlock, ++block) {
          if (block < begin || block >= end) continue;
          for (int i = thread; i < S::BN * 2; i += kHelperThreads) {
            const int row = i / 2, half = i % 2, from = output(row);
            const bool is_in = from < n && range_of(update, from) == range;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(piece(to, S::BN, row, block - begin, half)),
                         "l"(b_of(adapter, is_in ? from : at.x) + k + half * 8), "r"(is_in ? 16 : 0)
                         : "memory");
          }
        }
      });
    }
#pragma unroll 1
    for (; block < end; ++block) {
      for (int i = thread; i < S::BN * 2; i += kHelperThreads) store_zeros(piece(to, S::BN, i / 2, block - begin, i % 2));
    }
  }

  // Writes x A^T of the rows into the box at `to`, which holds zeros.
  __device__ __forceinline__ void write_shrunk(const SharedShrink& shrink, int thread, int begin, uint32_t to, int box_rows) const {
    const auto shrunk = shrink.shrunk();
    shrink.for_each_four(thread, kHelperThreads, first_range, ranges, [&](int row, int before, int range, int place, int k) {
      const int block = (range - first_range) * shrink.blocks + before + k / SharedShrink::kBlock - begin;
      if (block < 0 || block >= kBlocks) return;
      const float4 sum = shrunk.four(row, place);
      const __nv_bfloat162 low = __floats2bfloat162_rn(sum.x, sum.y), high = __floats2bfloat162_rn(sum.z, sum.w);
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(piece(to, box_rows, row, block, k % 16 / 8) + k % 8 * 2),
                   "r"(*reinterpret_cast<const uint32_t*>(&low)), "r"(*reinterpret_cast<const uint32_t*>(&high))
                   : "memory");
    });
  }

  // Fills the stage of step `step` with boxes of x and W at the given addresses.
  __device__ __forceinline__ void fill(SharedShrink& shrink, int step, uint32_t x_at, uint32_t w_at, int box_rows) const {
    const int thread = threadIdx.x - S::kGroups * 128 - WARP;
    copy_b(shrink, thread, step * kBlocks, w_at);
    for (uint32_t i = x_at + thread * 16; i < w_at; i += kHelperThreads * 16) store_zeros(i);
    wait_for_helpers();
    shrink.wait();
    write_shrunk(shrink, thread, step * kBlocks, x_at, box_rows);
    asm volatile("cp.async.wait_all;\nfence.proxy.async;" ::: "memory");
    wait_for_helpers();
  }
};

}  // namespace
}  // namespace baton
