// y[rows][n] = x[rows][k] W[n][k]^T for up to 128 rows (sm_90a): the weight is read once, at peak read bandwidth.
// skinny_gemm.cu selects it above 16 rows, and for some shapes above 8 rows.
//
// One thread loads boxes of W and x by TMA, stage by stage of a ring in shared memory. One warpgroup (two above 64
// rows) computes with wgmma, with rows of x as M and the tile's weight rows as N. N may be any multiple of 8, so tiles
// that give every SM an equal share exist without split-K. Only above 64 rows do two CTAs split k, where a tile of 32
// weight rows would read too much of x. A tile's accumulators stay in registers, where the epilogue (see
// skinny_gemm.cu) reads them. Epilogue inputs are ready before the accumulators are complete: the consumers fetch
// RoPE angles and old residuals early, and three further warps compute the scales of the rows of x.
//
// With `pdl` the ring is filled with weights before the preceding kernel has completed. The ring takes the whole shared
// memory of an SM. See skinny_gemm.cu for the reasons.
#include <utility>

#include "epilogue.h"
#include "hopper.h"

namespace baton {
namespace {

constexpr int kChunk = 64;  // elements of k in a row of 128 bytes, the widest row that TMA swizzles
constexpr int kSmem = 227 * 1024;
constexpr int kStagesMost = 12;
constexpr int kSplitDepthMin = 512;  // minimum depth at which two CTAs split k

// BN: weight rows per tile; GROUPS: consumer warpgroups of 64 rows of x; KC: chunks of k per stage; SPLIT: CTAs of the
// cluster that computes a tile, each from its own part of k.
template <int BN_, int GROUPS, int KC_, int SPLIT = 1>
struct Shape {
  static constexpr int BN = BN_, KC = KC_, kGroups = GROUPS, kSplit = SPLIT;
  static constexpr int kOwn = BN / SPLIT;  // weight rows whose results a CTA finishes
  static constexpr int kThreads = kGroups * 128 + 128;  // one warp fetches, three add up squares
  static constexpr int kWBytes = KC * BN * kChunk * 2;
  // Accumulators that a CTA receives from its peer, behind the ring.
  static constexpr int kPeerBytes = SPLIT > 1 ? kGroups * 128 * kOwn / 2 * 4 : 0;
  static constexpr int kRing = kSmem - 2048 - kPeerBytes;

  // Rows of x in a box: whole groups of eight rows for the swizzle. TMA takes three times as long for a row outside the
  // matrix as for a row of the matrix, so the box is not padded to the 64 rows that wgmma reads. The rest of these rows
  // are the bytes behind the box; their results are not stored.
  static __host__ __device__ int box_rows(int rows) { return (rows + 7) / 8 * 8; }
  static __host__ __device__ int x_bytes(int rows) { return KC * box_rows(rows) * kChunk * 2; }
  static __host__ __device__ int stage_bytes(int rows) { return x_bytes(rows) + kWBytes; }
  static __host__ __device__ int stages(int rows) {
    const int fit = kRing / stage_bytes(rows);
    return fit < kStagesMost ? fit : kStagesMost;
  }
  static __host__ __device__ int shared_bytes(int rows) { return stages(rows) * stage_bytes(rows) + kPeerBytes + 1024; }
  static_assert(SPLIT <= 2, "a CTA has one peer");
  static_assert(kWBytes % 1024 == 0 && BN % 16 == 0, "swizzling needs whole groups of eight rows");
  static_assert(kWBytes >= 56 * kChunk * 2, "wgmma reads up to 56 rows behind the last box of x");
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

template <class S, int EPI>
__global__ void __launch_bounds__(S::kThreads, 1)
    wide_gemm_kernel(const __grid_constant__ baton_skinny_gemm_args p, const __grid_constant__ CUtensorMap weight_map,
                     const __grid_constant__ CUtensorMap x_map, int tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int BN = S::BN, KC = S::KC;
  const int x_rows = S::box_rows(p.rows), x_bytes = S::x_bytes(p.rows), stage_bytes = S::stage_bytes(p.rows);
  const int stages = S::stages(p.rows);
  extern __shared__ char raw[];
  __shared__ __align__(8) uint64_t barriers[2 * kStagesMost];
  __shared__ float scales[S::kGroups * 64];
  const uint32_t ring = (smem_addr(raw) + 1023) / 1024 * 1024;
  const uint32_t full = smem_addr(barriers), empty = full + kStagesMost * 8;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  // CTA `part` of a cluster computes the steps of k from `first_step` on. A split tile has one round.
  const int part = blockIdx.x % S::kSplit, cluster = blockIdx.x / S::kSplit, clusters = gridDim.x / S::kSplit;
  const int all_steps = (p.depth / kChunk + KC - 1) / KC;
  const int first_step = all_steps * part / S::kSplit, steps = all_steps * (part + 1) / S::kSplit - first_step;
  const int rounds = (tiles - cluster + clusters - 1) / clusters;
  auto tile_of = [&](int round) { return cluster + round * clusters; };

  const bool fetches = threadIdx.x == S::kGroups * 128;
  const int total = rounds * steps, early = total < stages ? total : stages;
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
    int stage = 0;
    uint32_t parity = 0;
    for (int i = early; i < total; ++i) {
      barrier_wait(empty + stage * 8, parity);
      fetch_weights_of(i, stage);
      fetch_x_of(i, stage);
      if (++stage == stages) stage = 0, parity ^= 1;
    }
  } else if (warp < S::kGroups * 4) {
    pdl_wait_and_release();
    const int m0 = warp * 16 + (lane >> 2);
    float own_scales[2] = {1.f, 1.f};
    const uint32_t x_first = warp / 4 * 64 * kChunk * 2;

    int stage = 0, before = -1;
    uint32_t parity = 0;
    auto release = [&](int done) {
      if (lane == 0) barrier_arrive(empty + done * 8);
    };
    for (int round = 0; round < rounds; ++round) {
      const int tile = tile_of(round);
      const int own = tile * S::kSplit + part;
      const int2 at = tile_rows<S::kOwn, EPI>(p, own);
      Extras<S::kOwn, EPI, 2> extras;
      extras.fetch(p, at, m0);
      float acc[BN / 2];
      for (int step = 0; step < steps; ++step) {
        barrier_wait(full + stage * 8, parity);
        const uint32_t x_at = ring + stage * stage_bytes + x_first;
        const uint32_t w_at = ring + stage * stage_bytes + x_bytes;
        wgmma_begin();
#pragma unroll
        for (int chunk = 0; chunk < KC; ++chunk) {
#pragma unroll
          for (int k = 0; k < kChunk / 16; ++k) {
            multiply<BN>(acc, matrix_at(x_at + chunk * x_rows * kChunk * 2 + k * 32),
                         matrix_at(w_at + chunk * BN * kChunk * 2 + k * 32), step > 0 || chunk > 0 || k > 0);
          }
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (before >= 0) release(before);
        before = stage;
        if (++stage == stages) stage = 0, parity ^= 1;
      }
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
      release(before);
      before = -1;
      if (round == 0) {
        asm volatile("bar.sync 1, %0;" ::"n"(S::kThreads - 32) : "memory");
        own_scales[0] = scales[m0];
        own_scales[1] = scales[m0 + 8];
      }
      if constexpr (S::kSplit > 1) {
        // Each CTA finishes one half of the weight rows and sends the sums of the other half to its peer.
        constexpr int HALF = BN / 4;
        const uint32_t inbox = ring + stages * stage_bytes + threadIdx.x * 4;
        float sums[HALF];
        cluster_wait();
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
          store_to_peer(inbox + i * S::kGroups * 512, 1 - part, part == 0 ? acc[HALF + i] : acc[i]);
          sums[i] = part == 0 ? acc[i] : acc[HALF + i];
        }
        cluster_arrive();
        cluster_wait();
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
          float received;
          asm volatile("ld.shared.f32 %0, [%1];" : "=f"(received) : "r"(inbox + i * S::kGroups * 512) : "memory");
          sums[i] += received;
        }
        if (warp * 16 < p.rows) finish<S::kOwn, EPI, 2>(p, own, tiles * S::kSplit, at, m0, own_scales, extras, sums);
      } else {
        if (warp * 16 < p.rows) finish<BN, EPI, 2>(p, tile, tiles, at, m0, own_scales, extras, acc);
      }
    }
  } else if (warp > S::kGroups * 4) {
    // Computes the scales of the rows of x from the squares that the producer of x stored, while the other warps
    // multiply.
    pdl_wait_and_release();
    constexpr int TOGETHER = 11;  // rows whose loads are in flight, a third of 32
    for (int first = (warp - S::kGroups * 4 - 1) * TOGETHER; first < p.rows; first += 3 * TOGETHER) {
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
          scales[first + i] = p.squares ? rsqrtf(sum[i] / static_cast<float>(p.depth) + p.eps) : 1.f;
        }
      }
    }
    asm volatile("bar.arrive 1, %0;" ::"n"(S::kThreads - 32) : "memory");
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

Encode encode = nullptr;  // set by load_wide_gemm

template <class S>
int32_t make_maps(const baton_skinny_gemm_args& p, CUtensorMap& weight, CUtensorMap& x) {
  const bool is_paired = p.epilogue == BATON_SKINNY_SILU || p.epilogue == BATON_SKINNY_QKV;
  const cuuint64_t row = static_cast<cuuint64_t>(p.depth) * 2, chunks = p.depth / kChunk;
  // Dimensions: element in the chunk, row, half, chunk of the row. The second half starts `apart` rows after the first.
  const cuuint64_t apart = p.epilogue == BATON_SKINNY_SILU ? p.n / 2 : p.epilogue == BATON_SKINNY_QKV ? p.head_dim / 2 : p.n;
  BATON_TRY(make_map<4>(encode, weight, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, p.weight,
                        {kChunk, static_cast<cuuint64_t>(p.n) - (is_paired ? apart : 0), is_paired ? 2u : 1u, chunks},
                        {row, apart * row, kChunk * 2},
                        {kChunk, static_cast<cuuint32_t>(is_paired ? S::BN / 2 : S::BN), is_paired ? 2u : 1u, S::KC}));
  return make_map<3>(encode, x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, p.x, {kChunk, static_cast<cuuint64_t>(p.rows), chunks},
                     {static_cast<cuuint64_t>(p.x_stride) * 2, kChunk * 2},
                     {kChunk, static_cast<cuuint32_t>(S::box_rows(p.rows)), S::KC});
}

template <class S, int EPI>
struct Kernel {
  static int32_t load() { return baton::load(wide_gemm_kernel<S, EPI>, S::kRing + S::kPeerBytes + 1024); }
  static int32_t run(const baton_skinny_gemm_args& p, int blocks, cudaStream_t stream) {
    CUtensorMap weight, x;
    BATON_TRY(make_maps<S>(p, weight, x));
    const int tiles = divide_up(p.n, S::BN), ctas = tiles * S::kSplit;
    return launch_clusters(p.pdl != 0, S::kSplit, "wide GEMM", wide_gemm_kernel<S, EPI>,
                           dim3(ctas < blocks ? ctas : blocks), dim3(S::kThreads), S::shared_bytes(p.rows), stream, p,
                           weight, x, tiles);
  }
};

// Tile, warpgroups, chunks per stage: one kernel per tile and number of warpgroups.
#define SHAPES(X) X(16, 1, 4) X(32, 1, 4) X(64, 1, 2) X(112, 1, 2) X(128, 1, 1)
#define SILU_SHAPES(X) X(64, 2, 2) X(112, 2, 1) X(128, 2, 1) X(224, 2, 1)
using WideHeads = Shape<64, 2, 2>;
// Each of two CTAs finishes 32 weight rows of the tile.
using SplitResidual = Shape<64, 2, 2, 2>;

int groups_of(int rows) { return divide_up(rows, 64); }

int ctas_max(const baton_skinny_gemm_args& p, const Device& device) {
  return p.grid > 0 && p.grid < device.sm_count ? p.grid : device.sm_count;
}

template <class Body>
int32_t with_kernel(int tile, int rows, int epilogue, Body&& body) {
  const int groups = groups_of(rows);
#define CASE(bn, count, kc)                                                                 \
  if (tile == bn && groups == count) {                                                      \
    using S = Shape<bn, count, kc>;                                                         \
    if (epilogue == BATON_SKINNY_PLAIN) return body(Kernel<S, BATON_SKINNY_PLAIN>());       \
    if (epilogue == BATON_SKINNY_RESIDUAL) return body(Kernel<S, BATON_SKINNY_RESIDUAL>()); \
    if (epilogue == BATON_SKINNY_SILU) return body(Kernel<S, BATON_SKINNY_SILU>());         \
    if (epilogue == BATON_SKINNY_F32) return body(Kernel<S, BATON_SKINNY_F32>());           \
    if (epilogue == BATON_SKINNY_QKV) return body(Kernel<S, BATON_SKINNY_QKV>());           \
  }
#define SILU_CASE(bn, count, kc)                                        \
  if (tile == bn && groups == count && epilogue == BATON_SKINNY_SILU) { \
    return body(Kernel<Shape<bn, count, kc>, BATON_SKINNY_SILU>());     \
  }
  SHAPES(CASE)
  SILU_SHAPES(SILU_CASE)
  if (groups == 2 && epilogue == BATON_SKINNY_QKV && tile == WideHeads::kOwn) {
    return body(Kernel<WideHeads, BATON_SKINNY_QKV>());
  }
  if (groups == 2 && epilogue == BATON_SKINNY_RESIDUAL && tile == SplitResidual::kOwn) {
    return body(Kernel<SplitResidual, BATON_SKINNY_RESIDUAL>());
  }
#undef SILU_CASE
#undef CASE
  return fail(BATON_UNSUPPORTED,
              "invalid tile: %d for %d rows and epilogue %d; expected 0 or what baton_skinny_gemm_tile returns",
              tile, rows, epilogue);
}

}  // namespace

int32_t load_wide_gemm() {
  const Device* device;
  BATON_TRY(any_device(device));
  if (device->major != 9 || device->minor != 0) return BATON_OK;
  auto load_it = [](auto kernel) { return decltype(kernel)::load(); };
#define LOAD(bn, count, kc)                                                           \
  for (int epilogue = BATON_SKINNY_PLAIN; epilogue <= BATON_SKINNY_QKV; ++epilogue) { \
    BATON_TRY(with_kernel(bn, 64 * count, epilogue, load_it));                        \
  }
#define LOAD_SILU(bn, count, kc) BATON_TRY(with_kernel(bn, 64 * count, BATON_SKINNY_SILU, load_it));
  SHAPES(LOAD)
  SILU_SHAPES(LOAD_SILU)
  BATON_TRY(with_kernel(WideHeads::kOwn, 128, BATON_SKINNY_QKV, load_it));
  BATON_TRY(with_kernel(SplitResidual::kOwn, 128, BATON_SKINNY_RESIDUAL, load_it));
#undef LOAD_SILU
#undef LOAD
  return find_encode(encode);
}

int wide_gemm_tile(const baton_skinny_gemm_args& p, const Device& device) {
  if (encode == nullptr || p.depth % kChunk != 0 || p.n % 16 != 0) return 0;
  const int rows = p.rows, groups = groups_of(rows), grid = ctas_max(p, device);
  auto is_served = [&](int tile) {
    if (p.epilogue == BATON_SKINNY_QKV && p.head_dim % tile != 0) return false;
    if (groups == 1) return tile <= 128 && (tile >= 32 || rows <= 32);
    switch (p.epilogue) {
      case BATON_SKINNY_SILU: return tile >= 64;
      case BATON_SKINNY_QKV: return tile == WideHeads::kOwn;
      case BATON_SKINNY_RESIDUAL: {
        // All CTAs run at once and fill more than half of the SMs.
        const int ctas = p.n / SplitResidual::kOwn;
        const bool fits = p.n % SplitResidual::BN == 0 && p.depth >= kSplitDepthMin && ctas <= grid && 2 * ctas > grid;
        return fits && tile == SplitResidual::kOwn;
      }
      default: return false;  // cuBLAS is faster
    }
  };
  if (p.tile != 0) return is_served(p.tile) ? p.tile : 0;
  // A CTA has many tiles of logits, so small tiles balance the CTAs best.
  if (p.epilogue == BATON_SKINNY_F32 && is_served(64)) return 64;
  // Cost in weight rows: the rows of the busiest CTA, and per tile a fixed overhead and the loads of x.
  int best = 0, least = 1 << 30;
  for (int tile : {224, 128, 112, 64, 32, 16}) {
    if (!is_served(tile)) continue;
    const int cost = divide_up(divide_up(p.n, tile), grid) * (tile + 8 + rows / 4);
    if (cost < least) least = cost, best = tile;
  }
  return best;
}

int32_t wide_gemm(const baton_skinny_gemm_args& p, int tile, const Device& device, cudaStream_t stream) {
  const int blocks = ctas_max(p, device);
  return with_kernel(tile, p.rows, p.epilogue, [&](auto kernel) { return decltype(kernel)::run(p, blocks, stream); });
}

}  // namespace baton
