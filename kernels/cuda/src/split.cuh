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

// Converts eight elements to two parts in FP8.
__device__ __forceinline__ void split_eight(const float (&values)[8], float inverse, uint2& high, uint2& low) {
  uint32_t highs[4], lows[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Fp8Pair pair = split_pair(values[2 * i] * inverse, values[2 * i + 1] * inverse);
    highs[i] = pair.high, lows[i] = pair.low;
  }
  high = make_uint2(highs[0] | highs[1] << 16, highs[2] | highs[3] << 16);
  low = make_uint2(lows[0] | lows[1] << 16, lows[2] | lows[3] << 16);
}

// Stores elements `at` to `at` + 7 of a row in FP8, in the form of baton_quantize_args.out: with two parts, the low
// parts are behind the high parts of eight rows.
__device__ __forceinline__ void store_parts(void* out, int parts, int row, int width, int at, const float (&values)[8],
                                            float inverse) {
  uint2 high, low;
  split_eight(values, inverse, high, low);
  const int64_t place = parts == 2 ? row / 8 * 16 + row % 8 : row;
  uint8_t* to = static_cast<uint8_t*>(out) + place * width + at;
  *reinterpret_cast<uint2*>(to) = high;
  if (parts == 2) *reinterpret_cast<uint2*>(to + static_cast<int64_t>(8) * width) = low;
}

}  // namespace baton
