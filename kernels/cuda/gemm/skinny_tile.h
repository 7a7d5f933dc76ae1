// Parts that the GEMMs of few rows share: skinny_gemm.cu and int4_gemm.cu. The warps of a CTA share the k of a tile of
// weight rows, and store their parts of the tile's sums in shared memory. finish_tile adds the parts and applies the
// epilogue.
#pragma once

#include "low_rank.h"
#include "wide_gemm.h"

namespace baton {
namespace {

constexpr int kWarps = 8;
constexpr int kSlice = 128;  // k of a stage
constexpr int kTiles[] = {64, 32, 16};
// A weight format W has kHelperWarps, the warps that compute low-rank updates and finish the tiles, and kHasRowScales.
template <class W>
constexpr bool kHasUpdate = W::kHelperWarps > 0;
template <class W>
constexpr int kSums = kWarps + kHasUpdate<W>;  // parts of a tile's sums

__device__ __forceinline__ uint32_t smem_addr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Stores the scale of each of up to `count` rows, from the squares that the producer of x stored. finish_tile reads the
// scales after a barrier.
__device__ __forceinline__ void store_scales(const baton_skinny_gemm_args& p, int count, float* scales) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int m = warp; m < count; m += kWarps) {
    float sum = 0.f;
    if (p.squares && m < p.rows) {
      for (int i = lane; i < p.squares_count; i += 32) sum += p.squares[m * p.squares_count + i];
#pragma unroll
      for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    }
    if (lane == 0) scales[m] = p.squares ? rsqrtf(sum / (float)p.depth + p.eps) : 1.f;
  }
}

// Adds the parts of a tile's sums, which the warps have stored, and applies the epilogue. With updates, the helper warps
// call the function, else all warps.
template <class W, int NT, int MT, int EPI>
__device__ __forceinline__ void finish_tile(const baton_skinny_gemm_args& p, int tile, int tiles, const float* sums,
                                            const float* scales) {
  constexpr int R = NT * 8, kPitch = R + 4, kHalf = R / 2;
  constexpr int kFinishers = kHasUpdate<W> ? W::kHelperWarps : kWarps;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - (kHasUpdate<W> ? kWarps : 0);
  const int2 at = tile_rows<R, EPI>(p, tile);
  // Whole warps stay converged: RESIDUAL adds the squares of a tile's row with shuffles.
  for (int base = warp * 32; base < p.rows * kHalf; base += kFinishers * 32) {
    const int it = base + lane;
    const bool valid = it < p.rows * kHalf;
    const int m = valid ? it / kHalf : 0, i = it % kHalf;
    const float scale = scales[m];
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int w = 0; w < kSums<W>; ++w) {
      const float* from = sums + (w * MT * 8 + m) * kPitch + i;
      a += from[0];
      b += from[kHalf];
    }
    const int ra = at.x + i, rb = at.y + i;
    a *= scale;
    b *= scale;
    if constexpr (W::kHasRowScales) {
      if (ra < p.n) a *= p.weight_scales[ra];
      if (rb < p.n) b *= p.weight_scales[rb];
    }
    if (EPI == BATON_SKINNY_SILU) {
      if (valid && ra < p.n / 2)
        ((bf16*)p.out)[m * p.out_stride + ra] = __float2bfloat16(a / (1.f + __expf(-a)) * b);
    } else if (EPI == BATON_SKINNY_QKV) {
      if (!valid) continue;
      if (p.bias) {
        a += p.bias[ra];
        b += p.bias[rb];
      }
      const int head = at.x / p.head_dim, d = ra - head * p.head_dim;
      if (p.frequencies && head < p.query_heads + p.kv_heads) {
        float sn, cs;
        sincosf((float)p.positions[m] * p.frequencies[d], &sn, &cs);
        const float na = a * cs - b * sn, nb = b * cs + a * sn;
        a = na;
        b = nb;
      }
      bf16* to = (bf16*)p.out + m * p.out_stride + ra;
      if (head >= p.query_heads) {
        const int dest = p.destinations[m];
        if (dest < 0) continue;
        const int h = head - p.query_heads;
        const bool value = h >= p.kv_heads;
        to = (bf16*)(value ? p.v : p.k) + (int64_t)(dest >> 4) * p.stride_block +
             (int64_t)(value ? h - p.kv_heads : h) * p.stride_head + (int64_t)(dest & 15) * p.stride_token + d;
      }
      to[0] = __float2bfloat16(a);
      to[p.head_dim / 2] = __float2bfloat16(b);
    } else {
      float square = 0.f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = half ? rb : ra;
        float v = half ? b : a;
        if (!valid || r >= p.n) continue;
        if (EPI == BATON_SKINNY_PLAIN) {
          if (p.bias) v += p.bias[r];
          ((bf16*)p.out)[m * p.out_stride + r] = __float2bfloat16(v);
        } else if (EPI == BATON_SKINNY_F32) {
          ((float*)p.out)[m * p.out_stride + r] = v;
        } else {
          const int64_t o = (int64_t)m * p.n + r;
          v += p.residual[o] + (p.bias ? p.bias[r] : 0.f);
          p.residual[o] = v;
          square += v * v;
          if (p.mirror) ((bf16*)p.mirror)[o] = __float2bfloat16(p.next_norm ? v * p.next_norm[r] : v);
        }
      }
      if (EPI == BATON_SKINNY_RESIDUAL && p.squares_out) {
#pragma unroll
        for (int d = 1; d < kHalf && d < 32; d *= 2) square += __shfl_xor_sync(~0u, square, d);
        // A row of x has kHalf lanes: a warp for tiles of 64 weight rows, part of a warp for smaller tiles.
        if (valid && i == 0) p.squares_out[m * tiles + tile] = square;
      }
    }
  }
}

int32_t check_shape(const baton_skinny_gemm_args& p) {
  BATON_REQUIRE(p.epilogue >= BATON_SKINNY_PLAIN && p.epilogue <= BATON_SKINNY_QKV, "epilogue is %d; expected 0 to 4",
                p.epilogue);
  BATON_REQUIRE(p.rows >= 0, "rows is %d; expected 0 to %d", p.rows, WIDE_ROWS_MAX);
  if (p.rows > WIDE_ROWS_MAX) return fail(BATON_UNSUPPORTED, "rows is %d; expected 0 to %d", p.rows, WIDE_ROWS_MAX);
  BATON_REQUIRE(p.n > 0, "n is %d; expected 1 or more", p.n);
  const int depth_multiple = p.weight_scales ? 16 : 8;
  BATON_REQUIRE(p.depth > 0 && p.depth % depth_multiple == 0, "depth is %d; expected multiples of %d", p.depth,
                depth_multiple);
  BATON_REQUIRE(p.weight_block == 0 || (p.weight_scales && p.weight_block == 128),
                "weight_block is %d; expected 0, or 128 with scales", p.weight_block);
  BATON_REQUIRE(p.parts >= 0 && p.parts <= 2 && (p.parts == 0 || (p.weight_scales && p.weight_block == 0)),
                "parts is %d; expected 0, or 1 or 2 with scales of the weight's rows", p.parts);
  if (p.low_rank.shrunk && p.weight_scales) return fail(BATON_UNSUPPORTED, "no update of a weight in FP8");
  if (p.low_rank.shrunk && p.epilogue == BATON_SKINNY_F32) return fail(BATON_UNSUPPORTED, "no update with epilogue F32");
  BATON_REQUIRE(p.epilogue != BATON_SKINNY_SILU || p.n % 2 == 0, "n is %d; of gate and up it is even", p.n);
  BATON_REQUIRE(p.grid >= 0, "grid is %d; expected 0 or more", p.grid);
  BATON_REQUIRE(p.tile == 0 || p.tile == 16 || p.tile == 32 || p.tile == 64 || p.tile == 112 || p.tile == 128 ||
                    p.tile == 224 || (p.parts != 0 && p.tile == 48),
                "tile is %d; expected 0, 16, 32, 64, 112, 128 or 224, or 48 with parts", p.tile);
  if (p.epilogue == BATON_SKINNY_QKV) {
    BATON_REQUIRE(p.head_dim > 0, "head_dim is %d; expected multiples of 16", p.head_dim);
    const int multiple = p.tile != 0 ? p.tile : 16;
    if (p.head_dim % multiple != 0) {
      return fail(BATON_UNSUPPORTED, "head_dim is %d; expected multiples of the tile, %d", p.head_dim, multiple);
    }
  }
  return BATON_OK;
}

int32_t check_operands(const baton_skinny_gemm_args& p) {
  BATON_REQUIRE(p.weight && p.x, "weight or x is null");
  const int stride_multiple = p.parts ? 16 : 8;
  BATON_REQUIRE(p.x_stride >= p.depth && p.x_stride % stride_multiple == 0,
                "x_stride is %lld; expected multiples of %d from the depth, %d, on", static_cast<long long>(p.x_stride),
                stride_multiple, p.depth);
  BATON_REQUIRE(!p.parts || p.x_scales, "x_scales is null, parts is %d", p.parts);
  if (p.low_rank.shrunk) {
    BATON_TRY(check_update(p.low_rank, p.rows, p.n));
    BATON_REQUIRE(p.low_rank.progress, "progress of the low-rank update is null");
  }
  BATON_REQUIRE(!p.squares || p.squares_count > 0, "squares_count is %d; expected 1 or more", p.squares_count);
  if (p.epilogue == BATON_SKINNY_RESIDUAL) {
    BATON_REQUIRE(p.residual, "residual is null");
    return BATON_OK;
  }
  BATON_REQUIRE(p.out, "out is null");
  int width = p.n;
  if (p.epilogue == BATON_SKINNY_SILU) width = p.n / 2;
  if (p.epilogue == BATON_SKINNY_QKV) {
    BATON_REQUIRE(p.query_heads > 0 && p.kv_heads > 0, "query_heads is %d, kv_heads %d; expected 1 or more",
                  p.query_heads, p.kv_heads);
    BATON_REQUIRE(p.n == (p.query_heads + 2 * p.kv_heads) * p.head_dim, "n is %d; %d and twice %d heads of %d make %d",
                  p.n, p.query_heads, p.kv_heads, p.head_dim, (p.query_heads + 2 * p.kv_heads) * p.head_dim);
    BATON_REQUIRE(p.k && p.v && p.destinations, "k, v or destinations is null");
    BATON_REQUIRE(!p.frequencies || p.positions, "positions is null, frequencies is not");
    width = p.query_heads * p.head_dim;
  }
  BATON_REQUIRE(p.out_stride >= width, "out_stride is %lld; expected %d or more", static_cast<long long>(p.out_stride),
                width);
  return BATON_OK;
}

}  // namespace
}  // namespace baton
