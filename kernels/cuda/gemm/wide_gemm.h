// GEMMs to which skinny_gemm.cu dispatches: wide_gemm.cu (bf16, more than 8 rows), fp8_gemm.cu (weight in FP8, x in
// bf16) and wide_fp8_gemm.cu (weight and x in FP8).
#pragma once

#include <cstddef>
#include <cstring>

#include "device.cuh"

namespace baton {

constexpr int WIDE_ROWS_MAX = 128;

// Arguments of a kernel. A kernel without low-rank updates does not get them.
template <bool HAS_UPDATE>
struct GemmArgs {
  alignas(8) char bytes[HAS_UPDATE ? sizeof(baton_skinny_gemm_args) : offsetof(baton_skinny_gemm_args, low_rank)];

  explicit GemmArgs(const baton_skinny_gemm_args& from) { memcpy(bytes, &from, sizeof(bytes)); }
  __device__ __forceinline__ const baton_skinny_gemm_args& get() const {
    return reinterpret_cast<const baton_skinny_gemm_args&>(bytes);
  }
};

int32_t load_wide_gemm();
// Returns the weight rows per tile, or 0 where cuBLAS is faster or there is no kernel. `args` have been checked.
int wide_gemm_tile(const baton_skinny_gemm_args& args, const Device& device);
int32_t wide_gemm(const baton_skinny_gemm_args& args, int tile, const Device& device, cudaStream_t stream);

int32_t load_wide_fp8_gemm();
// Returns the weight rows per tile, or 0 where there is no kernel. `args` have been checked and have `parts`.
int wide_fp8_gemm_tile(const baton_skinny_gemm_args& args, const Device& device);
int32_t wide_fp8_gemm(const baton_skinny_gemm_args& args, const Device& device, cudaStream_t stream);

int32_t load_fp8_gemm();
// Returns the weight rows per tile, or 0 where there is no kernel. `args` have been checked and have `weight_scales`.
int fp8_gemm_tile(const baton_skinny_gemm_args& args, const Device& device);
int32_t fp8_gemm(const baton_skinny_gemm_args& args, const Device& device, cudaStream_t stream);

// Returns the first weight rows of the two halves of a tile of R rows. Rows that the epilogue combines (gate and up,
// halves of a head) share a tile.
template <int R, int EPI>
__device__ __forceinline__ int2 tile_rows(const baton_skinny_gemm_args& p, int tile) {
  if (EPI == BATON_SKINNY_SILU) return make_int2(tile * (R / 2), p.n / 2 + tile * (R / 2));
  if (EPI == BATON_SKINNY_QKV) {
    const int per_head = p.head_dim / R;
    const int head = tile / per_head;
    const int first = head * p.head_dim + (tile - head * per_head) * (R / 2);
    return make_int2(first, first + p.head_dim / 2);
  }
  return make_int2(tile * R, tile * R + R / 2);
}

}  // namespace baton
