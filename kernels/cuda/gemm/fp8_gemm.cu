// y[rows][n] = x[rows][k] W[n][k]^T for up to 32 rows of bf16 and a weight in FP8 (sm_90a): the weight is read once,
// and the tensor cores multiply in FP8. skinny_gemm.cu selects it for x in bf16. The engine passes x in bf16 where
// wide_fp8_gemm.cu, which is faster, has no tile (README.md).
//
// One thread loads boxes of W by TMA, a slice of 128 of k at a time, into a ring in shared memory. Further warps load
// the slices of x, split their elements into FP8 numbers and store these beside the weights. Two warpgroups compute
// with wgmma, each with its own tile of weight rows as N and with x as M. One warpgroup adds sums while the other
// multiplies.
//
// For each row and slice, x is `scale * (high + low / 32)`: the scale is a power of two, `high` is x rounded to FP8,
// and `low` is the rest. bf16 has eight significant bits, as many as both parts together. Only elements below 2^-14 of
// the slice's largest magnitude are rounded. The two parts are two rows of M, whose results are in one thread. M has
// 64 rows, so 32 rows of x cost no more than one.
//
// The tensor cores keep about 14 bits of a sum in FP8. So the sums of a slice start with zero. They are multiplied by
// the scale of the row and slice, and by the block scale if the weight has block scales, and added to f32 sums.
//
// Two CTAs may split k, which doubles the weight rows of a CTA. This halves the conversions of x. See epilogue.h for
// the epilogues, and skinny_gemm.cu for `pdl`.
#include <cuda_fp8.h>

#include "epilogue.h"
#include "hopper.h"

namespace baton {
namespace {

constexpr int kSlice = 128;  // elements of k in a row of 128 bytes
constexpr int kSmem = 227 * 1024;
constexpr int kStagesMost = 16;
constexpr int kRowsMost = 32;
constexpr int kWidenedRowsMost = 16;  // maximum rows of skinny_gemm.cu, which widens the weight
constexpr int kGroups = 2;  // warpgroups that multiply
constexpr int kBlock = 128;  // rows and columns of a block of the weight with a scale
constexpr float kLowFactor = 1.f / 32.f;

// BN: weight rows per tile; a CTA has one tile for each warpgroup. SPLIT: CTAs of the cluster that computes the tiles,
// each CTA from its own part of k.
template <int BN_, int SPLIT>
struct Shape {
  static constexpr int BN = BN_, kSplit = SPLIT;
  static constexpr int kOwn = BN / SPLIT;  // weight rows of a tile whose results a CTA finishes
  // Wide tiles need the registers of more threads for their sums, and have more time for a slice of x.
  static constexpr int kXWarps = BN <= 64 ? 8 : 4;
  static constexpr int kThreads = kGroups * 128 + 128 + kXWarps * WARP;
  static constexpr int kTogether = BN <= 32 ? 2 : 1;  // slices that a group multiplies before it adds the first
  static constexpr int kTileBytes = BN * kSlice;
  static constexpr int kWBytes = kGroups * kTileBytes;
  // Sums that a CTA receives from its peer, behind the ring.
  static constexpr int kPeerBytes = (SPLIT - 1) * kGroups * 128 * kOwn;
  static constexpr int kRing = kSmem - 1024 - 6 * 1024 - kPeerBytes;

  // The high and low parts of eight rows of x are 16 rows of M. wgmma reads 64 rows, so it also reads bytes behind x.
  // The results of these rows are not used.
  static __host__ __device__ int x_bytes(int rows) { return (rows + 7) / 8 * 16 * kSlice; }
  static __host__ __device__ int stage_bytes(int rows) { return x_bytes(rows) + kWBytes; }
  static __host__ __device__ int stages(int rows) {
    const int fit = kRing / stage_bytes(rows);
    return fit < kStagesMost ? fit : kStagesMost;
  }
  static __host__ __device__ int shared_bytes(int rows) { return stages(rows) * stage_bytes(rows) + kPeerBytes + 1024; }
  static_assert(SPLIT <= 2, "a CTA has one peer");
  static_assert(kWBytes >= 48 * kSlice, "wgmma reads up to 48 rows behind x");
  static_assert(kOwn % 16 == 0, "epilogues take pairs of groups of eight weight rows");
};

__device__ __forceinline__ void fetch_weights(const CUtensorMap* map, uint32_t to, uint32_t barrier, int k, int row,
                                              uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(k), "r"(row), "r"(0), "l"(policy)
      : "memory");
}

// ---- x ----

// A slice of up to eight rows of x: four lanes hold a row, each two pieces of 16 elements.
struct XRows {
  uint4 words[2][2];
};
constexpr int kAhead = 3;  // parts of x whose loads a warp starts ahead of their use

__device__ __forceinline__ int x_piece(int half) { return threadIdx.x % 4 + 4 * half; }

__device__ __forceinline__ void load_x(const baton_skinny_gemm_args& p, int first_row, int k, XRows& to) {
  const int row = first_row + threadIdx.x % WARP / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = k + x_piece(half) * 16;
    const bool valid = row < p.rows && at < p.depth;
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const bf16*>(p.x) + row * p.x_stride + at);
#pragma unroll
    for (int j = 0; j < 2; ++j) to.words[half][j] = valid ? __ldcg(from + j) : make_uint4(0, 0, 0, 0);
  }
}

// Returns the exponent's bits of the largest magnitude of a row.
__device__ __forceinline__ int largest_exponent(const XRows& x) {
  auto larger = [](uint32_t a, uint32_t b) {
    const __nv_bfloat162 most =
        __hmax2(__habs2(reinterpret_cast<__nv_bfloat162&>(a)), __habs2(reinterpret_cast<__nv_bfloat162&>(b)));
    return reinterpret_cast<const uint32_t&>(most);
  };
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4& words = x.words[i / 2][i % 2];
    most = larger(most, larger(larger(words.x, words.y), larger(words.z, words.w)));
  }
  most = larger(most, __shfl_xor_sync(FULL, most, 1));
  most = larger(most, __shfl_xor_sync(FULL, most, 2));
  // Magnitudes have the order of their bits. The minimum keeps the reciprocal of the scale finite.
  return max(static_cast<int>(max(most & 0xffff, most >> 16)) >> 7, 27);
}

// Splits two elements.
__device__ __forceinline__ void split_pair(uint32_t word, float factor, uint32_t& high, uint32_t& low) {
  const __half2 value =
      __floats2half2_rn(__uint_as_float(word << 16) * factor, __uint_as_float(word & 0xffff0000u) * factor);
  const __nv_fp8x2_storage_t rounded =
      __nv_cvt_halfraw2_to_fp8x2(static_cast<__half2_raw>(value), __NV_SATFINITE, __NV_E4M3);
  const __half2 rest = __hsub2(value, __half2(__nv_cvt_fp8x2_to_halfraw2(rounded, __NV_E4M3)));
  const __half2 scaled = __hmul2(rest, __float2half2_rn(1.f / kLowFactor));
  high = rounded;
  low = __nv_cvt_halfraw2_to_fp8x2(static_cast<__half2_raw>(scaled), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ void store_shared(uint32_t to, const uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

// Stores a slice of eight rows of x as wgmma reads it, and the scales of the rows.
__device__ __forceinline__ void store_x(const XRows& x, uint32_t to, float* scales) {
  const int row = threadIdx.x % WARP / 4;
  // The largest magnitude becomes a number from 128 to 256.
  const int exponent = largest_exponent(x);
  const float factor = __int_as_float((261 - exponent) << 23);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4& words = x.words[half][j];
      uint32_t highs[4], lows[4];
      split_pair(words.x, factor, highs[0], lows[0]);
      split_pair(words.y, factor, highs[1], lows[1]);
      split_pair(words.z, factor, highs[2], lows[2]);
      split_pair(words.w, factor, highs[3], lows[3]);
      high[2 * j] = highs[0] | highs[1] << 16, high[2 * j + 1] = highs[2] | highs[3] << 16;
      low[2 * j] = lows[0] | lows[1] << 16, low[2 * j + 1] = lows[2] | lows[3] << 16;
    }
    const uint32_t at = to + row * kSlice + (x_piece(half) ^ row) * 16;
    store_shared(at, high);
    store_shared(at + 8 * kSlice, low);
  }
  if (threadIdx.x % 4 == 0) scales[row] = __int_as_float((exponent - 7) << 23);
}

// ---- The kernel ----

template <int BN>
__device__ __forceinline__ int row_of(int2 at, int i) {
  return i < BN / 2 ? at.x + i : at.y + i - BN / 2;
}

// A position in the sequence of slices of all rounds, advanced without divisions.
struct Cursor {
  int index, slice, round, stage;
  uint32_t parity;  // of the stage's barriers in this use of the stage

  __device__ __forceinline__ void advance(int by, int slices, int stages) {
    index += by, slice += by, stage += by;
    while (slice >= slices) slice -= slices, ++round;
    while (stage >= stages) stage -= stages, parity ^= 1;
  }
};

template <class S, int EPI>
__global__ void __launch_bounds__(S::kThreads, 1)
    fp8_gemm_kernel(const __grid_constant__ baton_skinny_gemm_args p, const __grid_constant__ CUtensorMap weight_map,
                    int tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int BN = S::BN, OWN = S::kOwn, SPLIT = S::kSplit, EIGHTS = BN / 8;
  constexpr int kConsumers = kGroups * 128, kScaled = kConsumers + 96;  // threads that wait for the scales of rows
  const int x_bytes = S::x_bytes(p.rows), stage_bytes = S::stage_bytes(p.rows), stages = S::stages(p.rows);
  extern __shared__ char raw[];
  __shared__ __align__(8) uint64_t barriers[2 * kStagesMost];
  __shared__ float row_scales[kRowsMost], weight_scales[kGroups][BN];
  __shared__ float x_scales[kStagesMost][kRowsMost], block_scales[kStagesMost][kGroups][EIGHTS];
  const uint32_t ring = (smem_addr(raw) + 1023) / 1024 * 1024;
  const uint32_t full = smem_addr(barriers), empty = full + kStagesMost * 8;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  // CTA `part` of a cluster computes the slices from `first` on. A split tile has one round.
  const int part = blockIdx.x % SPLIT, cluster = blockIdx.x / SPLIT, clusters = gridDim.x / SPLIT;
  const int all_slices = (p.depth + kSlice - 1) / kSlice;
  const int first = all_slices * part / SPLIT, slices = all_slices * (part + 1) / SPLIT - first;
  const int pairs = (tiles + kGroups - 1) / kGroups;
  const int rounds = (pairs - cluster + clusters - 1) / clusters, total = rounds * slices;
  auto tile_of = [&](int round, int group) { return (cluster + round * clusters) * kGroups + group; };
  const bool has_blocks = p.weight_block != 0;

  const bool fetches = threadIdx.x == kConsumers;
  const int early = total < stages ? total : stages;
  Cursor at_fetch = {0, 0, 0, 0, 0};
  int fetched_round = -1, fetched_rows[kGroups] = {};
  uint64_t weights_once = 0;
  auto fetch = [&] {
    const auto& [index, slice, round, stage, parity] = at_fetch;
    if (round != fetched_round) {
      fetched_round = round;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        fetched_rows[group] = tile_rows<BN, EPI>(p, tile_of(round, group)).x;
      }
    }
    barrier_expect(full + stage * 8, S::kWBytes);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      fetch_weights(&weight_map, ring + stage * stage_bytes + x_bytes + group * S::kTileBytes, full + stage * 8,
                    (first + slice) * kSlice, fetched_rows[group], weights_once);
    }
    at_fetch.advance(1, slices, stages);
  };
  if (fetches) {
    fetch_map(&weight_map);
    for (int i = 0; i < stages; ++i) {
      barrier_init(full + i * 8, 2);  // weights and x
      barrier_init(empty + i * 8, kGroups * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
    weights_once = policy_first();
    while (at_fetch.index < early) fetch();
  }
  __syncthreads();
  if constexpr (SPLIT > 1) cluster_arrive();  // the peer runs, so its shared memory may be written

  if (fetches) {
    pdl_wait_and_release();
    while (at_fetch.index < total) {
      barrier_wait(empty + at_fetch.stage * 8, at_fetch.parity ^ 1);
      fetch();
    }
  } else if (warp < kGroups * 4) {
    const int group = warp / 4, m = warp % 4 * 8 + lane / 4;
    const bool is_used = warp % 4 * 8 < p.rows;
    auto wait_for_group = [&] { asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory"); };
    int stage = 0;
    uint32_t parity = 0;
    for (int round = 0; round < rounds; ++round) {
      const int tile = tile_of(round, group);
      const int2 at = tile_rows<BN, EPI>(p, tile);
      if (round > 0) wait_for_group();
      if (!has_blocks && threadIdx.x % 128 < BN) {
        const int row = row_of<BN>(at, threadIdx.x % 128);
        weight_scales[group][threadIdx.x % 128] = row < p.n ? p.weight_scales[row] : 0.f;
      }
      if (round == 0) pdl_wait_and_release();
      // Rows of the weight whose results this CTA finishes. The halves of a pair are in the two halves of the tile.
      constexpr bool kPaired = EPI == BATON_SKINNY_SILU || EPI == BATON_SKINNY_QKV;
      const int2 own = kPaired ? make_int2(at.x + part * (OWN / 2), at.y + part * (OWN / 2))
                               : make_int2(at.x + part * OWN, at.x + part * OWN + OWN / 2);
      Extras<OWN, EPI, 1> extras;
      if (tile < tiles) extras.fetch(p, own, m);
      float acc[BN / 4] = {};
      auto add = [&](const float (&sums)[BN / 2], int stage_of) {
        const float high = x_scales[stage_of][m], low = high * kLowFactor;
#pragma unroll
        for (int j = 0; j < EIGHTS; ++j) {
          const float block = has_blocks ? block_scales[stage_of][group][j] : 1.f;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float both = fmaf(sums[j * 4 + e], high, sums[j * 4 + 2 + e] * low);
            acc[j * 2 + e] = fmaf(both, block, acc[j * 2 + e]);
          }
        }
      };
      // Multiplies `COUNT` slices and adds their sums.
      auto multiply = [&](auto count) {
        constexpr int COUNT = decltype(count)::value;
        float sums[COUNT][BN / 2];
        int stage_of[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          stage_of[i] = stage;
          barrier_wait(full + stage * 8, parity);
          const uint32_t x_at = ring + stage * stage_bytes, w_at = x_at + x_bytes + group * S::kTileBytes;
          wgmma_begin();
#pragma unroll
          for (int k = 0; k < kSlice / 32; ++k) {
            multiply_fp8<BN>(sums[i], matrix_at(x_at + k * 32), matrix_at(w_at + k * 32), k > 0);
          }
          wgmma_commit();
          if (++stage == stages) stage = 0, parity ^= 1;
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          if (COUNT == 2 && i == 0) {
            wgmma_wait<1>();
          } else {
            wgmma_wait<0>();
          }
#pragma unroll
          for (int j = 0; j < BN / 2; ++j) asm volatile("" : "+f"(sums[i][j])::"memory");
          if (is_used) add(sums[i], stage_of[i]);
          __syncwarp();
          if (lane == 0) barrier_arrive(empty + stage_of[i] * 8);
        }
      };
      int slice = 0;
      for (; slice + S::kTogether <= slices; slice += S::kTogether) {
        multiply(std::integral_constant<int, S::kTogether>());
      }
      if (slice < slices) multiply(std::integral_constant<int, 1>());
      wait_for_group();
      if (round == 0) asm volatile("bar.sync 1, %0;" ::"n"(kScaled) : "memory");
      const float scale[1] = {row_scales[m]};
      if (!has_blocks) {
#pragma unroll
        for (int i = 0; i < BN / 4; ++i) acc[i] *= weight_scales[group][i / 2 * 8 + lane % 4 * 2 + i % 2];
      }
      float own_sums[OWN / 4];
      if constexpr (SPLIT > 1) {
        // Each CTA sends the sums that the other CTA finishes.
        const uint32_t inbox = ring + stages * stage_bytes + threadIdx.x * 4;
        // Returns the place of a sum of CTA `of`.
        auto place = [](int of, int i) {
          const int j = i / 2;
          const int eighth = !kPaired            ? of * (OWN / 8) + j
                             : j < OWN / 16 ? of * (OWN / 16) + j
                                            : EIGHTS / 2 + of * (OWN / 16) + j - OWN / 16;
          return eighth * 2 + i % 2;
        };
        cluster_wait();
#pragma unroll
        for (int i = 0; i < OWN / 4; ++i) {
          const float first_sum = acc[place(0, i)], second_sum = acc[place(1, i)];
          own_sums[i] = part == 0 ? first_sum : second_sum;
          if (is_used) store_to_peer(inbox + i * (kConsumers * 4), 1 - part, part == 0 ? second_sum : first_sum);
        }
        cluster_arrive();
        cluster_wait();
#pragma unroll
        for (int i = 0; i < OWN / 4; ++i) {
          float received;
          asm volatile("ld.shared.f32 %0, [%1];" : "=f"(received) : "r"(inbox + i * (kConsumers * 4)) : "memory");
          own_sums[i] += received;
        }
      } else {
#pragma unroll
        for (int i = 0; i < OWN / 4; ++i) own_sums[i] = acc[i];
      }
      const int places = (p.n + OWN - 1) / OWN, place = tile * SPLIT + part;
      if (is_used && place < places) finish<OWN, EPI, 1>(p, place, places, own, m, scale, extras, own_sums);
    }
  } else if (warp >= kGroups * 4 + 4) {
    pdl_wait_and_release();
    const int parts = (p.rows + 7) / 8, mine = warp - kGroups * 4 - 4;
    // Parts of x, of up to eight rows, that this warp loads and stores next.
    Cursor loaded = {0, 0, 0, 0, 0};
    loaded.advance(mine, slices, stages);
    Cursor stored = loaded;
    int loaded_part = 0, stored_part = 0;
    XRows x[kAhead];
    auto load_next = [&](XRows& to) {
      if (loaded.index < total) load_x(p, loaded_part * 8, (first + loaded.slice) * kSlice, to);
      if (++loaded_part == parts) loaded_part = 0, loaded.advance(S::kXWarps, slices, stages);
    };
#pragma unroll
    for (int j = 0; j < kAhead; ++j) load_next(x[j]);
    while (stored.index < total) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (stored.index >= total) break;
        const int stage = stored.stage;
        if (stored_part == 0 && stored.index >= stages) barrier_wait(empty + stage * 8, stored.parity ^ 1);
        store_x(x[j], ring + stage * stage_bytes + stored_part * 16 * kSlice, x_scales[stage] + stored_part * 8);
        load_next(x[j]);
        if (++stored_part < parts) continue;
        stored_part = 0;
        if (has_blocks && lane < EIGHTS) {
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const int row = row_of<BN>(tile_rows<BN, EPI>(p, tile_of(stored.round, group)), lane * 8);
            const int64_t block = static_cast<int64_t>(row / kBlock) * all_slices + first + stored.slice;
            block_scales[stage][group][lane] = row < p.n ? p.weight_scales[block] : 0.f;
          }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) barrier_arrive(full + stage * 8);
        stored.advance(S::kXWarps, slices, stages);
      }
    }
  } else if (warp > kGroups * 4) {
    // Computes the scales of the rows of x from the squares that the producer of x stored, while the other warps
    // multiply.
    pdl_wait_and_release();
    constexpr int TOGETHER = 11;  // rows whose loads are in flight, a third of 32
    const int begin = (warp - kGroups * 4 - 1) * TOGETHER;
    float sum[TOGETHER] = {};
    if (p.squares) {
#pragma unroll 2
      for (int j = lane; j < p.squares_count; j += WARP) {
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
          sum[i] += p.squares[static_cast<int64_t>(min(begin + i, p.rows - 1)) * p.squares_count + j];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      sum[i] = warp_sum(sum[i]);
      if (lane == 0 && begin + i < p.rows) {
        row_scales[begin + i] = p.squares ? rsqrtf(sum[i] / static_cast<float>(p.depth) + p.eps) : 1.f;
      }
    }
    asm volatile("bar.arrive 1, %0;" ::"n"(kScaled) : "memory");
  }
  if constexpr (SPLIT > 1) {
    if (warp >= kGroups * 4) {
      __syncwarp();
      cluster_wait();
      cluster_arrive();
      cluster_wait();
    }
  }
#endif
}

// ---- Launches ----

Encode encode = nullptr;  // set by load_fp8_gemm

template <class S, int EPI>
struct Kernel {
  static int32_t load() { return baton::load(fp8_gemm_kernel<S, EPI>, S::kRing + S::kPeerBytes + 1024); }
  static int32_t run(const baton_skinny_gemm_args& p, int blocks, cudaStream_t stream) {
    const bool is_paired = p.epilogue == BATON_SKINNY_SILU || p.epilogue == BATON_SKINNY_QKV;
    const cuuint64_t depth = p.depth;
    // Dimensions: k, row, half. The second half starts `apart` rows after the first.
    const cuuint64_t apart =
        p.epilogue == BATON_SKINNY_SILU ? p.n / 2 : p.epilogue == BATON_SKINNY_QKV ? p.head_dim / 2 : p.n;
    CUtensorMap weight;
    BATON_TRY(make_map<3>(encode, weight, CU_TENSOR_MAP_DATA_TYPE_UINT8, p.weight,
                          {depth, static_cast<cuuint64_t>(p.n) - (is_paired ? apart : 0), is_paired ? 2u : 1u},
                          {depth, apart * depth},
                          {kSlice, static_cast<cuuint32_t>(is_paired ? S::BN / 2 : S::BN), is_paired ? 2u : 1u}));
    const int tiles = divide_up(p.n, S::BN), ctas = divide_up(tiles, kGroups) * S::kSplit;
    return launch_clusters(p.pdl != 0, S::kSplit, "FP8 GEMM", fp8_gemm_kernel<S, EPI>,
                           dim3(ctas < blocks ? ctas : blocks), dim3(S::kThreads), S::shared_bytes(p.rows), stream, p,
                           weight, tiles);
  }
};

// Weight rows per tile and CTAs of a cluster. Of shapes with equal cost, the first is chosen.
#define SHAPES(X)                                                                                           \
  X(32, 2, BATON_SKINNY_PLAIN) X(32, 2, BATON_SKINNY_RESIDUAL) X(64, 2, BATON_SKINNY_PLAIN)                 \
  X(64, 2, BATON_SKINNY_RESIDUAL) X(64, 2, BATON_SKINNY_QKV) X(112, 1, BATON_SKINNY_SILU)                   \
  X(64, 1, BATON_SKINNY_PLAIN) X(64, 1, BATON_SKINNY_RESIDUAL) X(32, 1, BATON_SKINNY_PLAIN)                 \
  X(32, 1, BATON_SKINNY_RESIDUAL) X(32, 1, BATON_SKINNY_SILU) X(32, 1, BATON_SKINNY_QKV)

int ctas_max(const baton_skinny_gemm_args& p, const Device& device) {
  return p.grid > 0 && p.grid < device.sm_count ? p.grid : device.sm_count;
}

// A shape as numbers.
struct Choice {
  int rows, split;
};

// Returns the shape whose busiest CTA reads least, or zeros.
Choice choose(const baton_skinny_gemm_args& p, const Device& device) {
  const int grid = ctas_max(p, device), slices = divide_up(p.depth, kSlice);
  Choice best = {0, 0};
  int least = 1 << 30;
  auto see = [&](int rows, int split, int epilogue) {
    if (epilogue != p.epilogue || (epilogue == BATON_SKINNY_QKV && p.head_dim % rows != 0)) return;
    const int ctas = divide_up(p.n, kGroups * rows) * split;
    if (split > 1 && (ctas > grid || slices < split)) return;
    const int cost = divide_up(ctas, grid) * (rows / split);
    if (cost < least) least = cost, best = {rows, split};
  };
#define SEE(rows, split, epilogue) see(rows, split, epilogue);
  SHAPES(SEE)
#undef SEE
  return best;
}

}  // namespace

int32_t load_fp8_gemm() {
  const Device* device;
  BATON_TRY(any_device(device));
  if (device->major != 9 || device->minor != 0) return BATON_OK;
#define LOAD(rows, split, epilogue) BATON_TRY((Kernel<Shape<rows, split>, epilogue>::load()));
  SHAPES(LOAD)
#undef LOAD
  return find_encode(encode);
}

int fp8_gemm_tile(const baton_skinny_gemm_args& p, const Device& device) {
  if (encode == nullptr || p.rows > kRowsMost || p.n % 16 != 0) return 0;
  // If a CTA has only one tile, splitting x takes longer than widening the weight to bf16 (README.md).
  const bool is_narrow = p.epilogue == BATON_SKINNY_RESIDUAL && p.n <= 32 * ctas_max(p, device);
  if (is_narrow && p.rows <= kWidenedRowsMost && p.weight_block == 0) return 0;
  const Choice choice = choose(p, device);
  return choice.rows == 0 ? 0 : choice.rows / choice.split;
}

int32_t fp8_gemm(const baton_skinny_gemm_args& p, const Device& device, cudaStream_t stream) {
  const Choice choice = choose(p, device);
  const int blocks = ctas_max(p, device);
#define RUN(tile_rows, tile_split, tile_epilogue)                                                            \
  if (choice.rows == tile_rows && choice.split == tile_split && p.epilogue == tile_epilogue) {               \
    return Kernel<Shape<tile_rows, tile_split>, tile_epilogue>::run(p, blocks / tile_split * tile_split, stream); \
  }
  SHAPES(RUN)
#undef RUN
  return fail(BATON_UNSUPPORTED, "no FP8 GEMM for a weight of %d x %d and epilogue %d", p.n, p.depth, p.epilogue);
}

}  // namespace baton
