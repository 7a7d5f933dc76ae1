// GEMMs of more than 8 rows, which skinny_gemm.cu dispatches to wide_gemm.cu.
#pragma once

#include "status.h"

namespace baton {

constexpr int WIDE_ROWS_MAX = 128;

int32_t load_wide_gemm();
// Returns the weight rows per tile, or 0 where cuBLAS is faster or there is no kernel. `args` have been checked.
int wide_gemm_tile(const baton_skinny_gemm_args& args, const Device& device);
int32_t wide_gemm(const baton_skinny_gemm_args& args, int tile, const Device& device, cudaStream_t stream);

}  // namespace baton
