// y = x W^T for the rows of each expert (sm_90a). A tile has some rows of one expert and some rows of its weight. Two
// threads load the weight by TMA, 128 threads gather the rows of x by index, and warpgroups of 64 rows compute with
// wgmma. Rows are not padded: an expert's last tile gathers only the rows of the expert, and the results of other rows
// are not stored. CTAs take the tiles in turn, counted on the device. The loads of a tile overlap with the end of the
// previous tile.
//
// Small tiles give every SM an equal share of the weights, and large tiles read x and the weight less often. The order of
// a sum over k does not depend on the tile, so the bits of a row's results do not depend on the other rows.
//
// With weights in FP8 (e4m3), wgmma multiplies in FP8. An element of x is one FP8 number (one part), or the sum of two
// FP8 numbers (two parts), which keeps the precision of bf16. The two parts are two of the 64 rows of a wgmma. The
// GEMM of gate and up writes the x of down in the same form, with a factor for every 64 columns. The tensor cores keep
// about 14 bits of a sum in FP8. So the sum of each slice starts at zero and is then added to a sum in f32. With two
// parts, two warpgroups take turns at the slices: one multiplies while the other adds. The end of a tile adds their
// two sums.
//
// With one FP8 number for each element and an even number of tiles, an item has two neighbouring tiles of the weight and
// loads x once for both, because loads from the L2 cache limit these GEMMs.
//
// A CTA fills its ring with weights before it looks up the rows of x. With `pdl`, the GEMM of down fills its ring
// before the preceding kernel has completed. This is valid because the lists were written before the preceding kernel.
#include <cuda.h>
#include <cuda_fp8.h>

#include "experts.h"

#include "device.cuh"
#include "items.cuh"
#include "rows.cuh"
#include "split.cuh"

namespace baton {
namespace {

constexpr int kSliceBytes = 128;  // bytes of k in a row of a stage, the widest row that TMA swizzles
constexpr int kGroupRows = 64;  // rows of shared memory that a warpgroup multiplies
constexpr int kLoaders = 128;
constexpr int kSmem = 227 * 1024;
constexpr int kStagesMost = 12;
constexpr int kFactorColumns = 64;  // columns of the x of down that share a factor
constexpr float kLowFactor = 1.f / 32.f;  // factor of the second part of x
constexpr int kManyRows = 40;  // average rows of an expert above which large tiles are faster

// ROWS: rows of x in shared memory; N: weight rows of a tile; PARTS: parts of x in FP8, 0 for bf16; TILES: neighbouring
// tiles of the weight that an item has, for which the rows of x are loaded once.
template <int ROWS, int N, int PARTS, int TILES = 1>
struct Shape {
  static constexpr int kTiles = TILES;
  static constexpr bool kIsFp8 = PARTS > 0;
  static constexpr int kParts = kIsFp8 ? PARTS : 1;
  static constexpr int kRows = ROWS / kParts, kN = N, kHalf = N / 2;
  static constexpr int kOwn = 2 / kParts;  // rows of x of a thread: two (g and g + 8), or one in two parts
  static constexpr int kElementBytes = kIsFp8 ? 1 : 2, kSlice = kSliceBytes / kElementBytes;  // elements of k in a stage
  static constexpr int kOwnLoads = ROWS / 16;  // rows that a thread loads
  static constexpr int kGroups = (ROWS + kGroupRows - 1) / kGroupRows;
  // Teams take turns at the slices of k: one multiplies while the other adds. The first team stores the results.
  static constexpr int kTeams = PARTS == 2 ? 2 : 1;
  static constexpr int kMath = kTeams * kGroups * 128;  // threads
  static constexpr int kThreads = kMath + kLoaders;
  static constexpr int kInboxBytes = (kTeams - 1) * 128 * (N / 2 / kParts) * 4;  // sums that the first team receives
  static constexpr int kXBytes = ROWS * kSliceBytes, kTileBytes = N * kSliceBytes, kWBytes = TILES * kTileBytes;
  static constexpr int kStageBytes = kXBytes + kWBytes;
  static constexpr int kScaleBytes = kIsFp8 ? kStagesMost * kRows * 8 + kGroups * N * 4 : 16;
  static constexpr int kStatic = static_cast<int>(sizeof(ItemTable)) + 2 * kStagesMost * 8 + kScaleBytes + 64;
  static constexpr int kFit = (kSmem - 1024 - kStatic - kInboxBytes) / kStageBytes;
  // A stage is always used by the same team.
  static constexpr int kStages = (kFit < kStagesMost ? kFit : kStagesMost) / kTeams * kTeams;
  static constexpr int kShared = kStages * kStageBytes + kInboxBytes + 1024;
  static_assert(kHalf % 8 == 0 && ROWS % 16 == 0 && kXBytes % 1024 == 0, "swizzling needs whole groups of eight rows");
  // If ROWS is no multiple of 64, wgmma also reads weights behind the rows of x. The results of these are not stored.
  static_assert(kWBytes >= kGroupRows * kSliceBytes, "wgmma reads 64 rows of x");
  static_assert(kTeams == 1 || (kGroups == 1 && TILES == 1), "a team of two has one warpgroup and one tile");
  static_assert(TILES == 1 || (kIsFp8 && kGroups == 2), "registers are moved from the loaders to two warpgroups");
  static_assert(!kIsFp8 || kHalf == kFactorColumns, "a tile of gate and up has the columns of a factor");
};
using Few = Shape<64, 128, 0>;
using Many = Shape<128, 256, 0>;
using FewFp8 = Shape<64, 128, 2>;
using ManyFp8 = Shape<128, 128, 1>;
using PairFp8 = Shape<128, 128, 1, 2>;  // of many rows, where the number of tiles is even

__device__ __forceinline__ uint32_t smem_addr(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// ONCE: the weight is read once, so the L2 cache keeps other data instead.
template <bool ONCE>
__device__ __forceinline__ void fetch_weights(const CUtensorMap* map, uint32_t to, uint32_t barrier, int k, int row,
                                              int expert) {
  if constexpr (ONCE) {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(k), "r"(row), "r"(expert), "l"(policy)
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(k), "r"(row), "r"(expert)
      : "memory");
}
__device__ __forceinline__ void fetch_factors(uint32_t to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

// Returns the wgmma descriptor of a swizzled matrix: rows of 128 bytes, groups of eight rows 1,024 bytes apart.
__device__ __forceinline__ uint64_t matrix_at(uint32_t address) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) | ((address & 0x3ffff) >> 4);
}

#define D8(a)                                                                                                     \
  "+f"(d[a]), "+f"(d[a + 1]), "+f"(d[a + 2]), "+f"(d[a + 3]), "+f"(d[a + 4]), "+f"(d[a + 5]), "+f"(d[a + 6]), \
      "+f"(d[a + 7])
#define D32(a) D8(a), D8(a + 8), D8(a + 16), D8(a + 24)
#define REGS16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define REGS64                                                                                                     \
  REGS16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41" \
         ",%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define REGS128                                                                                                     \
  REGS64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89" \
         ",%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112" \
         ",%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA(KIND, REGS, A, B, S, TRANSPOSED, ...)                                                          \
  asm volatile(                                                                                              \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, " S ", 0;\n"                                                   \
      "wgmma.mma_async.sync.aligned." KIND " {" REGS "}, " A ", " B ", adds, 1, 1" TRANSPOSED ";\n}\n"       \
      : __VA_ARGS__                                                                                          \
      : "l"(a), "l"(b), "r"(adds))

// d = a b (+ d): 64 rows of x, N weight rows, 32 bytes of k.
template <int N, bool FP8>
__device__ __forceinline__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, int adds) {
  if constexpr (FP8) {
    static_assert(N == 128, "no wgmma instruction for this N");
    WGMMA("m64n128k32.f32.e4m3.e4m3", REGS64, "%64", "%65", "%66", "", D32(0), D32(32));
  } else if constexpr (N == 128) {
    WGMMA("m64n128k16.f32.bf16.bf16", REGS64, "%64", "%65", "%66", ", 0, 0", D32(0), D32(32));
  } else {
    static_assert(N == 256, "no wgmma instruction for this N");
    WGMMA("m64n256k16.f32.bf16.bf16", REGS128, "%128", "%129", "%130", ", 0, 0", D32(0), D32(32), D32(64), D32(96));
  }
}
#undef WGMMA
#undef REGS128
#undef REGS64
#undef REGS16
#undef D32
#undef D8

// The rows of x of a thread. One step loads the assignments and a later step the factors, so no step waits for a load.
template <class S>
struct OwnRows {
  int assignment[S::kOwn];  // negative: the item has no such row
  float scale[S::kOwn];
};

template <class S>
__device__ __forceinline__ int own_row(int half) {
  return threadIdx.x / WARP % (S::kGroups * 4) * (16 / S::kParts) + threadIdx.x % WARP / 4 + half * 8;
}

template <class S>
__device__ __forceinline__ OwnRows<S> own_rows(const baton_expert_gemm_args& p, const Item& item) {
  OwnRows<S> rows;
#pragma unroll
  for (int half = 0; half < S::kOwn; ++half) {
    const int m = own_row<S>(half);
    rows.assignment[half] = m < item.rows ? p.order[item.position + m] : -1;
    rows.scale[half] = 1.f;
  }
  return rows;
}
template <class S, bool GATE_UP>
__device__ __forceinline__ void fetch_scales(const baton_expert_gemm_args& p, OwnRows<S>& rows) {
  if constexpr (GATE_UP) {
#pragma unroll
    for (int half = 0; half < S::kOwn; ++half) {
      if (p.scales && rows.assignment[half] >= 0) rows.scale[half] = p.scales[rows.assignment[half] / p.count];
    }
  }
}

// Returns the index of the thread's first result for group `block` of eight weight rows.
template <class S>
__device__ __forceinline__ constexpr int result_at(int block, int half) {
  return (block * S::kOwn + half) * 2;
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// Stores a warp's results in bf16.
template <class S, bool GATE_UP, int COUNT>
__device__ __forceinline__ void store(const baton_expert_gemm_args& p, const Item& item, const OwnRows<S>& rows,
                                      const float (&acc)[COUNT]) {
  constexpr int BLOCKS = (GATE_UP ? S::kHalf : S::kN) / 8;
  const int c = threadIdx.x & 3;
  const int width = GATE_UP ? p.n / 2 : p.n, begin = item.tile * BLOCKS * 8;
#pragma unroll
  for (int half = 0; half < S::kOwn; ++half) {
    const float scale = rows.scale[half];
    const bool valid = rows.assignment[half] >= 0;
    const int position = item.position + own_row<S>(half);
    bf16* out = static_cast<bf16*>(p.out) + (GATE_UP ? position : rows.assignment[half]) * p.out_stride;
#pragma unroll
    for (int j = 0; j < BLOCKS; j += 4) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float v[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          v[e] = acc[result_at<S>(j + i, half) + e] * scale;
          if (GATE_UP) v[e] = silu(v[e]) * (acc[result_at<S>(BLOCKS + j + i, half) + e] * scale);
        }
        pairs[i] = pack(v[0], v[1]);
      }
      const uint4 eight = transpose_pairs(pairs);
      const int column = begin + j * 8 + c * 8;
      if (valid && column < width) *reinterpret_cast<uint4*>(out + column) = eight;
    }
  }
}

// Stores a warp's results of gate and up in FP8, and the factors of the rows.
template <class S>
__device__ __forceinline__ void store_fp8(const baton_expert_gemm_args& p, const Item& item, const OwnRows<S>& rows,
                                          float (&acc)[S::kN / 2 / S::kParts]) {
  constexpr int BLOCKS = S::kHalf / 8;
  const int c = threadIdx.x & 3, column = item.tile * S::kHalf + c * 16;
#pragma unroll
  for (int half = 0; half < S::kOwn; ++half) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < BLOCKS * 2; ++i) {
      float& v = acc[result_at<S>(i / 2, half) + i % 2];
      v = silu(v * rows.scale[half]) * (acc[result_at<S>(BLOCKS + i / 2, half) + i % 2] * rows.scale[half]);
      most = fmaxf(most, fabsf(v));
    }
    most = fmaxf(most, __shfl_xor_sync(FULL, most, 1));
    most = fmaxf(most, __shfl_xor_sync(FULL, most, 2));
    const Fp8Factor factor = S::kParts == 2 ? split_factor(most) : whole_factor(most);
    const bool valid = rows.assignment[half] >= 0;
    const int64_t position = item.position + own_row<S>(half);
    float* to = p.factors + position * p.factor_stride + item.tile;
    if (valid && c == 0) *to = factor.scale;
    // The last slice of down may have columns in its first half only. The factor of the second half is then zero.
    if (valid && c == 1 && (item.tile + 1) * S::kHalf >= p.n / 2 && item.tile + 1 < p.factor_stride) to[1] = 0.f;
    uint32_t words[S::kParts][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pairs[2][2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int at = result_at<S>(2 * i + b, half);
        const Fp8Pair pair = split_pair(acc[at] * factor.inverse, acc[at + 1] * factor.inverse);
        pairs[0][b] = pair.high, pairs[1][b] = pair.low;
      }
#pragma unroll
      for (int part = 0; part < S::kParts; ++part) words[part][i] = pairs[part][0] | pairs[part][1] << 16;
    }
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      const uint4 v = transpose_pairs(words[part]);
      const uint4 sixteen = make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410),
                                       __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x7632));
      char* out = static_cast<char*>(p.out) + (position * S::kParts + part) * p.out_stride + column;
      if (valid && column < p.n / 2) *reinterpret_cast<uint4*>(out) = sixteen;
    }
  }
}

template <class S>
struct Ring {
  uint32_t base, full, empty;  // addresses in shared memory
  int stage;
  uint32_t parity;

  __device__ __forceinline__ void advance(int by = 1) {
    stage += by;
    if (stage >= S::kStages) stage -= S::kStages, parity ^= 1;
  }
  __device__ __forceinline__ uint32_t x() const { return base + stage * S::kStageBytes; }
  __device__ __forceinline__ uint32_t weights() const { return x() + S::kXBytes; }
  __device__ __forceinline__ uint32_t arrived() const { return full + stage * 8; }
  __device__ __forceinline__ uint32_t released() const { return empty + stage * 8; }
};

// Loads the weights of a step: the first thread of each of two warps loads a half of the tile.
template <class S, bool GATE_UP>
__device__ __forceinline__ void load_weights(const baton_expert_gemm_args& p, const CUtensorMap* map, const Item& item, int step,
                                             const Ring<S>& ring, int half) {
  if (half == 0) barrier_expect(ring.arrived(), S::kWBytes);
#pragma unroll
  for (int i = 0; i < S::kTiles; ++i) {
    const int tile = item.tile * S::kTiles + i;
    const int row = tile * (GATE_UP ? S::kHalf : S::kN) + half * (GATE_UP ? p.n / 2 : S::kHalf);
    fetch_weights<(S::kTeams > 1)>(map, ring.weights() + i * S::kTileBytes + half * (S::kTileBytes / 2), ring.arrived(),
                                  step * S::kSlice, row, item.expert);
  }
}

// Loads weights and rows of x of all items of the CTA.
template <class S, bool GATE_UP, class Items>
__device__ __forceinline__ void load_items(const baton_expert_gemm_args& p, const CUtensorMap* map, Ring<S> ring, int steps,
                                           uint32_t factors, Items&& item_of) {
  constexpr int OWN = S::kOwnLoads;
  const int thread = threadIdx.x - S::kMath, c = thread & 7, r = thread >> 3;
  const bool loads_weights = thread == 0 || thread == WARP;
  int index = blockIdx.x;
  Item item = item_of(index);
  // Loads the first weights before the rows of x are known. For down, the preceding kernel may still run.
  int early = item.rows == 0 ? 0 : steps < S::kStages ? steps : S::kStages;
  if (loads_weights) {
    Ring<S> ahead = ring;
    for (int step = 0; step < early; ++step, ahead.advance()) {
      load_weights<S, GATE_UP>(p, map, item, step, ahead, thread / WARP);
    }
  }
  if (!GATE_UP) pdl_wait_and_release();
  // Looks up the rows of the next item while the loads of an item are in flight. With two parts, eight rows of shared
  // memory hold the first parts of rows of x, and the next eight hold the second parts.
  auto row_of = [&](int i) { return S::kParts == 2 ? 8 * i + (r & 7) : 16 * i + r; };
  int assignments[OWN];
  auto fetch_assignments = [&](const Item& of) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int m = row_of(i);
      assignments[i] = m >= of.rows ? 0 : GATE_UP ? p.order[of.position + m] : of.position + m;
    }
  };
  fetch_assignments(item);
  while (item.rows > 0) {
    const char* from[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int64_t row = (GATE_UP ? assignments[i] / p.count : assignments[i]) * S::kParts + (S::kParts == 2 ? r / 8 : 0);
      from[i] = static_cast<const char*>(p.x) + row * p.x_stride * S::kElementBytes + c * 16;
    }
    index += gridDim.x;
    const Item next = item_of(index);
    fetch_assignments(next);
    for (int step = 0; step < steps; ++step) {
      if (early > 0) {
        --early;
      } else {
        barrier_wait(ring.released(), ring.parity ^ 1);
        if (loads_weights) load_weights<S, GATE_UP>(p, map, item, step, ring, thread / WARP);
      }
      const int at = step * kSliceBytes;
      const bool in = at + c * 16 < p.depth * S::kElementBytes;
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
        const int m = r + 16 * i;
        const uint32_t to = ring.x() + m * kSliceBytes + ((c ^ (m & 7)) << 4);
        if (row_of(i) < item.rows) fetch_x(to, in ? from[i] + at : from[i], in);
      }
      if (S::kIsFp8 && !GATE_UP && thread < item.rows) {
        fetch_factors(factors + (ring.stage * S::kRows + thread) * 8,
                      p.factors + static_cast<int64_t>(item.position + thread) * p.factor_stride +
                          min(step * 2, p.factor_stride - 2));
      }
      arrive_with_x(ring.arrived());
      ring.advance();
    }
    item = next;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Multiplies a slice in bf16 and adds it to `acc`, unless it is the first. Does not wait for the result.
template <class S>
__device__ __forceinline__ void add_slice(const Ring<S>& ring, int group, bool is_first, float (&acc)[S::kN / 2]) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  const uint32_t x_at = ring.x() + group * (kGroupRows * kSliceBytes), w_at = ring.weights();
#pragma unroll
  for (int k = 0; k < kSliceBytes / 32; ++k) {
    multiply<S::kN, false>(acc, matrix_at(x_at + k * 32), matrix_at(w_at + k * 32), !is_first || k > 0);
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Multiplies a slice in FP8 by the weights of one of the item's tiles and adds it to the tile's `sums`. `factors` has the
// factors of the slice's halves by stage and row.
template <class S, bool GATE_UP>
__device__ __forceinline__ void add_slice_fp8(const Ring<S>& ring, int group, int tile,
                                              const float2 (*factors)[S::kRows],
                                              float (&sums)[S::kN / 2 / S::kParts]) {
  constexpr int HALVES = GATE_UP ? 1 : 2;  // a half of a slice has one factor
  const uint32_t x_at = ring.x() + group * (kGroupRows * kSliceBytes), w_at = ring.weights() + tile * S::kTileBytes;
  float2 own[S::kOwn];
#pragma unroll
  for (int half = 0; half < S::kOwn; ++half) {
    own[half] = GATE_UP ? make_float2(1.f, 1.f) : factors[ring.stage][own_row<S>(half)];
  }
#pragma unroll
  for (int part = 0; part < HALVES; ++part) {
    float acc[S::kN / 2];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4 / HALVES; ++k) {
      const int at = (part * 4 / HALVES + k) * 32;
      multiply<S::kN, true>(acc, matrix_at(x_at + at), matrix_at(w_at + at), k > 0);
    }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < S::kN / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
#pragma unroll
    for (int block = 0; block < S::kN / 8; ++block) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float low = acc[block * 4 + e], high = acc[block * 4 + 2 + e];
        if constexpr (S::kParts == 2) {
          sums[result_at<S>(block, 0) + e] += (low + high * kLowFactor) * (part ? own[0].y : own[0].x);
        } else {
          sums[result_at<S>(block, 0) + e] += low * (part ? own[0].y : own[0].x);
          sums[result_at<S>(block, 1) + e] += high * (part ? own[1].y : own[1].x);
        }
      }
    }
  }
}

// Returns the item with one of its tiles of the weight.
template <class S>
__device__ __forceinline__ Item tile_of(const Item& item, int tile) {
  return {item.expert, item.position, item.rows, item.tile * S::kTiles + tile};
}

// Returns the scale of weight row `threadIdx.x` of the tile.
template <class S, bool GATE_UP>
__device__ __forceinline__ float weight_scale(const baton_expert_gemm_args& p, const Item& item) {
  const int at = threadIdx.x % 128, limit = GATE_UP ? p.n / 2 : p.n;
  const int row = GATE_UP ? item.tile * S::kHalf + at % S::kHalf : item.tile * S::kN + at;
  const int64_t first = item.expert * p.weight_scales_stride + (GATE_UP ? at / S::kHalf * (p.n / 2) : 0);
  return item.rows > 0 && row < limit ? p.weight_scales[first + row] : 0.f;
}

// Multiplies the sums by the scales of the weight's rows. Each thread of the group has one scale.
template <class S>
__device__ __forceinline__ void scale_sums(float scale, int group, float* scales, float (&sums)[S::kN / 2 / S::kParts]) {
  static_assert(S::kN == 128, "a thread has one scale");
  auto wait_for_group = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); };
  wait_for_group();
  scales[threadIdx.x % 128] = scale;
  wait_for_group();
#pragma unroll
  for (int block = 0; block < S::kN / 8; ++block) {
    const float2 pair = *reinterpret_cast<const float2*>(scales + block * 8 + 2 * (threadIdx.x & 3));
#pragma unroll
    for (int half = 0; half < S::kOwn; ++half) {
      sums[result_at<S>(block, half)] *= pair.x;
      sums[result_at<S>(block, half) + 1] *= pair.y;
    }
  }
}

// The second team passes its sums of an item to the first team, which adds them to its own.
template <class S>
__device__ __forceinline__ void exchange_sums(int team, bool is_first_item, bool is_last_item, uint32_t inbox,
                                              float (&sums)[S::kN / 2 / S::kParts]) {
  constexpr int kFilled = 4, kRead = 5;  // barriers of both teams
  inbox += threadIdx.x % 128 * 4;
  if (team == 1) {
    if (!is_first_item) asm volatile("bar.sync %0, 256;" ::"n"(kRead) : "memory");
#pragma unroll
    for (int i = 0; i < S::kN / 2 / S::kParts; ++i) {
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(inbox + i * 512), "f"(sums[i]) : "memory");
    }
    asm volatile("bar.arrive %0, 256;" ::"n"(kFilled) : "memory");
    return;
  }
  asm volatile("bar.sync %0, 256;" ::"n"(kFilled) : "memory");
#pragma unroll
  for (int i = 0; i < S::kN / 2 / S::kParts; ++i) {
    float received;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(received) : "r"(inbox + i * 512) : "memory");
    sums[i] += received;
  }
  if (!is_last_item) asm volatile("bar.arrive %0, 256;" ::"n"(kRead) : "memory");
}

template <class S, bool GATE_UP>
__global__ void __launch_bounds__(S::kThreads, 1)
    expert_gemm_kernel(const __grid_constant__ baton_expert_gemm_args p, const __grid_constant__ CUtensorMap weight_map,
                       int tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char raw[];
  __shared__ __align__(8) uint64_t barriers[2 * S::kStages];
  __shared__ ItemTable table;
  __shared__ float2 factors[S::kIsFp8 ? S::kStages : 1][S::kIsFp8 ? S::kRows : 1];
  __shared__ float scales[S::kGroups][S::kIsFp8 ? S::kN : 1];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int team = warp / 4 / S::kGroups, group = warp / 4 % S::kGroups;
  // The number of slices, equal for each team. Slices beyond the depth are zeros.
  const int steps = (p.depth + S::kSlice * S::kTeams - 1) / (S::kSlice * S::kTeams) * S::kTeams;
  Ring<S> ring = {(smem_addr(raw) + 1023) / 1024 * 1024, smem_addr(barriers), smem_addr(barriers) + S::kStages * 8, 0, 0};
  if (threadIdx.x == S::kMath) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&weight_map) : "memory");
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(ring.full + i * 8, 1 + kLoaders);
      barrier_init(ring.empty + i * 8, S::kGroups * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  // For gate and up, the preceding kernel wrote the lists.
  if (GATE_UP) pdl_wait_and_release();
  if (warp == 0) fill_items<S::kRows>(p.offsets, p.experts, table);
  __syncthreads();
  auto item_of = [&](int index) { return item_at<S::kRows>(table, p.experts, tiles, index); };
  if (team == S::kTeams) {
    if constexpr (S::kTiles > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    return load_items<S, GATE_UP>(p, &weight_map, ring, steps, smem_addr(factors), item_of);
  }

  if constexpr (S::kTiles > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
  if (!GATE_UP) pdl_wait_and_release();
  auto release = [&](uint32_t barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  const int first_row = warp % (S::kGroups * 4) * (16 / S::kParts);
  int index = blockIdx.x;
  Item item = item_of(index);
  OwnRows<S> rows = own_rows<S>(p, item);
  fetch_scales<S, GATE_UP>(p, rows);
  ring.advance(team);
  for (bool is_first = true; item.rows > 0; is_first = false) {
    index += gridDim.x;
    const Item next = item_of(index);
    OwnRows<S> next_rows = own_rows<S>(p, next);
    if (group * (kGroupRows / S::kParts) >= item.rows) {
      for (int step = 0; step < steps; ++step, ring.advance()) {
        barrier_wait(ring.arrived(), ring.parity);
        release(ring.released());
      }
      fetch_scales<S, GATE_UP>(p, next_rows);
    } else if constexpr (S::kIsFp8) {
      float scale[S::kTiles], sums[S::kTiles][S::kN / 2 / S::kParts] = {};
#pragma unroll
      for (int i = 0; i < S::kTiles; ++i) scale[i] = weight_scale<S, GATE_UP>(p, tile_of<S>(item, i));
      for (int step = team; step < steps; step += S::kTeams, ring.advance(S::kTeams)) {
        barrier_wait(ring.arrived(), ring.parity);
#pragma unroll
        for (int i = 0; i < S::kTiles; ++i) add_slice_fp8<S, GATE_UP>(ring, group, i, factors, sums[i]);
        release(ring.released());
      }
      if constexpr (S::kTeams > 1) {
        exchange_sums<S>(team, is_first, next.rows == 0, ring.base + S::kStages * S::kStageBytes, sums[0]);
      }
      if (team == 0) {
        fetch_scales<S, GATE_UP>(p, next_rows);
#pragma unroll
        for (int i = 0; i < S::kTiles; ++i) {
          const Item of_tile = tile_of<S>(item, i);
          scale_sums<S>(scale[i], group, scales[group], sums[i]);
          if (first_row >= item.rows) continue;
          if constexpr (GATE_UP) store_fp8<S>(p, of_tile, rows, sums[i]);
          else store<S, false>(p, of_tile, rows, sums[i]);
        }
      }
    } else {
      float acc[S::kN / 2];
      uint32_t before = 0;
      for (int step = 0; step < steps; ++step, ring.advance()) {
        barrier_wait(ring.arrived(), ring.parity);
        add_slice<S>(ring, group, step == 0, acc);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (step > 0) release(before);
        before = ring.released();
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < S::kN / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
      release(before);
      fetch_scales<S, GATE_UP>(p, next_rows);
      if (first_row < item.rows) store<S, GATE_UP>(p, item, rows, acc);
    }
    item = next, rows = next_rows;
  }
#endif
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
Encode encode = nullptr;  // function of the driver; set by load_expert_gemm

template <int RANK>
int32_t make_map(CUtensorMap& map, CUtensorMapDataType type, const void* base, const cuuint64_t (&sizes)[RANK], const cuuint64_t (&strides)[RANK - 1],
                 const cuuint32_t (&box)[RANK]) {
  cuuint32_t ones[RANK];
  for (cuuint32_t& one : ones) one = 1;
  const CUresult result = encode(&map, type, RANK, const_cast<void*>(base), sizes, strides,
                                 box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return fail(BATON_CUDA + result, "cuTensorMapEncodeTiled failed: error %d", result);
  return BATON_OK;
}

// Returns the number of tiles of the weight.
template <class S>
int tiles_of(const baton_expert_gemm_args& p) {
  return p.is_gate_up ? divide_up(p.n / 2, S::kHalf) : divide_up(p.n, S::kN);
}

template <class S>
int32_t run(const baton_expert_gemm_args& p, int ctas, cudaStream_t stream) {
  CUtensorMap weight;
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const CUtensorMapDataType type = S::kIsFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  BATON_TRY(make_map<3>(weight, type, p.weight, {size(p.depth), size(p.n), size(p.experts)},
                        {size(p.depth) * S::kElementBytes, size(p.weight_stride) * S::kElementBytes},
                        {S::kSlice, S::kHalf, 1}));
  const int tiles = tiles_of<S>(p) / S::kTiles;
  const int64_t items_max = static_cast<int64_t>(p.rows) * p.count * tiles;
  const int grid = items_max < ctas ? static_cast<int>(items_max) : ctas;
  auto* kernel = p.is_gate_up ? expert_gemm_kernel<S, true> : expert_gemm_kernel<S, false>;
  return launch_as(p.pdl != 0, "GEMM of experts", kernel, dim3(grid), dim3(S::kThreads), S::kShared, stream, p, weight, tiles);
}

// Calls body(shape) for the shape of a call.
template <class Body>
int32_t with_shape(const baton_expert_gemm_args& p, Body&& body) {
  if (p.weight_scales && p.parts == 2) return body(FewFp8());
  if (p.weight_scales) return tiles_of<PairFp8>(p) % PairFp8::kTiles == 0 ? body(PairFp8()) : body(ManyFp8());
  const int64_t assignments = static_cast<int64_t>(p.rows) * p.count;
  return assignments > int64_t{kManyRows} * p.experts ? body(Many()) : body(Few());
}

int32_t check_args(const baton_expert_gemm_args& p) {
  BATON_REQUIRE(p.rows >= 0, "rows is %d; expected 0 or more", p.rows);
  BATON_REQUIRE(p.experts > 0 && p.experts <= BATON_EXPERTS_MAX, "experts is %d; expected 1 to %d", p.experts,
                BATON_EXPERTS_MAX);
  BATON_REQUIRE(p.count > 0 && p.count <= p.experts, "count is %d; expected 1 to %d", p.count, p.experts);
  BATON_REQUIRE(p.n > 0 && (!p.is_gate_up || p.n % 2 == 0), "n is %d; expected 1 or more, of gate and up even", p.n);
  BATON_REQUIRE(p.depth > 0 && p.depth % 8 == 0, "depth is %d; expected multiples of 8", p.depth);
  BATON_REQUIRE(p.x_stride >= p.depth && p.x_stride % 8 == 0,
                "x_stride is %lld; expected multiples of 8 from the depth, %d, on", static_cast<long long>(p.x_stride),
                p.depth);
  BATON_REQUIRE(p.weight_stride >= static_cast<int64_t>(p.n) * p.depth && p.weight_stride % 8 == 0,
                "weight_stride is %lld; expected multiples of 8 from %lld on", static_cast<long long>(p.weight_stride),
                static_cast<long long>(p.n) * p.depth);
  const int width = p.is_gate_up ? p.n / 2 : p.n;
  BATON_REQUIRE(p.out_stride >= width, "out_stride is %lld; expected %d or more", static_cast<long long>(p.out_stride),
                width);
  BATON_REQUIRE(p.grid >= 0, "grid is %d; expected 0 or more", p.grid);
  BATON_REQUIRE(p.weight && p.x && p.out && p.offsets && p.order, "weight, x, out, offsets or order is null");
  BATON_REQUIRE(p.out_stride % 8 == 0 && (p.is_gate_up ? p.n % 16 : p.n % 8) == 0,
                "out_stride is %lld and n %d; expected multiples of 8, and n of gate and up of 16",
                static_cast<long long>(p.out_stride), p.n);
  if (!p.weight_scales) return BATON_OK;
  BATON_REQUIRE(p.factors && (p.scales || !p.is_gate_up), "scales or factors is null");
  BATON_REQUIRE(p.parts == 1 || p.parts == 2, "parts is %d; expected 1 or 2", p.parts);
  BATON_REQUIRE(p.depth % 16 == 0 && p.n % 16 == 0 && p.x_stride % 16 == 0 && p.out_stride % 16 == 0 &&
                    p.weight_stride % 16 == 0,
                "depth is %d, n %d, x_stride %lld, out_stride %lld and weight_stride %lld; expected multiples of 16 in FP8",
                p.depth, p.n, static_cast<long long>(p.x_stride), static_cast<long long>(p.out_stride),
                static_cast<long long>(p.weight_stride));
  BATON_REQUIRE(!p.is_gate_up || p.n % 32 == 0, "n is %d; expected multiples of 32 for gate and up in FP8", p.n);
  const int columns = p.is_gate_up ? p.n / 2 : p.depth;
  BATON_REQUIRE(p.factor_stride % 2 == 0 && p.factor_stride * kFactorColumns >= columns,
                "factor_stride is %d; expected even numbers from %d on", p.factor_stride, divide_up(columns, kFactorColumns));
  return BATON_OK;
}

}  // namespace

int32_t load_expert_gemm() {
  const Device* device;
  BATON_TRY(any_device(device));
  if (device->major != 9 || device->minor != 0) return BATON_OK;
  cudaDriverEntryPointQueryResult found;
  void* function = nullptr;
  BATON_TRY(check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
                  "finding cuTensorMapEncodeTiled"));
  auto load_it = [](auto shape) -> int32_t {
    using S = decltype(shape);
    BATON_TRY(load(expert_gemm_kernel<S, true>, S::kShared));
    return load(expert_gemm_kernel<S, false>, S::kShared);
  };
  BATON_TRY(load_it(Few()));
  BATON_TRY(load_it(Many()));
  BATON_TRY(load_it(FewFp8()));
  BATON_TRY(load_it(ManyFp8()));
  BATON_TRY(load_it(PairFp8()));
  encode = reinterpret_cast<Encode>(function);
  return BATON_OK;
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_expert_gemm(const baton_expert_gemm_args* args, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(args, "args is null");
    const baton_expert_gemm_args& p = *args;
    BATON_TRY(check_args(p));
    if (p.rows == 0) return BATON_OK;
    const Device* device;
    BATON_TRY(any_device(device));
    if (encode == nullptr) {
      return fail(BATON_UNSUPPORTED, "experts need compute capability 9.0; this device has %d.%d", device->major,
                  device->minor);
    }
    const int ctas = p.grid > 0 && p.grid < device->sm_count ? p.grid : device->sm_count;
    return with_shape(p, [&](auto shape) { return run<decltype(shape)>(p, ctas, as_stream(stream)); });
  });
}
