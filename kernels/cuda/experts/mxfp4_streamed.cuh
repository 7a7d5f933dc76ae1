// GEMMs of experts in MXFP4 with many rows: slices of x go through the ring together with the weights.
#pragma once

#include "mxfp4_tile.cuh"

namespace baton {
namespace {

constexpr int kStagesMost = 20;

// Shape of tiles whose slices of x go through the ring. GROUPS: warpgroups of 64 weight rows; ROWS: rows of x; LOADERS:
// loading threads.
template <int GROUPS, int ROWS, int LOADERS>
struct Streamed {
  static constexpr int kGroups = GROUPS, kRows = ROWS, kLoaders = LOADERS;
  static constexpr int kThreads = GROUPS * 128 + LOADERS;
  static constexpr int kLoadRows = LOADERS / 8;           // rows of x that the loaders load at once
  static constexpr int kOwnLoads = ROWS / kLoadRows;      // rows of x that a loader loads
  static constexpr int kOwnColumns = (ROWS + 127) / 128;  // rows of x that a computing thread looks up
  static constexpr int kXBytes = ROWS * kSliceBytes, kStageBytes = kXBytes + GROUPS * kChunkBytes;
  static constexpr int kStatic = static_cast<int>(sizeof(ItemTable)) + 2 * kStagesMost * 8 + GROUPS * ROWS * 8 + 64;
  static constexpr int kFit = (kSmemOfSm - 2048 - kStatic) / kStageBytes;
  static constexpr int kStages = kFit < kStagesMost ? kFit : kStagesMost;
  static constexpr int kShared = kStages * kStageBytes + 1024;
  static constexpr bool kMovesRegisters = LOADERS == 128;  // whether loaders give registers to the computing threads
  static_assert(ROWS % 32 == 0, "the loads and the stores take whole groups of rows");
};
using Streamed64 = Streamed<3, 64, 64>;
using Streamed256 = Streamed<2, 256, 128>;

// The rows of x that a computing thread looks up. One step loads the assignments and a later step the scales, so no
// step waits for a load.
template <class S>
struct OwnColumns {
  int assignment[S::kOwnColumns];  // negative: the item has no such row
  float scale[S::kOwnColumns];
};

template <class S>
__device__ __forceinline__ OwnColumns<S> own_columns(const baton_mxfp4_gemm_args& p, const Item& item) {
  OwnColumns<S> own;
#pragma unroll
  for (int i = 0; i < S::kOwnColumns; ++i) {
    const int m = i * 128 + threadIdx.x % 128;
    own.assignment[i] = m < item.rows ? p.order[item.position + m] : -1;
    own.scale[i] = 1.f;
  }
  return own;
}
template <class S, bool GATE_UP>
__device__ __forceinline__ void fetch_scales(const baton_mxfp4_gemm_args& p, OwnColumns<S>& own) {
#pragma unroll
  for (int i = 0; i < S::kOwnColumns; ++i) {
    if (GATE_UP && p.scales && own.assignment[i] >= 0) own.scale[i] = p.scales[own.assignment[i] / p.count];
  }
}

template <class S>
struct Ring {
  uint32_t base, full, empty;  // addresses in shared memory
  int stage;
  uint32_t parity;

  __device__ __forceinline__ void advance() {
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ uint32_t x() const { return base + stage * S::kXBytes; }
  __device__ __forceinline__ uint32_t chunk(int group) const {
    return base + S::kStages * S::kXBytes + (stage * S::kGroups + group) * kChunkBytes;
  }
  __device__ __forceinline__ uint32_t arrived() const { return full + stage * 8; }
  __device__ __forceinline__ uint32_t released() const { return empty + stage * 8; }
};

// Loads the weights of a step.
template <class S>
__device__ __forceinline__ void load_chunks(const baton_mxfp4_gemm_args& p, const Chunks& chunks, const Item& item,
                                            int step, const Ring<S>& ring) {
  const int first = item.tile * S::kGroups, own = min(S::kGroups, chunks.tiles - first);
  barrier_expect(ring.arrived(), own * kChunkBytes);
  for (int group = 0; group < own; ++group) {
    const int64_t chunk = static_cast<int64_t>(first + group) * chunks.steps + step;
    const char* weight = static_cast<const char*>(p.weight) + item.expert * p.weight_stride;
    fetch_bulk(ring.chunk(group), weight + chunk * kChunkBytes, kChunkBytes, ring.arrived());
  }
}

// Loads weights and rows of x of all items of the CTA.
template <class S, bool GATE_UP, class Items>
__device__ __forceinline__ void load_items(const baton_mxfp4_gemm_args& p, const Chunks& chunks, Ring<S> ring,
                                           Items&& item_of) {
  constexpr int OWN = S::kOwnLoads;
  const int thread = threadIdx.x - S::kGroups * 128, c = thread & 7, r = thread >> 3, steps = chunks.steps;
  int index = blockIdx.x;
  Item item = item_of(index);
  int early = 0;
  if (!GATE_UP) {
    early = item.rows == 0 ? 0 : min(steps, S::kStages);
    if (thread == 0) {
      Ring<S> ahead = ring;
      for (int step = 0; step < early; ++step, ahead.advance()) load_chunks<S>(p, chunks, item, step, ahead);
    }
    pdl_wait_and_release();
  }
  // Looks up the rows of the next item while the loads of an item are in flight.
  int assignments[OWN];
  auto fetch_assignments = [&](const Item& of) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int m = S::kLoadRows * i + r;
      assignments[i] = m >= of.rows ? 0 : GATE_UP ? p.order[of.position + m] : of.position + m;
    }
  };
  fetch_assignments(item);
  while (item.rows > 0) {
    const char* from[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int64_t row = GATE_UP ? assignments[i] / p.count : assignments[i];
      from[i] = static_cast<const char*>(p.x) + row * p.x_stride * 2 + c * 16;
    }
    index += gridDim.x;
    const Item next = item_of(index);
    fetch_assignments(next);
    for (int step = 0; step < steps; ++step) {
      if (early > 0) {
        --early;
      } else {
        barrier_wait(ring.released(), ring.parity ^ 1);
        if (thread == 0) load_chunks<S>(p, chunks, item, step, ring);
      }
      const int at = step * kSliceBytes;
      const bool in = at + c * 16 < p.depth * 2;
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
        const int m = S::kLoadRows * i + r;
        const uint32_t to = ring.x() + m * kSliceBytes + ((c ^ (m & 7)) << 4);
        if (m < item.rows) fetch_x(to, in ? from[i] + at : from[i], in);
      }
      arrive_with_x(ring.arrived());
      ring.advance();
    }
    item = next;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Multiplies a tile of 64 weight rows. The widening of a slice overlaps the multiplication of the previous slice.
template <class S>
__device__ __forceinline__ void multiply_tile(Ring<S>& ring, int group, int steps, float (&acc)[S::kRows / 2]) {
  uint32_t even[16], odd[16], before = 0;
  auto release = [&](uint32_t barrier) {
    if (threadIdx.x % WARP == 0) barrier_arrive(barrier);
  };
  auto add_slice = [&](int step, uint32_t (&a)[16]) {
    barrier_wait(ring.arrived(), ring.parity);
    const OwnWords own(ring.chunk(group));
    widen(own.words, own.scales, a);
    wgmma_begin();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      multiply_widened<S::kRows>(acc, a + 4 * q, matrix_at(ring.x() + q * 32), step > 0 || q > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release(before);
    before = ring.released();
    ring.advance();
  };
  for (int step = 0; step + 1 < steps; step += 2) {
    add_slice(step, even);
    add_slice(step + 1, odd);
  }
  if (steps % 2) add_slice(steps - 1, even);
  wgmma_wait<0>();
#pragma unroll
  for (float& sum : acc) asm volatile("" : "+f"(sum)::"memory");
  release(before);
}

template <class S, bool GATE_UP>
__global__ void __launch_bounds__(S::kThreads, 1)
    mxfp4_gemm_kernel(const __grid_constant__ baton_mxfp4_gemm_args p, const __grid_constant__ Chunks chunks) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char raw[];
  __shared__ __align__(8) uint64_t barriers[2 * S::kStages];
  __shared__ ItemTable table;
  __shared__ Column columns[S::kGroups][S::kRows];
  const int warp = threadIdx.x / WARP, group = warp / 4;
  const uint32_t full = smem_addr(barriers);
  Ring<S> ring = {(smem_addr(raw) + 1023) / 1024 * 1024, full, full + S::kStages * 8, 0, 0};
  if (threadIdx.x == S::kGroups * 128) {
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(ring.full + i * 8, 1 + S::kLoaders);
      barrier_init(ring.empty + i * 8, S::kGroups * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  // For gate and up, the preceding kernel wrote the lists.
  if (GATE_UP) pdl_wait_and_release();
  if (warp == 0) fill_items<S::kRows>(p.offsets, p.experts, table);
  __syncthreads();
  const int tiles = (chunks.tiles + S::kGroups - 1) / S::kGroups;
  auto item_of = [&](int index) { return item_at<S::kRows>(table, p.experts, tiles, index); };
  if (group == S::kGroups) {
    if constexpr (S::kMovesRegisters) asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    return load_items<S, GATE_UP>(p, chunks, ring, item_of);
  }
  if constexpr (S::kMovesRegisters) asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
  if (!GATE_UP) pdl_wait_and_release();
  int index = blockIdx.x;
  Item item = item_of(index);
  OwnColumns<S> own = own_columns<S>(p, item);
  fetch_scales<S, GATE_UP>(p, own);
  auto wait_for_group = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); };
  while (item.rows > 0) {
    index += gridDim.x;
    const Item next = item_of(index);
    OwnColumns<S> next_own = own_columns<S>(p, next);
    const int tile = item.tile * S::kGroups + group;
    if (tile < chunks.tiles) {
      float acc[S::kRows / 2];
      multiply_tile<S>(ring, group, chunks.steps, acc);
      fetch_scales<S, GATE_UP>(p, next_own);
      wait_for_group();
#pragma unroll
      for (int i = 0; i < S::kOwnColumns; ++i) {
        const int m = i * 128 + threadIdx.x % 128;
        if (m < S::kRows) columns[group][m] = {own.assignment[i], own.scale[i]};
      }
      wait_for_group();
      store<S, GATE_UP>(p, item, tile, columns[group], fetch_biases<GATE_UP>(p, item, tile), acc);
    } else {
      for (int step = 0; step < chunks.steps; ++step, ring.advance()) {
        barrier_wait(ring.arrived(), ring.parity);
        if (threadIdx.x % WARP == 0) barrier_arrive(ring.released());
      }
      fetch_scales<S, GATE_UP>(p, next_own);
    }
    item = next, own = next_own;
  }
#endif
}

}  // namespace
}  // namespace baton
