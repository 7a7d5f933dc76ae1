// Epilogues of the wide GEMMs (skinny_gemm.cu describes them) on the accumulators of wgmma.
//
// A thread has results of ROWS rows of x, which are eight rows apart. For each group of eight weight rows, the thread
// has two results of each of these rows.
#pragma once

#include "wide_gemm.h"

namespace baton {
namespace {

__device__ __forceinline__ void store2(bf16* to, float a, float b) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
}

// Epilogue inputs of a thread, loaded before the accumulators are complete to hide the load latency.
template <int OWN, int EPI, int ROWS>
struct Extras {
  __device__ __forceinline__ void fetch(const baton_skinny_gemm_args&, int2, int) {}
};

// QKV: RoPE angles, biases and destinations of the rows.
template <int OWN, int ROWS>
struct Extras<OWN, BATON_SKINNY_QKV, ROWS> {
  float cosine[ROWS][OWN / 16][2], sine[ROWS][OWN / 16][2];
  float2 bias[2][OWN / 16];
  int destination[ROWS];
  __device__ __forceinline__ void fetch(const baton_skinny_gemm_args& p, int2 at, int m0) {
    const int c = threadIdx.x & 3, head = at.x / p.head_dim;
    const bool turns = p.frequencies && head < p.query_heads + p.kv_heads;
    float2 frequency[OWN / 16];
#pragma unroll
    for (int j = 0; j < OWN / 16; ++j) {
      const int i = j * 8 + 2 * c;
      const int d = at.x - head * p.head_dim + i;
      frequency[j] = turns ? make_float2(p.frequencies[d], p.frequencies[d + 1]) : make_float2(0.f, 0.f);
      bias[0][j] = p.bias ? make_float2(p.bias[at.x + i], p.bias[at.x + i + 1]) : make_float2(0.f, 0.f);
      bias[1][j] = p.bias ? make_float2(p.bias[at.y + i], p.bias[at.y + i + 1]) : make_float2(0.f, 0.f);
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const int m = m0 + row * 8;
      const bool valid = m < p.rows;
      destination[row] = valid && head >= p.query_heads ? p.destinations[m] : 0;
      const float position = valid && turns ? static_cast<float>(p.positions[m]) : 0.f;
#pragma unroll
      for (int j = 0; j < OWN / 16; ++j) {
        sincosf(position * frequency[j].x, &sine[row][j][0], &cosine[row][j][0]);
        sincosf(position * frequency[j].y, &sine[row][j][1], &cosine[row][j][1]);
      }
    }
  }
};

// Returns two elements of the old residual, plus the bias.
__device__ __forceinline__ float2 residual_at(const baton_skinny_gemm_args& p, int m, int r) {
  float2 old = *reinterpret_cast<const float2*>(p.residual + static_cast<int64_t>(m) * p.n + r);
  if (p.bias) old.x += p.bias[r], old.y += p.bias[r + 1];
  return old;
}

// RESIDUAL with narrow tiles: the old residual with the bias, and the weights of the next norm.
template <int OWN, int ROWS>
struct Extras<OWN, BATON_SKINNY_RESIDUAL, ROWS> {
  static constexpr bool kAhead = OWN <= 32;
  float2 old[ROWS][kAhead ? OWN / 8 : 1], norm[kAhead ? OWN / 8 : 1];
  __device__ __forceinline__ void fetch(const baton_skinny_gemm_args& p, int2 at, int m0) {
    if constexpr (kAhead) {
#pragma unroll
      for (int j = 0; j < OWN / 8; ++j) {
        const int r = (j < OWN / 16 ? at.x + j * 8 : at.y + (j - OWN / 16) * 8) + 2 * (threadIdx.x & 3);
        norm[j] = p.next_norm && r < p.n ? *reinterpret_cast<const float2*>(p.next_norm + r) : make_float2(1.f, 1.f);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
          const int m = m0 + row * 8;
          old[row][j] = m < p.rows && r < p.n ? residual_at(p, m, r) : make_float2(0.f, 0.f);
        }
      }
    }
  }
};

// Stores two results of row m of x in each half of the tile: `low` for weight rows ra and ra + 1, `high` for rb and
// rb + 1.
template <int EPI>
__device__ __forceinline__ void finish_pair(const baton_skinny_gemm_args& p, int m, int ra, int rb, float (&low)[2],
                                            float (&high)[2]) {
  if (EPI == BATON_SKINNY_SILU) {
    if (ra >= p.n / 2) return;
#pragma unroll
    for (int e = 0; e < 2; ++e) low[e] = low[e] / (1.f + __expf(-low[e])) * high[e];
    store2(static_cast<bf16*>(p.out) + m * p.out_stride + ra, low[0], low[1]);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = half ? rb : ra;
      float(&v)[2] = half ? high : low;
      if (r >= p.n) continue;
      if (EPI == BATON_SKINNY_PLAIN) {
        if (p.bias) v[0] += p.bias[r], v[1] += p.bias[r + 1];
        store2(static_cast<bf16*>(p.out) + m * p.out_stride + r, v[0], v[1]);
      } else {
        *reinterpret_cast<float2*>(static_cast<float*>(p.out) + m * p.out_stride + r) = make_float2(v[0], v[1]);
      }
    }
  }
}

template <int OWN, int ROWS>
__device__ __forceinline__ void finish_heads(const baton_skinny_gemm_args& p, int2 at, int m0, const float (&scales)[ROWS],
                                             const Extras<OWN, BATON_SKINNY_QKV, ROWS>& extras,
                                             const float (&sums)[OWN * ROWS / 4]) {
  const int head = at.x / p.head_dim, c = threadIdx.x & 3;
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const int m = m0 + row * 8;
    if (m >= p.rows) continue;
    bf16* to = static_cast<bf16*>(p.out) + m * p.out_stride + at.x;
    if (head >= p.query_heads) {
      const int destination = extras.destination[row];
      if (destination < 0) continue;
      const int kv_head = head - p.query_heads;
      const bool is_value = kv_head >= p.kv_heads;
      to = static_cast<bf16*>(is_value ? p.v : p.k) + static_cast<int64_t>(destination >> 4) * p.stride_block +
           static_cast<int64_t>(is_value ? kv_head - p.kv_heads : kv_head) * p.stride_head +
           static_cast<int64_t>(destination & 15) * p.stride_token + (at.x - head * p.head_dim);
    }
#pragma unroll
    for (int j = 0; j < OWN / 16; ++j) {
      const int near = (j * ROWS + row) * 2, far = ((j + OWN / 16) * ROWS + row) * 2;
      float low[2], high[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = sums[near + e] * scales[row] + (e ? extras.bias[0][j].y : extras.bias[0][j].x);
        const float y = sums[far + e] * scales[row] + (e ? extras.bias[1][j].y : extras.bias[1][j].x);
        low[e] = x * extras.cosine[row][j][e] - y * extras.sine[row][j][e];
        high[e] = y * extras.cosine[row][j][e] + x * extras.sine[row][j][e];
      }
      store2(to + j * 8 + 2 * c, low[0], low[1]);
      store2(to + j * 8 + 2 * c + p.head_dim / 2, high[0], high[1]);
    }
  }
}

// RESIDUAL for row m of x. Up to eight loads are in flight before their stores. The tile has OWN weight rows: one half
// starts at `low`, the other at `high`. The partial sum of squares is stored at `place`.
template <int OWN, int ROWS>
__device__ __forceinline__ void finish_residual(const baton_skinny_gemm_args& p, int place, int places, int m, bool valid,
                                                int low, int high, float scale, const float (&sums)[OWN * ROWS / 4],
                                                int row, const Extras<OWN, BATON_SKINNY_RESIDUAL, ROWS>& extras) {
  const int c = threadIdx.x & 3;
  const int64_t base = static_cast<int64_t>(m) * p.n;
  constexpr int EIGHTS = OWN / 8, TOGETHER = EIGHTS <= 8 ? EIGHTS : EIGHTS % 7 == 0 ? 7 : 8;
  auto row_of = [&](int j) { return (j < EIGHTS / 2 ? low + j * 8 : high + (j - EIGHTS / 2) * 8) + 2 * c; };
  float square = 0.f;
#pragma unroll
  for (int j0 = 0; j0 < EIGHTS; j0 += TOGETHER) {
    float2 old[TOGETHER];
#pragma unroll
    for (int j = 0; j < TOGETHER; ++j) {
      const int r = row_of(j0 + j);
      if constexpr (extras.kAhead) {
        old[j] = extras.old[row][j0 + j];
      } else {
        if (valid && r < p.n) old[j] = residual_at(p, m, r);
      }
    }
#pragma unroll
    for (int j = 0; j < TOGETHER; ++j) {
      const int r = row_of(j0 + j);
      if (!valid || r >= p.n) continue;
      const int at = ((j0 + j) * ROWS + row) * 2;
      const float a = old[j].x + sums[at] * scale, b = old[j].y + sums[at + 1] * scale;
      *reinterpret_cast<float2*>(p.residual + base + r) = make_float2(a, b);
      square += a * a + b * b;
      if (p.mirror) {
        float2 norm = make_float2(1.f, 1.f);
        if constexpr (extras.kAhead) {
          norm = extras.norm[j0 + j];
        } else {
          if (p.next_norm) norm = make_float2(p.next_norm[r], p.next_norm[r + 1]);
        }
        store2(static_cast<bf16*>(p.mirror) + base + r, a * norm.x, b * norm.y);
      }
    }
  }
  if (p.squares_out) {
    square += __shfl_xor_sync(FULL, square, 1);
    square += __shfl_xor_sync(FULL, square, 2);
    if (valid && c == 0) p.squares_out[static_cast<int64_t>(m) * places + place] = square;
  }
}

// Runs the epilogue of a thread's rows.
template <int OWN, int EPI, int ROWS>
__device__ __forceinline__ void finish(const baton_skinny_gemm_args& p, int place, int places, int2 at, int m0,
                                       const float (&scales)[ROWS], const Extras<OWN, EPI, ROWS>& extras,
                                       const float (&sums)[OWN * ROWS / 4]) {
  if constexpr (EPI == BATON_SKINNY_RESIDUAL) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const int m = m0 + row * 8;
      finish_residual<OWN>(p, place, places, m, m < p.rows, at.x, at.y, scales[row], sums, row, extras);
    }
  } else if constexpr (EPI == BATON_SKINNY_QKV) {
    finish_heads<OWN>(p, at, m0, scales, extras, sums);
  } else {
#pragma unroll
    for (int j = 0; j < OWN / 16; ++j) {
      const int i = j * 8 + 2 * (threadIdx.x & 3);
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        if (m0 + row * 8 >= p.rows) continue;
        const int near = (j * ROWS + row) * 2, far = ((j + OWN / 16) * ROWS + row) * 2;
        float low[2] = {sums[near] * scales[row], sums[near + 1] * scales[row]};
        float high[2] = {sums[far] * scales[row], sums[far + 1] * scales[row]};
        finish_pair<EPI>(p, m0 + row * 8, at.x + i, at.y + i, low, high);
      }
    }
  }
}

}  // namespace
}  // namespace baton
