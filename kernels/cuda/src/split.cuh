// x in FP8: rounded to one number, or as the sum of two numbers: x = scale * (high + low / 32). The sum keeps the
// precision of bf16.
#pragma once

#include <cuda_fp8.h>

#include "device.cuh"

namespace baton {

struct Fp8Factor {
  float scale, inverse;
};

// Returns the power of two by which the largest magnitude, `most`, is divided to get a number from 128 to 256.
__device__ __forceinline__ Fp8Factor split_factor(float most) {
  const int exponent = max(__float_as_int(most) >> 23, 27);  // the inverse is finite
  return {__int_as_float((exponent - 7) << 23), __int_as_float((261 - exponent) << 23)};
}

// Returns the factor by which the largest magnitude, `most`, is divided to get the greatest FP8 number.
__device__ __forceinline__ Fp8Factor whole_factor(float most) {
  constexpr float kGreatest = 448.f;
  const float scale = most > 0.f ? fmaxf(most / kGreatest, 1e-30f) : 1.f;
  return {scale, 1.f / scale};
}

struct Fp8Pair {
  uint32_t high, low;  // 16 bits each
};

__device__ __forceinline__ Fp8Pair split_pair(float a, float b) {
  const __nv_fp8x2_storage_t high = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const float2 rounded = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(high, __NV_E4M3)));
  const float2 rest = make_float2((a - rounded.x) * 32.f, (b - rounded.y) * 32.f);
  return {high, __nv_cvt_float2_to_fp8x2(rest, __NV_SATFINITE, __NV_E4M3)};
}

}  // namespace baton
