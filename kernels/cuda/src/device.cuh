// Shared by all kernels: element types, 8-element loads and stores, CTA reductions, launches.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "status.h"

namespace baton {

using bf16 = __nv_bfloat16;
constexpr int WARP = 32;
constexpr unsigned FULL = 0xffffffffu;

template <class T>
constexpr int32_t DTYPE = std::is_same_v<T, float> ? BATON_F32 : BATON_BF16;

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(bf16 x) { return __bfloat162float(x); }
template <class T>
__device__ inline T narrow(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return __float2bfloat16_rn(x);
  }
}

// Loads eight adjacent elements at a 16-byte boundary, as f32.
__device__ inline void load8(const float* from, float (&to)[8]) {
  const float4 low = *reinterpret_cast<const float4*>(from);
  const float4 high = *reinterpret_cast<const float4*>(from + 4);
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}
__device__ inline void load8(const bf16* from, float (&to)[8]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = __uint_as_float(words[i] << 16);
    to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ inline void store8(float* to, const float (&from)[8]) {
  *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
  *reinterpret_cast<float4*>(to + 4) = make_float4(from[4], from[5], from[6], from[7]);
}
__device__ inline void store8(bf16* to, const float (&from)[8]) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
    words[i] = *reinterpret_cast<const unsigned*>(&pair);
  }
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Returns the sum over a warp to every lane, in a fixed order.
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(FULL, x, distance);
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(FULL, x, distance));
  }
  return x;
}
// Returns the sum over a CTA to every thread, in an order that depends only on the CTA size. `shared` holds 32 floats
// and is free again after the CTA's next barrier.
__device__ inline float block_sum(float x, float* shared) {
  x = warp_sum(x);
  if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
  __syncthreads();
  const int warps = (blockDim.x + WARP - 1) / WARP;
  x = threadIdx.x % WARP < warps ? shared[threadIdx.x % WARP] : 0.f;
  return warp_sum(x);
}

// Programmatic dependent launch: a kernel may start while its predecessor in the stream ends. Every thread of every CTA
// waits for the predecessor, and releases the next kernel only after this wait. So before its wait, a kernel may read
// data that was written before its predecessor. baton_programmatic_launch lists the exceptions, which release the next
// kernel before their own wait. Without the launch attribute, these calls do nothing.
__device__ inline void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void pdl_release() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Starts a kernel that has no work before the wait.
__device__ inline void pdl_wait_and_release() {
  pdl_wait();
  pdl_release();
}

// c += a b for matrices of 16 by 16 and 16 by 8 bf16 numbers, in the layout of mma.m16n8k16.
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Returns the flag that baton_programmatic_launch has set.
bool is_programmatic();

template <class... Parameters, class... Arguments>
int32_t launch_clusters(bool programmatic, int cluster, const char* name, void (*kernel)(Parameters...), dim3 grid,
                        dim3 block, size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (programmatic) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  const cudaError_t error =
      cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(std::forward<Arguments>(arguments))...);
  // Clears the error, so that the next call does not return it.
  if (error != cudaSuccess) cudaGetLastError();
  return check(error, name);
}

template <class... Parameters, class... Arguments>
int32_t launch_as(bool programmatic, const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                  size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  return launch_clusters(programmatic, 1, name, kernel, grid, block, shared_bytes, stream,
                         std::forward<Arguments>(arguments)...);
}

template <class... Parameters, class... Arguments>
int32_t launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
               cudaStream_t stream, Arguments&&... arguments) {
  return launch_as(is_programmatic(), name, kernel, grid, block, shared_bytes, stream,
                   std::forward<Arguments>(arguments)...);
}

// Calls `body` with a value of the element type: `body(float())` or `body(bf16())`.
template <class Body>
int32_t with_dtype(int32_t dtype, Body&& body) {
  switch (dtype) {
    case BATON_F32: return body(float());
    case BATON_BF16: return body(bf16());
    default: return fail(BATON_INVALID, "dtype is %d; expected 0 (f32) or 1 (bf16)", dtype);
  }
}

inline int divide_up(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Loads a kernel onto the device, for baton_initialise.
template <class Kernel>
int32_t load(Kernel* kernel) {
  cudaFuncAttributes attributes;
  return check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "loading a kernel");
}

// Loads a kernel and sets its dynamic shared memory limit. A device with less shared memory cannot run the kernel.
template <class Kernel>
int32_t load(Kernel* kernel, int shared_bytes) {
  BATON_TRY(load(kernel));
  const Device* device;
  BATON_TRY(any_device(device));
  if (shared_bytes > device->shared_bytes) return BATON_OK;
  return check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    shared_bytes),
               "the shared memory of a kernel");
}

// Each unit's part of baton_initialise.
int32_t load_rows();
int32_t load_quantize();
int32_t load_rope();
int32_t load_blocks();
int32_t load_step();
int32_t load_drafts();
int32_t load_attention();
int32_t load_decode_attention();
int32_t load_skinny_gemm();
int32_t load_sample();
int32_t load_probe();

}  // namespace baton
