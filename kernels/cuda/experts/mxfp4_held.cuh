// GEMMs of experts in MXFP4 with few rows: the x of a tile stays in shared memory for the whole depth.
#pragma once

#include "mxfp4_tile.cuh"

namespace baton {
namespace {

// Shape of tiles whose rows of x are held in shared memory for the whole depth. GROUPS: warpgroups, each with its own
// tiles of 64 weight rows; STAGES: pairs of chunks in a warpgroup's ring.
template <int ROWS, int GROUPS, int STAGES>
struct Held {
  static constexpr int kRows = ROWS, kGroups = GROUPS, kStages = STAGES;
  static constexpr int kOwners = GROUPS * 128, kThreads = kOwners + GROUPS * WARP;  // each group has a loading warp
  static constexpr int kRingBytes = STAGES * 2 * kChunkBytes;
  static constexpr int kStatic = static_cast<int>(sizeof(ItemTable)) + ROWS * 8 + GROUPS * STAGES * 16 + 64;
  static constexpr int kSharedMost = kSmemOfSm - 1024 - kStatic;

  // Dynamic shared memory of a CTA.
  static constexpr int shared_bytes(int steps) { return steps * ROWS * kSliceBytes + GROUPS * kRingBytes + 1024; }
};
using Held8 = Held<8, 4, 5>;
using Held16 = Held<16, 4, 5>;
using Held24 = Held<24, 4, 4>;
using Held32 = Held<32, 4, 2>;

// A run of neighbouring tiles of the weight for the same rows of x.
struct TileRun {
  Item item;  // of the first tile
  int tiles;  // number of tiles

  // Returns the first tile of a warpgroup. The warpgroup's tiles end before the first tile of the next warpgroup.
  template <class S>
  __device__ __forceinline__ int first_of(int group) const {
    return item.tile + tiles * group / S::kGroups;
  }
};

// The tiles of a CTA, in runs.
template <class S>
struct CtaTiles {
  const ItemTable& table;
  int experts, tiles;  // tiles of an expert's weight
  int index, end;

  __device__ __forceinline__ CtaTiles(const ItemTable& table, int experts, int tiles)
      : table(table), experts(experts), tiles(tiles) {
    const int64_t total = static_cast<int64_t>(table.tile[experts]) * tiles;
    index = static_cast<int>(total * blockIdx.x / gridDim.x);
    end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  }
  // Returns the next run; after the last one, a run without tiles.
  __device__ __forceinline__ TileRun next() {
    TileRun run = {};
    if (index >= end) return run;
    run.item = item_at<S::kRows>(table, experts, tiles, index);
    run.tiles = min(end - index, tiles - run.item.tile);
    index += run.tiles;
    return run;
  }
};

// Addresses of a warpgroup's ring, and the warpgroup's place in the ring. A stage has two chunks. With an odd number
// of chunks, the last stage of a tile has one.
template <class S>
struct HeldRing {
  uint32_t chunks, full, empty;
  int stage;
  uint32_t parity;

  __device__ __forceinline__ uint32_t stage_at() const { return chunks + stage * 2 * kChunkBytes; }
  __device__ __forceinline__ uint32_t arrived() const { return full + stage * 8; }
  __device__ __forceinline__ uint32_t released() const { return empty + stage * 8; }
  __device__ __forceinline__ void advance() {
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
};

// Loads the weights of a warpgroup. One thread of the warpgroup's loading warp runs it.
template <class S>
struct Loader {
  const baton_mxfp4_gemm_args& p;
  const Chunks& chunks;
  CtaTiles<S> tiles_of_cta;
  TileRun run;
  int group;
  HeldRing<S> ring;
  int early;  // pairs of chunks of the first tile that load_early has loaded
  uint64_t once;  // policy of the L2 cache for weights, which are read once

  __device__ __forceinline__ Loader(const baton_mxfp4_gemm_args& p, const Chunks& chunks, const ItemTable& table,
                                    int group, const HeldRing<S>& ring)
      : p(p), chunks(chunks), tiles_of_cta(table, p.experts, chunks.tiles), run(tiles_of_cta.next()), group(group),
        ring(ring), early(0), once(policy_first()) {}
  __device__ __forceinline__ int pairs() const { return (chunks.steps + 1) / 2; }
  // Loads the pairs of chunks of a tile from `first` up to `end`.
  __device__ __forceinline__ void load_pairs(int tile, int first, int end) {
    const char* from = static_cast<const char*>(p.weight) + run.item.expert * p.weight_stride +
                       (static_cast<int64_t>(tile) * chunks.steps + first * 2) * kChunkBytes;
    for (int pair = first; pair < end; ++pair, from += 2 * kChunkBytes) {
      const int bytes = min(2, chunks.steps - 2 * pair) * kChunkBytes;
      barrier_wait(ring.released(), ring.parity ^ 1);
      barrier_expect(ring.arrived(), bytes);
      fetch_bulk_as(ring.stage_at(), from, bytes, ring.arrived(), once);
      ring.advance();
    }
  }
  // Fills the ring with the first pairs of the first tile.
  __device__ __forceinline__ void load_early() {
    const int tile = run.first_of<S>(group);
    early = tile < run.first_of<S>(group + 1) ? min(pairs(), S::kStages) : 0;
    load_pairs(tile, 0, early);
  }
  __device__ __forceinline__ void load_rest() {
    for (; run.tiles > 0; run = tiles_of_cta.next()) {
      for (int tile = run.first_of<S>(group); tile < run.first_of<S>(group + 1); ++tile) {
        load_pairs(tile, early, pairs());
        early = 0;
      }
    }
  }
};

// Loads the x of a tile as slices of 64 columns, then the assignments and scales of its rows.
template <class S, bool GATE_UP>
__device__ __forceinline__ void hold_x(const baton_mxfp4_gemm_args& p, int steps, const Item& item, uint32_t x,
                                       Column* columns) {
  constexpr int kTogether = 8;
  for (int first = 0; first < item.rows; first += kTogether) {
    const char* from[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int position = item.position + min(first + i, item.rows - 1);
      const int64_t row = GATE_UP ? p.order[position] / p.count : position;
      from[i] = static_cast<const char*>(p.x) + row * p.x_stride * 2;
    }
    for (int piece = threadIdx.x; piece < steps * 8; piece += S::kOwners) {
      const bool in = piece * 8 < p.depth;
      const uint32_t to = x + (piece / 8 * S::kRows + first) * kSliceBytes, c = piece % 8;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= item.rows) break;
        fetch_x(to + i * kSliceBytes + ((c ^ i) << 4), in ? from[i] + piece * 16 : from[i], in);
      }
    }
  }
  // These loads follow those of x, so that no load of x waits for them.
  if (threadIdx.x < item.rows) {
    const int assignment = p.order[item.position + threadIdx.x];
    const bool is_scaled = GATE_UP && p.scales;
    columns[threadIdx.x] = {assignment, is_scaled ? p.scales[assignment / p.count] : 1.f};
  }
  asm volatile("cp.async.wait_all;\nfence.proxy.async.shared::cta;" ::: "memory");
}

// Multiplies a tile of 64 weight rows by the held x. The widening of a slice overlaps the multiplication of the
// previous slice.
template <class S>
__device__ __forceinline__ void multiply_held(HeldRing<S>& ring, uint32_t x, int steps, float (&acc)[S::kRows / 2]) {
  uint32_t even[16], odd[16];
  uint64_t matrix = matrix_at(x);
#pragma unroll
  for (float& sum : acc) sum = 0.f;
  auto add_slice = [&](const OwnWords& own, uint32_t (&a)[16]) {
    widen<4>(own, 0, a);
    wgmma_wait<0>();
    wgmma_begin();
#pragma unroll
    for (int q = 0; q < 4; ++q) multiply_widened<S::kRows>(acc, a + 4 * q, matrix + 2 * q, 1);
    wgmma_commit();
    matrix += S::kRows * kSliceBytes >> 4;
  };
  auto release = [&] {
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier_arrive(ring.released());
    ring.advance();
  };
#pragma unroll 1
  for (int step = 0; step + 1 < steps; step += 2) {
    barrier_wait(ring.arrived(), ring.parity);
    const OwnWords first(ring.stage_at()), second(ring.stage_at() + kChunkBytes);
    add_slice(first, even);
    add_slice(second, odd);
    release();
  }
  if (steps % 2) {
    barrier_wait(ring.arrived(), ring.parity);
    add_slice(OwnWords(ring.stage_at()), even);
    release();
  }
  wgmma_wait<0>();
#pragma unroll
  for (float& sum : acc) asm volatile("" : "+f"(sum)::"memory");
}

template <class S, bool GATE_UP>
__global__ void __launch_bounds__(S::kThreads, 1)
    held_gemm_kernel(const __grid_constant__ baton_mxfp4_gemm_args p, const __grid_constant__ Chunks chunks) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char raw[];
  __shared__ __align__(8) uint64_t barriers[2 * S::kGroups * S::kStages];
  __shared__ ItemTable table;
  __shared__ Column columns[S::kRows];
  const int warp = __shfl_sync(FULL, threadIdx.x / WARP, 0);
  const bool is_loader = warp >= S::kGroups * 4;
  const int group = is_loader ? warp - S::kGroups * 4 : warp / 4;
  const uint32_t x = (smem_addr(raw) + 1023) / 1024 * 1024, rings = x + chunks.steps * S::kRows * kSliceBytes;
  const uint32_t full = smem_addr(barriers), empty = full + S::kGroups * S::kStages * 8;
  if (threadIdx.x == S::kOwners) {
    for (int i = 0; i < S::kGroups * S::kStages; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  // For gate and up, the preceding kernel wrote the lists.
  if (GATE_UP) pdl_wait_and_release();
  if (warp == 0) fill_items<S::kRows>(p.offsets, p.experts, table);
  __syncthreads();
  const int first_stage = group * S::kStages;
  HeldRing<S> ring = {rings + group * S::kRingBytes, full + first_stage * 8, empty + first_stage * 8, 0, 0};
  Loader<S> loader(p, chunks, table, group, ring);
  if (!GATE_UP) {
    if (is_loader && threadIdx.x % WARP == 0) loader.load_early();
    __syncwarp();
    pdl_wait_and_release();
  }
  if (is_loader) {
    if (threadIdx.x % WARP == 0) loader.load_rest();
    return;
  }
  auto wait_for_owners = [] { asm volatile("bar.sync 1, %0;" ::"n"(S::kOwners) : "memory"); };
  CtaTiles<S> tiles_of_cta(table, p.experts, chunks.tiles);
  for (TileRun run = tiles_of_cta.next(); run.tiles > 0; run = tiles_of_cta.next()) {
    hold_x<S, GATE_UP>(p, chunks.steps, run.item, x, columns);
    wait_for_owners();
    for (int tile = run.first_of<S>(group); tile < run.first_of<S>(group + 1); ++tile) {
      const Biases biases = fetch_biases<GATE_UP>(p, run.item, tile);
      float acc[S::kRows / 2];
      multiply_held<S>(ring, x, chunks.steps, acc);
      store<S, GATE_UP>(p, run.item, tile, columns, biases, acc);
    }
    wait_for_owners();
  }
#endif
}

}  // namespace
}  // namespace baton
