// Baseline of the attention benchmark: FlashInfer's paged decode in bf16 with head dim 128, behind C functions. The
// plan is made for CUDA graphs. Each call takes K and V pointers and strides, so any page layout can be measured.
#include <cuda_bf16.h>
#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>

#include <exception>

using T = __nv_bfloat16;
using Args = flashinfer::BatchDecodeParams<T, T, T, int32_t>;
using Variant = flashinfer::DefaultAttention<false, false, false, false>;
constexpr auto kPos = flashinfer::PosEncodingMode::kNone;
constexpr int kDim = 128, kPage = 16, kGroup = 4;

struct Peer {
  flashinfer::DecodePlanInfo plan;
  void *floats, *ints;
};
static Peer peer;

extern "C" {
__attribute__((visibility("default"))) int32_t peer_plan(void* floats, uint64_t float_bytes, void* ints, void* pinned,
                                                         uint64_t int_bytes, int32_t* indptr_host, int32_t batch,
                                                         int32_t heads, void* stream) try {
  peer.floats = floats;
  peer.ints = ints;
  auto estimate = flashinfer::BatchDecodeWithPagedKVCacheWorkEstimationDispatched<kGroup, kDim, kPos, Variant, Args>;
  return (int32_t)flashinfer::DecodePlan<kDim, kPos, Variant, Args>(floats, float_bytes, ints, pinned, int_bytes,
                                                                    peer.plan, indptr_host, batch, heads, kPage, true,
                                                                    (cudaStream_t)stream, estimate);
} catch (const std::exception&) {
  return -1;
}

__attribute__((visibility("default"))) int32_t peer_run(const void* q, const void* k, const void* v,
                                                        int64_t stride_block, int64_t stride_head,
                                                        int64_t stride_token, const int32_t* indptr,
                                                        const int32_t* indices, const int32_t* last_len, void* out,
                                                        int32_t batch, int32_t heads, int32_t kv_heads, float scale,
                                                        void* stream) try {
  int64_t strides[3] = {stride_block, stride_token, stride_head};
  flashinfer::paged_kv_t<T, int32_t> kv(kv_heads, kPage, kDim, batch, flashinfer::QKVLayout::kNHD, (T*)k, (T*)v,
                                        strides, (int32_t*)indices, (int32_t*)indptr, (int32_t*)last_len);
  Args p;
  p.q = (T*)q;
  p.paged_kv = kv;
  p.o = (T*)out;
  p.lse = nullptr;
  p.num_qo_heads = heads;
  p.q_stride_n = heads * kDim;
  p.q_stride_h = kDim;
  p.window_left = -1;
  p.sm_scale = scale;
  p.rope_rcp_scale = 1.f;
  p.rope_rcp_theta = 1.f;
  auto at = [&](int64_t o) { return flashinfer::GetPtrFromBaseOffset<int32_t>(peer.ints, o); };
  p.request_indices = at(peer.plan.request_indices_offset);
  p.kv_tile_indices = at(peer.plan.kv_tile_indices_offset);
  p.o_indptr = at(peer.plan.o_indptr_offset);
  p.kv_chunk_size_ptr = at(peer.plan.kv_chunk_size_ptr_offset);
  p.padded_batch_size = peer.plan.padded_batch_size;
  T* part = nullptr;
  float* sums = nullptr;
  if (peer.plan.split_kv) {
    part = flashinfer::GetPtrFromBaseOffset<T>(peer.floats, peer.plan.v_offset);
    sums = flashinfer::GetPtrFromBaseOffset<float>(peer.floats, peer.plan.s_offset);
    if (peer.plan.enable_cuda_graph)
      p.block_valid_mask = flashinfer::GetPtrFromBaseOffset<bool>(peer.ints, peer.plan.block_valid_mask_offset);
  }
  return (int32_t)flashinfer::BatchDecodeWithPagedKVCacheDispatched<kDim, kPos, Variant, Args>(
      p, part, sums, false, (cudaStream_t)stream);
} catch (const std::exception&) {
  return -1;
}
}
