/* Products of up to 16 rows with a weight matrix, bound by the weight's bytes. C ABI; see skinny_gemm.cu. */
#ifndef BATON_SKINNY_GEMM_H
#define BATON_SKINNY_GEMM_H

#include <stdint.h>

typedef enum {
  BATON_SKINNY_PLAIN = 0,    /* out bf16 [rows][n] = x W^T (+ bias) */
  BATON_SKINNY_RESIDUAL = 1, /* residual f32 [rows][n] += x W^T; mirror for what follows */
  BATON_SKINNY_SILU = 2,     /* W holds n/2 gate rows, then n/2 up rows; out bf16 [rows][n/2] = silu(gate) * up */
  BATON_SKINNY_F32 = 3,      /* out f32 [rows][n] = x W^T: logits */
  BATON_SKINNY_QKV = 4       /* + bias, rotation of queries and keys, keys and values into the arena */
} baton_skinny_epilogue;

typedef struct {
  const void *weight; /* bf16 [n][k], packed */
  const void *x;      /* bf16 [rows][x_stride] */
  int64_t x_stride;
  /* Null, or the sums of squares of every row before its norm, [rows][squares_count]: the products of row r are
   * scaled by 1 / sqrt(sum of its squares / k + eps). x then is the residual times the norm's weight, as RESIDUAL
   * (or baton_skinny_prepare, with a count of 1) leaves it. */
  const float *squares;
  const float *bias; /* [n] or null; PLAIN and QKV */
  void *out;
  int64_t out_stride; /* elements; QKV: of the query rows */
  float *residual;    /* RESIDUAL: [rows][n] packed */
  void *mirror;       /* RESIDUAL: [rows][n] packed, or null: the new residual, times next_norm [n] if not null */
  const float *next_norm;
  float *squares_out; /* RESIDUAL: null, or [rows][ceil(n / tile)], for the next product's `squares` */
  /* QKV: k and v are this layer's keys and values of block 0; destinations[row] = block * 16 + token, negative
   * for none; angles are positions[row] * frequencies[i], frequencies null for no rotation. */
  void *k;
  void *v;
  int64_t stride_block, stride_head, stride_token;
  const float *frequencies;
  const int32_t *positions;
  const int32_t *destinations;
  float eps;
  int32_t rows; /* 1..16 */
  int32_t n;
  int32_t depth; /* k: a multiple of 8 */
  int32_t epilogue;
  int32_t query_heads, kv_heads, head_dim;
  int32_t grid; /* blocks at most; 0: one an SM */
  int32_t tile; /* weight rows a tile: 16, 32, 64; 0 chooses */
  int32_t pdl;  /* 1: may start before the preceding kernel of the stream has ended (weights are fetched meanwhile) */
  int32_t squares_count;
} baton_skinny_gemm_args;

#ifdef __cplusplus
extern "C" {
#endif
#define BATON_SKINNY_API __attribute__((visibility("default")))
BATON_SKINNY_API int32_t baton_skinny_gemm(const baton_skinny_gemm_args *args, void *stream);
/* Rows a tile that a call with these arguments takes; squares_out has ceil(n / that) numbers a row. */
BATON_SKINNY_API int32_t baton_skinny_gemm_tile(const baton_skinny_gemm_args *args);
/* mirror (bf16 [rows][width]) = residual * norm; squares [rows]: for the first norm of a step. */
BATON_SKINNY_API int32_t baton_skinny_prepare(const float *residual, const float *norm, void *mirror, float *squares,
                                              int32_t rows, int32_t width, int32_t pdl, void *stream);
#ifdef __cplusplus
}
#endif

#endif
