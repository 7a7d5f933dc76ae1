// Element formats of decode attention: how KV in shared memory becomes operands of mma.m16n8k16.
//
// A raw fragment is the result of one ldmatrix.x4 over 16 tokens and 32 bytes. Lane (g, c) of an operand of K has tokens
// g and g + 8, and of V^T dimensions g and g + 8 of the 16 of a step.
#pragma once

#include <cuda_fp8.h>

#include "device.cuh"

namespace baton {
namespace {

__device__ __forceinline__ uint32_t smem_addr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Copies `bytes` bytes and fills 16 up with zeros: data past the last token must not reach the MMA.
__device__ __forceinline__ void cp_async16(uint32_t dst, const void* src, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
__device__ __forceinline__ uint32_t transpose8x8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// KV in bf16: a raw fragment is the operand of one step.
struct Bf16Kv {
  using Element = bf16;
  static constexpr bool HAS_SCALES = false;
  static constexpr int STAGES = 3;       // of a ring, for many rows with queries in registers
  static constexpr int TILE_STAGES = 2;  // for queries in shared memory
  static constexpr int STEPS = 1;      // steps of a raw fragment
  static constexpr int QUERY_PAD = 8;  // elements, so that the lanes of a warp read different banks
  static constexpr float OUTPUT_FACTOR = 1.f;

  __device__ __forceinline__ static void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    baton::mma(c, a[0], a[1], a[2], a[3], b[0], b[1]);
  }
  __device__ __forceinline__ static uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  __device__ __forceinline__ static void keys(uint32_t (&a)[4], const uint32_t (&raw)[4], int) {
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = raw[j];
  }
  __device__ __forceinline__ static void values(uint32_t (&a)[4], const uint32_t (&raw)[4], int) { keys(a, raw, 0); }
  // Queries of 16 dimensions for lane column c.
  __device__ __forceinline__ static void queries(uint32_t (&b)[2], const bf16* q, int c) {
    b[0] = *reinterpret_cast<const uint32_t*>(q + 2 * c);
    b[1] = *reinterpret_cast<const uint32_t*>(q + 2 * c + 8);
  }
  __device__ __forceinline__ static void shared_queries(uint32_t (&b)[2], const bf16* q, int c) { queries(b, q, c); }
  __device__ __forceinline__ static uint4 stored_queries(uint4 q) { return q; }
  // Stores dimensions g and g + 8 of 16 to the merge area.
  __device__ __forceinline__ static void store(float* to, int g, float low, float high) {
    to[g] = low;
    to[g + 8] = high;
  }
};

// KV in FP8 (e4m3), multiplied as f16. A raw fragment holds two steps. Within a step, the dimensions are permuted so
// that the bytes of a lane are those that it needs: of K to 4c..4c+3 (also of the queries), and of V^T to 2g and 2g + 1.
struct Fp8Kv {
  using Element = uint8_t;
  static constexpr bool HAS_SCALES = true;
  static constexpr int STAGES = 4;
  static constexpr int TILE_STAGES = 4;
  static constexpr int STEPS = 2;
  static constexpr int QUERY_PAD = 16;
  // A probability times its value's scale has a factor of 2^8, so that small scales stay in the range of f16.
  static constexpr int VALUE_EXPONENT = 8;
  static constexpr float OUTPUT_FACTOR = 1.f / (1 << VALUE_EXPONENT);

  __device__ __forceinline__ static void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
  // Saturates; NaN stays.
  __device__ __forceinline__ static uint32_t pack(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  __device__ __forceinline__ static void widen(uint32_t& low, uint32_t& high, uint32_t codes) {
    const __half2_raw a = __nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3);
    const __half2_raw b = __nv_cvt_fp8x2_to_halfraw2(codes >> 16, __NV_E4M3);
    low = a.x | uint32_t{a.y} << 16;
    high = b.x | uint32_t{b.y} << 16;
  }
  __device__ __forceinline__ static void keys(uint32_t (&a)[4], const uint32_t (&raw)[4], int step) {
    widen(a[0], a[2], raw[2 * step]);
    widen(a[1], a[3], raw[2 * step + 1]);
  }
  __device__ __forceinline__ static void values(uint32_t (&a)[4], const uint32_t (&raw)[4], int step) {
    // Bytes of two tokens by two dimensions, transposed.
    widen(a[0], a[1], __byte_perm(raw[step], 0, 0x3120));
    widen(a[2], a[3], __byte_perm(raw[step + 2], 0, 0x3120));
  }
  __device__ __forceinline__ static uint32_t half_pair(uint32_t pair) {
    return pack(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
  __device__ __forceinline__ static void queries(uint32_t (&b)[2], const bf16* q, int c) {
    const uint2 raw = *reinterpret_cast<const uint2*>(q + 4 * c);
    b[0] = half_pair(raw.x);
    b[1] = half_pair(raw.y);
  }
  __device__ __forceinline__ static void shared_queries(uint32_t (&b)[2], const bf16* q, int c) {
    const uint2 raw = *reinterpret_cast<const uint2*>(q + 4 * c);
    b[0] = raw.x;
    b[1] = raw.y;
  }
  __device__ __forceinline__ static uint4 stored_queries(uint4 q) {
    return make_uint4(half_pair(q.x), half_pair(q.y), half_pair(q.z), half_pair(q.w));
  }
  __device__ __forceinline__ static void store(float* to, int g, float low, float high) {
    *reinterpret_cast<float2*>(to + 2 * g) = make_float2(low * OUTPUT_FACTOR, high * OUTPUT_FACTOR);
  }
  __device__ __forceinline__ static float key_scale(int exponent) { return __uint_as_float(exponent << 23); }
  __device__ __forceinline__ static float value_scale(int exponent) {
    return __uint_as_float(min(exponent + VALUE_EXPONENT, 254) << 23);
  }
};

}  // namespace
}  // namespace baton
