// Shared by the experts' GEMMs: loads of rows of x by index, and results of a warp as pieces of 16 bytes of a row.
#pragma once

#include "device.cuh"

namespace baton {

__device__ __forceinline__ void fetch_x(uint32_t to, const char* from, bool in) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(in ? 16 : 0) : "memory");
}
// Arrives when the thread's loads of x so far are complete.
__device__ __forceinline__ void arrive_with_x(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Transposes pairs among four neighbouring lanes, each of which has pairs 0 to 3: lane c gets pair c of all four
// lanes.
__device__ __forceinline__ uint4 transpose_pairs(uint32_t (&v)[4]) {
  const int c = threadIdx.x & 3;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t received = __shfl_xor_sync(FULL, c & 1 ? v[i] : v[i + 1], 1);
    if (c & 1) v[i] = received;
    else v[i + 1] = received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t received = __shfl_xor_sync(FULL, c & 2 ? v[i] : v[i + 2], 2);
    if (c & 2) v[i] = received;
    else v[i + 2] = received;
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ uint32_t pack(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

}  // namespace baton
