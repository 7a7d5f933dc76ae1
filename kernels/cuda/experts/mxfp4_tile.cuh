// A tile of the GEMMs of experts in MXFP4 (mxfp4_gemm.cu): widens 64 weight rows in registers, multiplies them by rows
// of x, and stores the results.
#pragma once

#include "../gemm/hopper.h"
#include "experts.h"
#include "items.cuh"
#include "rows.cuh"

namespace baton {
namespace {

constexpr int kSlice = 64;        // columns of a chunk
constexpr int kSliceBytes = 128;  // bytes of a row of x in a slice
constexpr int kGroupRows = 64;    // weight rows of a chunk and of a warpgroup
constexpr int kNumberBytes = kGroupRows * kSlice / 2;
constexpr int kChunkBytes = kNumberBytes + kGroupRows * (kSlice / 32);  // numbers, then scales
constexpr int kSmemOfSm = 228 * 1024;

// Sizes of a weight in chunks.
struct Chunks {
  int tiles;  // rows of chunks, each of 64 weight rows
  int steps;  // chunks of a tile, each of 64 columns
};

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
#define REGS64                                                                                                      \
  REGS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57" \
         ",%58,%59,%60,%61,%62,%63"
#define REGS96                                                                                                      \
  REGS64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89" \
         ",%90,%91,%92,%93,%94,%95"
#define REGS128                                                                                                     \
  REGS96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116"    \
         ",%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA(N, REGS, A0, A1, A2, A3, B, S, ...)                                                         \
  asm volatile(                                                                                           \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, " S ", 0;\n"                                                \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS "}, {" A0 "," A1 "," A2 "," A3    \
      "}, " B ", adds, 1, 1, 0;\n}\n"                                                                     \
      : __VA_ARGS__                                                                                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))

// d = a b (+ d): 64 weight rows in registers, N rows of x, 16 of k. Uses the first N / 2 numbers of d.
template <int N, int COUNT>
__device__ __forceinline__ void multiply_widened(float (&d)[COUNT], const uint32_t* a, uint64_t b, int adds) {
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
  } else if constexpr (N == 128) {
    WGMMA(128, REGS64, "%64", "%65", "%66", "%67", "%68", "%69", D32(0), D32(32));
  } else if constexpr (N == 192) {
    WGMMA(192, REGS96, "%96", "%97", "%98", "%99", "%100", "%101", D32(0), D32(32), D32(64));
  } else {
    static_assert(N == 256, "no wgmma instruction for this N");
    WGMMA(256, REGS128, "%128", "%129", "%130", "%131", "%132", "%133", D32(0), D32(32), D32(64), D32(96));
  }
}
#undef WGMMA
#undef REGS128
#undef REGS96
#undef REGS64
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

// The same with a policy of the L2 cache.
__device__ __forceinline__ void fetch_bulk_as(uint32_t to, const char* from, int bytes, uint32_t barrier,
                                                uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
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

// A thread's part of a chunk, loaded from shared memory: numbers of a row and of the row eight below, in four words of
// 16 columns, and scales. Bytes of `scales`: the scales of the first row's two groups of 32 columns, then those of the
// second row.
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

// Widens COUNT words from word `first` on. A word has eight numbers of 16 columns: columns of a row and of the row eight
// below. kernels/src/mxfp4.rs defines the four fields of a word. The first field is in place. Rotations move the second
// and the third. A multiplication moves the bits of the fourth by 2, 7 and 12 without a carry.
template <int COUNT>
__device__ __forceinline__ void widen_words(const OwnWords& own, int first, const uint32_t (&factors)[4],
                                            uint32_t (&a)[4 * COUNT]) {
  constexpr uint32_t kField = 0x81c081c0, kFourth = 0x001b001b, kMoves = 1 << 2 | 1 << 7 | 1 << 12;
#pragma unroll
  for (int q = 0; q < COUNT; ++q) {
    const int at = first + q;
    const uint32_t w = own.words[at], high = factors[at / 2], low = factors[2 + at / 2];
    a[4 * q] = multiply_pair(w & kField, high);
    a[4 * q + 1] = multiply_pair(__funnelshift_l(w, w, 10) & kField, low);
    a[4 * q + 2] = multiply_pair(__funnelshift_l(w, w, 13) & kField, high);
    a[4 * q + 3] = multiply_pair((w & kFourth) * kMoves & kField, low);
  }
}

// Widens COUNT words from word `first` on, and applies their scales.
template <int COUNT>
__device__ __forceinline__ void widen(const OwnWords& own, int first, uint32_t (&a)[4 * COUNT]) {
  constexpr uint32_t kGreatest = 128;  // greatest scale that one multiplication can apply
  uint32_t factors[4];
  const uint32_t exponents = own.scales + 126 * 0x01010101u;
#pragma unroll
  for (int i = 0; i < 4; ++i) factors[i] = __byte_perm(exponents, 0, 0x4440 + i) * 0x00800080;
  widen_words<COUNT>(own, first, factors, a);
  // The byte-wise addition above is valid for scales below 128. With a scale of 128 or more, two multiplications apply
  // the scales, with factors that are computed one by one.
  if (__any_sync(FULL, (own.scales & 0x80808080) != 0)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) factors[i] = power_pair(min(own.scales >> (8 * i) & 0xff, kGreatest) + 126);
    widen_words<COUNT>(own, first, factors, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) factors[i] = power_pair(max(own.scales >> (8 * i) & 0xff, kGreatest) - 1);
#pragma unroll
    for (int i = 0; i < 4 * COUNT; ++i) a[i] = multiply_pair(a[i], factors[i % 2 * 2 + (first + i / 4) / 2]);
  }
}

// ---- Results ----

struct Column {
  int assignment;
  float scale;
};

// Transposes a matrix of 8 by 8 bf16 numbers, of which each lane has a pair. Returns the lane's pair of the result.
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

// Outputs of a warp's 16 weight rows: eight gate rows and their eight up rows give 8 outputs, rows of down give 16.
template <bool GATE_UP>
constexpr int kOutputs = GATE_UP ? 8 : 16;
// Returns the first output of the warp.
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

}  // namespace
}  // namespace baton
