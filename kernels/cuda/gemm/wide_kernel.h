// The kernel of wide GEMMs: y[rows][n] = x[rows][k] W[n][k]^T for up to 128 rows (sm_90a). The weight is read once, at
// peak read bandwidth. wide_gemm.cu instantiates the kernel for bf16, wide_fp8_gemm.cu for weight and x in FP8.
//
// One thread loads boxes of W and x by TMA, stage by stage of a ring in shared memory. One warpgroup (two above 64
// rows of M) computes with wgmma, with rows of x as M and the tile's weight rows as N. N may be any multiple of 8, so
// tiles that give every SM an equal share exist without split-K. Two CTAs may split k, where a narrow tile would read
// too much of x. A tile's accumulators stay in registers, where the epilogue (epilogue.h) reads them. Epilogue inputs
// are ready before the accumulators are complete: the consumers fetch RoPE angles and old residuals early, and three
// further warps compute the scales of the rows of x.
//
// FP8: baton_quantize has quantized x. A row of x is one row of M, or two rows whose sum keeps the precision of bf16:
// row i of a group of eight is the high part, row i + 8 is the low part, and one thread has both results. The tensor
// cores keep about 14 bits of a sum in FP8. With two parts, the sums of a stage therefore start with zero and are
// added to f32 sums.
//
// With low-rank updates, the three further warps help: they compute x A^T together with those of the other CTAs
// (low_rank.h), and fill the last stages of each tile with it (update_steps.h).
//
// With `pdl` the ring is filled with weights before the preceding kernel has completed. The ring takes the whole shared
// memory of an SM. See skinny_gemm.cu for the reasons.
#pragma once

#include <utility>

#include "epilogue.h"
#include "hopper.h"
#include "update_steps.h"

namespace baton {
namespace {

constexpr int kChunkBytes = 128;  // bytes of k in a row of a box, the widest row that TMA swizzles
constexpr int kSmem = 227 * 1024;
constexpr int kStagesMost = 12;
constexpr int kSplitDepthMin = 512;  // minimum depth at which two CTAs split k
constexpr float kLowFactor = 1.f / 32.f;  // factor of the low parts of x

// BN: weight rows per tile; GROUPS: consumer warpgroups of 64 rows of M; KC: chunks of k per stage; SPLIT: CTAs of the
// cluster that computes a tile, each from its own part of k; PARTS: rows of M for each row of x in FP8, 0 for bf16.
template <int BN_, int GROUPS, int KC_, int SPLIT = 1, int PARTS = 0>
struct Shape {
  static constexpr int BN = BN_, KC = KC_, kGroups = GROUPS, kSplit = SPLIT, kParts = PARTS;
  static constexpr int kElementBytes = PARTS > 0 ? 1 : 2;
  static constexpr int kChunk = kChunkBytes / kElementBytes;
  static constexpr bool kIsSplit = PARTS == 2;  // whether x is split into high and low parts
  static constexpr int kRows = kIsSplit ? 1 : 2;  // rows of x whose results a thread has
  static constexpr int kWarpRows = 8 * kRows;
  static constexpr int kOwn = BN / SPLIT;  // weight rows whose results a CTA finishes
  static constexpr int kThreads = kGroups * 128 + 128;  // one warp fetches, three add up squares
  static constexpr int kWBytes = KC * BN * kChunkBytes;
  // Accumulators that a CTA receives from its peer, behind the ring.
  static constexpr int kPeerBytes = SPLIT > 1 ? kGroups * 128 * kOwn / 2 * 4 : 0;
  static constexpr int kScaleBytes = PARTS > 0 ? kGroups * kOwn * 4 : 0;  // scales of weight rows, in static memory
  // With FP8, CTAs of the kernel that quantizes x fit beside the ring.
  static constexpr int kRing = kSmem - (PARTS > 0 ? 4096 : 2048) - kScaleBytes - kPeerBytes;

  // Rows of x in a box: whole groups of eight rows for the swizzle. TMA takes three times as long for a row outside the
  // matrix as for a row of the matrix, so the box is not padded to the 64 rows that wgmma reads. Behind the box wgmma
  // reads other bytes, whose results are not stored.
  static __host__ __device__ int box_rows(int rows) { return (rows + 7) / 8 * (kIsSplit ? 16 : 8); }
  static __host__ __device__ int x_bytes(int rows) { return KC * box_rows(rows) * kChunkBytes; }
  static __host__ __device__ int stage_bytes(int rows) { return x_bytes(rows) + kWBytes; }
  static __host__ __device__ int stages(int rows) {
    const int fit = kRing / stage_bytes(rows);
    return fit < kStagesMost ? fit : kStagesMost;
  }
  static __host__ __device__ int shared_bytes(int rows) { return stages(rows) * stage_bytes(rows) + kPeerBytes + 1024; }
  static_assert(SPLIT <= 2, "a CTA has one peer");
  static_assert(kWBytes % 1024 == 0 && BN % 16 == 0, "swizzling needs whole groups of eight rows");
  static_assert(kWBytes >= 56 * kChunkBytes, "wgmma reads up to 56 rows behind the last box of x");
};

// ---- TMA ----

__device__ __forceinline__ void fetch_weights(const CUtensorMap* map, uint32_t to, uint32_t barrier, int row, int chunk,
                                              uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(0), "r"(chunk), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void fetch_x(const CUtensorMap* map, uint32_t to, uint32_t barrier, int chunk, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(0), "r"(0), "r"(chunk), "l"(policy)
      : "memory");
}

// ---- The kernel ----

// Returns the thread's sums over all stages.
template <class S>
__device__ __forceinline__ auto& sums_of(float (&acc)[S::BN / 2], float (&total)[S::kIsSplit ? S::BN / 4 : 1]) {
  if constexpr (S::kIsSplit) {
    return total;
  } else {
    return acc;
  }
}

// HAS_UPDATE: adds the low-rank updates of the rows of x, in bf16 only.
template <class S, int EPI, bool HAS_UPDATE>
__global__ void __launch_bounds__(S::kThreads, 1)
    wide_gemm_kernel(const __grid_constant__ GemmArgs<HAS_UPDATE> args, const __grid_constant__ CUtensorMap weight_map,
                     const __grid_constant__ CUtensorMap x_map, int tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const baton_skinny_gemm_args& p = args.get();
  constexpr int BN = S::BN, KC = S::KC;
  const int x_rows = S::box_rows(p.rows), x_bytes = S::x_bytes(p.rows), stage_bytes = S::stage_bytes(p.rows);
  const int stages = S::stages(p.rows);
  extern __shared__ char raw[];
  __shared__ __align__(8) uint64_t barriers[(HAS_UPDATE ? 3 : 2) * kStagesMost + HAS_UPDATE];
  __shared__ float scales[S::kGroups * 64];
  __shared__ float weight_scales[S::kGroups][S::kParts > 0 ? S::kOwn : 1];
  const uint32_t ring = (smem_addr(raw) + 1023) / 1024 * 1024;
  const uint32_t full = smem_addr(barriers), empty = full + kStagesMost * 8;
  // With an update: the helper warps may fill a stage whose barrier `handed` has completed. They set `blocks`, the blocks of
  // ranks of the adapters of all rows, before they arrive at `known`.
  __shared__ int blocks;
  const uint32_t handed = empty + kStagesMost * 8, known = handed + kStagesMost * 8;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  // CTA `part` of a cluster computes the steps of k from `first_step` on. A split tile has one round.
  const int part = blockIdx.x % S::kSplit, cluster = blockIdx.x / S::kSplit, clusters = gridDim.x / S::kSplit;
  const int all_steps = (p.depth / S::kChunk + KC - 1) / KC;
  const int first_step = all_steps * part / S::kSplit, steps = all_steps * (part + 1) / S::kSplit - first_step;
  const int rounds = (tiles - cluster + clusters - 1) / clusters;
  auto tile_of = [&](int round) { return cluster + round * clusters; };

  const bool fetches = threadIdx.x == S::kGroups * 128;
  const int total = rounds * steps, early = min(HAS_UPDATE ? steps : total, stages);
  // Returns the steps of a tile's updates.
  auto updates_of = [&](int round) {
    return UpdateSteps<S>(p.low_rank, p.n, tile_rows<BN, EPI>(p, tile_of(round)));
  };
  auto update_steps_of = [&](int round) {
    barrier_wait(known, 0);
    return updates_of(round).count(blocks);
  };
  uint64_t weights_once = 0;
  auto fetch_weights_of = [&](int i, int stage) {
    barrier_expect(full + stage * 8, stage_bytes);
    fetch_weights(&weight_map, ring + stage * stage_bytes + x_bytes, full + stage * 8,
                  tile_rows<BN, EPI>(p, tile_of(i / steps)).x, (first_step + i % steps) * KC, weights_once);
  };
  if (fetches) {
    fetch_map(&weight_map);
    fetch_map(&x_map);
    for (int i = 0; i < stages; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, S::kGroups * 4);
    }
    if constexpr (HAS_UPDATE) {
      for (int i = 0; i < stages; ++i) barrier_init(handed + i * 8, 1);
      barrier_init(known, 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
    weights_once = policy_first();
    for (int i = 0; i < early; ++i) fetch_weights_of(i, i);
  }
  __syncthreads();
  if constexpr (S::kSplit > 1) cluster_arrive();  // the peer runs, so its shared memory may be written

  if (fetches) {
    const uint64_t x_often = policy_last();
    auto fetch_x_of = [&](int i, int stage) {
      fetch_x(&x_map, ring + stage * stage_bytes, full + stage * 8, (first_step + i % steps) * KC, x_often);
    };
    pdl_wait_and_release();
    for (int i = 0; i < early; ++i) fetch_x_of(i, i);
    int stage = HAS_UPDATE ? early % stages : 0;
    uint32_t parity = HAS_UPDATE && early < stages;  // a wait for the other phase of a new barrier returns at once
    auto pass = [&] {
      if (++stage == stages) stage = 0, parity ^= 1;
    };
    // Gives the stages behind a tile to the helper warps.
    auto hand_over = [&](int round) {
      for (int left = update_steps_of(round); left > 0; --left) {
        barrier_wait(empty + stage * 8, parity);
        barrier_arrive(handed + stage * 8);
        pass();
      }
    };
    for (int i = early; i < total; ++i) {
      if constexpr (HAS_UPDATE) {
        if (i % steps == 0) hand_over(i / steps - 1);
      }
      barrier_wait(empty + stage * 8, parity);
      fetch_weights_of(i, stage);
      fetch_x_of(i, stage);
      pass();
    }
    if constexpr (HAS_UPDATE) hand_over(rounds - 1);
  } else if (warp < S::kGroups * 4) {
    pdl_wait_and_release();
    constexpr int ROWS = S::kRows;
    const int m0 = warp * S::kWarpRows + (lane >> 2), group = warp / 4;
    float own_scales[ROWS];
    const uint32_t x_first = group * 64 * kChunkBytes;
    auto wait_for_group = [&] { asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory"); };

    auto finish_own = [&](int own, int2 at, const auto& extras, auto& sums) {
      if constexpr (S::kParts > 0) {
        wait_for_group();
#pragma unroll
        for (int i = 0; i < S::kOwn * ROWS / 4; ++i) {
          sums[i] *= weight_scales[group][i / (2 * ROWS) * 8 + lane % 4 * 2 + i % 2];
        }
      }
      const int places = (p.n + S::kOwn - 1) / S::kOwn;
      if (warp * S::kWarpRows < p.rows && own < places) {
        finish<S::kOwn, EPI, ROWS>(p, own, places, at, m0, own_scales, extras, sums);
      }
    };

    int stage = 0, before = -1;
    uint32_t parity = 0;
    auto release = [&](int done) {
      if (lane == 0) barrier_arrive(empty + done * 8);
    };
    for (int round = 0; round < rounds; ++round) {
      const int tile = tile_of(round);
      const int own = tile * S::kSplit + part;
      const int2 at = tile_rows<S::kOwn, EPI>(p, own);
      if constexpr (S::kParts > 0) {
        if (round > 0) wait_for_group();
        for (int i = threadIdx.x % 128; i < S::kOwn; i += 128) {
          const int row = i < S::kOwn / 2 ? at.x + i : at.y + i - S::kOwn / 2;
          weight_scales[group][i] = row < p.n ? p.weight_scales[row] : 0.f;
        }
      }
      Extras<S::kOwn, EPI, ROWS> extras;
      extras.fetch(p, at, m0);
      float acc[BN / 2];
      float total[S::kIsSplit ? BN / 4 : 1] = {};
      int end = steps;
      for (int step = 0; step < end; ++step) {
        barrier_wait(full + stage * 8, parity);
        const uint32_t x_at = ring + stage * stage_bytes + x_first;
        const uint32_t w_at = ring + stage * stage_bytes + x_bytes;
        const bool adds = step > 0 && !S::kIsSplit;
        wgmma_begin();
#pragma unroll
        for (int chunk = 0; chunk < KC; ++chunk) {
#pragma unroll
          for (int k = 0; k < kChunkBytes / 32; ++k) {
            const uint64_t a = matrix_at(x_at + chunk * x_rows * kChunkBytes + k * 32);
            const uint64_t b = matrix_at(w_at + chunk * BN * kChunkBytes + k * 32);
            if constexpr (S::kParts > 0) {
              multiply_fp8<BN>(acc, a, b, adds || chunk > 0 || k > 0);
            } else {
              multiply<BN>(acc, a, b, adds || chunk > 0 || k > 0);
            }
          }
        }
        wgmma_commit();
        if constexpr (S::kIsSplit) {
          wgmma_wait<0>();
#pragma unroll
          for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
          release(stage);
#pragma unroll
          for (int i = 0; i < BN / 4; ++i) {
            const int high = i / 2 * 4 + i % 2;
            total[i] += fmaf(acc[high + 2], kLowFactor, acc[high]);
          }
        } else {
          wgmma_wait<1>();
          if (before >= 0) release(before);
          before = stage;
        }
        if (++stage == stages) stage = 0, parity ^= 1;
        if constexpr (HAS_UPDATE) {
          if (step + 1 == steps) end += update_steps_of(round);
        }
      }
      if constexpr (!S::kIsSplit) {
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
        release(before);
        before = -1;
      }
      if (round == 0) {
        asm volatile("bar.sync 1, %0;" ::"n"(S::kThreads - 32) : "memory");
#pragma unroll
        for (int row = 0; row < ROWS; ++row) own_scales[row] = scales[m0 + row * 8];
      }
      // The thread's sums: ROWS for each pair of weight rows.
      float(&all)[BN * ROWS / 4] = sums_of<S>(acc, total);
      if constexpr (S::kSplit > 1) {
        // Each CTA finishes one half of the weight rows and sends the sums of the other half to its peer.
        constexpr int HALF = BN * ROWS / 8;
        const uint32_t inbox = ring + stages * stage_bytes + threadIdx.x * 4;
        float sums[HALF];
        cluster_wait();
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
          store_to_peer(inbox + i * S::kGroups * 512, 1 - part, part == 0 ? all[HALF + i] : all[i]);
          sums[i] = part == 0 ? all[i] : all[HALF + i];
        }
        cluster_arrive();
        cluster_wait();
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
          float received;
          asm volatile("ld.shared.f32 %0, [%1];" : "=f"(received) : "r"(inbox + i * S::kGroups * 512) : "memory");
          sums[i] += received;
        }
        finish_own(own, at, extras, sums);
      } else {
        finish_own(own, at, extras, all);
      }
    }
  } else if (warp > S::kGroups * 4) {
    // Computes the scales of the rows of x from the squares that the producer of x stored, while the other warps
    // multiply. Rows in FP8 have scales of their own.
    const int helper = warp - S::kGroups * 4 - 1;
    auto compute_scales = [&] {
      constexpr int TOGETHER = 11;  // rows whose loads are in flight, a third of 32
      for (int first = helper * TOGETHER; first < p.rows; first += kHelpers * TOGETHER) {
        float sum[TOGETHER] = {};
        if (p.squares) {
#pragma unroll 2
          for (int j = lane; j < p.squares_count; j += WARP) {
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
              const int m = min(first + i, p.rows - 1);
              sum[i] += p.squares[static_cast<int64_t>(m) * p.squares_count + j];
            }
          }
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
          sum[i] = warp_sum(sum[i]);
          if (lane == 0 && first + i < p.rows) {
            const float scale = p.squares ? rsqrtf(sum[i] / static_cast<float>(p.depth) + p.eps) : 1.f;
            scales[first + i] = S::kParts > 0 ? scale * p.x_scales[first + i] : scale;
          }
        }
      }
      asm volatile("bar.arrive 1, %0;" ::"n"(S::kThreads - 32) : "memory");
    };
    if constexpr (HAS_UPDATE) {
      __shared__ uint8_t lists[kHelpers][SharedShrink::kRows];
      SharedShrink shrink(p.low_rank, p.rows, p.depth);
      if (helper == 0) {
        if (lane == 0) blocks = shrink.blocks, barrier_arrive(known);
        updates_of(0).prefetch_b(shrink);
      }
      shrink.prefetch_a(helper * gridDim.x + blockIdx.x, kHelpers * gridDim.x);
      pdl_wait_and_release();
      shrink.compute<2>(static_cast<const bf16*>(p.x), p.x_stride, lists[helper]);
      compute_scales();
      int stage = 0;
      uint32_t parities = 0;  // of `handed`, a bit for each stage
      for (int round = 0; round < rounds; ++round) {
        stage = (stage + steps) % stages;
        const auto updates = updates_of(round);
#pragma unroll 1
        for (int step = 0; step < updates.count(shrink.blocks); ++step) {
          const uint32_t x_at = ring + stage * stage_bytes;
          barrier_wait(handed + stage * 8, parities >> stage & 1);
          parities ^= 1u << stage;
          updates.fill(shrink, step, x_at, x_at + x_bytes, x_rows);
          if (helper == 0 && lane == 0) barrier_arrive(full + stage * 8);
          stage = (stage + 1) % stages;
        }
      }
      shrink.reset_after_last(shrink.leave(), kHelpers * gridDim.x);
    } else {
      pdl_wait_and_release();
      compute_scales();
    }
  }
  if constexpr (S::kSplit > 1) {
    if (warp >= S::kGroups * 4) {
      __syncwarp();
      cluster_wait();
      cluster_arrive();
      cluster_wait();
    }
  }
#endif
}

// ---- Launches ----

Encode encode = nullptr;  // set by the unit's load function

template <class S>
int32_t make_maps(const baton_skinny_gemm_args& p, CUtensorMap& weight, CUtensorMap& x) {
  constexpr CUtensorMapDataType TYPE = S::kParts > 0 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  constexpr cuuint32_t CHUNK = S::kChunk;
  const bool is_paired = p.epilogue == BATON_SKINNY_SILU || p.epilogue == BATON_SKINNY_QKV;
  const cuuint64_t row = static_cast<cuuint64_t>(p.depth) * S::kElementBytes, chunks = p.depth / CHUNK;
  const cuuint64_t x_rows = S::kIsSplit ? S::box_rows(p.rows) : p.rows;
  // Dimensions: element in the chunk, row, half, chunk of the row. The second half starts `apart` rows after the first.
  const cuuint64_t apart = p.epilogue == BATON_SKINNY_SILU ? p.n / 2 : p.epilogue == BATON_SKINNY_QKV ? p.head_dim / 2 : p.n;
  BATON_TRY(make_map<4>(encode, weight, TYPE, p.weight,
                        {CHUNK, static_cast<cuuint64_t>(p.n) - (is_paired ? apart : 0), is_paired ? 2u : 1u, chunks},
                        {row, apart * row, kChunkBytes},
                        {CHUNK, static_cast<cuuint32_t>(is_paired ? S::BN / 2 : S::BN), is_paired ? 2u : 1u, S::KC}));
  return make_map<3>(encode, x, TYPE, p.x, {CHUNK, x_rows, chunks},
                     {static_cast<cuuint64_t>(p.x_stride) * S::kElementBytes, kChunkBytes},
                     {CHUNK, static_cast<cuuint32_t>(S::box_rows(p.rows)), S::KC});
}

template <class S, int EPI, bool HAS_UPDATE = false>
struct Kernel {
  static int32_t load() { return baton::load(wide_gemm_kernel<S, EPI, HAS_UPDATE>, S::kRing + S::kPeerBytes + 1024); }
  static int32_t run(const baton_skinny_gemm_args& p, int blocks, cudaStream_t stream) {
    CUtensorMap weight, x;
    BATON_TRY(make_maps<S>(p, weight, x));
    const int tiles = divide_up(p.n, S::BN), ctas = tiles * S::kSplit;
    return launch_clusters(p.pdl != 0, S::kSplit, "wide GEMM", wide_gemm_kernel<S, EPI, HAS_UPDATE>,
                           dim3(ctas < blocks ? ctas : blocks), dim3(S::kThreads), S::shared_bytes(p.rows), stream,
                           GemmArgs<HAS_UPDATE>(p), weight, x, tiles);
  }
};

inline int ctas_max(const baton_skinny_gemm_args& p, const Device& device) {
  return p.grid > 0 && p.grid < device.sm_count ? p.grid : device.sm_count;
}

}  // namespace
}  // namespace baton
