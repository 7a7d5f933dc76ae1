// Routing of a mixture of experts: the experts of each row, the list of rows of each expert, and the weighted sum of
// the experts' outputs.
//
// Few rows: a cluster of 8 CTAs computes the logits of 16 rows. Each CTA computes the logits of some experts.
// Meanwhile further warps compute the scales of the rows and split the rows into FP8 numbers. With up to 16 rows in
// all (4 with more than 256 experts), the first CTA chooses the experts of all rows. Otherwise each CTA chooses the
// experts of two rows. The first CTA sorts up to 256 assignments. The CTA that arrives last builds longer lists, which
// do not depend on the order of arrival. Many rows: cuBLAS computes the logits, one warp per row chooses, and one CTA
// per expert lists the rows.
#include "experts.h"

#include "device.cuh"
#include "split.cuh"

namespace baton {
namespace {

constexpr int kCluster = 8, kTileRows = 16;
constexpr int kRowsOfCta = kTileRows / kCluster;
// Warps of a CTA that routes few rows: warps that compute logits, and warps that split rows of x.
constexpr int kMathWarps = 8, kSplitWarps = 4, kRouteWarps = kMathWarps + kSplitWarps;
constexpr int kListWarps = 32;
constexpr int kRankedMax = 256;  // maximum assignments that a CTA sorts by comparing all pairs
constexpr int kOwned = BATON_EXPERTS_MAX / WARP;  // experts of a lane, at most
constexpr float kSumMin = 1e-20f, kSoftmaxSumMin = 1e-12f;  // prevent a division by zero, as on CPUs
constexpr int kSigmoid = 1, kBiasedSoftmax = 2;  // values of baton_route_args.score
constexpr int kAssignmentsMax = kMathWarps * UINT16_MAX;  // a warp counts its part in 16 bits

// ---- Choice of experts ----

// Returns an integer key with the order of `value`. The key is never 0.
__device__ __forceinline__ unsigned key_of(float value) {
  const unsigned bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Returns whether scores are a softmax without biases and groups. A kernel of its own then has less code to load.
__host__ __device__ __forceinline__ bool is_plain(const baton_route_args& p) {
  return p.score == 0 && !p.bias && p.groups == 1;
}

// One warp turns the logits of a row into scores. OWNED: experts of a lane.
template <int OWNED, bool PLAIN>
__device__ __forceinline__ void find_scores(const baton_route_args& p, const float* logits, float (&scores)[OWNED]) {
  const int lane = threadIdx.x % WARP;
  float greatest = -INFINITY;
#pragma unroll
  for (int i = 0; i < OWNED; ++i) {
    const int expert = i * WARP + lane;
    scores[i] = expert < p.experts ? logits[expert] : -INFINITY;
    if (!PLAIN && p.score == kBiasedSoftmax && p.bias && expert < p.experts) scores[i] += p.bias[expert];
    greatest = fmaxf(greatest, scores[i]);
  }
  if (!PLAIN && p.score == kSigmoid) {
#pragma unroll
    for (int i = 0; i < OWNED; ++i) {
      const float power = expf(-fabsf(scores[i]));
      scores[i] = (scores[i] < 0.f ? power : 1.f) / (1.f + power);
    }
    return;
  }
  greatest = warp_max(greatest);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < OWNED; ++i) {
    scores[i] = i * WARP + lane < p.experts ? expf(scores[i] - greatest) : 0.f;
    sum += scores[i];
  }
  const float inverse = 1.f / warp_sum(sum);
#pragma unroll
  for (int i = 0; i < OWNED; ++i) scores[i] *= inverse;
}

// Sets the keys of experts outside the chosen groups to 0. The chosen groups have the greatest sums of their two best
// scores with bias. `values`: scratch memory for the row's experts.
template <int OWNED>
__device__ __forceinline__ void keep_groups(const baton_route_args& p, const float (&biased)[OWNED], float* values,
                                            unsigned (&keys)[OWNED]) {
  const int lane = threadIdx.x % WARP, size = p.experts / p.groups;
#pragma unroll
  for (int i = 0; i < OWNED; ++i) {
    if (i * WARP + lane < p.experts) values[i * WARP + lane] = biased[i];
  }
  __syncwarp();
  float first = -INFINITY, second = -INFINITY;
  for (int i = 0; i < size && lane < p.groups; ++i) {
    const float value = values[lane * size + i];
    second = fmaxf(second, fminf(value, first));
    first = fmaxf(first, value);
  }
  unsigned own = lane < p.groups ? key_of(first + second) : 0, kept = 0;
  for (int i = 0; i < p.groups_chosen; ++i) {
    const unsigned best = __reduce_max_sync(FULL, own);
    const int group = __ffs(__ballot_sync(FULL, own == best)) - 1;
    kept |= 1u << group;
    if (lane == group) own = 0;
  }
#pragma unroll
  for (int i = 0; i < OWNED; ++i) {
    if (i * WARP + lane < p.experts && !(kept >> ((i * WARP + lane) / size) & 1)) keys[i] = 0;
  }
}

// A candidate of the choice. Order: descending key, then ascending expert. Key 0: in no chosen group, or no expert.
struct Candidate {
  unsigned key;
  int expert;
  float score;
};

// Swaps `a` and `b` if `b` has the greater key. Equal keys keep their order, which is that of the experts.
__device__ __forceinline__ void sort_pair(Candidate& a, Candidate& b) {
  const bool swaps = b.key > a.key;
  const Candidate first = swaps ? b : a;
  b = swaps ? a : b;
  a = first;
}

// One warp chooses the experts of a row and overwrites the row's logits. Lane i returns the expert of slot i.
template <int OWNED, bool PLAIN>
__device__ int choose(const baton_route_args& p, float* logits, int row) {
  const int lane = threadIdx.x % WARP;
  float scores[OWNED], biased[OWNED];
  find_scores<OWNED, PLAIN>(p, logits, scores);
  unsigned keys[OWNED];
#pragma unroll
  for (int i = 0; i < OWNED; ++i) {
    const int expert = i * WARP + lane;
    const bool has_bias = !PLAIN && p.bias && p.score != kBiasedSoftmax && expert < p.experts;
    biased[i] = scores[i] + (has_bias ? p.bias[expert] : 0.f);
    keys[i] = expert < p.experts ? key_of(biased[i]) : 0;
  }
  if (!PLAIN && p.groups > 1) keep_groups(p, biased, logits, keys);
  int expert = 0;
  float weight = 0.f;
  if constexpr (OWNED <= 4) {
    // A lane sorts its candidates if these are few.
    Candidate own[OWNED];
#pragma unroll
    for (int i = 0; i < OWNED; ++i) own[i] = {keys[i], i * WARP + lane, scores[i]};
#pragma unroll
    for (int end = OWNED - 1; end > 0; --end) {
#pragma unroll
      for (int i = 0; i < end; ++i) sort_pair(own[i], own[i + 1]);
    }
    // Not unrolled, because loading instructions takes a large part of this kernel's time.
#pragma unroll 1
    for (int slot = 0; slot < p.count; ++slot) {
      const unsigned best = __reduce_max_sync(FULL, own[0].key);
      unsigned lanes = __ballot_sync(FULL, own[0].key == best);
      if (lanes & (lanes - 1)) {
        const int least = __reduce_min_sync(FULL, own[0].key == best ? own[0].expert : BATON_EXPERTS_MAX);
        lanes = 1u << (least % WARP);
      }
      const int winner = __ffs(lanes) - 1;
      const int chosen = __shfl_sync(FULL, own[0].expert, winner);
      const float score = __shfl_sync(FULL, own[0].score, winner);
      if (lane == slot) expert = chosen, weight = score;
      if (lane == winner) {
#pragma unroll
        for (int i = 0; i + 1 < OWNED; ++i) own[i] = own[i + 1];
        own[OWNED - 1].key = 0;
      }
    }
  } else {
#pragma unroll 1
    for (int slot = 0; slot < p.count; ++slot) {
      unsigned most = 0, at = ~0u;
      float score = 0.f;
#pragma unroll
      for (int i = 0; i < OWNED; ++i) {
        if (keys[i] > most) most = keys[i], at = i * WARP + lane, score = scores[i];
      }
      const unsigned best = __reduce_max_sync(FULL, most);
      const unsigned chosen = __reduce_min_sync(FULL, most == best ? at : ~0u);
#pragma unroll
      for (int i = 0; i < OWNED; ++i) {
        if (i * WARP + lane == chosen) keys[i] = 0;
      }
      score = __shfl_sync(FULL, score, chosen % WARP);
      if (lane == slot) expert = static_cast<int>(chosen), weight = score;
    }
  }
  if (p.is_normalized) {
    const float sum = warp_sum(weight);
    weight /= p.score == kSigmoid ? sum + kSumMin : fmaxf(sum, kSoftmaxSumMin);
  }
  if (lane < p.count) {
    p.expert_of[static_cast<int64_t>(row) * p.count + lane] = expert;
    p.weights[static_cast<int64_t>(row) * p.count + lane] = weight * p.scale;
  }
  return expert;
}

__device__ int choose(const baton_route_args& p, float* logits, int row) {
  return p.experts <= 4 * WARP ? choose<4, false>(p, logits, row) : choose<kOwned, false>(p, logits, row);
}

// ---- Lists of the experts ----

template <int WARPS>
struct Lists {
  uint16_t before[WARPS][BATON_EXPERTS_MAX];  // by warp: assignments of an expert before its part; later, so far
  int32_t first[BATON_EXPERTS_MAX + 1];
};

// Calls visit(assignment, expert, lanes of this expert) for the warp's part of the assignments, in their order.
template <int WARPS, class Visit>
__device__ void visit_part(const int32_t* expert_of, int assignments, Visit&& visit) {
  constexpr int TOGETHER = 8;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int part = (assignments + WARPS * WARP - 1) / (WARPS * WARP) * WARP;
  const int end = min(assignments, (warp + 1) * part);
  for (int first = warp * part; first < end; first += TOGETHER * WARP) {
    int experts[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      const int at = first + i * WARP + lane;
      experts[i] = at < end ? *static_cast<const volatile int32_t*>(expert_of + at) : -1;
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      if (first + i * WARP >= end) break;
      visit(first + i * WARP + lane, experts[i], __match_any_sync(FULL, experts[i]));
      __syncwarp();
    }
  }
}

// One CTA lists the assignments by expert. `expert_of` is in any memory.
template <int WARPS>
__device__ void build_lists(const baton_route_args& p, const int32_t* expert_of, Lists<WARPS>& lists) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, threads = WARPS * WARP;
  const int assignments = p.rows * p.count;
  for (int expert = lane; expert < p.experts; expert += WARP) lists.before[warp][expert] = 0;
  __syncthreads();
  visit_part<WARPS>(expert_of, assignments, [&](int, int expert, unsigned same) {
    if (expert >= 0 && (same & ((1u << lane) - 1)) == 0) lists.before[warp][expert] += __popc(same);
  });
  __syncthreads();
  for (int expert = threadIdx.x; expert < p.experts; expert += threads) {
    int sum = 0;
    for (int w = 0; w < WARPS; ++w) {
      const int own = lists.before[w][expert];
      lists.before[w][expert] = sum;
      sum += own;
    }
    lists.first[expert] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    // A lane has neighbouring experts.
    const int own = (p.experts + WARP - 1) / WARP, begin = lane * own, end = min(p.experts, begin + own);
    int sum = 0;
    for (int i = begin; i < end; ++i) sum += lists.first[i];
    int before = sum;
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
      const int other = __shfl_up_sync(FULL, before, distance);
      if (lane >= distance) before += other;
    }
    before -= sum;
    for (int i = begin; i < end; ++i) {
      const int count = lists.first[i];
      lists.first[i] = before;
      before += count;
    }
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < p.experts; expert += threads) p.offsets[expert] = lists.first[expert];
  if (threadIdx.x == 0) p.offsets[p.experts] = assignments;
  visit_part<WARPS>(expert_of, assignments, [&](int assignment, int expert, unsigned same) {
    const unsigned earlier = same & ((1u << lane) - 1);
    if (expert >= 0) p.order[lists.first[expert] + lists.before[warp][expert] + __popc(earlier)] = assignment;
    __syncwarp();
    if (expert >= 0 && earlier == 0) lists.before[warp][expert] += __popc(same);
  });
}

// Lists up to kRankedMax assignments. `keys`: expert * kRankedMax + assignment. The position of an assignment is the
// number of smaller keys. One CTA calls this function.
__device__ void rank_keys(const baton_route_args& p, int32_t (&keys)[kRankedMax]) {
  const int assignments = p.rows * p.count, padded = (assignments + 3) / 4 * 4;
  for (int i = threadIdx.x; i < assignments + p.experts + 1; i += blockDim.x) {
    const int expert = i - assignments;
    const int bound = expert < 0 ? keys[i] : expert * kRankedMax;
    int smaller = 0;
#pragma unroll 4
    for (int other = 0; other < padded; other += 4) {
      const int4 four = *reinterpret_cast<const int4*>(keys + other);
      smaller += (four.x < bound) + (other + 1 < assignments && four.y < bound) +
                 (other + 2 < assignments && four.z < bound) + (other + 3 < assignments && four.w < bound);
    }
    if (expert < 0) p.order[smaller] = i;
    else p.offsets[expert] = smaller;
  }
}

// Lists the assignments in the CTA that arrives last.
template <int WARPS>
__device__ void arrive(const baton_route_args& p, int32_t (&keys)[kRankedMax], Lists<WARPS>& lists) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  const int ctas = gridDim.x * gridDim.y, assignments = p.rows * p.count;
  if (threadIdx.x == 0) is_last = atomicAdd(p.arrivals, 1) == ctas - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  if (assignments <= kRankedMax) {
    for (int i = threadIdx.x; i < assignments; i += WARPS * WARP) {
      keys[i] = *static_cast<const volatile int32_t*>(p.expert_of + i) * kRankedMax + i;
    }
    __syncthreads();
    rank_keys(p, keys);
  } else {
    build_lists<WARPS>(p, p.expert_of, lists);
  }
  if (threadIdx.x == 0) *p.arrivals = 0;
}

// ---- Few rows ----

// Stores to the same address of another CTA of the cluster.
__device__ __forceinline__ void store_to(int cta, const void* address, float value) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.f32 [there], %2;\n}\n" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))),
      "r"(cta), "f"(value)
      : "memory");
}

// ---- Few rows: the warps of a CTA that do not compute logits ----

// Computes the scales of the norms of the cluster's rows of x.
__device__ void find_scales(const baton_route_args& p, int row, int rows, float (&scales)[kTileRows]) {
  constexpr int OWN = kTileRows / kSplitWarps;
  const int warp = threadIdx.x / WARP - kMathWarps, lane = threadIdx.x % WARP;
  float sums[OWN] = {};
  for (int i = lane; p.squares && i < p.squares_count; i += WARP) {
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      const int m = warp + j * kSplitWarps;
      if (m < rows) sums[j] += p.squares[static_cast<int64_t>(row + m) * p.squares_count + i];
    }
  }
#pragma unroll
  for (int j = 0; j < OWN; ++j) {
    const int m = warp + j * kSplitWarps;
    if (m >= rows) return;
    const float sum = warp_sum(sums[j]);
    const float scale = p.squares ? rsqrtf(sum / static_cast<float>(p.hidden) + p.eps) : 1.f;
    if (lane == 0) scales[m] = scale;
    if (lane == 0 && blockIdx.x == 0 && !p.split) p.scales[row + m] = scale;
  }
}

// Splits the CTA's rows of x into two parts in FP8. Two warps split a row.
__device__ void split_rows(const baton_route_args& p, int row, int rows, const float (&scales)[kTileRows],
                           float (&most_of)[kSplitWarps]) {
  constexpr int kWarps = kSplitWarps / kRowsOfCta, kThreads = kWarps * WARP;
  const int warp = threadIdx.x / WARP - kMathWarps, own = warp / kWarps, thread = threadIdx.x % kThreads;
  const int m = blockIdx.x * kRowsOfCta + own;
  const bf16* from = static_cast<const bf16*>(p.x) + (row + m) * p.x_stride;
  float most = 0.f;
#pragma unroll 4
  for (int k = thread * 8; k < p.hidden; k += kThreads * 8) {
    float values[8] = {};
    if (m < rows) load8(from + k, values);
#pragma unroll
    for (float value : values) most = fmaxf(most, fabsf(value));
  }
  most = warp_max(most);
  if (threadIdx.x % WARP == 0) most_of[warp] = most;
  asm volatile("bar.sync 1, %0;" ::"n"(kSplitWarps * WARP) : "memory");
  if (m >= rows) return;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) most = fmaxf(most, most_of[own * kWarps + i]);
  const Fp8Factor factor = split_factor(most);
  if (thread == 0) p.scales[row + m] = scales[m] * factor.scale;
#pragma unroll 4
  for (int k = thread * 8; k < p.hidden; k += kThreads * 8) {
    float values[8];
    load8(from + k, values);
    uint2 high, low;
    split_eight(values, factor.inverse, high, low);
    char* to = static_cast<char*>(p.split) + static_cast<int64_t>(row + m) * 2 * p.hidden + k;
    *reinterpret_cast<uint2*>(to) = high;
    *reinterpret_cast<uint2*>(to + p.hidden) = low;
  }
}

// ---- Few rows: logits and choice ----

// NT: groups of eight experts of a CTA.
template <int NT>
struct Own {
  static constexpr int kExperts = NT * 8 * kCluster / WARP;  // experts of a lane, at most
  static constexpr int kRows = NT <= 4 ? kTileRows : 4;  // rows that one CTA chooses for, at most
};

template <int NT>
union alignas(16) RouteShared {
  float sums[kMathWarps][kTileRows][NT * 8 + 2];
  Lists<kRouteWarps> lists;
};

template <int NT, bool PLAIN>
__global__ void __launch_bounds__(kRouteWarps * WARP) route_kernel(const __grid_constant__ baton_route_args p) {
#if __CUDA_ARCH__ >= 900
  __shared__ RouteShared<NT> shared;
  __shared__ float logits[Own<NT>::kRows][NT * 8 * kCluster];
  __shared__ float scales[kTileRows];
  __shared__ __align__(16) int32_t keys[kRankedMax];
  __shared__ float most_of[kSplitWarps];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane >> 2, c = lane & 3;
  const int row = blockIdx.y * kTileRows, rows = min(kTileRows, p.rows - row);
  const int per_cta = (p.experts + kCluster - 1) / kCluster, first = blockIdx.x * per_cta;
  const int own = max(0, min(per_cta, p.experts - first));
  // With few rows, one CTA chooses the experts of all rows. Otherwise each CTA chooses for its own rows.
  const bool gathers = p.rows <= Own<NT>::kRows;
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // this CTA runs

  if (warp < kMathWarps) {
    // The router's weight is constant, so its first slices are loaded before the wait.
    constexpr int AHEAD = NT <= 2 ? 8 : 2, kStep = kMathWarps * 32;
    const bf16* router = static_cast<const bf16*>(p.router) + static_cast<int64_t>(first) * p.hidden;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 w[AHEAD][NT];
    auto load_router = [&](int slice) {
#pragma unroll
      for (int j = 0; j < AHEAD; ++j) {
        const int k = slice + j * kStep + c * 8;
#pragma unroll
        for (int t = 0; t < NT; ++t) {
          const bf16* from = router + static_cast<int64_t>(t * 8 + g) * p.hidden + k;
          w[j][t] = k < p.hidden && t * 8 + g < own ? __ldg(reinterpret_cast<const uint4*>(from)) : zero;
        }
      }
    };
    load_router(warp * 32);
    pdl_wait_and_release();

    // The same permutation of k in both operands does not change the sum: a lane's 16 bytes serve two instructions.
    float acc[NT][4] = {};
    const bf16* x0 = static_cast<const bf16*>(p.x) + (row + g) * p.x_stride;
    const bf16* x1 = x0 + 8 * p.x_stride;
    for (int slice = warp * 32; slice < p.hidden; slice += AHEAD * kStep) {
      if (slice != warp * 32) load_router(slice);
      uint4 low[AHEAD], high[AHEAD];
#pragma unroll
      for (int j = 0; j < AHEAD; ++j) {
        const int k = slice + j * kStep + c * 8;
        low[j] = k < p.hidden && g < rows ? *reinterpret_cast<const uint4*>(x0 + k) : zero;
        high[j] = k < p.hidden && g + 8 < rows ? *reinterpret_cast<const uint4*>(x1 + k) : zero;
      }
#pragma unroll
      for (int j = 0; j < AHEAD; ++j) {
#pragma unroll
        for (int t = 0; t < NT; ++t) {
          mma(acc[t], low[j].x, high[j].x, low[j].y, high[j].y, w[j][t].x, w[j][t].y);
          mma(acc[t], low[j].z, high[j].z, low[j].w, high[j].w, w[j][t].z, w[j][t].w);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      *reinterpret_cast<float2*>(&shared.sums[warp][g][t * 8 + 2 * c]) = make_float2(acc[t][0], acc[t][1]);
      *reinterpret_cast<float2*>(&shared.sums[warp][g + 8][t * 8 + 2 * c]) = make_float2(acc[t][2], acc[t][3]);
    }
    asm volatile("bar.sync 2, %0;" ::"n"(kMathWarps * WARP) : "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    for (int i = threadIdx.x; i < rows * own; i += kMathWarps * WARP) {
      const int m = i / own, expert = i % own;
      float sum = 0.f;
#pragma unroll
      for (int other = 0; other < kMathWarps; ++other) sum += shared.sums[other][m][expert];
      store_to(gathers ? 0 : m / kRowsOfCta, &logits[gathers ? m : m % kRowsOfCta][first + expert], sum);
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  } else {
    pdl_wait_and_release();
    find_scales(p, row, rows, scales);
    asm volatile("barrier.cluster.wait.aligned;\nbarrier.cluster.arrive.release.aligned;" ::: "memory");
    if (p.split) split_rows(p, row, rows, scales, most_of);
    __syncwarp();
  }
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");

  const bool is_ranked = gathers && p.rows * p.count <= kRankedMax;
  const int first_own = gathers ? 0 : blockIdx.x * kRowsOfCta;
  const int chosen_rows = gathers ? (blockIdx.x == 0 ? rows : 0) : min(kRowsOfCta, rows - first_own);
  for (int i = warp; i < chosen_rows; i += kRouteWarps) {
    const float scale = scales[first_own + i];
    for (int expert = lane; expert < p.experts; expert += WARP) logits[i][expert] *= scale;
    const int expert = choose<Own<NT>::kExperts, PLAIN>(p, logits[i], row + first_own + i);
    const int assignment = i * p.count + lane;
    if (is_ranked && lane < p.count) keys[assignment] = expert * kRankedMax + assignment;
  }
  if (!is_ranked) return arrive<kRouteWarps>(p, keys, shared.lists);
  __syncthreads();
  if (blockIdx.x == 0) rank_keys(p, keys);
#endif
}

// ---- Many rows ----

__global__ void __launch_bounds__(kRouteWarps * WARP) choose_kernel(const __grid_constant__ baton_route_args p) {
  pdl_wait_and_release();
  const int row = blockIdx.x * kRouteWarps + threadIdx.x / WARP;
  if (row < p.rows) choose(p, p.logits + static_cast<int64_t>(row) * p.experts, row);
}

// Lists the assignments of an expert. One CTA per expert reads all choices.
__global__ void __launch_bounds__(kListWarps * WARP) list_kernel(const __grid_constant__ baton_route_args p) {
  __shared__ int32_t before[kListWarps], own[kListWarps];
  pdl_wait_and_release();
  const int expert = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int assignments = p.rows * p.count;
  const int part = (assignments + kListWarps * WARP - 1) / (kListWarps * WARP) * WARP;
  const int begin = warp * part, end = min(assignments, begin + part);
  int less = 0, equal = 0;
#pragma unroll 8
  for (int i = begin + lane; i < end; i += WARP) {
    const int of = p.expert_of[i];
    less += of < expert;
    equal += of == expert;
  }
  less = __reduce_add_sync(FULL, less);
  equal = __reduce_add_sync(FULL, equal);
  if (lane == 0) before[warp] = less, own[warp] = equal;
  __syncthreads();
  const int first = __reduce_add_sync(FULL, before[lane]);
  int position = first + __reduce_add_sync(FULL, lane < warp ? own[lane] : 0);
  if (threadIdx.x == 0) p.offsets[expert] = first;
  if (threadIdx.x == 0 && expert == p.experts - 1) p.offsets[p.experts] = assignments;
#pragma unroll 8
  for (int i = begin; i < end; i += WARP) {
    const bool is_own = i + lane < end && p.expert_of[i + lane] == expert;
    const unsigned same = __ballot_sync(FULL, is_own);
    if (is_own) p.order[position + __popc(same & ((1u << lane) - 1))] = i + lane;
    position += __popc(same);
  }
}

// ---- The weighted sum ----

constexpr int kCombineMax = 32768;  // widest row
constexpr int kCombineThreads = 1024;

// Returns the weight of the shared expert for a row.
__device__ float shared_weight(const baton_combine_args& p, int64_t row, float* memory) {
  if (!p.shared_router) return 1.f;
  const bf16* x = static_cast<const bf16*>(p.x) + row * p.x_stride;
  float logit = 0.f;
  for (int at = threadIdx.x * 8; at < p.width; at += blockDim.x * 8) {
    float values[8], factors[8];
    load8(x + at, values);
    load8(static_cast<const bf16*>(p.shared_router) + at, factors);
#pragma unroll
    for (int i = 0; i < 8; ++i) logit += values[i] * factors[i];
  }
  return 1.f / (1.f + expf(-block_sum(logit, memory)));
}

// One CTA per row; a thread holds ITEMS groups of 8, `blockDim.x` groups apart.
template <int ITEMS, bool NORM>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ baton_combine_args p) {
  __shared__ float of_norm[WARP], of_router[WARP], mosts[WARP], slot_weights[BATON_EXPERTS_CHOSEN_MAX];
  const int64_t row = blockIdx.x;
  const bf16* outputs = static_cast<const bf16*>(p.outputs) + row * p.count * p.width;
  float* residual = p.residual + row * p.width;
  bf16* out = static_cast<bf16*>(p.out) + row * p.width;
  // With a norm, the successor is a GEMM or baton_quantize. Both read at most weights before their wait, so they may
  // start before this kernel's predecessor ends.
  if (NORM) pdl_release();
  // Reads before the wait: kernels before the preceding one wrote the weights of the chosen experts and the residual
  // stream. The preceding kernel wrote the outputs.
  float values[ITEMS][8] = {}, factors[ITEMS][8] = {};
  if (threadIdx.x < p.count) slot_weights[threadIdx.x] = p.weights[row * p.count + threadIdx.x];
  if constexpr (NORM) {
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int at = (item * blockDim.x + threadIdx.x) * 8;
      if (at >= p.width) break;
      load8(residual + at, values[item]);
      load8(p.norm + at, factors[item]);
    }
  }
  __syncthreads();
  pdl_wait_and_release();
  const float weight_of_shared = p.shared ? shared_weight(p, row, of_router) : 0.f;
  float sum = 0.f, most = 0.f;
#pragma unroll
  for (int item = 0; item < ITEMS; ++item) {
    const int at = (item * blockDim.x + threadIdx.x) * 8;
    if (at >= p.width) break;
    float mixed[8] = {};
    auto add = [&](const bf16* from, float weight) {
      float output[8];
      load8(from + at, output);
#pragma unroll
      for (int i = 0; i < 8; ++i) mixed[i] += weight * output[i];
    };
#pragma unroll 8
    for (int slot = 0; slot < p.count; ++slot) add(outputs + slot * p.width, slot_weights[slot]);
    if (p.shared) add(static_cast<const bf16*>(p.shared) + row * p.width, weight_of_shared);
    if constexpr (NORM) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        values[item][i] += mixed[i];
        sum += values[item][i] * values[item][i];
        most = fmaxf(most, fabsf(values[item][i] * factors[item][i]));
      }
      store8(residual + at, values[item]);
    } else {
      store8(out + at, mixed);
    }
  }
  if constexpr (NORM) {
    most = warp_max(most);
    if (threadIdx.x % WARP == 0) mosts[threadIdx.x / WARP] = most;
    const float scale = 1.f / sqrtf(block_sum(sum, of_norm) / static_cast<float>(p.width) + p.eps);
    Fp8Factor factor = {};
    if (p.quantized) {
      most = warp_max(threadIdx.x % WARP < blockDim.x / WARP ? mosts[threadIdx.x % WARP] : 0.f) * scale;
      factor = p.parts == 2 ? split_factor(most) : whole_factor(most);
      if (threadIdx.x == 0) p.scales[row] = factor.scale;
    }
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
      const int at = (item * blockDim.x + threadIdx.x) * 8;
      if (at >= p.width) break;
#pragma unroll
      for (int i = 0; i < 8; ++i) values[item][i] = values[item][i] * scale * factors[item][i];
      store8(out + at, values[item]);
      if (p.quantized) store_parts(p.quantized, p.parts, blockIdx.x, p.width, at, values[item], factor.inverse);
    }
  }
}

template <bool PLAIN, class Body>
int32_t with_route_kernel(int experts, Body&& body) {
  const int groups = divide_up(divide_up(experts, kCluster), 8);
  if (groups <= 1) return body(route_kernel<1, PLAIN>);
  if (groups <= 2) return body(route_kernel<2, PLAIN>);
  if (groups <= 4) return body(route_kernel<4, PLAIN>);
  return body(route_kernel<8, PLAIN>);
}
template <class Body>
int32_t with_route_kernel(int experts, bool plain, Body&& body) {
  return plain ? with_route_kernel<true>(experts, body) : with_route_kernel<false>(experts, body);
}

int32_t check_route(const baton_route_args& p) {
  BATON_REQUIRE(p.rows >= 0, "rows is %d; expected 0 or more", p.rows);
  BATON_REQUIRE(p.experts > 0 && p.experts <= BATON_EXPERTS_MAX, "experts is %d; expected 1 to %d", p.experts,
                BATON_EXPERTS_MAX);
  const int most = p.experts < BATON_EXPERTS_CHOSEN_MAX ? p.experts : BATON_EXPERTS_CHOSEN_MAX;
  BATON_REQUIRE(p.count > 0 && p.count <= most, "count is %d; expected 1 to %d", p.count, most);
  BATON_REQUIRE(p.expert_of && p.weights && p.offsets && p.order && p.arrivals,
                "expert_of, weights, offsets, order or arrivals is null");
  BATON_REQUIRE(static_cast<int64_t>(p.rows) * p.count <= kAssignmentsMax,
                "rows is %d; expected at most %d with %d experts each", p.rows, kAssignmentsMax / p.count, p.count);
  BATON_REQUIRE(p.groups > 0 && p.groups <= WARP && p.experts % p.groups == 0, "groups is %d; expected divisors of %d up to %d",
                p.groups, p.experts, WARP);
  BATON_REQUIRE(p.groups_chosen > 0 && p.groups_chosen <= p.groups && p.count <= p.experts / p.groups * p.groups_chosen,
                "groups_chosen is %d; expected groups, up to %d, with %d experts", p.groups_chosen, p.groups, p.count);
  BATON_REQUIRE(p.score >= 0 && p.score <= kBiasedSoftmax, "score is %d; expected 0 to %d", p.score, kBiasedSoftmax);
  if (p.logits) return BATON_OK;
  BATON_REQUIRE(p.x && p.router && p.scales, "x, router or scales is null");
  BATON_REQUIRE(p.hidden > 0 && p.hidden % 8 == 0, "hidden is %d; expected multiples of 8", p.hidden);
  BATON_REQUIRE(p.x_stride >= p.hidden && p.x_stride % 8 == 0,
                "x_stride is %lld; expected multiples of 8 from hidden, %d, on", static_cast<long long>(p.x_stride),
                p.hidden);
  BATON_REQUIRE(!p.squares || p.squares_count > 0, "squares_count is %d; expected 1 or more", p.squares_count);
  return BATON_OK;
}

template <class Body>
int32_t with_combine_kernel(int items, bool norms, Body&& body) {
  if (items == 1) return norms ? body(combine_kernel<1, true>) : body(combine_kernel<1, false>);
  if (items == 2) return norms ? body(combine_kernel<2, true>) : body(combine_kernel<2, false>);
  return norms ? body(combine_kernel<4, true>) : body(combine_kernel<4, false>);
}

}  // namespace

int32_t load_route() {
  auto load_it = [](auto* kernel) { return load(kernel); };
  for (int experts : {64, 128, 256, 512}) {
    for (bool plain : {false, true}) BATON_TRY(with_route_kernel(experts, plain, load_it));
  }
  for (int items : {1, 2, 4}) {
    BATON_TRY(with_combine_kernel(items, true, load_it));
    BATON_TRY(with_combine_kernel(items, false, load_it));
  }
  BATON_TRY(load(list_kernel));
  return load(choose_kernel);
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_route(const baton_route_args* args, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(args, "args is null");
    const baton_route_args& p = *args;
    BATON_TRY(check_route(p));
    if (p.rows == 0) return BATON_OK;
    if (p.logits) {
      BATON_TRY(launch("choice of experts", choose_kernel, dim3(divide_up(p.rows, kRouteWarps)), dim3(kRouteWarps * WARP), 0,
                       as_stream(stream), p));
      return launch("lists of experts", list_kernel, dim3(p.experts), dim3(kListWarps * WARP), 0, as_stream(stream), p);
    }
    return with_route_kernel(p.experts, is_plain(p), [&](auto* kernel) {
      return launch_clusters(is_programmatic(), kCluster, "router of experts", kernel,
                             dim3(kCluster, divide_up(p.rows, kTileRows)), dim3(kRouteWarps * WARP), 0, as_stream(stream), p);
    });
  });
}

BATON_API int32_t baton_combine_experts(const baton_combine_args* args, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(args, "args is null");
    const baton_combine_args& p = *args;
    BATON_REQUIRE(p.rows >= 0, "rows is %d; expected 0 or more", p.rows);
    BATON_REQUIRE(p.width > 0 && p.width % 8 == 0 && p.width <= kCombineMax, "width is %d; expected multiples of 8 up to %d",
                  p.width, kCombineMax);
    BATON_REQUIRE(p.count > 0 && p.count <= BATON_EXPERTS_CHOSEN_MAX, "count is %d; expected 1 to %d", p.count,
                  BATON_EXPERTS_CHOSEN_MAX);
    BATON_REQUIRE(p.outputs && p.weights && p.out && (!p.residual || p.norm), "outputs, weights, out or norm is null");
    BATON_REQUIRE(!p.quantized || (p.residual && p.scales && (p.parts == 1 || p.parts == 2)),
                  "residual or scales is null, or parts is %d; expected 1 or 2", p.parts);
    BATON_REQUIRE(!p.shared_router || (p.shared && p.x && p.x_stride >= p.width && p.x_stride % 8 == 0),
                  "shared or x is null, or x_stride is %lld; expected multiples of 8 from the width, %d, on",
                  static_cast<long long>(p.x_stride), p.width);
    if (p.rows == 0) return BATON_OK;
    const int groups = p.width / 8;
    const int threads = groups >= kCombineThreads ? kCombineThreads : divide_up(groups, WARP) * WARP;
    return with_combine_kernel(divide_up(groups, threads), p.residual != nullptr, [&](auto* kernel) {
      return launch("sum of experts", kernel, dim3(p.rows), dim3(threads), 0, as_stream(stream), p);
    });
  });
}
