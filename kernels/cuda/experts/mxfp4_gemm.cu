// y = x W^T for the rows of each expert, with weights in MXFP4 (sm_90a). wgmma takes its first operand from registers.
// So weight rows are the rows of the result, and rows of x are its columns: a warpgroup widens 64 weight rows to bf16
// in registers, while the tensor cores multiply the slice before. No weight is written to shared memory a second time.
//
// The widened weight is exact: the bits of two e2m1 numbers are moved to their places in two bf16 numbers, which are
// then 2^126 times too small. A multiplication with 2^(scale - 1) gives the numbers times their scale (e8m0).
//
// A weight is stored in chunks of 64 rows and 64 columns, in the order in which the threads read it, so one bulk copy
// loads a chunk. Rows of x are loaded by index, as in expert_gemm.cu. The order of a sum over k does not depend on the
// tile, so the bits of a row do not depend on the other rows. CTAs count their tiles from the lists, so that a captured
// graph fits any routing. With `pdl` down fills its ring with weights before the preceding kernel has completed.
//
// With few rows x of a tile stays in shared memory for the whole depth. Warpgroups then share nothing but x: each has
// its own tiles of 64 weight rows, its ring and the warp that loads it. Otherwise slices of x go through the ring.
#include "../gemm/hopper.h"
#include "experts.h"
#include "items.cuh"
#include "rows.cuh"

namespace baton {
namespace {

constexpr int kSlice = 64;        // columns of a chunk
constexpr int kSliceBytes = 128;  // of a row of x in a stage
constexpr int kGroupRows = 64;    // weight rows of a chunk and of a warpgroup
constexpr int kNumberBytes = kGroupRows * kSlice / 2;
constexpr int kChunkBytes = kNumberBytes + kGroupRows * (kSlice / 32);  // numbers, then scales
constexpr int kSmemOfSm = 228 * 1024;
constexpr int kStagesMost = 20;
// Rows of an expert, on average, up to which a shape is the fastest.
constexpr int kHeld8Rows = 5, kHeld16Rows = 9, kHeld24Rows = 18, kHeld32Rows = 128, kSomeRows = 64;

// GROUPS: warpgroups of 64 weight rows; ROWS: rows of x; LOADERS: threads that load; CTAS: CTAs of an SM.
template <int GROUPS, int ROWS, int LOADERS, int CTAS>
struct Shape {
  static constexpr int kGroups = GROUPS, kRows = ROWS, kLoaders = LOADERS, kCtas = CTAS;
  static constexpr int kThreads = GROUPS * 128 + LOADERS;
  static constexpr int kLoadRows = LOADERS / 8;           // rows that the loaders load at once
  static constexpr int kOwnLoads = ROWS / kLoadRows;      // rows that a thread loads
  static constexpr int kOwnColumns = (ROWS + 127) / 128;  // rows of x that a thread looks up for its warpgroup
  static constexpr int kXBytes = ROWS * kSliceBytes, kStageBytes = kXBytes + GROUPS * kChunkBytes;
  static constexpr int kStatic = static_cast<int>(sizeof(ItemTable)) + 2 * kStagesMost * 8 + GROUPS * ROWS * 8 + 64;
  static constexpr int kFit = (kSmemOfSm / CTAS - 2048 - kStatic) / kStageBytes;
  static constexpr int kStages = kFit < kStagesMost ? kFit : kStagesMost;
  static constexpr int kShared = kStages * kStageBytes + 1024;
  static constexpr bool kMovesRegisters = LOADERS == 128;  // from the loaders to the sums
  static_assert(ROWS % 32 == 0, "the loads and the stores take whole groups of rows");
};

// Shape of tiles whose rows of x are held in shared memory for the whole depth. GROUPS: warpgroups, each with its own
// tiles of 64 weight rows; STAGES: pairs of chunks in a warpgroup's ring.
template <int ROWS, int GROUPS, int STAGES>
struct Held {
  static constexpr int kRows = ROWS, kGroups = GROUPS, kStages = STAGES;
  static constexpr int kOwners = GROUPS * 128, kThreads = kOwners + GROUPS * WARP;  // with a loading warp for each
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
using Some = Shape<3, 64, 64, 1>;
using Many = Shape<2, 256, 128, 1>;

#define D4(a) "+f"(d[a]), "+f"(d[a + 1]), "+f"(d[a + 2]), "+f"(d[a + 3])
#define D8(a)                                                                                                 \
  "+f"(d[a]), "+f"(d[a + 1]), "+f"(d[a + 2]), "+f"(d[a + 3]), "+f"(d[a + 4]), "+f"(d[a + 5]), "+f"(d[a + 6]), \
      "+f"(d[a + 7])
#define D32(a) D8(a), D8(a + 8), D8(a + 16), D8(a + 24)
#define REGS4 "%0,%1,%2,%3"
#define REGS8 REGS4 ",%4,%5,%6,%7"
#define REGS12 REGS8 ",%8,%9,%10,%11"
#define REGS16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define REGS32 REGS16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGS128                                                                                                        \
  REGS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57"    \
         ",%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83"    \
         ",%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107"    \
         ",%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA(N, REGS, A0, A1, A2, A3, B, S, ...)                                                         \
  asm volatile(                                                                                           \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, " S ", 0;\n"                                                \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS "}, {" A0 "," A1 "," A2 "," A3    \
      "}, " B ", adds, 1, 1, 0;\n}\n"                                                                     \
      : __VA_ARGS__                                                                                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))

// d = a b (+ d): 64 weight rows in registers, N rows of x, 16 of k.
template <int N>
__device__ __forceinline__ void multiply_widened(float (&d)[N / 2], const uint32_t* a, uint64_t b, int adds) {
  if constexpr (N == 8) {
    WGMMA(8, REGS4, "%4", "%5", "%6", "%7", "%8", "%9", D4(0));
  } else if constexpr (N == 16) {
    WGMMA(16, REGS8, "%8", "%9", "%10", "%11", "%12", "%13", D8(0));
  } else if constexpr (N == 24) {
    WGMMA(24, REGS12, "%12", "%13", "%14", "%15", "%16", "%17", D8(0), D4(8));
  } else if constexpr (N == 32) {
    WGMMA(32, REGS16, "%16", "%17", "%18", "%19", "%20", "%21", D8(0), D8(8));
  } else if constexpr (N == 64) {
    WGMMA(64, REGS32, "%32", "%33", "%34", "%35", "%36", "%37", D32(0));
  } else {
    static_assert(N == 256, "no wgmma instruction for this N");
    WGMMA(256, REGS128, "%128", "%129", "%130", "%131", "%132", "%133", D32(0), D32(32), D32(64), D32(96));
  }
}
#undef WGMMA
#undef REGS128
#undef REGS32
#undef REGS16
#undef REGS12
#undef REGS8
#undef REGS4
#undef D32
#undef D8
#undef D4

__device__ __forceinline__ void fetch_bulk(uint32_t to, const char* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// ---- Widening ----

__device__ __forceinline__ uint32_t multiply_pair(uint32_t pair, uint32_t factor) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factor));
  return product;
}

// Returns two equal bf16 numbers: 2^(exponent - 127) for an exponent from 1 to 254.
__device__ __forceinline__ uint32_t power_pair(uint32_t exponent) { return exponent << 7 | exponent << 23; }

// Widens four words of eight numbers, one for each 16 columns. kernels/src/mxfp4.rs writes the fields of a word: the
// first is in place, a rotation moves the second and the third, and a multiplication moves the bits of the fourth by 2,
// 7 and 12, with no carry.
__device__ __forceinline__ void widen_words(const uint32_t (&words)[4], const uint32_t (&factors)[4],
                                            uint32_t (&a)[16]) {
  constexpr uint32_t kField = 0x81c081c0, kFourth = 0x001b001b, kMoves = 1 << 2 | 1 << 7 | 1 << 12;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const uint32_t w = words[q], high = factors[q / 2], low = factors[2 + q / 2];
    a[4 * q] = multiply_pair(w & kField, high);
    a[4 * q + 1] = multiply_pair(__funnelshift_l(w, w, 10) & kField, low);
    a[4 * q + 2] = multiply_pair(__funnelshift_l(w, w, 13) & kField, high);
    a[4 * q + 3] = multiply_pair((w & kFourth) * kMoves & kField, low);
  }
}

// Widens a thread's part of a chunk. Bytes of `scales`: the row's two groups of 32 columns, then those of the row eight
// below.
__device__ __forceinline__ void widen(const uint32_t (&words)[4], uint32_t scales, uint32_t (&a)[16]) {
  constexpr uint32_t kGreatest = 128;  // scale that one multiplication reaches
  uint32_t factors[4];
  const uint32_t exponents = scales + 126 * 0x01010101u;
#pragma unroll
  for (int i = 0; i < 4; ++i) factors[i] = __byte_perm(exponents, 0, 0x4440 + i) * 0x00800080;
  widen_words(words, factors, a);
  // The sums of great scales carry.
  if (__any_sync(FULL, (scales & 0x80808080) != 0)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) factors[i] = power_pair(min(scales >> (8 * i) & 0xff, kGreatest) + 126);
    widen_words(words, factors, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) factors[i] = power_pair(max(scales >> (8 * i) & 0xff, kGreatest) - 1);
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i] = multiply_pair(a[i], factors[i % 2 * 2 + i / 8]);
  }
}

// A thread's part of a chunk in shared memory: numbers and scales.
struct OwnWords {
  uint32_t words[4], scales;

  __device__ __forceinline__ explicit OwnWords(uint32_t chunk) {
    const uint32_t thread = threadIdx.x % 128;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(chunk + thread * 16));
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(scales) : "r"(chunk + kNumberBytes + thread / 4 * 4));
  }
};

// ---- Tiles ----

// The rows of x of a thread's warpgroup that the thread looks up. Two steps load the assignments and then the factors,
// so that no step waits for a load.
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

struct Column {
  int assignment;
  float scale;
};

// Returns the pairs of a transposed matrix of 8 by 8 numbers in bf16: the pairs of a column are those of a row.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// Returns the clamped SwiGLU of a gate and an up value.
__device__ __forceinline__ float activate(const baton_mxfp4_gemm_args& p, float gate, float up) {
  gate = fminf(gate, p.limit);
  up = fminf(fmaxf(up, -p.limit), p.limit);
  return __fdividef(gate, 1.f + __expf(-p.alpha * gate)) * (up + 1.f);
}

// Outputs of a warp, whose rows are eight gate rows and their up rows, or 16 outputs of down; and the first of them.
template <bool GATE_UP>
constexpr int kOutputs = GATE_UP ? 8 : 16;
template <bool GATE_UP>
__device__ __forceinline__ int first_output(int tile) {
  return (tile * 4 + threadIdx.x % 128 / WARP) * kOutputs<GATE_UP>;
}

// Biases of a thread's two weight rows.
struct Biases {
  float first, second;
};
template <bool GATE_UP>
__device__ __forceinline__ Biases fetch_biases(const baton_mxfp4_gemm_args& p, const Item& item, int tile) {
  const int width = GATE_UP ? p.n / 2 : p.n, base = first_output<GATE_UP>(tile);
  const float* bias = p.bias + item.expert * p.bias_stride + base + threadIdx.x % WARP / 4;
  Biases biases = {0.f, 0.f};
  if (p.bias && base < width) biases.first = bias[0];
  if (p.bias && base + kOutputs<GATE_UP> - 8 < width) biases.second = bias[GATE_UP ? width : 8];
  return biases;
}

// Stores a warp's results.
template <class S, bool GATE_UP>
__device__ __forceinline__ void store(const baton_mxfp4_gemm_args& p, const Item& item, int tile, const Column* columns,
                                      const Biases& biases, const float (&acc)[S::kRows / 2]) {
  constexpr int kTogether = GATE_UP ? 4 : 2;  // groups of eight rows of x that are stored together
  const int lane = threadIdx.x % WARP, g = lane >> 2, c = lane & 3, width = GATE_UP ? p.n / 2 : p.n;
  const int base = first_output<GATE_UP>(tile);
  const float first = biases.first, second = biases.second;
#pragma unroll
  for (int j = 0; j < S::kRows / 8; j += kTogether) {
    if (j * 8 >= item.rows) break;
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (j + i >= S::kRows / 8) {
        pairs[GATE_UP ? i : 2 * i] = pairs[GATE_UP ? i : 2 * i + 1] = 0;
        continue;
      }
      const float* v = acc + 4 * (j + i);
      if constexpr (GATE_UP) {
        const Column* of = columns + (j + i) * 8 + 2 * c;
        pairs[i] = pack(activate(p, v[0] * of[0].scale + first, v[2] * of[0].scale + second),
                        activate(p, v[1] * of[1].scale + first, v[3] * of[1].scale + second));
      } else {
        pairs[2 * i] = pack(v[0] + first, v[1] + first);
        pairs[2 * i + 1] = pack(v[2] + second, v[3] + second);
      }
    }
#pragma unroll
    for (uint32_t& pair : pairs) pair = transpose_matrix(pair);
    const uint4 eight = transpose_pairs(pairs);
    const int m = (j + (GATE_UP ? c : c / 2)) * 8 + g, column = base + (GATE_UP ? 0 : c % 2 * 8);
    if (m >= item.rows || column >= width) continue;
    const int64_t row = GATE_UP ? item.position + m : columns[m].assignment;
    *reinterpret_cast<uint4*>(static_cast<bf16*>(p.out) + row * p.out_stride + column) = eight;
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

// Sizes of a weight in chunks.
struct Chunks {
  int tiles;  // of 64 rows
  int steps;  // of 64 columns
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

// Multiplies a tile of 64 weight rows. The widening of a slice overlaps the multiplication of the slice before.
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
__global__ void __launch_bounds__(S::kThreads, S::kCtas)
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
  // The preceding kernel wrote the lists of gate and up.
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
  auto wait_for_group = [&] {
    // A barrier by number would take all barriers of the CTA.
    if constexpr (S::kGroups == 1) asm volatile("bar.sync 1, 128;" ::: "memory");
    else asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
  };
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

// ---- Tiles with x held in shared memory ----

// Neighbouring tiles of the weight for the same rows of x.
struct Segment {
  Item item;  // the first tile
  int tiles;  // of the CTA

  // First tile of a warpgroup; that of the next warpgroup is the end.
  template <class S>
  __device__ __forceinline__ int first_of(int group) const {
    return item.tile + tiles * group / S::kGroups;
  }
};

// The segments of a CTA's part of all tiles.
template <class S>
struct Part {
  const ItemTable& table;
  int experts, tiles;  // tiles of an expert's weight
  int index, end;

  __device__ __forceinline__ Part(const ItemTable& table, int experts, int tiles)
      : table(table), experts(experts), tiles(tiles) {
    const int64_t total = static_cast<int64_t>(table.tile[experts]) * tiles;
    index = static_cast<int>(total * blockIdx.x / gridDim.x);
    end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  }
  // Returns the next segment, which has no tiles after the last.
  __device__ __forceinline__ Segment next() {
    Segment segment = {};
    if (index >= end) return segment;
    segment.item = item_at<S::kRows>(table, experts, tiles, index);
    segment.tiles = min(end - index, tiles - segment.item.tile);
    index += segment.tiles;
    return segment;
  }
};

// Addresses of a warpgroup's ring, and its place in the ring. A stage has two chunks, or the last of an odd number.
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

// Loads the weights of a warpgroup, by one thread of a warp of its own.
template <class S>
struct Loader {
  const baton_mxfp4_gemm_args& p;
  const Chunks& chunks;
  Part<S> part;
  Segment segment;
  int group;
  HeldRing<S> ring;
  int early;  // pairs of the first tile that are loaded

  __device__ __forceinline__ Loader(const baton_mxfp4_gemm_args& p, const Chunks& chunks, const ItemTable& table,
                                    int group, const HeldRing<S>& ring)
      : p(p), chunks(chunks), part(table, p.experts, chunks.tiles), segment(part.next()), group(group), ring(ring),
        early(0) {}
  __device__ __forceinline__ int pairs() const { return (chunks.steps + 1) / 2; }
  // Loads pairs of a tile, from `first` up to `end`.
  __device__ __forceinline__ void load_pairs(int tile, int first, int end) {
    const char* from = static_cast<const char*>(p.weight) + segment.item.expert * p.weight_stride +
                       (static_cast<int64_t>(tile) * chunks.steps + first * 2) * kChunkBytes;
    for (int pair = first; pair < end; ++pair, from += 2 * kChunkBytes) {
      const int bytes = min(2, chunks.steps - 2 * pair) * kChunkBytes;
      barrier_wait(ring.released(), ring.parity ^ 1);
      barrier_expect(ring.arrived(), bytes);
      fetch_bulk(ring.stage_at(), from, bytes, ring.arrived());
      ring.advance();
    }
  }
  // Fills the ring.
  __device__ __forceinline__ void load_early() {
    const int tile = segment.first_of<S>(group);
    early = tile < segment.first_of<S>(group + 1) ? min(pairs(), S::kStages) : 0;
    load_pairs(tile, 0, early);
  }
  __device__ __forceinline__ void load_rest() {
    for (; segment.tiles > 0; segment = part.next()) {
      for (int tile = segment.first_of<S>(group); tile < segment.first_of<S>(group + 1); ++tile) {
        load_pairs(tile, early, pairs());
        early = 0;
      }
    }
  }
};

// Loads a tile of x as slices of 64 columns, and the places of its rows.
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
  // Later than x, so that no load of x waits for these.
  if (threadIdx.x < item.rows) {
    const int assignment = p.order[item.position + threadIdx.x];
    const bool is_scaled = GATE_UP && p.scales;
    columns[threadIdx.x] = {assignment, is_scaled ? p.scales[assignment / p.count] : 1.f};
  }
  asm volatile("cp.async.wait_all;\nfence.proxy.async.shared::cta;" ::: "memory");
}

// Multiplies a tile of 64 weight rows with the held x. The widening of a slice overlaps the multiplication of the slice
// before.
template <class S>
__device__ __forceinline__ void multiply_held(HeldRing<S>& ring, uint32_t x, int steps, float (&acc)[S::kRows / 2]) {
  uint32_t even[16], odd[16];
  uint64_t matrix = matrix_at(x);
#pragma unroll
  for (float& sum : acc) sum = 0.f;
  auto add_slice = [&](const OwnWords& own, uint32_t (&a)[16]) {
    widen(own.words, own.scales, a);
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
  // The preceding kernel wrote the lists of gate and up.
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
  Part<S> part(table, p.experts, chunks.tiles);
  for (Segment segment = part.next(); segment.tiles > 0; segment = part.next()) {
    hold_x<S, GATE_UP>(p, chunks.steps, segment.item, x, columns);
    wait_for_owners();
    for (int tile = segment.first_of<S>(group); tile < segment.first_of<S>(group + 1); ++tile) {
      const Biases biases = fetch_biases<GATE_UP>(p, segment.item, tile);
      float acc[S::kRows / 2];
      multiply_held<S>(ring, x, chunks.steps, acc);
      store<S, GATE_UP>(p, segment.item, tile, columns, biases, acc);
    }
    wait_for_owners();
  }
#endif
}

// Returns whether x of a tile fits into shared memory.
template <class S>
bool fits(const baton_mxfp4_gemm_args& p) {
  return S::shared_bytes(divide_up(p.depth, kSlice)) <= S::kSharedMost;
}

template <class S>
int32_t run_held(const baton_mxfp4_gemm_args& p, int sms, cudaStream_t stream) {
  const Chunks chunks = {divide_up(p.n, kGroupRows), divide_up(p.depth, kSlice)};
  const int64_t items_max = static_cast<int64_t>(p.rows) * p.count * chunks.tiles;
  const int ctas = items_max < sms ? static_cast<int>(items_max) : sms;
  auto* kernel = p.is_gate_up ? held_gemm_kernel<S, true> : held_gemm_kernel<S, false>;
  return launch_as(p.pdl != 0, "GEMM of experts in MXFP4", kernel, dim3(ctas), dim3(S::kThreads),
                   S::shared_bytes(chunks.steps), stream, p, chunks);
}

template <class S>
int32_t run(const baton_mxfp4_gemm_args& p, int sms, cudaStream_t stream) {
  const Chunks chunks = {divide_up(p.n, kGroupRows), divide_up(p.depth, kSlice)};
  const int64_t items_max = static_cast<int64_t>(p.rows) * p.count * divide_up(chunks.tiles, S::kGroups);
  const int ctas_max = sms * S::kCtas, ctas = items_max < ctas_max ? static_cast<int>(items_max) : ctas_max;
  auto* kernel = p.is_gate_up ? mxfp4_gemm_kernel<S, true> : mxfp4_gemm_kernel<S, false>;
  return launch_as(p.pdl != 0, "GEMM of experts in MXFP4", kernel, dim3(ctas), dim3(S::kThreads), S::kShared, stream, p,
                   chunks);
}

// Launches the fastest shape for the rows of an expert, on average.
int32_t run_fastest(const baton_mxfp4_gemm_args& p, int sms, cudaStream_t stream) {
  const int64_t assignments = static_cast<int64_t>(p.rows) * p.count;
  auto is_up_to = [&](int rows) { return assignments <= static_cast<int64_t>(rows) * p.experts; };
  if (is_up_to(kHeld8Rows) && fits<Held8>(p)) return run_held<Held8>(p, sms, stream);
  if (is_up_to(kHeld16Rows) && fits<Held16>(p)) return run_held<Held16>(p, sms, stream);
  if (is_up_to(kHeld24Rows) && fits<Held24>(p)) return run_held<Held24>(p, sms, stream);
  if (is_up_to(kHeld32Rows) && fits<Held32>(p)) return run_held<Held32>(p, sms, stream);
  return is_up_to(kSomeRows) ? run<Some>(p, sms, stream) : run<Many>(p, sms, stream);
}

int32_t check_args(const baton_mxfp4_gemm_args& p) {
  BATON_REQUIRE(p.rows >= 0, "rows is %d; expected 0 or more", p.rows);
  BATON_REQUIRE(p.experts > 0 && p.experts <= BATON_EXPERTS_MAX, "experts is %d; expected 1 to %d", p.experts,
                BATON_EXPERTS_MAX);
  BATON_REQUIRE(p.count > 0 && p.count <= p.experts, "count is %d; expected 1 to %d", p.count, p.experts);
  BATON_REQUIRE(p.n > 0 && p.n % (p.is_gate_up ? 16 : 8) == 0,
                "n is %d; expected multiples of 8, and of 16 for gate and up", p.n);
  BATON_REQUIRE(p.depth > 0 && p.depth % 32 == 0, "depth is %d; expected multiples of 32", p.depth);
  BATON_REQUIRE(p.x_stride >= p.depth && p.x_stride % 8 == 0,
                "x_stride is %lld; expected multiples of 8 from the depth, %d, on", static_cast<long long>(p.x_stride),
                p.depth);
  const int64_t bytes = int64_t{kChunkBytes} * divide_up(p.n, kGroupRows) * divide_up(p.depth, kSlice);
  BATON_REQUIRE(p.weight_stride >= bytes && p.weight_stride % 16 == 0,
                "weight_stride is %lld; expected multiples of 16 from %lld on", static_cast<long long>(p.weight_stride),
                static_cast<long long>(bytes));
  const int width = p.is_gate_up ? p.n / 2 : p.n;
  BATON_REQUIRE(p.out_stride >= width && p.out_stride % 8 == 0,
                "out_stride is %lld; expected multiples of 8 from %d on", static_cast<long long>(p.out_stride), width);
  BATON_REQUIRE(p.grid >= 0, "grid is %d; expected 0 or more", p.grid);
  BATON_REQUIRE(p.weight && p.x && p.out && p.offsets && p.order, "weight, x, out, offsets or order is null");
  return BATON_OK;
}

bool is_loaded = false;  // set by load_mxfp4_gemm

}  // namespace

int32_t load_mxfp4_gemm() {
  const Device* device;
  BATON_TRY(any_device(device));
  if (device->major != 9 || device->minor != 0) return BATON_OK;
  auto load_held = [](auto shape) -> int32_t {
    using S = decltype(shape);
    BATON_TRY(load(held_gemm_kernel<S, true>, S::kSharedMost));
    return load(held_gemm_kernel<S, false>, S::kSharedMost);
  };
  auto load_it = [](auto shape) -> int32_t {
    using S = decltype(shape);
    BATON_TRY(load(mxfp4_gemm_kernel<S, true>, S::kShared));
    return load(mxfp4_gemm_kernel<S, false>, S::kShared);
  };
  BATON_TRY(load_held(Held8()));
  BATON_TRY(load_held(Held16()));
  BATON_TRY(load_held(Held24()));
  BATON_TRY(load_held(Held32()));
  BATON_TRY(load_it(Some()));
  BATON_TRY(load_it(Many()));
  is_loaded = true;
  return BATON_OK;
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_mxfp4_gemm(const baton_mxfp4_gemm_args* args, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(args, "args is null");
    const baton_mxfp4_gemm_args& p = *args;
    BATON_TRY(check_args(p));
    if (p.rows == 0) return BATON_OK;
    const Device* device;
    BATON_TRY(any_device(device));
    if (!is_loaded) {
      return fail(BATON_UNSUPPORTED, "experts need compute capability 9.0; this device has %d.%d", device->major,
                  device->minor);
    }
    const int sms = p.grid > 0 && p.grid < device->sm_count ? p.grid : device->sm_count;
    return run_fastest(p, sms, as_stream(stream));
  });
}
