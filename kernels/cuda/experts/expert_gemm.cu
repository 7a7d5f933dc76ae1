// y = x W^T for the rows of each expert (sm_90a). A tile has some rows of one expert and some rows of its weight. Four
// threads load the weight by TMA, 128 threads gather the rows of x by index, and warpgroups of 64 rows compute with
// wgmma. Rows are not padded: an expert's last tile gathers the rows that it has, and the results of other rows are not
// stored. CTAs take the tiles in turn, counted on the device, and the loads of a tile overlap with the end of the tile
// before.
//
// Small tiles give every SM an equal share of the weights, and large tiles read x and the weight less often. The order of
// a sum over k does not depend on the tile: a row's results have the same bits in any company.
//
// With `pdl` down fills its ring with weights before the preceding kernel has completed: the lists are older.
#include <cuda.h>

#include "experts.h"

#include "device.cuh"
#include "items.cuh"

namespace baton {
namespace {

constexpr int kChunk = 64;  // elements of k in a row of 128 bytes, the widest row that TMA swizzles
constexpr int kGroupRows = 64;  // rows of x that a warpgroup computes
constexpr int kLoaders = 128;
constexpr int kSmem = 227 * 1024;
constexpr int kStagesMost = 12;
constexpr int kManyRows = 40;  // rows of an expert, on average, above which large tiles are faster

// ROWS: rows of x in a tile; N: weight rows; KC: chunks of k per stage.
template <int ROWS, int N, int KC>
struct Shape {
  static constexpr int kRows = ROWS, kN = N, kHalf = N / 2, kChunks = KC;
  static constexpr int kGroups = (ROWS + kGroupRows - 1) / kGroupRows;
  static constexpr int kThreads = kGroups * 128 + kLoaders;
  static constexpr int kXBytes = ROWS * kChunk * 2, kWBytes = N * kChunk * 2;  // of a chunk
  static constexpr int kStageBytes = KC * (kXBytes + kWBytes);
  static constexpr int kStatic = static_cast<int>(sizeof(ItemTable)) + 2 * kStagesMost * 8 + 64;
  static constexpr int kFit = (kSmem - 1024 - kStatic) / kStageBytes;
  static constexpr int kStages = kFit < kStagesMost ? kFit : kStagesMost;
  static constexpr int kShared = kStages * kStageBytes + 1024;
  static_assert(kHalf % 8 == 0 && ROWS % 16 == 0 && kXBytes % 1024 == 0, "swizzling needs whole groups of eight rows");
  // The results of rows outside of the tile are not stored.
  static_assert(KC * kWBytes >= kGroupRows * kChunk * 2, "wgmma reads 64 rows of x");
};
using Few = Shape<64, 128, 1>;
using Many = Shape<128, 256, 1>;

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
__device__ __forceinline__ void fetch_weights(const CUtensorMap* map, uint32_t to, uint32_t barrier, int k, int row,
                                              int expert) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(k), "r"(row), "r"(expert)
      : "memory");
}
__device__ __forceinline__ void fetch_x(uint32_t to, const bf16* from, bool in) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(in ? 16 : 0) : "memory");
}
// Arrives when the thread's loads of x so far are complete.
__device__ __forceinline__ void arrive_with_x(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
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
#define WGMMA(N, REGS, A, B, S, ...)                                                     \
  asm volatile(                                                                          \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, " S ", 0;\n"                               \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS "}, " A ", " B   \
      ", adds, 1, 1, 0, 0;\n}\n"                                                         \
      : __VA_ARGS__                                                                      \
      : "l"(a), "l"(b), "r"(adds))

// d = a b (+ d): 64 rows of x, N weight rows, 16 of k.
template <int N>
__device__ __forceinline__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, int adds) {
  if constexpr (N == 128) {
    WGMMA(128, REGS64, "%64", "%65", "%66", D32(0), D32(32));
  } else {
    static_assert(N == 256, "no wgmma instruction for this N");
    WGMMA(256, REGS128, "%128", "%129", "%130", D32(0), D32(32), D32(64), D32(96));
  }
}
#undef WGMMA
#undef REGS128
#undef REGS64
#undef REGS16
#undef D32
#undef D8

// Gives lane c of four neighbours the pairs c of all four, where each lane has pairs 0 to 3.
__device__ __forceinline__ uint4 transpose_pairs(uint32_t (&v)[4]) {
  const int c = threadIdx.x & 3;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t received = __shfl_xor_sync(FULL, c & 1 ? v[i] : v[i + 1], 1);
    if (c & 1) v[i] = received;
    else v[i + 1] = received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t received = __shfl_xor_sync(FULL, c & 2 ? v[i] : v[i + 2], 2);
    if (c & 2) v[i] = received;
    else v[i + 2] = received;
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ uint32_t pack(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Rows g and g + 8 of a warp's 16. Two steps load the assignments and then the factors, so that no step waits for a
// load.
struct OwnRows {
  int assignment[2];  // negative: the item has no such row
  float scale[2];
};

template <class S>
__device__ __forceinline__ OwnRows own_rows(const baton_expert_gemm_args& p, const Item& item) {
  OwnRows rows = {{-1, -1}, {1.f, 1.f}};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4 + half * 8;
    if (m < item.rows) rows.assignment[half] = p.order[item.position + m];
  }
  return rows;
}
template <bool GATE_UP>
__device__ __forceinline__ void fetch_scales(const baton_expert_gemm_args& p, OwnRows& rows) {
  if (!GATE_UP || !p.scales) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (rows.assignment[half] >= 0) rows.scale[half] = p.scales[rows.assignment[half] / p.count];
  }
}

// Stores a warp's results of 16 rows.
template <class S, bool GATE_UP>
__device__ __forceinline__ void store(const baton_expert_gemm_args& p, const Item& item, const OwnRows& rows,
                                      const float (&acc)[S::kN / 2]) {
  constexpr int BLOCKS = (GATE_UP ? S::kHalf : S::kN) / 8;
  const int c = threadIdx.x & 3;
  const int width = GATE_UP ? p.n / 2 : p.n, begin = item.tile * BLOCKS * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = rows.scale[half];
    const bool valid = rows.assignment[half] >= 0;
    const int position = item.position + threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4 + half * 8;
    bf16* out = static_cast<bf16*>(p.out) + (GATE_UP ? position : rows.assignment[half]) * p.out_stride;
#pragma unroll
    for (int j = 0; j < BLOCKS; j += 4) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float v[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = (j + i) * 4 + half * 2 + e;
          v[e] = acc[at] * scale;
          if (GATE_UP) v[e] = __fdividef(v[e], 1.f + __expf(-v[e])) * (acc[S::kN / 4 + at] * scale);
        }
        pairs[i] = pack(v[0], v[1]);
      }
      const uint4 eight = transpose_pairs(pairs);
      const int column = begin + j * 8 + c * 8;
      if (valid && column < width) *reinterpret_cast<uint4*>(out + column) = eight;
    }
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
  __device__ __forceinline__ uint32_t x() const { return base + stage * S::kStageBytes; }
  __device__ __forceinline__ uint32_t weights() const { return x() + S::kChunks * S::kXBytes; }
  __device__ __forceinline__ uint32_t arrived() const { return full + stage * 8; }
  __device__ __forceinline__ uint32_t released() const { return empty + stage * 8; }
};

// Loads the weights of a step. The first thread of each of four warps loads some of the boxes.
template <class S, bool GATE_UP>
__device__ __forceinline__ void load_weights(const baton_expert_gemm_args& p, const CUtensorMap* map, const Item& item, int step,
                                             const Ring<S>& ring, int part) {
  if (part == 0) barrier_expect(ring.arrived(), S::kChunks * S::kWBytes);
#pragma unroll
  for (int box = 0; box < 2 * S::kChunks; ++box) {
    if (box % (kLoaders / WARP) != part) continue;
    const int chunk = box / 2, half = box % 2;
    const int row = item.tile * (GATE_UP ? S::kHalf : S::kN) + half * (GATE_UP ? p.n / 2 : S::kHalf);
    fetch_weights(map, ring.weights() + box * (S::kWBytes / 2), ring.arrived(), (step * S::kChunks + chunk) * kChunk, row,
                  item.expert);
  }
}

// Loads weights and rows of x of all items of the CTA.
template <class S, bool GATE_UP, class Items>
__device__ __forceinline__ void load_items(const baton_expert_gemm_args& p, const CUtensorMap* map, Ring<S> ring, int steps,
                                           Items&& item_of) {
  constexpr int OWN = S::kRows / 16;  // rows of a thread
  const int thread = threadIdx.x - S::kGroups * 128, c = thread & 7, r = thread >> 3;
  const bool loads_weights = thread % WARP == 0;
  int index = blockIdx.x;
  Item item = item_of(index);
  int early = 0;
  if (!GATE_UP) {
    early = item.rows == 0 ? 0 : steps < S::kStages ? steps : S::kStages;
    if (loads_weights) {
      Ring<S> ahead = ring;
      for (int step = 0; step < early; ++step, ahead.advance()) {
        load_weights<S, GATE_UP>(p, map, item, step, ahead, thread / WARP);
      }
    }
    pdl_wait_and_release();
  }
  // Looks up the rows of the next item while the loads of an item are in flight.
  int assignments[OWN];
  auto fetch_assignments = [&](const Item& of) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int m = r + 16 * i;
      assignments[i] = m >= of.rows ? 0 : GATE_UP ? p.order[of.position + m] : of.position + m;
    }
  };
  fetch_assignments(item);
  while (item.rows > 0) {
    const bf16* from[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int row = GATE_UP ? assignments[i] / p.count : assignments[i];
      from[i] = static_cast<const bf16*>(p.x) + row * p.x_stride + c * 8;
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
#pragma unroll
      for (int chunk = 0; chunk < S::kChunks; ++chunk) {
        const int k = (step * S::kChunks + chunk) * kChunk;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
          const int m = r + 16 * i;
          const bool in = k + c * 8 < p.depth;
          const uint32_t to = ring.x() + chunk * S::kXBytes + m * (kChunk * 2) + ((c ^ (m & 7)) << 4);
          if (m < item.rows) fetch_x(to, in ? from[i] + k : from[i], in);
        }
      }
      arrive_with_x(ring.arrived());
      ring.advance();
    }
    item = next;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

template <class S, bool GATE_UP>
__global__ void __launch_bounds__(S::kThreads, 1)
    expert_gemm_kernel(const __grid_constant__ baton_expert_gemm_args p, const __grid_constant__ CUtensorMap weight_map,
                       int tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char raw[];
  __shared__ __align__(8) uint64_t barriers[2 * S::kStages];
  __shared__ ItemTable table;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = warp / 4;
  const int steps = (p.depth + S::kChunks * kChunk - 1) / (S::kChunks * kChunk);
  Ring<S> ring = {(smem_addr(raw) + 1023) / 1024 * 1024, smem_addr(barriers), smem_addr(barriers) + S::kStages * 8, 0, 0};
  if (threadIdx.x == S::kGroups * 128) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&weight_map) : "memory");
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(ring.full + i * 8, 1 + kLoaders);
      barrier_init(ring.empty + i * 8, S::kGroups * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  // The preceding kernel wrote the lists of gate and up.
  if (GATE_UP) pdl_wait_and_release();
  if (warp == 0) fill_items<S::kRows>(p.offsets, p.experts, table);
  __syncthreads();
  auto item_of = [&](int index) { return item_at<S::kRows>(table, p.experts, tiles, index); };
  if (group == S::kGroups) return load_items<S, GATE_UP>(p, &weight_map, ring, steps, item_of);

  if (!GATE_UP) pdl_wait_and_release();
  auto release = [&](uint32_t barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  int index = blockIdx.x;
  Item item = item_of(index);
  OwnRows rows = own_rows<S>(p, item);
  fetch_scales<GATE_UP>(p, rows);
  while (item.rows > 0) {
    index += gridDim.x;
    const Item next = item_of(index);
    OwnRows next_rows = own_rows<S>(p, next);
    if (group * kGroupRows >= item.rows) {
      for (int step = 0; step < steps; ++step, ring.advance()) {
        barrier_wait(ring.arrived(), ring.parity);
        release(ring.released());
      }
      fetch_scales<GATE_UP>(p, next_rows);
    } else {
      float acc[S::kN / 2];
      uint32_t before = 0;
      for (int step = 0; step < steps; ++step, ring.advance()) {
        barrier_wait(ring.arrived(), ring.parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const uint32_t x_at = ring.x() + group * (kGroupRows * kChunk * 2), w_at = ring.weights();
#pragma unroll
        for (int chunk = 0; chunk < S::kChunks; ++chunk) {
#pragma unroll
          for (int k = 0; k < kChunk / 16; ++k) {
            multiply<S::kN>(acc, matrix_at(x_at + chunk * S::kXBytes + k * 32), matrix_at(w_at + chunk * S::kWBytes + k * 32),
                            step > 0 || chunk > 0 || k > 0);
          }
        }
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (step > 0) release(before);
        before = ring.released();
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < S::kN / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
      release(before);
      fetch_scales<GATE_UP>(p, next_rows);
      if (warp * 16 < item.rows) store<S, GATE_UP>(p, item, rows, acc);
    }
    item = next, rows = next_rows;
  }
#endif
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
Encode encode = nullptr;  // of the driver; set by load_grouped_gemm

template <int RANK>
int32_t make_map(CUtensorMap& map, const void* base, const cuuint64_t (&sizes)[RANK], const cuuint64_t (&strides)[RANK - 1],
                 const cuuint32_t (&box)[RANK]) {
  cuuint32_t ones[RANK];
  for (cuuint32_t& one : ones) one = 1;
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, RANK, const_cast<void*>(base), sizes, strides,
                                 box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return fail(BATON_CUDA + result, "cuTensorMapEncodeTiled failed: error %d", result);
  return BATON_OK;
}

template <class S>
int32_t run(const baton_expert_gemm_args& p, int ctas, cudaStream_t stream) {
  CUtensorMap weight;
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  BATON_TRY(make_map<3>(weight, p.weight, {size(p.depth), size(p.n), size(p.experts)},
                        {size(p.depth) * 2, size(p.weight_stride) * 2}, {kChunk, S::kHalf, 1}));
  const int tiles = p.is_gate_up ? divide_up(p.n / 2, S::kHalf) : divide_up(p.n, S::kN);
  const int64_t items_max = static_cast<int64_t>(p.rows) * p.count * tiles;
  const int grid = items_max < ctas ? static_cast<int>(items_max) : ctas;
  auto* kernel = p.is_gate_up ? expert_gemm_kernel<S, true> : expert_gemm_kernel<S, false>;
  return launch_as(p.pdl != 0, "GEMM of experts", kernel, dim3(grid), dim3(S::kThreads), S::kShared, stream, p, weight, tiles);
}

// Calls body(shape) for the shape of a call.
template <class Body>
int32_t with_shape(const baton_expert_gemm_args& p, Body&& body) {
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
