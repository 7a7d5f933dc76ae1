// Instructions of Hopper that the wide GEMMs use: barriers in shared memory, clusters, TMA policies and wgmma.
#pragma once

#include <cuda.h>

#include <utility>

#include "device.cuh"

namespace baton {
namespace {

__device__ __forceinline__ uint32_t smem_addr(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- Barriers ----

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// ---- The cluster of a split tile ----

// Stores to the same address of the peer's shared memory.
__device__ __forceinline__ void store_to_peer(uint32_t address, int peer, float value) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.f32 [there], %2;\n}\n" ::"r"(address),
      "r"(peer), "f"(value)
      : "memory");
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// ---- TMA ----

__device__ __forceinline__ uint64_t policy_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t policy_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void fetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Returns the driver's function that makes a tensor map.
inline int32_t find_encode(Encode& encode) {
  cudaDriverEntryPointQueryResult found;
  void* function = nullptr;
  BATON_TRY(check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
                  "finding cuTensorMapEncodeTiled"));
  encode = reinterpret_cast<Encode>(function);
  return BATON_OK;
}

// Makes a map of a matrix whose boxes have rows of 128 bytes.
template <int RANK>
int32_t make_map(Encode encode, CUtensorMap& map, CUtensorMapDataType type, const void* base,
                 const cuuint64_t (&sizes)[RANK], const cuuint64_t (&strides)[RANK - 1], const cuuint32_t (&box)[RANK]) {
  cuuint32_t ones[RANK];
  for (cuuint32_t& one : ones) one = 1;
  const CUresult result =
      encode(&map, type, RANK, const_cast<void*>(base), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return fail(BATON_CUDA + result, "cuTensorMapEncodeTiled failed: error %d", result);
  return BATON_OK;
}

// ---- wgmma ----

// Returns the wgmma descriptor of a swizzled matrix: rows of 128 bytes, groups of eight rows 1,024 bytes apart.
__device__ __forceinline__ uint64_t matrix_at(uint32_t address) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) | ((address & 0x3ffff) >> 4);
}
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#define D8(a)                                                                                                     \
  "+f"(d[a]), "+f"(d[a + 1]), "+f"(d[a + 2]), "+f"(d[a + 3]), "+f"(d[a + 4]), "+f"(d[a + 5]), "+f"(d[a + 6]), \
      "+f"(d[a + 7])
#define REGS8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define REGS16 REGS8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define REGS32 REGS16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGS48 REGS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define REGS56 REGS48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define REGS64 REGS56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define REGS112 REGS64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87" \
    ",%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define WGMMA_OF(SHAPE, REGS, A, B, S, SIGNS, ...)                             \
  asm volatile(                                                                \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, " S ", 0;\n"                     \
      "wgmma.mma_async.sync.aligned." SHAPE " {" REGS "}, " A ", " B           \
      ", adds, " SIGNS ";\n}\n"                                                \
      : __VA_ARGS__                                                            \
      : "l"(a), "l"(b), "r"(adds))
#define WGMMA(N, REGS, A, B, S, ...) \
  WGMMA_OF("m64n" #N "k16.f32.bf16.bf16", REGS, A, B, S, "1, 1, 0, 0", __VA_ARGS__)
#define WGMMA_FP8(N, REGS, A, B, S, ...) \
  WGMMA_OF("m64n" #N "k32.f32.e4m3.e4m3", REGS, A, B, S, "1, 1", __VA_ARGS__)

// d = a b (+ d): 64 rows of x, N weight rows, 16 of k.
template <int N>
__device__ __forceinline__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, int adds) {
  if constexpr (N == 16) {
    WGMMA(16, REGS8, "%8", "%9", "%10", D8(0));
  } else if constexpr (N == 32) {
    WGMMA(32, REGS16, "%16", "%17", "%18", D8(0), D8(8));
  } else if constexpr (N == 64) {
    WGMMA(64, REGS32, "%32", "%33", "%34", D8(0), D8(8), D8(16), D8(24));
  } else if constexpr (N == 112) {
    WGMMA(112, REGS56, "%56", "%57", "%58", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48));
  } else if constexpr (N == 224) {
    WGMMA(224, REGS112, "%112", "%113", "%114", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56), D8(64),
          D8(72), D8(80), D8(88), D8(96), D8(104));
  } else {
    static_assert(N == 128, "no wgmma instruction for this N");
    WGMMA(128, REGS64, "%64", "%65", "%66", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56));
  }
}

// d = a b (+ d) in FP8 (e4m3): 64 rows of x, N weight rows, 32 of k.
template <int N>
__device__ __forceinline__ void multiply_fp8(float (&d)[N / 2], uint64_t a, uint64_t b, int adds) {
  if constexpr (N == 32) {
    WGMMA_FP8(32, REGS16, "%16", "%17", "%18", D8(0), D8(8));
  } else if constexpr (N == 112) {
    WGMMA_FP8(112, REGS56, "%56", "%57", "%58", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48));
  } else if constexpr (N == 96) {
    WGMMA_FP8(96, REGS48, "%48", "%49", "%50", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40));
  } else if constexpr (N == 128) {
    WGMMA_FP8(128, REGS64, "%64", "%65", "%66", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56));
  } else if constexpr (N == 224) {
    WGMMA_FP8(224, REGS112, "%112", "%113", "%114", D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56), D8(64),
              D8(72), D8(80), D8(88), D8(96), D8(104));
  } else {
    static_assert(N == 64, "no wgmma instruction for this N");
    WGMMA_FP8(64, REGS32, "%32", "%33", "%34", D8(0), D8(8), D8(16), D8(24));
  }
}
#undef D8
#undef REGS8
#undef REGS16
#undef REGS32
#undef REGS48
#undef REGS56
#undef REGS64
#undef REGS112
#undef WGMMA
#undef WGMMA_FP8
#undef WGMMA_OF

}  // namespace
}  // namespace baton
