/* GEMMs with weights in INT4: a part of the C ABI, with the rules of baton_kernels.h. A weight [n][depth] is stored in
 * chunks of 8 rows and 128 columns, in the order that kernels/src/int4/chunks.rs defines. Rows and columns are padded
 * to whole chunks. */
#ifndef BATON_INT4_H
#define BATON_INT4_H

#include "baton_kernels.h"

/* y = x W^T as baton_skinny_gemm computes it, with W in chunks of INT4 and f32 scales. Other than there:
 * weight_block is the number of columns with a common scale, 32, 64 or 128; weight_scales is null, parts is 0, and
 * low_rank.shrunk is null; the epilogue is not F32; depth is a multiple of 8, and n of 16 with SILU. BATON_UNSUPPORTED
 * above 128 rows, and except on compute capability 9.0. */
BATON_API int32_t baton_int4_gemm(const baton_skinny_gemm_args *args, void *stream);
/* Returns the weight rows per tile for these arguments, as baton_skinny_gemm_tile does; 0: there is no kernel. */
BATON_API int32_t baton_int4_gemm_tile(const baton_skinny_gemm_args *args);
/* Dequantises a weight to bf16 [n][depth], contiguous: (number - zero point) * scale, rounded once. weight_block is the
 * number of columns with a common scale, and depth is a multiple of 8. */
BATON_API int32_t baton_int4_widen(const void *weight, int32_t weight_block, int32_t n, int32_t depth, void *out,
                                   void *stream);

#endif
