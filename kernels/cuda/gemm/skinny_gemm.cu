// y[rows][n] = x[rows][k] W[n][k]^T for up to 16 rows: the weight is read once, at close to peak read bandwidth.
//
// Every warp of a CTA streams its own slices of k (cp.async, 16 bytes per lane, swizzled) through its own ring in
// shared memory and multiplies them with all rows of x, so the inner loop has no barrier. The warps' partial sums are
// reduced in shared memory at the end of a tile of weight rows. Fragments are loaded as 16-byte pieces with the same
// permutation of k in both operands, which does not change the reduction over k.
//
// Neighbouring operations are fused. A preceding RMS norm has two factors. The producer of x applies the norm's weight.
// This kernel applies the row's scale to the result. It computes the scale from the partial sums of squares that the
// producer stored, one per tile, in a fixed order. The epilogue is the residual add, silu(gate) * up, or bias, RoPE and
// KV store. Rows of W that the epilogue combines (gate and up, the two halves of a head) share a tile.
//
// With `pdl` (programmatic dependent launch) the rings are filled with weights before the preceding kernel has
// completed. Then the kernel waits for it, lets the next kernel start, and reads x. Data that a kernel reads before its
// wait was therefore written at least two kernels before.
//
// With `pdl` a CTA takes the whole shared memory of an SM on purpose: the next kernel's CTA starts on an SM only when
// this kernel's CTA there exits. With two CTAs per SM, early CTAs gather on idle SMs, and an SM with two CTAs finishes
// late. This is slower than no early start.
//
// With low-rank updates a CTA has helper warps. They compute x A^T together with those of the other CTAs (low_rank.h) while the
// other warps multiply. Their part of a tile's sums is the update, and they run the epilogue, so that the other warps go on
// with the next tiles.
#include <utility>

#include "skinny_tile.h"

namespace baton {
namespace {

constexpr int kRowsMax = 16;  // rows of x; wide_gemm.cu takes more

// Formats of the weight. FP8 is e4m3 with a scale per weight row, and is widened to bf16 in registers.
struct Bf16Weight {
  static constexpr int kBytes = 2, kHelperWarps = 0;
  static constexpr bool kHasRowScales = false;
};
// bf16, and the low-rank updates of the rows of x are added.
struct UpdatedBf16Weight {
  static constexpr int kBytes = 2, kHelperWarps = 4;
  static constexpr bool kHasRowScales = false;
};
struct Fp8Weight {
  static constexpr int kBytes = 1, kHelperWarps = 0;
  static constexpr bool kHasRowScales = true;
};
template <class W>
constexpr int kThreads = (kWarps + W::kHelperWarps) * WARP;
constexpr int kStagedFloats = 2048;  // of x A^T in shared memory
template <class W>
constexpr int kStageBytes = 8 * kSlice * W::kBytes;
constexpr int kSmemHalf = 112 * 1024, kSmemWhole = 224 * 1024;

template <class W, int NT, int MT, bool DEEP>
struct Shape {
  static constexpr int kRows = NT * 8;
  static constexpr int kSumPitch = kRows + 4;
  static constexpr int kSumFloats = kSums<W> * MT * 8 * kSumPitch;
  static constexpr int kBuffers = !kHasUpdate<W> || NT * MT > 4 ? 1 : NT * MT > 2 ? 2 : 3;  // of sums of tiles
  static constexpr int kSumBytes = (kBuffers * kSumFloats + 16 + kHasUpdate<W> * kStagedFloats) * 4;
  static constexpr int kFit = ((DEEP ? kSmemWhole : kSmemHalf) - kSumBytes) / (kWarps * kStageBytes<W>);
  // Stages for which each format has the same number of bytes in flight.
  static constexpr int kMost = (DEEP ? 24 : 12) / W::kBytes;
  static constexpr int kStages = kFit < kMost ? kFit : kMost;
  static constexpr int kSmem = kWarps * kStages * kStageBytes<W> + kSumBytes;
};

// Widens two FP8 numbers, in the high byte of each half of `word`, to bf16. The exponent bias of bf16 is greater by
// 120. The multiplication by 2^120 is exact, for subnormal numbers too.
__device__ __forceinline__ uint32_t widen_fp8(uint32_t word) {
  const uint32_t bits = (word & 0x80008000u) | ((word & 0x7f007f00u) >> 4);
  const uint32_t bias = 0x7b807b80u;  // 2^120 twice
  const __nv_bfloat162 wide =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), *reinterpret_cast<const __nv_bfloat162*>(&bias));
  return *reinterpret_cast<const uint32_t*>(&wide);
}

// Stores the accumulators of the eight weight rows from t * 8 on to part `part` of a tile's sums.
template <int NT, int MT>
__device__ __forceinline__ void store_sums(float* sums, int part, int t, const float (&acc)[4]) {
  constexpr int kPitch = NT * 8 + 4;
  const int lane = threadIdx.x & 31;
  float* to = sums + (part * MT * 8 + (lane >> 2)) * kPitch + t * 8 + 2 * (lane & 3);
  *reinterpret_cast<float2*>(to) = make_float2(acc[0], acc[1]);
  if (MT == 2) *reinterpret_cast<float2*>(to + 8 * kPitch) = make_float2(acc[2], acc[3]);
}

// Named barriers. A full buffer has the sums of a tile, a free one may get those of another tile.
constexpr int kHelperBarrier = 1, kFullBarrier = 2, kFreeBarrier = 5;
__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Work of a helper warp: its items of x A^T, then the updates of sixteen weight rows of each tile, and the epilogue.
template <class W, int NT, int MT, int EPI, class S>
__device__ __forceinline__ void help(const baton_skinny_gemm_args& p, int tiles, float* sums, const float* scales) {
  __shared__ uint8_t lists[W::kHelperWarps][SharedShrink::kRows];
  const int helper = threadIdx.x / WARP - kWarps;
  const bool adds = helper < NT / 2;
  SharedShrink shrink(p.low_rank, p.rows, p.depth);
  shrink.prefetch_a(helper * gridDim.x + blockIdx.x, W::kHelperWarps * gridDim.x);
  UpdateOfRows<2, 8> update(p.low_rank, p.rows, p.n, 0);
  auto prepare = [&](int tile) {
    const int2 at = tile_rows<NT * 8, EPI>(p, tile);
    update.prepare(make_int2(at.x + helper * 8, at.y + helper * 8));
  };
  if (adds) prepare(blockIdx.x);
  pdl_wait_and_release();
  shrink.compute<MT>(static_cast<const bf16*>(p.x), p.x_stride, lists[helper]);
  shrink.wait();
  auto shrunk = shrink.shrunk();
  const int pitch = p.low_rank.ranges * shrink.rank_most;
  if (p.rows * pitch <= kStagedFloats) {
    auto* staged = const_cast<float*>(scales) + 16;
    const int thread = threadIdx.x - kWarps * WARP;
    shrink.for_each_four(thread, W::kHelperWarps * WARP, 0, p.low_rank.ranges, [&](int row, int, int, int place, int) {
      *reinterpret_cast<float4*>(staged + row * pitch + place) = shrunk.four(row, place);
    });
    named_sync(kHelperBarrier, W::kHelperWarps * WARP);
    shrunk = {staged, pitch, 0, 1};
  }
  int buffer = 0;
  unsigned long long left = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float acc[2][4] = {};
    float* const to = sums + buffer * S::kSumFloats;
    if (adds) update.add(shrunk, acc);
    if (tile + gridDim.x >= tiles) left = shrink.leave();
    if (adds) {
      store_sums<NT, MT>(to, kWarps, helper, acc[0]);
      store_sums<NT, MT>(to, kWarps, NT / 2 + helper, acc[1]);
      if (tile + gridDim.x < tiles) prepare(tile + gridDim.x);
    }
    named_sync(kFullBarrier + buffer, kThreads<W>);
    finish_tile<W, NT, MT, EPI>(p, tile, tiles, to, scales);
    if (S::kBuffers == 1) named_sync(kHelperBarrier, W::kHelperWarps * WARP);
    if (tile + S::kBuffers * gridDim.x < tiles) named_arrive(kFreeBarrier + buffer, kThreads<W>);
    buffer = (buffer + 1) % S::kBuffers;
  }
  shrink.reset_after_last(left, W::kHelperWarps * gridDim.x);
}

template <class W, int NT, int MT, int EPI, bool DEEP>
__global__ void __launch_bounds__(kThreads<W>, DEEP || kHasUpdate<W> ? 1 : 2)
    skinny_gemm_kernel(const __grid_constant__ GemmArgs<kHasUpdate<W>> args, int tiles) {
  const baton_skinny_gemm_args& p = args.get();
  using S = Shape<W, NT, MT, DEEP>;
  constexpr int R = NT * 8;
  constexpr int kStage = kStageBytes<W>;
  constexpr int kParts = kSlice / 32;       // 16-byte pieces of x per lane and slice
  constexpr int kEach = 16 / W::kBytes;     // weights of a 16-byte piece
  constexpr int kPieces = kSlice / kEach;   // pieces of a weight row and slice
  constexpr int kRowsAtOnce = 32 / kPieces; // weight rows that a warp loads with one instruction
  extern __shared__ __align__(128) char smem[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, c = lane & 3;
  char* mine = smem + warp * (S::kStages * kStage);
  float* sums = reinterpret_cast<float*>(smem + kWarps * S::kStages * kStage);
  float* scales = sums + S::kBuffers * S::kSumFloats;
  if constexpr (kHasUpdate<W>) {
    if (warp >= kWarps) return help<W, NT, MT, EPI, S>(p, tiles, sums, scales);
  }
  const int slices = (p.depth + kSlice - 1) / kSlice;

  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  const char* weight = (const char*)p.weight;
  const int r_at = lane / kPieces, ch = lane % kPieces;
  const uint32_t dst0 = smem_addr(mine) + r_at * (kPieces * 16) + ((ch ^ ((r_at & 1) << 2)) << 4);
  int a_tile = warp < slices ? blockIdx.x : tiles, a_slice = warp, a_t = 0;
  int2 a_at = tile_rows<R, EPI>(p, a_tile);
  auto load = [&](int stage) {
    if (a_tile < tiles) {
      const int k = a_slice * kSlice + ch * kEach;
#pragma unroll
      for (int i = 0; i < 8 / kRowsAtOnce; ++i) {
        int r = a_t * 8 + kRowsAtOnce * i + r_at;
        int row = r < R / 2 ? a_at.x + r : a_at.y + r - R / 2;
        bool ok = row < p.n && k < p.depth;
        const char* src = ok ? weight + ((int64_t)row * p.depth + k) * W::kBytes : weight;
        int n = ok ? 16 : 0;
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(
                         dst0 + stage * kStage + i * 512),
                     "l"(src), "r"(n), "l"(policy)
                     : "memory");
      }
      if (++a_t == NT) {
        a_t = 0;
        a_slice += kWarps;
        if (a_slice >= slices) {
          a_slice = warp;
          a_tile += gridDim.x;
          a_at = tile_rows<R, EPI>(p, a_tile);
        }
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll
  for (int i = 0; i < S::kStages; ++i) load(i);
  pdl_wait_and_release();

  store_scales(p, 16, scales);

  // Pieces of x for each piece of the weight, which has 16 bytes: with FP8, a piece of the weight has twice the
  // elements.
  constexpr int kXPieces = 2 / W::kBytes;
  const bf16* x0 = (const bf16*)p.x + g * p.x_stride + c * kEach;
  const bf16* x1 = x0 + 8 * p.x_stride;
  const bool has0 = g < p.rows, has1 = MT == 2 && g + 8 < p.rows;
  constexpr bool kAhead = DEEP || NT <= 4;
  uint4 xn[kParts][MT];
  auto fetch_x = [&](int s) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      int k = s * kSlice + i / kXPieces * (4 * kEach) + i % kXPieces * 8;
      bool in = k + c * kEach < p.depth;
      xn[i][0] = in && has0 ? *reinterpret_cast<const uint4*>(x0 + k) : make_uint4(0, 0, 0, 0);
      if (MT == 2) xn[i][MT - 1] = in && has1 ? *reinterpret_cast<const uint4*>(x1 + k) : make_uint4(0, 0, 0, 0);
    }
  };
  if (kAhead && blockIdx.x < tiles) fetch_x(warp);
  int stage = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float acc[NT][4] = {};
    for (int s = warp; s < slices; s += kWarps) {
      uint4 x[kParts][MT];
      if (!kAhead) fetch_x(s);
#pragma unroll
      for (int i = 0; i < kParts; ++i)
#pragma unroll
        for (int m = 0; m < MT; ++m) x[i][m] = xn[i][m];
      if (kAhead) fetch_x(s + kWarps < slices ? s + kWarps : warp);
      if constexpr (W::kBytes == 1) {
        // Puts x in the order in which widen_fp8 yields four weights: 0 and 2, 1 and 3.
        auto reorder = [](uint32_t& a, uint32_t& b) {
          const uint32_t even = __byte_perm(a, b, 0x5410);
          b = __byte_perm(a, b, 0x7632);
          a = even;
        };
#pragma unroll
        for (int i = 0; i < kParts; ++i)
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            reorder(x[i][m].x, x[i][m].y);
            reorder(x[i][m].z, x[i][m].w);
          }
      }
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        asm volatile("cp.async.wait_group %0;" ::"n"(S::kStages - 1) : "memory");
        __syncwarp();
        const char* base = mine + stage * kStage + g * (kPieces * 16);
        uint4 w[kParts / kXPieces];
#pragma unroll
        for (int i = 0; i < kParts / kXPieces; ++i)
          w[i] = *reinterpret_cast<const uint4*>(base + (((i * 4 + c) ^ ((g & 1) << 2)) << 4));
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          uint4 u = MT == 2 ? x[i][MT - 1] : make_uint4(0, 0, 0, 0);
          uint4 v;
          if constexpr (W::kBytes == 1) {
            const uint4 piece = w[i / 2];
            const uint32_t first = i % 2 ? piece.z : piece.x, second = i % 2 ? piece.w : piece.y;
            v = make_uint4(widen_fp8(first << 8), widen_fp8(first), widen_fp8(second << 8), widen_fp8(second));
          } else {
            v = w[i];
          }
          mma(acc[t], x[i][0].x, u.x, x[i][0].y, u.y, v.x, v.y);
          mma(acc[t], x[i][0].z, u.z, x[i][0].w, u.w, v.z, v.w);
        }
        __syncwarp();
        load(stage);
        stage = stage + 1 == S::kStages ? 0 : stage + 1;
      }
    }
    float* to = sums;
    const int round = (tile - blockIdx.x) / gridDim.x, buffer = round % S::kBuffers;
    if constexpr (kHasUpdate<W>) {
      to += buffer * S::kSumFloats;
      if (round >= S::kBuffers) named_sync(kFreeBarrier + buffer, kThreads<W>);
    }
#pragma unroll
    for (int t = 0; t < NT; ++t) store_sums<NT, MT>(to, warp, t, acc[t]);
    if constexpr (kHasUpdate<W>) {
      named_arrive(kFullBarrier + buffer, kThreads<W>);
    } else {
      __syncthreads();
      finish_tile<W, NT, MT, EPI>(p, tile, tiles, sums, scales);
      __syncthreads();
    }
  }
}

// Calls body(kernel, shared bytes) for a tile of NT * 8 weight rows. DEEP, for dependent launch, doubles the rings.
template <class W, int NT, int MT, bool DEEP, class Body>
int32_t with_epilogue(int epilogue, Body&& body) {
  constexpr int bytes = Shape<W, NT, MT, DEEP>::kSmem;
  switch (epilogue) {
    case BATON_SKINNY_PLAIN: return body(skinny_gemm_kernel<W, NT, MT, BATON_SKINNY_PLAIN, DEEP>, bytes);
    case BATON_SKINNY_RESIDUAL: return body(skinny_gemm_kernel<W, NT, MT, BATON_SKINNY_RESIDUAL, DEEP>, bytes);
    case BATON_SKINNY_SILU: return body(skinny_gemm_kernel<W, NT, MT, BATON_SKINNY_SILU, DEEP>, bytes);
    case BATON_SKINNY_F32:
      if constexpr (kHasUpdate<W>) return fail(BATON_INVALID, "check_shape accepts no update with epilogue F32");
      else return body(skinny_gemm_kernel<W, NT, MT, BATON_SKINNY_F32, DEEP>, bytes);
    case BATON_SKINNY_QKV: return body(skinny_gemm_kernel<W, NT, MT, BATON_SKINNY_QKV, DEEP>, bytes);
    default: return fail(BATON_INVALID, "epilogue is %d; expected 0 to 4", epilogue);
  }
}
template <class W, int NT, class Body>
int32_t with_kernel(int epilogue, int rows, bool deep, Body&& body) {
  if (rows <= 8) {
    return deep ? with_epilogue<W, NT, 1, true>(epilogue, body) : with_epilogue<W, NT, 1, false>(epilogue, body);
  }
  return deep ? with_epilogue<W, NT, 2, true>(epilogue, body) : with_epilogue<W, NT, 2, false>(epilogue, body);
}
template <class W, class Body>
int32_t with_kernel(int tile, int epilogue, int rows, bool deep, Body&& body) {
  switch (tile) {
    case 16: return with_kernel<W, 2>(epilogue, rows, deep, body);
    case 32: return with_kernel<W, 4>(epilogue, rows, deep, body);
    default: return with_kernel<W, 8>(epilogue, rows, deep, body);
  }
}
enum class Format { BF16, BF16_UPDATED, FP8 };
template <class Body>
int32_t with_kernel(Format format, int tile, int epilogue, int rows, bool deep, Body&& body) {
  switch (format) {
    case Format::BF16: return with_kernel<Bf16Weight>(tile, epilogue, rows, deep, body);
    case Format::BF16_UPDATED: return with_kernel<UpdatedBf16Weight>(tile, epilogue, rows, deep, body);
    default: return with_kernel<Fp8Weight>(tile, epilogue, rows, deep, body);
  }
}

// Returns whether wide_gemm.cu computes this GEMM: every GEMM of more than 16 rows, and GEMMs of 9 to 16 rows with
// epilogue RESIDUAL, SILU or QKV and at least 4,096 inputs and outputs if wide_gemm.cu has a tile for them.
// wide_gemm.cu is faster for these GEMMs (README.md).
bool is_wide(const baton_skinny_gemm_args& p, const Device& device) {
  if (p.weight_scales) return false;
  if (p.rows > kRowsMax) return true;
  const bool is_inner = p.epilogue != BATON_SKINNY_PLAIN && p.epilogue != BATON_SKINNY_F32;
  if (p.rows <= 8 || !is_inner || p.depth < 4096 || p.n < 4096) return false;
  return wide_gemm_tile(p, device) != 0;
}

// Returns whether fp8_gemm.cu computes this GEMM: every GEMM with a weight in FP8 and x in bf16 for which fp8_gemm.cu
// has the tile.
bool is_fp8_wide(const baton_skinny_gemm_args& p, const Device& device) {
  if (!p.weight_scales || p.parts) return false;
  const int tile = fp8_gemm_tile(p, device);
  return tile != 0 && (p.tile == 0 || p.tile == tile);
}

// Chooses the tile of a valid call.
int choose_tile(const baton_skinny_gemm_args& p, int grid) {
  if (p.tile != 0) return p.tile;
  // Cost of the busiest CTA in weight rows; the end of a tile costs as much as about four. Of tiles with equal cost the
  // largest is chosen, because it reads x least often.
  int best = 0, least = 1 << 30;
  for (int tile : kTiles) {
    if (p.epilogue == BATON_SKINNY_QKV && p.head_dim % tile != 0) continue;
    const int tiles = divide_up(p.n, tile);
    const int cost = divide_up(tiles, grid) * (tile + 4);
    if (cost < least) {
      least = cost;
      best = tile;
    }
  }
  return best;
}

}  // namespace

int32_t load_skinny_gemm() {
  for (int tile : kTiles) {
    for (int epilogue = BATON_SKINNY_PLAIN; epilogue <= BATON_SKINNY_QKV; ++epilogue) {
      for (int rows : {8, 16}) {
        for (bool deep : {false, true}) {
          for (Format format : {Format::BF16, Format::BF16_UPDATED, Format::FP8}) {
            if (format == Format::BF16_UPDATED && epilogue == BATON_SKINNY_F32) continue;
            BATON_TRY(with_kernel(format, tile, epilogue, rows, deep,
                                  [](auto* kernel, int bytes) { return load(kernel, bytes); }));
          }
        }
      }
    }
  }
  BATON_TRY(load_fp8_gemm());
  BATON_TRY(load_wide_fp8_gemm());
  return load_wide_gemm();
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_skinny_gemm_rows_max(void) { return WIDE_ROWS_MAX; }

BATON_API int32_t baton_skinny_gemm_tile(const baton_skinny_gemm_args* args) {
  int32_t tile = 0;
  guarded([&]() -> int32_t {
    BATON_REQUIRE(args, "args is null");
    BATON_TRY(check_shape(*args));
    const Device* device;
    BATON_TRY(any_device(device));
    if (args->parts) {
      tile = wide_fp8_gemm_tile(*args, *device);
      return BATON_OK;
    }
    if (is_fp8_wide(*args, *device)) {
      tile = fp8_gemm_tile(*args, *device);
      return BATON_OK;
    }
    if (is_wide(*args, *device)) {
      tile = wide_gemm_tile(*args, *device);
      return BATON_OK;
    }
    if (device->shared_bytes < kSmemHalf || args->tile > 64) return BATON_UNSUPPORTED;
    if (args->weight_block || args->rows > kRowsMax) return BATON_UNSUPPORTED;
    tile = choose_tile(*args, args->grid > 0 ? args->grid : device->sm_count);
    return BATON_OK;
  });
  return tile;
}

BATON_API int32_t baton_skinny_gemm(const baton_skinny_gemm_args* args, void* stream) {
  return guarded([&]() -> int32_t {
    BATON_REQUIRE(args, "args is null");
    const baton_skinny_gemm_args& p = *args;
    BATON_TRY(check_shape(p));
    if (p.rows == 0) return BATON_OK;
    BATON_TRY(check_operands(p));
    const Device* device;
    BATON_TRY(any_device(device));
    if (p.parts) {
      const int tile = wide_fp8_gemm_tile(p, *device);
      if (tile == 0 || (p.tile != 0 && p.tile != tile)) {
        return fail(BATON_UNSUPPORTED,
                    "no GEMM with x in FP8 for %d rows, a weight of %d x %d and epilogue %d: use cuBLAS", p.rows, p.n, p.depth,
                    p.epilogue);
      }
      BATON_REQUIRE(p.out_stride % 2 == 0, "out_stride is %lld; expected even numbers",
                    static_cast<long long>(p.out_stride));
      return wide_fp8_gemm(p, *device, as_stream(stream));
    }
    if (is_fp8_wide(p, *device)) {
      BATON_REQUIRE(p.out_stride % 2 == 0, "out_stride is %lld; expected even numbers",
                    static_cast<long long>(p.out_stride));
      return fp8_gemm(p, *device, as_stream(stream));
    }
    if (p.weight_scales && (p.weight_block || p.rows > kRowsMax)) {
      return fail(BATON_UNSUPPORTED, "no GEMM for %d rows, a weight in FP8 of %d x %d and epilogue %d: use cuBLAS",
                  p.rows, p.n, p.depth, p.epilogue);
    }
    if (is_wide(p, *device)) {
      const int tile = wide_gemm_tile(p, *device);
      if (tile == 0) {
        return fail(BATON_UNSUPPORTED, "no wide GEMM for %d rows, a weight of %d x %d and epilogue %d: use cuBLAS",
                    p.rows, p.n, p.depth, p.epilogue);
      }
      BATON_REQUIRE(p.out_stride % 2 == 0, "out_stride is %lld; expected even numbers",
                    static_cast<long long>(p.out_stride));
      return wide_gemm(p, tile, *device, as_stream(stream));
    }
    if (p.tile > 64) {
      return fail(BATON_UNSUPPORTED, "tile is %d; expected 0, 16, 32 or 64 for these rows", p.tile);
    }
    const bool deep = p.pdl != 0 && device->shared_bytes >= kSmemWhole;
    int grid = p.grid > 0 ? p.grid : device->sm_count;
    const int tile = choose_tile(p, grid);
    const int tiles = divide_up(p.n, tile);
    grid = tiles < grid ? tiles : grid;
    const Format format = p.weight_scales ? Format::FP8 : p.low_rank.shrunk ? Format::BF16_UPDATED : Format::BF16;
    const int threads = format == Format::BF16_UPDATED ? kThreads<UpdatedBf16Weight> : kThreads<Bf16Weight>;
    return with_kernel(format, tile, p.epilogue, p.rows, deep, [&](auto* kernel, int bytes) {
      if (bytes > device->shared_bytes) {
        return fail(BATON_UNSUPPORTED, "a skinny GEMM needs %d bytes of shared memory; a CTA has at most %d", bytes,
                    device->shared_bytes);
      }
      return launch_as(deep, "skinny GEMM", kernel, dim3(grid), dim3(threads), bytes, as_stream(stream), p, tiles);
    });
  });
}
