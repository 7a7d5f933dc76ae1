// GEMMs of experts in MXFP4 with many rows: slices of x go through the ring together with the weights. TMA loads the rows
// of x, so they must be in the order of their positions. The rows of down are. sort_rows_kernel copies those of gate and
// up.
#pragma once

#include "mxfp4_tile.cuh"

namespace baton {
namespace {

// Shape of tiles whose slices of x go through the ring.
struct Streamed {
  static constexpr int kGroups = 2, kRows = 256;  // warpgroups of 64 weight rows; rows of x
  static constexpr int kMath = kGroups * 128, kThreads = kMath + 128;  // one thread of a further warpgroup loads
  static constexpr int kBoxRows = 64;                                  // rows of x that one instruction loads
  static constexpr int kXBytes = kRows * kSliceBytes, kStageBytes = kXBytes + kGroups * kChunkBytes;
  static constexpr int kStages = 6;
  static constexpr int kShared = kStages * kStageBytes + 1024;
  static constexpr int kStatic = static_cast<int>(sizeof(ItemTable)) + kGroups * kRows * 8 + kStages * 16 + 64;
  static_assert(kShared + kStatic + 1024 <= kSmemOfSm, "the ring fits into shared memory");
};

// Copies the rows of x to their positions. A warp copies a row at a time.
__global__ void __launch_bounds__(512) sort_rows_kernel(const __grid_constant__ baton_mxfp4_gemm_args p) {
  pdl_wait_and_release();
  const int positions = p.offsets[p.experts], warps = blockDim.x / WARP;
  for (int position = blockIdx.x * warps + threadIdx.x / WARP; position < positions; position += gridDim.x * warps) {
    const int64_t row = p.order[position] / p.count;
    const auto* from = reinterpret_cast<const uint4*>(static_cast<const bf16*>(p.x) + row * p.x_stride);
    auto* to = reinterpret_cast<uint4*>(static_cast<bf16*>(p.sorted) + static_cast<int64_t>(position) * p.depth);
#pragma unroll 4
    for (int i = threadIdx.x % WARP; i < p.depth / 8; i += WARP) to[i] = from[i];
  }
}

struct Ring {
  uint32_t base, full, empty;  // addresses in shared memory
  int stage;
  uint32_t parity;

  __device__ __forceinline__ void advance() {
    if (++stage == Streamed::kStages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ uint32_t x() const { return base + stage * Streamed::kXBytes; }
  __device__ __forceinline__ uint32_t chunk(int group) const {
    return base + Streamed::kStages * Streamed::kXBytes + (stage * Streamed::kGroups + group) * kChunkBytes;
  }
  __device__ __forceinline__ uint32_t arrived() const { return full + stage * 8; }
  __device__ __forceinline__ uint32_t released() const { return empty + stage * 8; }
};

__device__ __forceinline__ void fetch_box(const CUtensorMap* map, uint32_t to, uint32_t barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

__device__ __forceinline__ int boxes_of(const Item& item) {
  return (item.rows + Streamed::kBoxRows - 1) / Streamed::kBoxRows;
}

// Loads the weights of a step.
__device__ __forceinline__ void load_chunks(const baton_mxfp4_gemm_args& p, const Chunks& chunks, const Item& item,
                                            int step, const Ring& ring) {
  const int first = item.tile * Streamed::kGroups, own = min(Streamed::kGroups, chunks.tiles - first);
  barrier_expect(ring.arrived(), own * kChunkBytes + boxes_of(item) * Streamed::kBoxRows * kSliceBytes);
  for (int group = 0; group < own; ++group) {
    const int64_t chunk = static_cast<int64_t>(first + group) * chunks.steps + step;
    const char* weight = static_cast<const char*>(p.weight) + item.expert * p.weight_stride;
    fetch_bulk(ring.chunk(group), weight + chunk * kChunkBytes, kChunkBytes, ring.arrived());
  }
}

// Loads weights and rows of x of all items of the CTA. One thread calls this function, before the preceding kernel has
// completed: routing, which wrote the lists, is at least two kernels before.
template <class Items>
__device__ __forceinline__ void load_items(const baton_mxfp4_gemm_args& p, const CUtensorMap* x, const Chunks& chunks,
                                           Ring ring, Items&& item_of) {
  int index = blockIdx.x;
  Item item = item_of(index);
  int early = item.rows == 0 ? 0 : min(chunks.steps, Streamed::kStages);
  Ring ahead = ring;
  for (int step = 0; step < early; ++step, ahead.advance()) load_chunks(p, chunks, item, step, ahead);
  pdl_wait_and_release();
  for (; item.rows > 0; index += gridDim.x, item = item_of(index)) {
    for (int step = 0; step < chunks.steps; ++step, ring.advance()) {
      if (early > 0) {
        --early;
      } else {
        barrier_wait(ring.released(), ring.parity ^ 1);
        load_chunks(p, chunks, item, step, ring);
      }
      for (int box = 0; box < boxes_of(item); ++box) {
        const int first = box * Streamed::kBoxRows;
        fetch_box(x, ring.x() + first * kSliceBytes, ring.arrived(), step * kSlice, item.position + first);
      }
    }
  }
}

// Multiplies a tile of 64 weight rows by N rows of x. The widening of half a slice overlaps the multiplication of the
// previous half.
template <int N>
__device__ __forceinline__ void multiply_rows(Ring& ring, int group, int steps, float (&acc)[Streamed::kRows / 2]) {
  uint32_t first[8], second[8], before = 0;
  auto release = [&](uint32_t barrier) {
    if (threadIdx.x % WARP == 0) barrier_arrive(barrier);
  };
  auto add_half = [&](const OwnWords& own, int step, int word, uint32_t (&a)[8]) {
    widen<2>(own, word, a);
    wgmma_begin();
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const uint64_t columns = matrix_at(ring.x() + (word + q) * 32);
      multiply_widened<N>(acc, a + 4 * q, columns, step > 0 || word + q > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
  };
  for (int step = 0; step < steps; ++step, ring.advance()) {
    barrier_wait(ring.arrived(), ring.parity);
    const OwnWords own(ring.chunk(group));
    add_half(own, step, 0, first);
    if (step > 0) release(before);
    add_half(own, step, 2, second);
    before = ring.released();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
  release(before);
}

// Multiplies a tile of 64 weight rows by the rows of x of the item, rounded up to 64, 128, 192 or 256.
__device__ __forceinline__ void multiply_tile(Ring& ring, int group, int steps, int rows,
                                              float (&acc)[Streamed::kRows / 2]) {
  if (rows <= 64) multiply_rows<64>(ring, group, steps, acc);
  else if (rows <= 128) multiply_rows<128>(ring, group, steps, acc);
  else if (rows <= 192) multiply_rows<192>(ring, group, steps, acc);
  else multiply_rows<256>(ring, group, steps, acc);
}

template <bool GATE_UP>
__global__ void __launch_bounds__(Streamed::kThreads, 1)
    streamed_gemm_kernel(const __grid_constant__ baton_mxfp4_gemm_args p, const __grid_constant__ CUtensorMap x,
                         const __grid_constant__ Chunks chunks) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = Streamed;
  extern __shared__ char raw[];
  __shared__ __align__(8) uint64_t barriers[2 * S::kStages];
  __shared__ ItemTable table;
  __shared__ Column columns[S::kGroups][S::kRows];
  const int warp = threadIdx.x / WARP, group = warp / 4;
  const uint32_t full = smem_addr(barriers);
  Ring ring = {(smem_addr(raw) + 1023) / 1024 * 1024, full, full + S::kStages * 8, 0, 0};
  if (threadIdx.x == S::kMath) {
    fetch_map(&x);
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(ring.full + i * 8, 1);
      barrier_init(ring.empty + i * 8, S::kGroups * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  if (warp == 0) fill_items<S::kRows>(p.offsets, p.experts, table);
  __syncthreads();
  const int tiles = (chunks.tiles + S::kGroups - 1) / S::kGroups;
  auto item_of = [&](int index) { return item_at<S::kRows>(table, p.experts, tiles, index); };
  if (group == S::kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == S::kMath) load_items(p, &x, chunks, ring, item_of);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
  pdl_wait_and_release();
  auto wait_for_group = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); };
  int index = blockIdx.x;
  for (Item item = item_of(index); item.rows > 0; index += gridDim.x, item = item_of(index)) {
    const int tile = item.tile * S::kGroups + group;
    if (tile >= chunks.tiles) {
      for (int step = 0; step < chunks.steps; ++step, ring.advance()) {
        barrier_wait(ring.arrived(), ring.parity);
        if (threadIdx.x % WARP == 0) barrier_arrive(ring.released());
      }
      continue;
    }
    float acc[S::kRows / 2];
    multiply_tile(ring, group, chunks.steps, item.rows, acc);
    wait_for_group();
    for (int m = threadIdx.x % 128; m < item.rows; m += 128) {
      const int assignment = p.order[item.position + m];
      columns[group][m] = {assignment, GATE_UP && p.scales ? p.scales[assignment / p.count] : 1.f};
    }
    wait_for_group();
    store<S, GATE_UP>(p, item, tile, columns[group], fetch_biases<GATE_UP>(p, item, tile), acc);
  }
#endif
}

}  // namespace
}  // namespace baton
